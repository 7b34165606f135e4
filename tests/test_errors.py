"""Expected failures are one line; defects keep their traceback."""

import errno

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from recipe.atropos.errors import AtroposError, ConfigurationError, expected_failure, one_line_errors


def noted(error, note):
    error.add_note(note)
    return error


def of_a_rank(cause: Exception) -> Exception:
    """As ``ray.get`` raises it: an instance of RayTaskError and of the cause's class."""
    return RayTaskError("update_actor", "Traceback ...\nmany lines", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigurationError("seed=abc: give a number"), "seed=abc: give a number"),
        (of_a_rank(AtroposError("server A refused the weights")), "server A refused the weights"),
        (noted(AtroposError("the first"), "then, at the end: no space"), "the first; then, at the end: no space"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/metrics.jsonl"), "/run/metrics.jsonl"),
        (of_a_rank(OSError(errno.ENOSPC, "No space left on device", "/run/model.pt")), "/run/model.pt"),
        (ActorDiedError(), "ActorDiedError: The actor died unexpectedly before finishing this task."),
        (ActorUnavailableError("rank 1", None), "ActorUnavailableError: "),
        (GetTimeoutError("no reply"), "GetTimeoutError: no reply"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_expected_failures_are_one_line(error, told, capsys):
    assert told in expected_failure(error) and "\n" not in expected_failure(error)
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        raise error
    assert exit_.value.code == f"error: {expected_failure(error)}"


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("division by zero"),
        of_a_rank(ZeroDivisionError("division by zero")),
        ActorDiedError(RayTaskError("__init__", "Traceback ...", KeyError("x"))),
        FileNotFoundError(errno.ENOENT, "No such file", "x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_defects_keep_their_traceback(error):
    assert expected_failure(error) is None
    with pytest.raises(type(error)), one_line_errors():
        raise error
