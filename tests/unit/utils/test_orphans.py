"""However and whenever a launcher ends, no process of its services is left, and no process of a failed test either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from helpers import ROOT
from recipe.atropos.utils.process import RUN_ID_VARIABLE, start_service

pytestmark = pytest.mark.timeout(120)
LIMIT = 20.0  # seconds from the end of the launcher to the end of the last process

# Each process writes its number into the working folder, because one of them has neither name, session nor environment
# of its service, and ignores SIGTERM.
WAIT = "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"
FAMILY = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True, env={{}})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        exec({WAIT!r})
    os._exit(0)
os.wait()
exec({WAIT!r})
"""
PROCESSES = 3
DAEMONS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}], start_new_session=True); {WAIT}"

LAUNCHER = f"""
import os, signal, socket, subprocess, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from recipe.atropos.utils.process import start_service

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has these two ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def start():
    return start_service("family", [sys.executable, "-c", {FAMILY!r}], log_path="family.log")

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

moment = sys.argv[1]
if moment == "forked":  # the guardian is there, and has not been told what to start
    real = subprocess.Popen.__init__
    subprocess.Popen.__init__ = lambda *args, **kw: (real(*args, **kw), die())
if moment == "asked":  # it is starting the service
    socket.socket.recv = die
if moment == "thread":  # a thread that ends started it
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
if moment == "fork":  # a child of the launcher inherits its end of the socket, and outlives it
    if os.fork() == 0:
        time.sleep(60)
if moment == "many":
    print("ready", flush=True)
    while True:
        start()
if moment == "returns":
    while len([name for name in os.listdir() if name.endswith(".pid")]) < {PROCESSES}:
        time.sleep(0.02)
    sys.exit()
if moment == "raises":
    raise RuntimeError
print("ready", flush=True)
time.sleep(600)
"""


class Family:
    """The processes of one test, known by their mark and by the numbers that they wrote."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, uuid.uuid4().hex

    def launch(self, moment: str) -> subprocess.Popen:
        environment = {**os.environ, RUN_ID_VARIABLE: self.mark}
        command = [sys.executable, "-c", LAUNCHER, moment]
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE)

    def numbers(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.pid")]

    def living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                marked = self.mark in process.environ().get(RUN_ID_VARIABLE, "").split(":")
                if (marked or process.pid in self.numbers()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> float:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < seconds, f"after {seconds:g} s: {self.living()}"
            time.sleep(0.05)
        return time.monotonic() - begin


@pytest.fixture
def families(tmp_path: Path) -> Iterator[Callable[[], Family]]:
    """Makes families. Whatever a failed test leaves is ended here, and is a failure of its own."""
    made = []

    def make() -> Family:
        folder = tmp_path / f"family{len(made)}"
        folder.mkdir()
        made.append(Family(folder))
        return made[-1]

    yield make
    left = [process for family in made for process in family.living()]
    for process in left:
        process.kill()
    assert not left


@pytest.fixture
def family(families) -> Family:
    return families()


def test_orphans_are_ended_however_and_whenever_a_launcher_ends(families):
    """By a signal while its services run, by itself, and killed between the steps of starting a service."""
    signals = [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT]
    cases = [("running", number) for number in signals] + [("thread", signal.SIGKILL), ("fork", signal.SIGKILL)]
    cases += [("forked", None), ("asked", None), ("returns", None), ("raises", None)]
    launched = []
    for moment, number in cases:  # side by side: the process that ignores SIGTERM takes each its time
        family = families()
        launched.append((family, family.launch(moment), moment, number))
    for family, launcher, _, number in launched:
        if number is not None:
            assert launcher.stdout.readline() == b"ready\n"
            family.wait_until(lambda family=family: len(family.numbers()) == PROCESSES)
            launcher.send_signal(number)
    for family, launcher, moment, number in launched:
        launcher.wait(60)
        if number is None:
            killed = moment in ("forked", "asked")
            assert launcher.returncode == (-signal.SIGKILL if killed else moment == "raises")
        children = 1 if moment == "fork" else 0  # the launcher's own, which is no service
        family.wait_until(lambda family=family, n=children: len(family.living()) == n)
        for process in family.living():
            process.kill()
            process.wait(10)
        assert moment != "forked" or not family.numbers()


@pytest.mark.slow
def test_orphans_of_a_launcher_killed_in_a_spawn_are_ended(families):
    """At moments spread over the start of a service."""
    launched = [(family := families(), family.launch("many")) for _ in range(5)]
    for number, (_, launcher) in enumerate(launched):
        assert launcher.stdout.readline() == b"ready\n"
        time.sleep(0.013 * number)
        launcher.kill()
        launcher.wait(30)
    for family, _ in launched:
        family.wait_until(lambda family=family: not family.living())


INNER = f"""
import os, sys, time
from pathlib import Path
import psutil
import pytest
from helpers.processes import no_service_outlives_its_test  # noqa: F401
from recipe.atropos.utils.process import start_service

def numbers():
    return [int(path.stem) for path in Path().glob("*.pid")]

def start():
    before = len(numbers())
    start_service("wait", [sys.executable, "-c", {DAEMONS!r}], log_path="log")
    while len(numbers()) < before + 2:
        time.sleep(0.02)

def test_fails():
    start()
    assert False

@pytest.mark.timeout(4)
def test_times_out():
    start()
    time.sleep(60)

def test_crashes():
    assert len(numbers()) == 4 and not any(map(psutil.pid_exists, numbers()))
    start()
    os._exit(7)
"""


def test_orphans_of_a_failed_test_are_ended(family):
    """Of one that fails, one that runs into its limit, and one that takes the test run with it."""
    (family.folder / "test_inner.py").write_text(INNER)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, RUN_ID_VARIABLE: family.mark, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "test_inner.py"]
    status = subprocess.run(command, cwd=family.folder, env=environment, stdout=subprocess.DEVNULL).returncode
    assert status == 7 and len(family.numbers()) == 6
    family.wait_until(lambda: not family.living())


def test_orphans_of_a_killed_guardian_are_ended_by_stop(family, monkeypatch):
    """Those that have the service's session or its mark; the service itself ends with its guardian."""
    monkeypatch.setenv(RUN_ID_VARIABLE, family.mark)
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}], start_new_session=True); {WAIT}"
    service = start_service("family", [sys.executable, "-c", code], log_path=family.folder / "log", cwd=family.folder)
    family.wait_until(lambda: len(family.numbers()) == 2)
    service.process.kill()
    assert service.process.wait(30) == -signal.SIGKILL
    service.stop(grace=0.5)
    assert not family.living()


def test_orphans_of_a_stopped_process_are_ended(family, monkeypatch):
    """SIGSTOP: such a process meets SIGTERM only when it is continued."""
    monkeypatch.setenv(RUN_ID_VARIABLE, family.mark)
    service = start_service("wait", [sys.executable, "-c", WAIT], log_path=family.folder / "log", cwd=family.folder)
    family.wait_until(lambda: len(family.numbers()) == 1)
    os.kill(service.pid, signal.SIGSTOP)
    begin = time.monotonic()
    service.stop(grace=30)
    assert service.poll() == -signal.SIGTERM and time.monotonic() - begin < 20 and not family.living()
