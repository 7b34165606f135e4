"""A launcher that can be killed at any moment, and the processes of its services."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil

from helpers import ROOT
from recipe.atropos.utils.process import RUN_ID_VARIABLE, Service, start_service

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
LAUNCHER = f"""
import os, signal, socket, subprocess, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from recipe.atropos.utils.process import start_service

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and a shell's "&" have these ignored
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
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


def living_of(mark: str, known: Collection[int] = ()) -> list[psutil.Process]:
    """The living processes with a mark in their environment, or with one of the ``known`` numbers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in known or mark in process.environ().get(RUN_ID_VARIABLE, "").split(":"):
                found.append(process)
    return found


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
        return living_of(self.mark, self.numbers())

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> float:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < seconds, f"after {seconds:g} s: {self.living()}"
            time.sleep(0.05)
        return time.monotonic() - begin


@contextlib.contextmanager
def families_in(folder: Path) -> Iterator[Callable[[], Family]]:
    """Makes families. Whatever a failed test leaves is ended here, and is a failure of its own."""
    made = []

    def make() -> Family:
        made.append(Family(folder / f"family{len(made)}"))
        made[-1].folder.mkdir()
        return made[-1]

    yield make
    left = [process for family in made for process in family.living()]
    for process in left:
        process.kill()
    assert not left


@contextlib.contextmanager
def launched(folder: Path, model: Path, *options: str) -> Iterator[Service]:
    """A launcher of the demonstration's run in ``folder``, which nothing but the block ends early."""
    command = [sys.executable, "-m", "recipe.atropos.launch_services", "--preset=demo", f"--model={model}", *options]
    launcher = start_service("launcher", [*command, f"--run-dir={folder}"], log_path=folder.parent / "log")
    try:
        yield launcher
    finally:
        launcher.stop(grace=0)


def trained(folder: Path, *options: str, timeout: float = 900, **variables: str) -> str:
    """Run a launcher in ``folder`` to the end of its training; return what it printed, without its line breaks."""
    command = [sys.executable, "-m", "recipe.atropos.launch_services", *options]
    launcher = start_service("launcher", command, log_path=folder / "launcher.log", cwd=folder, env=variables)
    try:
        assert launcher.process.wait(timeout) == 0, launcher.tail(60)
        assert "left running" not in launcher.tail(), "it ends what it started"
        return " ".join(launcher.log_path.read_text().split())
    finally:
        launcher.stop(grace=0)


@contextlib.contextmanager
def environment_process(folder: Path, *command: str, flags: dict[str, object], **variables: str) -> Iterator[Service]:
    """An environment that serves, by a command and flags; whatever fails meanwhile shows the end of its log."""
    words = [*command, "serve", *(f"--{key}={value}" for key, value in flags.items())]
    given = {"log_path": folder / "environment.log", "cwd": folder, "env": {"PYTHONUNBUFFERED": "1", **variables}}
    service = start_service("environment", [sys.executable, *words], **given)
    try:
        yield service
    except Exception as error:
        raise AssertionError(service.tail(60)) from error
    finally:
        service.stop()
