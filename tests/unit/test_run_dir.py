"""The run folder: its lock, and that a kill or a full disk at any byte leaves it readable."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time
import tracemalloc

import orjson
import psutil
import pytest

from helpers.disk import fill, size_limit
from recipe.atropos.errors import ConfigurationError, secondary_errors
from recipe.atropos.run.folder import LOCK_VARIABLE, RunDir, RunDirError
from recipe.atropos.run.record import update_summary
from recipe.atropos.utils.files import (
    DiskFull,
    FolderRemoved,
    LineReader,
    append_line,
    bound_log,
    printable,
    read_lines,
    replace_folder,
    rewrite_lines,
    write_atomic,
    write_json,
)

LINES = [{"step": step, "note": "x" * step} for step in range(1, 6)]
HOLD = """
import os, sys
from recipe.atropos.run.folder import RunDir
with RunDir(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""
START_AND_DIE = """
import os, subprocess, sys
from recipe.atropos.run.folder import LOCK_VARIABLE, RunDir
with RunDir(sys.argv[1]).lock() as descriptor:
    child = f"from recipe.atropos.run.folder import RunDir\\nimport sys\\nwith RunDir({sys.argv[1]!r}).lock(): " \\
        "print('inside', flush=True); sys.stdin.read()"
    environment = {**os.environ, LOCK_VARIABLE: str(descriptor)}
    subprocess.Popen([sys.executable, "-c", child], env=environment, pass_fds=[descriptor], stdin=sys.stdin)
    os._exit(0)
"""


@pytest.fixture
def started():
    """Starts a Python program with the run folder as its argument; ends it after the test."""
    processes = []

    def start(program, folder):
        command = [sys.executable, "-c", program, str(folder)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.stdin.close()  # also ends what it started
        process.kill()
        process.wait()
        process.stdout.close()


def test_run_dir_lock_names_its_holder_and_goes_with_it(tmp_path, started):
    holder = started(HOLD, tmp_path / "run")
    assert holder.stdout.readline() == "held\n"
    told = rf"run.dir={tmp_path}/run is in use by process {holder.pid} "
    with pytest.raises(RunDirError, match=told), RunDir(tmp_path / "run").lock():
        pass
    holder.kill()
    holder.wait()
    with RunDir(tmp_path / "run").lock():
        pass


def test_run_dir_lock_is_shared_with_what_inherits_it(tmp_path, started):
    """What a killed launcher started still holds the folder; the next start waits for its end, and says so."""
    launcher, said = started(START_AND_DIE, tmp_path), []
    assert launcher.stdout.readline() == "inside\n"
    launcher.wait()

    def say(text):
        said.append(text)
        launcher.stdin.close()  # ends the child

    with RunDir(tmp_path).lock(say):
        pass
    assert len(said) == 1 and f"waiting for what was started by process {launcher.pid} " in said[0]


def test_run_dir_locks_cannot_be_taken_by_other_users(tmp_path):
    """Whoever can read a file can lock it, and keep the launcher waiting."""
    summary = tmp_path / ".summary.lock"
    summary.touch(0o644)  # an earlier version's
    update_summary(tmp_path, {"steps": 1})
    with (run := RunDir(tmp_path)).lock():
        modes = [path.stat().st_mode & 0o777 for path in (summary, run.lock_file, run.holder_file)]
    assert modes[:2] == [0o600, 0o600] and modes[2] & 0o444 == 0o444, "others may see who holds the folder"


def test_run_dir_lock_variable_of_another_folder_is_not_believed(tmp_path, monkeypatch, started):
    holder = started(HOLD, tmp_path / "one")
    assert holder.stdout.readline() == "held\n"
    with RunDir(tmp_path / "other").lock() as descriptor:
        monkeypatch.setenv(LOCK_VARIABLE, str(descriptor))
        with RunDir(tmp_path / "other").lock() as again:
            assert again == descriptor
        with pytest.raises(RunDirError, match="is in use"), RunDir(tmp_path / "one").lock():
            pass


def test_run_dir_lock_names_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    told = f"run.dir={tmp_path}/file/run: Not a directory; give a folder"
    with pytest.raises(ConfigurationError, match=told), RunDir(tmp_path / "file/run").lock():
        pass

    # As Lustre is by default.
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    told = r"cannot be locked \(flock: Function not implemented\); give a folder"
    with pytest.raises(ConfigurationError, match=told), RunDir(tmp_path).lock():
        pass


def test_run_dir_of_another_format_is_refused(tmp_path):
    run = RunDir(tmp_path)
    run.check_format()
    run.config.write_text("")
    with pytest.raises(ConfigurationError, match=r"format 0.*an older version"):
        run.check_format()
    write_json(run.identity, {"format": 1})
    run.check_format()
    write_json(run.identity, {"format": 99})
    with pytest.raises(ConfigurationError, match=r"format 99.*a newer version"):
        run.check_format()


REPLACE_HALF = """
import os, signal, sys
from pathlib import Path
from recipe.atropos.utils.files import replace_folder
rename = Path.rename
def die(*paths):
    paths and rename(*paths)
    os.kill(os.getpid(), signal.SIGKILL)
with replace_folder(Path(sys.argv[1]) / "model") as folder:
    (folder / "new").touch()
    {}
"""


@pytest.mark.parametrize(
    ("killed", "left"), [("die()", (True, 1)), ("Path.rename = die", (False, 2))], ids=["while_writing", "in_renames"]
)
@pytest.mark.parametrize("by", ["start", "export"])
def test_run_dir_folder_returns_after_a_kill(tmp_path, started, killed, left, by):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").touch()
    started(REPLACE_HALF.format(killed), tmp_path).wait()
    assert ((tmp_path / "model").exists(), len(list(tmp_path.glob(".model*")))) == left
    if by == "start":
        RunDir(tmp_path).remove_partial()
    else:
        with contextlib.suppress(KeyError), replace_folder(tmp_path / "model"):
            raise KeyError
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"] and not list(tmp_path.glob(".*"))


REPLACE_SLOWLY = """
import sys
from pathlib import Path
from recipe.atropos.utils.files import replace_folder
with replace_folder(Path(sys.argv[1]) / "model") as folder:
    print("writing", flush=True)
    sys.stdin.read()
    (folder / "new").touch()
"""


@pytest.mark.parametrize("by", ["start", "export"])
def test_run_dir_partial_files_of_the_living_elsewhere_are_left(tmp_path, started, monkeypatch, by):
    """On another machine, or in another container, whose pids are unknown here."""
    monkeypatch.setattr(psutil, "pid_exists", lambda _: False)
    writer = started(REPLACE_SLOWLY, tmp_path)
    assert writer.stdout.readline() == "writing\n"
    if by == "start":
        RunDir(tmp_path).remove_partial()
    else:
        with replace_folder(tmp_path / "model") as folder:
            (folder / "old").touch()
    writer.communicate()
    assert writer.returncode == 0 and [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]


def test_run_dir_folder_replaces_what_an_earlier_version_left(tmp_path):
    """Its number was a pid, and there was no lock."""
    for name in (f".model.{os.getpid()}.partial", f".model.former.{os.getpid()}.partial", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").touch()
    with replace_folder(tmp_path / "model") as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]


def test_run_dir_write_atomic_keeps_the_old_file_at_any_byte(tmp_path):
    path, old, new = tmp_path / "file", b"old" * 10, b"new" * 30
    write_atomic(path, old)
    for size in range(len(new)):
        with size_limit(size), pytest.raises(DiskFull, match=f"no space left on device: {path}"):
            write_atomic(path, new)
        assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]
    write_atomic(path, new)
    assert path.read_bytes() == new


def test_run_dir_partial_files_of_the_dead_are_removed(tmp_path):
    folder = RunDir(tmp_path)
    folder.environments.mkdir()
    names = ".lock.1.partial", ".summary.json.1.partial", "environments/.a.jsonl.3.partial", ".lock.4.partial"
    left = [tmp_path / name for name in names]
    kept = [tmp_path / name for name in (".lock.2.partial", ".summary.json.2.partial", "mine.partial")]
    for path in [*left, *kept]:
        path.touch()
    with kept[0].open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.remove_partial()
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_run_dir_append_line_on_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    for line in LINES:
        before = path.read_bytes() if path.exists() else b""
        for room in range(len(orjson.dumps(line)) + 1):
            with size_limit(len(before) + room), pytest.raises(DiskFull, match=str(path)):
                append_line(path, line)
            assert path.read_bytes() == before
        append_line(path, line)
    assert read_lines(path) == LINES


def test_run_dir_lines_go_on_after_a_cut_at_any_byte(tmp_path):
    path = tmp_path / "lines.jsonl"
    for line in LINES:
        append_line(path, line)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept, reader = LINES[: whole[:size].count(b"\n")], LineReader(path)
        assert [*reader.new_lines()] == kept
        append_line(path, {"more": 1})
        assert [*reader.new_lines()] == [{"more": 1}] and read_lines(path) == [*kept, {"more": 1}]


def test_run_dir_lines_are_read_one_by_one(tmp_path):
    """A run of days has more than fit into memory."""
    path = tmp_path / "lines.jsonl"
    rewrite_lines(path, [{"step": step, "text": "x" * 1000} for step in range(10_000)])
    reader = LineReader(path)
    tracemalloc.start()
    assert sum(1 for _ in reader.new_lines()) == 10_000
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("line", [b'{"st', b"", b"[1]", b"\xff"])
def test_run_dir_line_that_is_damaged_is_named(tmp_path, line):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(RunDirError, match=f"{path}, line 2 is damaged"):
        read_lines(path)


@pytest.mark.parametrize(
    "write",
    [
        lambda run: write_json(run / "run.json", {}),
        lambda run: append_line(run / "metrics.jsonl", {}),
        lambda run: update_summary(run, {}),
    ],
    ids=["write_json", "append_line", "update_summary"],
)
def test_run_dir_that_was_removed_is_named(tmp_path, write):
    with pytest.raises(FolderRemoved, match=f"^{tmp_path}/run is gone: it was removed or moved while in use"):
        write(tmp_path / "run")


def test_run_dir_first_error_is_the_one_that_is_shown():
    with pytest.raises(RuntimeError, match="first") as shown:
        try:
            raise RuntimeError("first")
        finally:
            with secondary_errors():
                raise DiskFull("/a/file")
    assert shown.value.__notes__ == [f"then, at the end: {DiskFull('/a/file')}"]
    with pytest.raises(DiskFull), secondary_errors():
        raise DiskFull("/a/file")


def test_bound_log_keeps_the_newest_part_of_a_log(tmp_path):
    """The process that writes it goes on; each line is in one of the two files, in order."""
    path, former = tmp_path / "service.log", tmp_path / "service.log.1"
    program = """if True:
        import os, sys
        for number in range(20000):
            number % 2000 or sys.stdin.readline()
            os.write(1, b"%06d\\n" % number)
        """
    with open(path, "ab") as log:
        writer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=log, text=True)
    seen = []
    with writer:
        for part in range(10):
            print(file=writer.stdin, flush=True)
            while path.stat().st_size < 2000 * 7 * (part % 2 + 1):
                time.sleep(0.001)
            bound_log(path, 20000)
            if part % 2:
                assert former.stat().st_size == 28000 and former.stat().st_mode & 0o777 == 0o600
                seen += former.read_bytes().split()
                assert path.stat().st_size == 0
    assert seen == [b"%06d" % number for number in range(20000)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["service.log", "service.log.1"]


def test_bound_log_of_a_process_that_does_not_pause(tmp_path):
    """What the files hold stays in order; what is written in the moment of a move may be lost or cut."""
    path, former = tmp_path / "service.log", tmp_path / "service.log.1"
    program = 'import os\nfor number in range(50000):\n    os.write(1, b"%06d\\n" % number)'
    with open(path, "ab") as log:
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=log)
    parts = []
    while writer.poll() is None:
        bound_log(path, 20000)
        if former.exists() and (part := former.read_bytes()) not in parts[-1:]:
            parts.append(part)
    assert parts
    lines = [line for line in b"\n".join([*parts, path.read_bytes()]).split() if len(line) == 6]
    assert lines == sorted(set(lines))


def test_bound_log_keeps_no_more_of_an_endless_log(tmp_path):
    """A process that prints without end, faster than its log is copied."""
    path, former, limit = tmp_path / "service.log", tmp_path / "service.log.1", 1 << 20
    with open(path, "ab") as log:
        writer = subprocess.Popen(["yes"], stdout=log)
    try:
        for _ in range(5):
            while path.stat().st_size <= 4 * limit:
                time.sleep(0.001)
            bound_log(path, limit)
            assert limit <= former.stat().st_size <= 2 * limit
    finally:
        writer.kill()
        writer.wait()
    path.write_bytes(b"before\n" + b"x" * (3 * limit) + b"the end")
    bound_log(path, limit)
    assert former.stat().st_size == limit and former.read_bytes().endswith(b"xthe end") and not path.stat().st_size


def test_a_log_is_shown_without_control_characters():
    hostile = (
        "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link \x1b[2J\x9b2Jclear\a\b\x00 tab\t\r\n 1%\r 2%\n"
    )
    assert printable(hostile) == "red link 2Jclear tab\t\n 1%\n 2%\n"
    assert printable("\x1b") == "" and printable("é漢🙂\n") == "é漢🙂\n"


def test_bound_log_leaves_a_log_for_which_there_is_no_room(full_disk):
    path = full_disk / "service.log"
    path.write_bytes(b"x" * 100_000)
    fill(full_disk)
    bound_log(path, 1000)
    assert path.stat().st_size == 100_000
    bound_log(full_disk / "none.log", 1000)
