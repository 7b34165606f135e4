"""File with which the launcher tells the trainer the latest weight version that has been evaluated.

The trainer replaces weights that are due for evaluation only once the file holds their version. Without the launcher,
no file is configured and the trainer does not wait.
"""

import time
from collections.abc import Callable
from pathlib import Path

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.files import write_atomic

NONE_YET = -1

_POLL_SECONDS, _MEANWHILE_SECONDS = 0.1, 2.0


class NotEvaluated(AtroposError, RuntimeError):
    """The launcher did not report in time that the weights were evaluated."""


def needs_evaluation(version: int, every: int | None) -> bool:
    """Return whether the trainer keeps ``version`` until it is evaluated: the first, and then each ``every`` updates.

    The last version is evaluated when the trainer has ended.
    """
    return version == 0 or bool(every and version % every == 0)


def mark_evaluated(path: str | Path, version: int) -> None:
    """Write ``version`` atomically: a reader sees the old or the new number, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, str(version).encode())


def wait_until_evaluated(
    path: str | Path, version: int, timeout: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Wait until ``version``, or a later one, was evaluated; call ``meanwhile`` every few seconds.

    Raises:
        NotEvaluated: it was not evaluated within ``timeout`` seconds.
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
