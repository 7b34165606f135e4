"""The root of this recipe's errors, and what an entry point does with an error.

An ``AtroposError`` says by itself what is wrong, with the offending value and the fix, so an entry point prints its
message on one line and exits with a status other than 0. A few exceptions of others mean something expected too, see
``expected_failure``. Any other exception is a defect, and keeps its traceback.
"""

import contextlib
import errno
import sys
from collections.abc import Iterator


class AtroposError(Exception):
    """An expected failure: its message is all that a user needs."""


class ConfigurationError(AtroposError, ValueError):
    """A value in the configuration that cannot work; the message says which, and what to give instead."""


class LaunchError(AtroposError, ValueError):
    """A server cannot be started as asked; the message names the value and what to do."""


class NothingToTrain(AtroposError, RuntimeError):
    """What the environments send cannot be trained on; the message counts the reasons."""


class EnvironmentFailure(AtroposError, RuntimeError):
    """An environment cannot go on, and ends; the message says what was wrong, with its value, and what to do."""


def expected_failure(error: BaseException) -> str | None:
    """What a user needs to know of ``error``; None: it is a defect, of which the traceback must be seen.

    Of an error that Ray brings from another process, it is the original error's message. A process that Ray lost (it
    was killed, or the machine ran out of memory) is expected, and so is a full disk.
    """
    ray = sys.modules.get("ray.exceptions")  # where Ray was never imported, the error is not Ray's
    if ray is not None and isinstance(error, ray.RayError):
        if isinstance(error, ray.RayTaskError):
            return expected_failure(error.cause)
        if type(error) is ray.RayError or getattr(error, "actor_init_failed", False):
            return None  # the text of a traceback
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, AtroposError):
        return "; ".join([str(error), *getattr(error, "__notes__", [])])
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on device: {error.filename or 'a file without a name'}; make room there"
    return None


@contextlib.contextmanager
def secondary_errors() -> Iterator[None]:
    """Around each step of a ``finally``: where an error is on its way already, one of the step becomes a note of it."""
    first = sys.exception()
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        first.add_note(f"then, at the end: {error}")


@contextlib.contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Around an entry point: an expected failure, or one of ``others``, ends the process with ``error: ...`` and
    status 1; a defect goes through."""
    try:
        yield
    except Exception as error:
        told = str(error) if isinstance(error, others) else expected_failure(error)
        if told is None:
            raise
        sys.exit(f"error: {told}")
