"""The launcher's word to the trainer that a version of the weights has been evaluated: its number, in a file.

The trainer replaces weights that are due for evaluation only once their number is there. Whoever trains without a
launcher names no file, and waits for nothing.
"""

import time
from collections.abc import Callable
from pathlib import Path

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.files import write_atomic

NONE_YET = -1

_POLL_SECONDS, _MEANWHILE_SECONDS = 0.1, 2.0


class NotEvaluated(AtroposError, RuntimeError):
    """The launcher did not say in time that the weights were evaluated."""


def say_evaluated(path: str | Path, version: int) -> None:
    """A reader sees the old or the new number, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, str(version).encode())


def wait_until_evaluated(
    path: str | Path, version: int, timeout: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Until ``version``, or a later one, was evaluated; ``meanwhile`` is called every few seconds.

    Raises:
        NotEvaluated: it was not within ``timeout`` seconds.
    """
    begun = looked = time.monotonic()
    while int(Path(path).read_text()) < version:
        now = time.monotonic()
        if now - begun > timeout:
            raise NotEvaluated(
                f"version {version} of the weights was not evaluated within {timeout:g} s; see the launcher's output, "
                "or raise evaluation.timeout"
            )
        if now - looked > _MEANWHILE_SECONDS:
            meanwhile()
            looked = time.monotonic()
        time.sleep(_POLL_SECONDS)
