"""However and whenever a launcher ends, no process of its services is left, and no process of a failed test either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import ROOT
from helpers.launchers import DEAF, PROCESSES, WAIT, Family, families_in
from recipe.atropos.utils.process import RUN_ID_VARIABLE, start_service

pytestmark = pytest.mark.timeout(120)

DAEMONS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}], start_new_session=True); {WAIT}"


@pytest.fixture
def families(tmp_path):
    with families_in(tmp_path) as make:
        yield make


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
    (family.folder / "pytest.ini").touch()  # so that no configuration of a folder above counts
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, RUN_ID_VARIABLE: family.mark, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "test_inner.py"]
    status = subprocess.run(command, cwd=family.folder, env=environment, stdout=subprocess.DEVNULL).returncode
    assert status == 7 and len(family.numbers()) == 6
    family.wait_until(lambda: not family.living())


@pytest.mark.parametrize("inner_too", [False, True])
def test_orphans_of_a_killed_guardian_are_ended_by_stop(family, monkeypatch, inner_too):
    """If both are killed: those that have the service's session or its mark; the kernel ends the service itself."""
    monkeypatch.setenv(RUN_ID_VARIABLE, family.mark)
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}], start_new_session=True); {WAIT}"
    service = start_service("family", [sys.executable, "-c", code], log_path=family.folder / "log", cwd=family.folder)
    family.wait_until(lambda: len(family.numbers()) == 2)
    inner = psutil.Process(service.process.pid).children()[0]
    service.process.kill()
    if inner_too:
        inner.kill()
    assert service.process.wait(30) == -signal.SIGKILL
    family.wait_until(lambda: not psutil.pid_exists(service.pid))
    service.stop(grace=0.5)
    assert not family.living()


@pytest.mark.slow
def test_orphans_are_ended_by_the_other_guardian(families):
    """Whichever of the two is killed, by whatever signal; with no help of the launcher, which may be gone."""
    kills = [("outer", signal.SIGKILL), ("inner", signal.SIGKILL), ("outer", signal.SIGQUIT)]
    kills += [("inner", signal.SIGSEGV), ("inner", signal.SIGUSR1)]
    cases = [([kill], False) for kill in kills] + [([kill], True) for kill in kills[:2]]
    stops = [("outer", signal.SIGSTOP), ("inner", signal.SIGSTOP)]
    cases += [(stops[:1], True), (stops[1:], True), (stops, True)]
    launched = []
    for signals, launcher_too in cases:
        family = families()
        launched.append((family, family.launch("running"), signals, launcher_too))
    for family, launcher, signals, launcher_too in launched:
        assert launcher.stdout.readline() == b"ready\n"
        family.wait_until(lambda family=family: len(family.numbers()) == PROCESSES)
        [outer] = psutil.Process(launcher.pid).children()
        guardians = {"outer": outer, "inner": outer.children()[0]}
        for guardian, number in signals:
            guardians[guardian].send_signal(number)
        if launcher_too:
            launcher.kill()
    for family, launcher, _, launcher_too in launched:
        family.wait_until(lambda family=family, n=1 - launcher_too: len(family.living()) == n)
        launcher.kill()
        launcher.wait(10)


def test_a_stopped_guardian_delays_no_end(family, monkeypatch):
    """Each continues the other: the launcher hears of the service's end, and its request reaches the inner one."""
    monkeypatch.setenv(RUN_ID_VARIABLE, family.mark)
    ended = start_service("true", ["sleep", "1"], log_path=family.folder / "log")
    stopped = start_service("wait", [sys.executable, "-c", WAIT], log_path=family.folder / "log", cwd=family.folder)
    family.wait_until(lambda: len(family.numbers()) == 1)
    ended.process.send_signal(signal.SIGSTOP)
    psutil.Process(stopped.process.pid).children()[0].send_signal(signal.SIGSTOP)
    stopped.stop(grace=30)
    assert stopped.poll() == -signal.SIGTERM
    assert ended.process.wait(20) == 0
    ended.stop()


def test_orphans_of_a_stopped_process_are_ended(family, monkeypatch):
    """SIGSTOP: such a process meets SIGTERM only when it is continued."""
    monkeypatch.setenv(RUN_ID_VARIABLE, family.mark)
    service = start_service("wait", [sys.executable, "-c", WAIT], log_path=family.folder / "log", cwd=family.folder)
    family.wait_until(lambda: len(family.numbers()) == 1)
    os.kill(service.pid, signal.SIGSTOP)
    begin = time.monotonic()
    service.stop(grace=30)
    assert service.poll() == -signal.SIGTERM and time.monotonic() - begin < 20 and not family.living()


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
