"""Services: no process outlives its service or its launcher, none else is touched, failures show the last lines."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers import ROOT
from helpers.waiting import until
from recipe.atropos.utils.process import (
    RUN_ID_VARIABLE,
    Service,
    ServiceFailed,
    _claims,
    free_port,
    run_command,
    start_service,
    wait_until_healthy,
)
from recipe.atropos.utils.sockets import reserve

pytestmark = pytest.mark.timeout(60)

# Each writes its own process number into a file named after it in the working folder, then waits.
WAIT = "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(600)"
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); {WAIT}"
DEAF_CHILD = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {CHILD}"
NEW_SESSION_CHILD = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}], start_new_session=True); {WAIT}"
)
DAEMON = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {WAIT}
    os._exit(0)
os.wait()
{WAIT}
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def started(folder: Path, count: int, timeout: float = 10.0) -> list[psutil.Process]:
    """The `count` processes that have written their number into `folder`."""
    until(lambda: len(list(folder.glob("*.pid"))) >= count, timeout)
    return [psutil.Process(int(path.stem)) for path in folder.glob("*.pid")]


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def launch(tmp_path):
    """Start python code as a service in `tmp_path`; whatever the test leaves is ended."""
    services: list[Service] = []

    def launch(code: str, **kw) -> Service:
        services.append(start_service("worker", python(code), log_path=tmp_path / "worker.log", cwd=tmp_path, **kw))
        return services[-1]

    yield launch
    for service in services:
        service.stop(grace=1)


@pytest.mark.parametrize(
    ("code", "count"),
    [(WAIT, 1), (CHILD, 2), (NEW_SESSION_CHILD, 2), (DAEMON, 2)],
    ids=["alone", "child", "child-in-own-session", "double-forked"],
)
def test_stop_ends_the_whole_tree_and_nothing_else(launch, tmp_path, code, count):
    bystander = subprocess.Popen(python("import time; time.sleep(600)"))
    try:
        service = launch(code)
        processes = started(tmp_path, count)
        begin = time.monotonic()
        service.stop()
        assert time.monotonic() - begin < 5
        assert all(gone(process) for process in processes)
        assert bystander.poll() is None
        assert service.poll() is not None
        service.stop()  # again: nothing to do
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    "given", [{}, {"NO_PROXY": "inside"}, {"no_proxy": "inside", "NO_PROXY": "x"}, {"no_proxy": "*"}]
)
def test_a_proxy_is_not_asked_for_the_services_themselves(launch, monkeypatch, given):
    """SGLang would not get healthy, and would send its key to the proxy; what the user excludes stays excluded."""
    for name, value in {"no_proxy": None, "NO_PROXY": None, "http_proxy": "http://proxy:3128", **given}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    asked = "[host for host in ('127.0.0.1', 'localhost', '10.1.2.3', 'inside', 'outside') if not proxy_bypass(host)]"
    code = f"from urllib.request import getproxies, proxy_bypass; print(getproxies()['http'], {asked})"
    service = launch(code, url="http://10.1.2.3:80")
    service.process.wait(30)
    others = {"": ["inside", "outside"], "inside": ["outside"], "*": []}[
        given.get("no_proxy", given.get("NO_PROXY", ""))
    ]
    assert service.tail() == f"http://proxy:3128 {others}"


def test_stop_right_after_the_start_ends_the_service(launch):
    """A SIGTERM between fork and exec is not lost: it would be killed, when the grace is over."""
    for _ in range(20):
        service = launch("import time; time.sleep(600)")
        service.stop(grace=30)
        assert service.poll() == -signal.SIGTERM


def test_stop_kills_what_ignores_sigterm(launch, tmp_path):
    service = launch(DEAF_CHILD)
    processes = started(tmp_path, 2)
    service.stop(grace=0.5)
    assert all(gone(process) for process in processes) and service.poll() == -signal.SIGKILL


@pytest.mark.parametrize("own_session", [True, False])
def test_orphan_of_a_dead_leader_is_ended_and_named(launch, tmp_path, own_session):
    """Also one without the mark in its environment. The service has ended only when the orphan has."""
    hidden = f"env={{}}, start_new_session={own_session}"
    service = launch(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}], {hidden})")
    assert service.process.wait(30) == 0
    (orphan,) = tmp_path.glob("*.pid")
    assert not psutil.pid_exists(int(orphan.stem))
    assert f"ending what it left running: {orphan.stem} (" in service.tail()


def test_orphan_is_ended_where_the_log_has_no_room(tmp_path):
    """/dev/full refuses each write, as a full disk does."""
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); sys.exit(3)"
    service = start_service("worker", python(code), log_path="/dev/full", cwd=tmp_path)
    try:
        assert service.process.wait(30) == 3
        assert not any(psutil.pid_exists(int(path.stem)) for path in tmp_path.glob("*.pid"))
    finally:
        service.stop(grace=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_service_that_a_signal_ended_reports_that_signal(launch, tmp_path, number):
    service = launch(WAIT)
    started(tmp_path, 1)
    os.kill(service.pid, number)
    assert service.process.wait(30) == -number


def test_a_service_of_a_service_ends_with_the_outer_one(launch, tmp_path):
    inner = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from recipe.atropos.utils.process import start_service\n"
        f"start_service('inner', [sys.executable, '-c', {DAEMON!r}], log_path='inner.log')\n{WAIT}"
    )
    service = launch(inner)
    processes = started(tmp_path, 3)
    os.kill(service.pid, signal.SIGKILL)
    service.process.wait(30)
    assert all(gone(process) for process in processes)


def test_service_ignores_no_signal_that_python_ignores(launch):
    """An ignored SIGPIPE would pass through exec, and change how every program in a pipe ends."""
    service = launch("import subprocess; subprocess.run('grep SigIgn /proc/self/status', shell=True)")
    service.process.wait(10)
    assert int(service.tail().split()[1], 16) & 1 << (signal.SIGPIPE - 1) == 0


def test_a_dead_service_is_reported_at_once_with_its_last_lines(launch):
    service = launch("print('loading'); raise SystemExit('no such checkpoint')")
    begin = time.monotonic()
    with pytest.raises(ServiceFailed) as failure:
        asyncio.run(wait_until_healthy(service, lambda: asyncio.sleep(0, False), timeout=30))
    assert time.monotonic() - begin < 10
    for part in ("worker", "exit code 1", "no such checkpoint", "worker.log"):
        assert part in str(failure.value)


def test_failure_of_our_own_program_is_its_one_line_and_the_log(launch):
    """Whatever Ray prints after it."""
    service = launch("import sys; print('error: seed=abc: give a number'); sys.exit('Ray: 3 workers have ended')")
    service.process.wait(30)
    told = str(service.failure("ended while the run needs it"))
    assert told == f"worker: ended while the run needs it; seed=abc: give a number; see {service.log_path}"


def test_service_that_never_gets_healthy_has_the_last_reason(launch):
    async def check() -> bool:
        raise ConnectionRefusedError("port closed")

    service = launch("import time; print('still loading', flush=True); time.sleep(600)", url="http://127.0.0.1:9")
    with pytest.raises(ServiceFailed, match=r"(?s)http://127.0.0.1:9 within 1 s \(its.key\) .*port closed.*still load"):
        asyncio.run(wait_until_healthy(service, check, timeout=1, key="its.key"))


def test_health_is_waited_for(launch, tmp_path):
    """No longer than the limit; a bug in the check is not taken for "not yet"."""
    service = launch(WAIT)
    with pytest.raises(ServiceFailed, match=r"within 0.5 s"):
        asyncio.run(wait_until_healthy(service, lambda: asyncio.sleep(600), timeout=0.5))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(wait_until_healthy(service, lambda: 1 / 0, timeout=30))
    check = lambda: asyncio.sleep(0, any(tmp_path.glob("*.pid")))  # noqa: E731
    assert 0 <= asyncio.run(wait_until_healthy(service, check, timeout=30)) < 30


def test_tail_shows_this_start_only_and_the_log_is_private(launch, tmp_path):
    """And the service's variables are added to those of this process."""
    (tmp_path / "worker.log").write_text("of an earlier run\n")
    (tmp_path / "worker.log").chmod(0o600)
    variables = f"print(os.environ['PATH'] != '', os.environ['X'], os.environ[{RUN_ID_VARIABLE!r}])"
    service = launch(f"import os\nfor i in range(100): print('line', i)\n{variables}", env={"X": "y"})
    service.process.wait(10)
    assert service.tail(2) == f"line 99\nTrue y {service.run_id}"
    assert "earlier" not in service.tail(1000)
    assert "earlier" in service.log_path.read_text()
    assert service.log_path.stat().st_mode & 0o077 == 0


def test_command_is_run_to_its_end_and_ended_at_its_limit(tmp_path):
    assert run_command("says", python("import sys; print('done'); sys.exit(3)")) == (3, "done\n")
    (tmp_path / "log").write_text("before\n")
    assert run_command("says", python("print('done')"), log_path=tmp_path / "log") == (0, "done\n")
    assert (tmp_path / "log").read_text() == "before\ndone\n"
    begin = time.monotonic()
    code = f"import os; os.chdir({str(tmp_path)!r}); {CHILD}"
    with pytest.raises(TimeoutError, match="waits: not done within 2 s"):
        run_command("waits", python(code), timeout=2)
    assert time.monotonic() - begin < 20
    assert not any(psutil.pid_exists(int(path.stem)) for path in tmp_path.glob("*.pid"))


def test_a_missing_program_is_an_error_at_once(tmp_path):
    with pytest.raises(ServiceFailed, match="no program '/nowhere/python'"):
        start_service("worker", ["/nowhere/python"], log_path=tmp_path / "log")


def test_free_ports_are_nobodys_choice(monkeypatch):
    """They are none of outgoing connections either."""
    chosen = {free_port() for _ in range(50)}
    assert len(chosen) == 50 and max(chosen) < 32768
    probe = "from recipe.atropos.utils.process import _claimed; import sys; print(_claimed(int(sys.argv[1])))"
    told = subprocess.run([sys.executable, "-c", probe, str(max(chosen))], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False", "another process leaves it alone"
    monkeypatch.setattr("recipe.atropos.utils.process.port_is_free", lambda port, host, *option: False)
    with pytest.raises(OSError, match="no free port on 127.0.0.1 among a hundred"):
        free_port()


def test_a_free_port_can_be_reserved(monkeypatch):
    """Unlike one that an ended connection still has."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ended, other = listener.getsockname()[1], free_port()
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
    _claims.pop(other).close()
    monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [ended, other])
    assert free_port() == other
    reserve("127.0.0.1", other, "key").close()
