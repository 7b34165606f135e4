"""Expected failures are one line; defects keep their traceback."""

import errno
import os
import pickle
import subprocess
import sys
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from recipe.atropos.errors import RECOVERABLE, AtroposError, ConfigurationError, expected_failure, one_line_errors
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.utils.files import DiskFull, FolderRemoved
from recipe.atropos.utils.local_ray import keep_logs, start_ray
from recipe.atropos.utils.scratch import Scratch


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
        (OSError(errno.EROFS, "Read-only file system", "/run/lock"), "read-only file system: /run/lock; mount it"),
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
    message = f"error: {expected_failure(error)}"
    if type(error) in (ActorDiedError, ActorUnavailableError, GetTimeoutError):  # the same command can continue
        assert exit_.value.code == RECOVERABLE and capsys.readouterr().err == f"{message}\n"
    else:
        assert exit_.value.code == message


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_entry_points_run_where_the_shell_has_closed_files(closed, tmp_path):
    """A file that is opened later must not get the number of one of them."""
    program = """
from recipe.atropos.errors import output_may_be_closed
with output_may_be_closed():
    print("printed")
    with open("found", "w") as file:
        file.write(str(file.fileno()))
"""
    command = f'exec "$@" {closed}'
    subprocess.run(["bash", "-c", command, "bash", sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert int((tmp_path / "found").read_text()) > 2


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


def test_errors_of_a_start_of_ray_are_expected(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("recipe.atropos.utils.local_ray._keep_private", lambda: None)
    monkeypatch.setattr("ray.init", lambda **_: 1 / 0)
    with pytest.raises(AtroposError, match="^ray_kwargs.ray_init: Ray did not start: [^\n]+$"):
        start_ray(num_cpus=1)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:1,2"])
def test_errors_of_a_missing_cluster_come_at_once(monkeypatch, address):
    """Ray itself would try for more than ten minutes."""
    monkeypatch.setattr("ray.init", Mock(side_effect=AssertionError))
    with pytest.raises(AtroposError, match=f"the cluster at {address} cannot be joined: (ConnectionRefused|Value)"):
        start_ray(address=address)


def test_errors_of_copying_logs_do_not_hide_the_first(tmp_path, monkeypatch):
    run = Scratch(tmp_path / "run", [])
    monkeypatch.setattr("recipe.atropos.utils.local_ray.scratch.current", lambda: run)
    logs = run.folder / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    for name in ("gcs.out", "raylet.out"):
        os.mkfifo(logs / name)  # which cannot be copied
    with pytest.raises(ZeroDivisionError) as raised:
        try:
            raise ZeroDivisionError("the first")
        except ZeroDivisionError:
            keep_logs(tmp_path / "kept")
            raise
    [note] = raised.value.__notes__
    assert note.startswith(f"then, at the end: Ray's log {logs}/") and ", and 1 others could not be copied" in note


def test_copy_of_rays_logs_is_this_users_alone(tmp_path, monkeypatch):
    """Any user may write to Ray's folder, whose mode a copy would have; its logs of runtime environments quote keys."""
    run, kept = Scratch(tmp_path / "run", []), tmp_path / "kept"
    monkeypatch.setattr("recipe.atropos.utils.local_ray.scratch.current", lambda: run)
    logs = run.folder / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    logs.chmod(0o777)
    for name in ("raylet.out", "runtime_env_agent.log"):
        (logs / name).write_text("log")
    kept.mkdir(mode=0o777)  # as an earlier version left it, and with what another user put there
    (kept / "raylet.out").symlink_to(tmp_path / "file")
    keep_logs(kept)
    assert kept.stat().st_mode & 0o777 == 0o700 and not (tmp_path / "file").exists()
    assert [path.name for path in kept.glob("*/*")] == ["raylet.out"]


@pytest.mark.parametrize(
    "error",
    [
        DiskFull("/run/metrics.jsonl"),
        FolderRemoved("/run"),
        InferenceError("http://a", "/model_info", "cannot connect"),
        AtroposError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_a_rank_arrive_as_they_were_raised(error):
    """Ray pickles them; one that it cannot make again would be a bug's, and no server that died in a push."""
    error = noted(error, "a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
