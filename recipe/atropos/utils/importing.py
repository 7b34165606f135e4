"""Import modules faster, and what a configuration names."""

import contextlib
import gc
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from recipe.atropos.errors import ConfigurationError


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect no garbage while the block imports: modules leave none, and looking for it takes a fifth of the time.

    What was imported is not looked through later either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def named_function(name: str, key: str) -> Callable[..., Any]:
    """Return the function that a configuration's ``key`` names. Raises ConfigurationError if there is none."""
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:  # of the module too
        raise ConfigurationError(
            f"{key}={name}: {error!r}; give MODULE:function, with its folder on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"{key}={name}: no function, but {found!r:.80}")
    return found
