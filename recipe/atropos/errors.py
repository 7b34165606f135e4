"""The base class of this recipe's errors, and how entry points handle errors.

The message of an ``AtroposError`` says what is wrong, with the offending value and the fix, so an entry point prints it
on one line and exits with a nonzero status. A few exceptions of other libraries are expected failures too, see
``expected_failure``. Any other exception is a bug, and keeps its traceback.
"""

import contextlib
import copyreg
import errno
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator

_OF_THE_DISK = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EROFS: "mount it for writing again, or see why it is not",
}

RECOVERABLE = 75  # exit status of a failure after which the same command can continue: BSD's EX_TEMPFAIL


class AtroposError(Exception):
    """An expected failure: its message is all that a user needs. ``recoverable``: the same command can continue."""

    recoverable = False

    def __reduce__(self) -> tuple[object, ...]:
        """Without the constructor, which may take other arguments than the message: Ray passes errors on, pickled."""
        return copyreg.__newobj__, (type(self),), {**self.__dict__, "args": self.args}


class ConfigurationError(AtroposError, ValueError):
    """A value in the configuration that cannot work; the message says which, and what to give instead."""


class LaunchError(AtroposError, ValueError):
    """A server cannot be started as asked; the message names the value and what to do."""


class NothingToTrain(AtroposError, RuntimeError):
    """What the environments send cannot be trained on; the message counts the reasons."""


class Preempted(AtroposError, RuntimeError):
    """The run gives its machines back, as SIGUSR1 asked; the same command continues from the newest checkpoint."""

    recoverable = True


class EnvironmentFailure(AtroposError, RuntimeError):
    """An environment cannot continue and exits; the message says what was wrong, with its value, and what to do."""


def expected_failure(error: BaseException) -> str | None:
    """Return the message that a user needs for ``error``, or None if it is a bug, whose traceback must be shown.

    For an error that Ray forwards from another process, it is the original error's message. The loss of a Ray process
    (it was killed, or the machine ran out of memory) is an expected failure, and so is a full or read-only disk.
    """
    ray = sys.modules.get("ray.exceptions")  # if Ray was never imported, the error is not Ray's
    if ray is not None and isinstance(error, ray.RayError):
        if isinstance(error, ray.RayTaskError):
            return expected_failure(error.cause)
        if type(error) is ray.RayError or getattr(error, "actor_init_failed", False):
            return None  # its message is a whole traceback
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, AtroposError):
        return "; ".join([str(error), *getattr(error, "__notes__", [])])
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        what, fix = os.strerror(error.errno).lower(), _OF_THE_DISK[error.errno]
        return f"{what}: {error.filename or 'a file without a name'}; {fix}"
    return None


def _recoverable(error: BaseException) -> bool:
    """Return whether the failure is the loss of a process, as opposed to one that would repeat itself."""
    ray = sys.modules.get("ray.exceptions")
    if ray is not None and isinstance(error, ray.RayError):
        return _recoverable(error.cause) if isinstance(error, ray.RayTaskError) else True
    return isinstance(error, AtroposError) and error.recoverable


def attempt_all(steps: Iterable[Callable[[], object]]) -> None:
    """Take all steps, whichever of them fail as expected, and raise the first failure at the end."""
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except (AtroposError, OSError) as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


@contextlib.contextmanager
def secondary_errors() -> Iterator[None]:
    """Wrap one step of a ``finally``: if an error is already propagating, the step's error is added to it as a note."""
    first = sys.exception()
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        first.add_note(f"then, at the end: {error}")


@contextlib.contextmanager
def output_may_be_closed() -> Iterator[None]:
    """Wrap an entry point: whoever reads its output may stop, as ``| head`` does; the rest of the output is dropped.

    A character that the locale's encoding lacks, of a log or an answer, is shown as "?" instead of ending the program.
    What a shell has closed, as ``>&-`` does, is opened at nothing: else the next file would get its number.
    """
    for name in ("stdin", "stdout", "stderr"):  # by number: each open gets the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    (sys.__stdout__ or sys.stdout).reconfigure(errors="replace")
    try:
        yield
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # it was another pipe
            raise
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Wrap an entry point: exit with ``error: ...`` on an expected failure or one of ``others``, with status 1, or
    ``RECOVERABLE``.
    """
    try:
        yield
    except Exception as error:
        message = str(error) if isinstance(error, others) else expected_failure(error)
        if message is None:
            raise
        if not _recoverable(error):
            sys.exit(f"error: {message}")
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(RECOVERABLE)
