"""What a run leaves in temporary folders and shared memory goes with it, or with the next run; nothing else does."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from helpers.runs import run_of
from helpers.waiting import until
from recipe.atropos.errors import AtroposError
from recipe.atropos.utils import scratch
from recipe.atropos.utils.process import run_command, start_service
from recipe.atropos.utils.scratch import Scratch, remove_dead
from recipe.atropos.weight_sync.transports.tensor import TensorTransport

SHM = Path("/dev/shm")

# A rank with a buffer of a push: it says where, and waits.
RANK = """
import sys, time
from recipe.atropos.weight_sync.transports.tensor import TensorTransport
transport = TensorTransport(bucket_size=1 << 16)
buffer = transport._allocate(1 << 16)
print(transport._segments[0][1], flush=True)
time.sleep(100)
"""
# A launcher that starts a rank, says the run's folder, and waits.
LAUNCHER = """
import sys, subprocess, time
from recipe.atropos.utils.scratch import Scratch
own = Scratch.create()
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**__import__("os").environ, **own.variables()})
print(own.folder, flush=True)
time.sleep(100)
"""


def kill(process):
    """With all that it started; torch's manager of shared memory would tidy up, where it is not killed too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in reversed(psutil.Process(process.pid).children(recursive=True)):
            child.kill()
    process.kill()
    process.wait()


@pytest.fixture
def launcher():
    """(process, the run's folder, the rank's buffer) of a run in the middle of a push."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE, text=True)
    try:
        lines = sorted((process.stdout.readline().strip() for _ in range(2)), key=lambda line: "/shm/" in line)
        yield process, *map(Path, lines)
    finally:
        kill(process)
        process.stdout.close()


@pytest.mark.timeout(120)
def test_leftovers_of_a_killed_run_go_with_the_next(launcher):
    process, folder, buffer = launcher
    name = uuid.uuid4().hex[:8]
    ours = [SHM / f"sglang_loads_{folder.name}_ab12_cd.shm", SHM / f"sem.{folder.name}-mp-ab"]
    names = [f"sglang_loads_{name}_ab.shm", f"sem.mp-{name}", f"torch_{name}", f"atropos-{name}x", f"my-atropos-{name}"]
    others = [*(SHM / n for n in names), folder.parent / f"atropos-{name}-1-1", folder.parent / f"atropos-{name}"]
    try:
        for path in (*ours, *others):
            path.touch()
        remove_dead()
        assert folder.is_dir() and buffer.exists() and buffer.name.startswith(folder.name), "the run lives"
        kill(process)
        assert buffer.exists(), "shared memory outlives those who are killed"
        own = Scratch.create()
        own.remove()
        assert not folder.exists() and not list(SHM.glob(f"{folder.name}*")) and not any(map(Path.exists, ours))
        assert all(path.exists() for path in others), "what is not ours stays"
    finally:
        for path in (*ours, *others):
            path.unlink(missing_ok=True)


def test_leftovers_of_a_run_go_at_its_end(tmp_path):
    run = run_of(None, tmp_path)
    try:
        code = "import os, tempfile; open(tempfile.mktemp(), 'w'); open(os.environ['NAME'], 'w')"
        folder = Path(run.variables["TMPDIR"])
        segment = SHM / f"{folder.name}-1-0"
        service = run.start("a", [sys.executable, "-c", code], NAME=str(segment))
        assert service.process.wait(30) == 0
        assert folder.stat().st_mode & 0o777 == 0o700 and segment.exists()
        assert sorted(path.name[:3] for path in folder.iterdir()) == [".sc", "tmp"]
    finally:
        run.stop()
    assert not folder.exists() and not list(SHM.glob(f"{folder.name}*"))


def test_leftovers_of_a_killed_process_go_with_its_successor():
    name, ended = scratch.current().folder.name, subprocess.Popen(["true"])
    ended.wait()
    left, used = SHM / f"{name}-{ended.pid}-0", SHM / f"{name}-{os.getpid()}-999999"
    successor = "from recipe.atropos.utils.scratch import current; current().shared_memory()"
    try:
        for path in (left, used):
            path.touch()
        environment = {**os.environ, **scratch.current().variables()}
        subprocess.run([sys.executable, "-c", successor], env=environment, check=True, timeout=60)
        assert not left.exists() and used.exists()
    finally:
        for path in (left, used):
            path.unlink(missing_ok=True)


def test_leftovers_of_a_push_are_named_by_their_run():
    transport = TensorTransport(bucket_size=1 << 16)
    buffer = transport._allocate(1 << 16)
    [(_, path)] = transport._segments
    assert path.name.startswith(f"{scratch.current().folder.name}-{os.getpid()}-")
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size >= len(buffer)
    assert buffer.fill_(7).sum() == 7 * (1 << 16)
    del buffer
    transport._sweep()
    assert not path.exists()


def test_leftovers_of_another_machine_are_left_to_it():
    """On a shared file system, where no lock tells that its run lives."""
    other = Scratch.create()
    try:
        os.close(other._locks[0])
        (other.folder / ".scratch").write_text("another boot")
        remove_dead()
        assert other.folder.is_dir()
        (other.folder / ".scratch").write_text(scratch._machine())
        remove_dead()
        assert not other.folder.exists()
    finally:
        shutil.rmtree(other.folder, ignore_errors=True)
        os.close(other._locks.pop())
        (SHM / other.folder.name).unlink(missing_ok=True)


def test_leftovers_of_another_program_do_not_move_the_folder(tmp_path, monkeypatch):
    """Any user may write a file of that name into the system's temporary folder. Nor can one give torch code to run."""
    (tmp_path / ".scratch").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/torchinductor_root")  # as torch itself does
    monkeypatch.setattr(scratch, "_LONGEST_BASE", 200)
    own = Scratch.create()
    try:
        assert own.folder.parent == tmp_path
        cache = tmp_path / f"torchinductor_{os.getuid()}"
        assert own.variables()["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
        cache.chmod(0o777)
        assert own.variables()["TORCHINDUCTOR_CACHE_DIR"] == str(own.folder / "torchinductor")
    finally:
        own.remove()


def test_leftovers_are_none_where_nothing_can_be_locked(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    made, make = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **kw: made.append(make(**kw)) or made[-1])
    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    with pytest.raises(AtroposError, match="TMPDIR=.* cannot be locked .* give one on a local disk"):
        Scratch.create()
    assert made and not any(Path(folder).exists() or (SHM / Path(folder).name).exists() for folder in made)


@pytest.mark.timeout(60)
def test_leftovers_of_a_killed_process_go_with_its_tracker(tmp_path):
    """Semaphores have names of multiprocessing's own, by which nobody could tell later whose they were."""
    code = (
        "import multiprocessing, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "lock = multiprocessing.get_context('spawn').Lock(); print(lock._semlock.name, flush=True); time.sleep(100)"
    )
    service = start_service("locks", [sys.executable, "-c", code], log_path=tmp_path / "log")
    try:
        name = until(lambda: Path(service.log_path).read_text().strip(), 50, service)
        semaphore = SHM / f"sem.{name.removeprefix('/')}"
        assert semaphore.exists()
    finally:
        service.stop(grace=0)
    assert not semaphore.exists()


def test_leftovers_of_a_command_go_with_it():
    code = "import os, tempfile; tempfile.mkstemp(); print(os.environ['TMPDIR'], len(os.listdir(os.environ['TMPDIR'])))"
    status, printed = run_command("makes", [sys.executable, "-c", code])
    folder, files = printed.split()
    assert status == 0 and files == "3" and Path(folder).name.startswith("atropos-") and not Path(folder).exists()
