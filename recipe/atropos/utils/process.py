"""Start, watch and stop operating-system processes (Linux).

Guarantees:

* a service, and everything that it started, ends with the process that started it, however and whenever that one ends:
  above the service are two guardians (see ``guardian.py``), which notice that the launcher is gone;
* `Service.stop` ends every process of the service, and no other. If both guardians were killed, they are identified by
  their session and their mark in the environment;
* a service that has ended leaves no process behind;
* a service's output is in its log file, and a failure quotes its last lines.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import psutil

from recipe.atropos.errors import AtroposError, attempt_all
from recipe.atropos.utils.files import printable
from recipe.atropos.utils.hosts import without_proxy
from recipe.atropos.utils.scratch import Scratch

RUN_ID_VARIABLE = "ATROPOS_RUN_ID"
"""Environment variable that marks a service's processes: the ids of the services that they belong to, outermost first,
joined by ":". A service started by a service carries both marks, so stopping the outer one ends the inner one too."""

_POLL_SECONDS, _CHECK_SECONDS = 0.2, 0.1
_KILL_SECONDS = 5.0
_TICKS_SECONDS = 0.1  # by which a process's start time since the boot may differ later, in ticks of 10 ms
_TAIL_LINES, _TAIL_COLUMNS = 20, 300

_GUARDIAN_SECONDS = 60.0  # for it to start the service


class ServiceFailed(AtroposError, RuntimeError):
    """A service died, or did not become healthy in time. The message quotes the last lines of its log."""


def port_is_free(port: int, host: str = "127.0.0.1", option: int = socket.SO_REUSEADDR) -> bool:
    """Return whether a server could listen on `host`:`port` now.

    With SO_REUSEADDR, a port in TIME_WAIT is free; with SO_REUSEPORT, so is what sockets of this user with it hold.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


# Above Ray's own ports, and below those that Linux assigns to outgoing connections.
_PORTS = range(20000, 32768)
_claims: dict[int, socket.socket] = {}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free and that no other process of this machine has claimed by this function.

    It is low enough for SGLang, which adds up to 10,000 to it for its own ports.

    Raises:
        OSError: a hundred ports were taken.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        if port not in _claims and _claimed(port) and _is_free(port, host):
            return port
    raise OSError(f"no free port on {host} among a hundred from {_PORTS[0]} to {_PORTS[-1]}: name one that is free")


def default_port(preferred: int, host: str = "127.0.0.1", given: Collection[int] = ()) -> int:
    """Return `preferred` if nothing listens there, no other launcher of this machine has claimed it, and it is not
    among the ports `given` to other services of this launcher; else a free port."""
    usable = preferred not in given and (preferred in _claims or _claimed(preferred))
    return preferred if usable and _is_free(preferred, host) else free_port(host)


def _is_free(port: int, host: str) -> bool:
    """Return whether nothing listens there, nor do ended connections keep the port from ``sockets.reserve``."""
    return port_is_free(port, host) and port_is_free(port, host, socket.SO_REUSEPORT)


def _claimed(port: int) -> bool:
    """Claim the port and return whether that worked: the abstract socket's name is held until this process ends."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0atropos-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims[port] = claim
    return True


@dataclass
class Service(ABC):
    """A started process, leader of its own session, with all its output in one log file; ``pid``: that on its node."""

    name: str
    pid: int
    log_path: Path
    url: str | None = None
    log_start: int = 0
    """Size of the log file when this process was started: what precedes it is from an earlier process."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the leading process's exit code (negative: the signal), or None while any process runs."""

    @abstractmethod
    def stop(self, grace: float = 10.0) -> None:
        """End every process of this service; return when none is left. May be called any number of times, even after
        the process has died by itself.

        The leader gets SIGTERM first, because it knows best how to end its own processes. When it is gone the others
        get SIGTERM; those left `grace` seconds after the call are killed.

        Raises:
            ServiceFailed: a process survived SIGKILL (it hangs in the kernel).
        """

    def _last_lines(self) -> list[str]:
        with open(self.log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            start = self.log_start if self.log_start <= end else 0  # bound_log has emptied it since
            log.seek(max(start, end - 65536))
            return printable(log.read().decode(errors="replace")).splitlines()

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the last lines that this process wrote, long ones cut (SGLang prints all its arguments in one)."""
        last = self._last_lines()[-lines:]
        return "\n".join(line if len(line) <= _TAIL_COLUMNS else f"{line[:_TAIL_COLUMNS]} ..." for line in last)

    def failure(self, what: str) -> ServiceFailed:
        """Return an error that says `what` happened to this service, how it ended if it did, and its last lines.

        Our own programs end an expected failure with a line "error: ..."; the error then quotes only that line.
        """
        status = self.poll()
        if status is None:
            state = "it still runs"
        elif status < 0:
            state = f"it was ended by {signal.Signals(-status).name}"
        else:
            state = f"it ended with exit code {status}"
        lines = self._last_lines()
        if status and (errors := [line for line in lines[-_TAIL_LINES:] if line.startswith("error: ")]):
            return ServiceFailed(f"{self.name}: {what}; {errors[-1].removeprefix('error: ')}; see {self.log_path}")
        tail = self.tail() or "(it wrote nothing)"
        return ServiceFailed(f"{self.name}: {what}; {state}. Last lines of {self.log_path}:\n{tail}")


@dataclass(kw_only=True)
class LocalService(Service):
    """A service on this machine."""

    process: subprocess.Popen
    """The outer guardian, which ends as the service did, once all of the service has ended."""
    control: socket.socket = field(repr=False)
    run_id: str = ""
    _started: float = field(default=0.0, repr=False)

    def poll(self) -> int | None:
        return self.process.poll()

    def members(self) -> list[psutil.Process]:
        """Return every living process of this service that its session or its mark shows; not the outer guardian."""
        others = (p for p in psutil.process_iter() if p.pid not in (os.getpid(), self.process.pid))
        return [process for process in others if self._marked(process)]

    def _marked(self, process: psutil.Process) -> bool:
        """Return whether a process is no zombie, and has this service's mark or its session.

        The session counts because programs that rename themselves (SGLang's scheduler, Ray's workers) overwrite the
        memory in which the system shows their environment. Once the leader is reaped, its pid can be reused only when
        no member of its session is left.
        """
        session_ended = self.process.returncode is not None and psutil.pid_exists(self.pid)
        try:
            if process.create_time() < self._started - 1 or process.status() == psutil.STATUS_ZOMBIE:
                return False  # clock ticks are rounded
            if os.getsid(process.pid) == self.pid and not session_ended:
                return True
            return self.run_id in process.environ().get(RUN_ID_VARIABLE, "").split(":")
        except (psutil.Error, OSError):
            return False  # ended meanwhile, or another user's

    def stop(self, grace: float = 10.0) -> None:
        if self.control.fileno() == -1:  # it is closed: stopped before
            return
        self.process.send_signal(signal.SIGCONT)  # a guardian that was stopped (SIGSTOP) would end nothing
        with contextlib.suppress(OSError):  # it has ended
            self.control.sendall(b"%g\n" % grace)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace + _KILL_SECONDS)
        with contextlib.suppress(OSError):  # it was killed, and the inner one still ends the service
            self.control.settimeout(grace + 2 * _KILL_SECONDS)
            self.control.recv(1)  # nothing, once neither of them holds the socket
        signal_all(self.members(), signal.SIGTERM)  # there are some if both were killed
        kill = time.monotonic() + grace
        while (rest := self.members()) and time.monotonic() < kill + _KILL_SECONDS:
            if time.monotonic() >= kill:
                signal_all(rest, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        if rest:
            raise self.failure(f"processes {[p.pid for p in rest]} survived SIGKILL")
        self.control.close()
        unstopped[:] = [service for service in unstopped if service is not self]


def stop_all(services: Collection[Service]) -> None:
    """Stop services at once: an SGLang server takes 5 s and more, and a run that is preempted has 180 s for all.

    Raises:
        ServiceFailed, DiskFull: the first failure, once all have been tried.
    """
    with ThreadPoolExecutor(1 + len(services)) as pool:
        attempt_all([stopped.result for stopped in [pool.submit(service.stop) for service in services]])


unstopped: list[LocalService] = []
"""The services that this process started and did not stop. A guardian ends its service when the socket to it is closed,
so they are kept here, even if no other reference to the ``LocalService`` is left."""


def open_log(path: Path) -> BinaryIO:
    """Open a file for appending, with mode 0600, since it may hold private data."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb", buffering=0)


def start_service(
    name: str,
    command: list[str],
    *,
    log_path: Path | str,
    output_path: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    url: str | None = None,
    inherited: Mapping[str, int] | None = None,
) -> LocalService:
    """Start `command` as the leader of a new session; its output is appended to `log_path` (see ``open_log``), what it
    writes to standard output to `output_path`, if one is given.

    `env` is added to this process's environment. `inherited`: descriptors that stay open in the service, by the
    environment variables that name them there. A proxy that is set is not asked for loopback addresses and the
    host of `url`. May be called from any thread.

    Raises:
        ServiceFailed: the program does not exist.
    """
    inherited = inherited or {}
    environment = {**os.environ, **(env or {}), **{name: str(number) for name, number in inherited.items()}}
    # SGLang asks itself whether it is up, with its key, and agents ask the session server.
    environment |= without_proxy(environment, "localhost", "127.0.0.1", url and urlsplit(url).hostname)
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ServiceFailed(f"{name}: no program {command[0]!r}; give its full path, or put it on PATH")
    run_id = uuid.uuid4().hex
    environment[RUN_ID_VARIABLE] = ":".join(filter(None, [os.environ.get(RUN_ID_VARIABLE), run_id]))

    log_path = Path(log_path)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    control, theirs = socket.socketpair()
    with theirs, open_log(log_path) as log, open_log(output_path or log_path) as output:
        log_start = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), name],
            stdin=theirs.fileno(),
            stdout=output,
            stderr=log,
            env=environment,
            cwd=cwd,
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
            pass_fds=tuple(inherited.values()),
        )
    words = "\0".join(command).encode(errors="surrogateescape")
    pid = b""
    with contextlib.suppress(OSError):  # it ended, or took too long
        control.settimeout(_GUARDIAN_SECONDS)
        control.sendall(len(words).to_bytes(8, "big") + words)
        pid = control.recv(64)
    if not pid:
        process.kill()
        process.wait()
        raise ServiceFailed(f"{name}: its guardian process started nothing; see {log_path}")
    service = LocalService(
        name, int(pid), log_path, url, log_start,
        process=process, control=control, run_id=run_id, _started=started,
    )  # fmt: skip
    unstopped.append(service)
    return service


def run_command(
    name: str,
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    log_path: Path | None = None,
    grace: float = 1.0,
) -> tuple[int, str]:
    """Run a command as a service, so that it never outlives this process; return its status and output.

    Its temporary files are removed when it ends or, if this process is killed, by the next run. ``log_path``: where its
    output can be read meanwhile.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds, and was ended, with ``grace`` seconds to end by itself.
        ServiceFailed: the program does not exist.
    """
    scratch = Scratch.create()
    try:
        variables = {**(env or {}), **scratch.variables()}
        service = start_service(name, command, log_path=log_path or scratch.folder / "log", env=variables)
        try:
            status = service.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{name}: not done within {timeout:g} s") from error
        finally:
            service.stop(grace)
        with service.log_path.open("rb") as log:
            log.seek(service.log_start)
            return status, log.read().decode(errors="replace")
    finally:
        scratch.remove()


async def wait_until_healthy(
    service: Service | Callable[[], Service],
    check: Callable[[], Awaitable[bool]],
    timeout: float,
    *,
    what: str = "healthy",
    key: str = "",
) -> float:
    """Wait until `await check()` is true and return the seconds that it took.

    `service` may be a function that returns it, if it may be restarted meanwhile. False, an OSError or a TimeoutError
    mean "not yet"; any other exception propagates. ``key``: the setting of ``timeout``. The service is not stopped: the
    caller decides.

    Raises:
        ServiceFailed: the process ended, or `timeout` seconds went by.
    """
    begin = time.monotonic()
    reason = ""
    while True:
        current = service() if callable(service) else service
        target = f"{what} at {current.url}" if current.url else what
        if current is service and current.poll() is not None:
            raise current.failure(f"not {target} after {time.monotonic() - begin:.1f} s")
        remaining = begin + timeout - time.monotonic()
        if remaining <= 0:
            raise current.failure(f"not {target} within {timeout:g} s{f' ({key})' if key else ''}{reason}")
        try:
            if await asyncio.wait_for(check(), remaining):
                return time.monotonic() - begin
        except (OSError, TimeoutError) as error:
            reason = f" (the last check said: {error!r})"
        await asyncio.sleep(_CHECK_SECONDS)


def start_time(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.create_time()
    return None


def process_lives(pid: int, started: float, booted: float) -> bool:
    """Return whether ``pid`` is still the process that started then, and no later one.

    ``booted``: ``psutil.boot_time()`` when ``started`` was recorded. Both move when the clock is set, by a resumed
    virtual machine for example; their difference does not.
    """
    found = start_time(pid)
    return found is not None and abs((found - psutil.boot_time()) - (started - booted)) < _TICKS_SECONDS


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that live."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
