"""The services of a run: which exist, where, and what happens when one ends.

A service with a ``RestartPolicy`` is restarted, a server on the same port, up to the policy's limit. After that, the
run continues without it if the policy marks it as optional and another of its kind is left. Any other service that
ends, except a trainer that is done, ends the run. ``services.json`` lists the launcher and the running services.
"""

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from omegaconf import DictConfig

from recipe.atropos.errors import RECOVERABLE, ConfigurationError, Preempted, attempt_all
from recipe.atropos.launcher.run_plan import RunPlan
from recipe.atropos.run.folder import LAUNCHER, LOCK_VARIABLE
from recipe.atropos.terminal.progress import say
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.utils.files import FolderRemoved, bound_log, write_json
from recipe.atropos.utils.hosts import cluster_address, interface_variables, is_this_host
from recipe.atropos.utils.process import LocalService, Service, start_service, start_time, stop_all
from recipe.atropos.utils.scratch import Scratch
from recipe.atropos.utils.secret import environments_key
from recipe.atropos.utils.sockets import SOCKET_VARIABLE, listening

if TYPE_CHECKING:
    from recipe.atropos.launcher.on_ray import Cluster

WATCH_SECONDS = 0.5  # between two looks at the services and the run's files
_API_SECONDS = 10.0  # for one request to the Trajectory API
_SOON_SECONDS, _LONGEST_DELAY = 60.0, 30.0  # a service that ends so soon is restarted later each time
_STABLE_SECONDS = 1800.0  # after which a restart is forgotten
LOG_BYTES = 64 << 20  # of a service's log, and as much before it in NAME.log.1
_LOG_SECONDS = 0.5  # between two looks at the logs' sizes


@dataclass
class RestartPolicy:
    """How a service is restarted, and which configuration key sets the limit.

    ``kind`` names a set of services of which any one suffices once training is done or, if they are ``optional``, also
    before. A restart waits while ``awaited`` says what for. ``recovers``: whether a restart can help after an exit
    status.
    """

    start: Callable[[], Service]
    limit: int
    kind: str
    awaited: Callable[[], str] = lambda: ""
    recovers: Callable[[int], bool] = lambda status: True
    key: str = "inference.max_restarts"
    optional: bool = False
    count: int = 0
    moved: bool = False  # it was ended, for a server that has moved; its restart does not count
    soon: int = 0  # how often in a row it ended soon after a restart
    since: float = field(default_factory=time.monotonic)  # of the last start
    delayed_until: float | None = None  # while a restart waits

    def delay(self) -> float:
        """Return the seconds until the restart is due; each time that a service ends soon again, they double.

        A restart that held for ``_STABLE_SECONDS`` no longer counts toward the limit.
        """
        now = time.monotonic()
        if self.delayed_until is None:
            lived = now - self.since
            self.soon = self.soon + 1 if self.count and lived < _SOON_SECONDS else 0
            self.count = 0 if lived > _STABLE_SECONDS else self.count
            self.delayed_until = now + min(_LONGEST_DELAY, 2.0 ** (self.soon - 1) if self.soon else 0.0)
        return self.delayed_until - now


@dataclass
class Run:
    """A planned run's services. ``services``, by name, are in start order and are stopped in reverse.

    ``restart_policies``: of those that are restarted when they end, by name.
    """

    plan: RunPlan
    services: dict[str, Service] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)
    restart_policies: dict[str, RestartPolicy] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    lock: int | None = None
    """Descriptor of the run folder's lock, which every started service inherits."""
    scratch: Scratch | None = None
    complete: DictConfig | None = field(default=None, repr=False)
    """The trainer's configuration, with the addresses of all services."""
    sessions_url: str | None = None
    """Of the session server, if the run has one."""
    started: float = field(default_factory=time.time)
    reserved: dict[str, socket.socket] = field(default_factory=dict)
    """Sockets that hold the ports of services, by name; each start of such a service inherits one that listens."""
    preempted: bool = False
    cluster: "Cluster | None" = field(default=None, repr=False)
    """Where Ray has placed servers and environments, if it does."""

    def __post_init__(self) -> None:
        self.config, self.files = self.plan.config, self.plan.files
        # The trainer's: the user's own, or a generated one.
        self.api_key = (self.config and self.config.inference.api_key) or secrets.token_hex(16)
        self.environments_key = environments_key(self.api_key)

    def start(self, name: str, command: list[str], url: str | None = None, **env: str) -> Service:
        """Start a service in the launcher's working directory, so that relative paths and local modules resolve."""
        env = {"PYTHONUNBUFFERED": "1", **self.variables, **env}
        descriptors = {} if self.lock is None else {LOCK_VARIABLE: self.lock}
        with listening(self.reserved[name]) if name in self.reserved else contextlib.nullcontext() as listener:
            if listener is not None:
                descriptors[SOCKET_VARIABLE] = listener.fileno()
            service = start_service(
                name, command, log_path=self.files.log(name), env=env, url=url, inherited=descriptors
            )
        self.add(service)
        return service

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all services: the run's temporary folder, and loopback if all are local."""
        if self.scratch is None:
            self.scratch = Scratch.create()
        config, variables = self.config, self.scratch.variables()
        if (
            config
            and config.trainer.nnodes == config.inference.args.get("nnodes", 1) == 1
            and not cluster_address(config.ray_kwargs.ray_init)
            and is_this_host(f"http://{config.inference.host}")
        ):
            variables |= interface_variables()
        return variables

    def add(self, service: Service) -> None:
        """Add a started service, replacing one of the same name."""
        self.services[service.name] = service
        self._write_listing()

    def remove(self, service: Service) -> None:
        del self.services[service.name]
        self._write_listing()

    def end(self, service: Service) -> None:
        """Stop a service and remove it. Raises ServiceFailed or DiskFull once both are done."""
        try:
            service.stop()
        finally:
            self.remove(service)

    async def ask_api(self, url: str, ask: Callable[[TrajectoryApiClient], Awaitable[Any]]) -> Any:
        """Return what the run's Trajectory API answers, in a single attempt. Raises TrajectoryApiError."""
        async with TrajectoryApiClient(url, self.api_key, retry_timeout=0, timeout=_API_SECONDS) as client:
            return await ask(client)

    def stop(self) -> None:
        """Stop all services, the last started first, its servers at once, and remove the run's temporary files.

        Raises:
            ServiceFailed, DiskFull: the first failure, once the rest is done.
        """
        with contextlib.suppress(OSError):  # including DiskFull: written again below
            self._write_listing(ending=True)
        try:
            servers = [service for service in self.services.values() if service.name.startswith("sglang")]
            others = (each.stop for each in reversed(self.services.values()) if not each.name.startswith("sglang"))
            attempt_all([*others, partial(stop_all, servers), self._write_listing])
        finally:
            for reserved in self.reserved.values():
                reserved.close()
            if self.cluster is not None:
                self.cluster.close()
                self.cluster = None
            if self.scratch is not None:
                self.scratch.remove()

    def check(self) -> None:
        """Restart services that have ended, as far as their policies allow.

        Raises:
            ServiceFailed: a service that the run needs has ended for good; a trainer with status 0 is done.
            Preempted: the run was preempted, and its trainer has ended as that asked, was killed or is done: what is
                still to come, such as the last evaluation, may take longer than there is.
            FolderRemoved: the run's folder was removed or moved, whatever may have made one there since.
        """
        gone = False
        with contextlib.suppress(OSError):  # of a disk that does not answer now
            gone = self.lock is not None and not self.files.is_locked_by(self.lock)
        if gone:
            raise FolderRemoved(self.files.path)
        trainer = self.services.get("trainer")
        ended = RECOVERABLE if trainer is None else trainer.poll()
        if ended is not None and (ended == RECOVERABLE or ended <= 0):
            self.check_preempted()
        for service in tuple(self.services.values()):
            if service.poll() is None or (service is trainer and service.poll() == 0):
                continue
            if ended == 0 and service.name != "api":  # which accounts for the groups at the end
                self._drop_after_training(service)
            else:
                self._restart(service)

    def check_preempted(self) -> None:
        """Raise Preempted if the run was preempted; called where no trainer runs."""
        if self.preempted:
            raise Preempted(f"{self.files.path}: SIGUSR1 has ended the run; the same command continues")

    def preempt(self) -> None:
        """End the run once the trainer has ended, see ``end_trainer``."""
        self.preempted = True
        self.end_trainer()

    def end_trainer(self) -> None:
        """Let the trainer end after the step that it trains, with a checkpoint; without one before its first step."""
        trainer = self.services.get("trainer")
        if trainer is not None and trainer.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and what it started has not
                os.kill(trainer.pid, signal.SIGUSR1)

    def _restart(self, service: Service) -> None:
        policy = self.restart_policies.get(service.name)
        if policy is None or not (policy.moved or policy.recovers(service.poll())):
            raise service.failure("ended while the run needs it")
        announced = policy.delayed_until is not None
        delay = policy.delay()
        if policy.count >= policy.limit and not policy.moved:
            self._abandon(service, policy, f"ended once more after {policy.count} restarts ({policy.key})")
            return
        service.stop()
        try:
            awaited = policy.awaited()
        except ConfigurationError as error:
            self._abandon(service, policy, str(error))
            return
        if awaited or delay > 0:
            if not announced:
                when = awaited or f"in {delay:.0f} s"
                say(f"ended ({service.poll()}); it starts again {when}", service.name, width=0)
            return
        policy.delayed_until = None
        policy.count += not policy.moved
        policy.moved = False
        self.add(policy.start())
        policy.since = time.monotonic()
        where = f" at {self.services[service.name].url}" if service.url else ""  # which may be another one
        restarts = f"{policy.count} of {policy.limit} restarts; see {service.log_path}"
        say(f"ended ({service.poll()}), started again{where}: {restarts}", service.name, width=0)

    def _abandon(self, service: Service, policy: RestartPolicy, what: str) -> None:
        """Continue without an optional service that has ended. Raises ServiceFailed if the run needs it."""
        if not (policy.optional and self._others(policy.kind, service)):
            raise service.failure(what)
        self.end(service)
        self.abandoned.add(service.name)
        last = f"last lines of {service.log_path}:\n{service.tail(3)}"
        say(f"{what}, abandoned; {last}", service.name, "bold red", width=0)

    def _drop_after_training(self, service: Service) -> None:
        """Drop a service: no trainer is left to push weights to a server or train on new groups."""
        policy = self.restart_policies.get(service.name)
        spare = policy is not None and (
            policy.optional or any(other.poll() is None for other in self._others(policy.kind, service))
        )
        if not spare:
            raise service.failure("ended while the run needs it")
        self.end(service)
        say(f"ended ({service.poll()}); the others go on", service.name, width=0)

    def _others(self, kind: str, service: Service) -> list[Service]:
        """Return the other services of a kind, including those that have ended but may be restarted."""
        names = [name for name, policy in self.restart_policies.items() if policy.kind == kind]
        return [self.services[name] for name in names if name in self.services and name != service.name]

    def _write_listing(self, ending: bool = False) -> None:
        # What Ray has placed is not of this machine, and ends with the launcher.
        running = [
            (s.name, s.pid if isinstance(s, LocalService) else os.getpid(), s.url, str(s.log_path))
            for s in self.services.values()
            if s.poll() is None
        ]
        if running:
            running.insert(0, (LAUNCHER, os.getpid(), None, _output(self.files.log(LAUNCHER))))
        listing = {
            name: {"pid": pid, "started": start_time(pid), "booted": psutil.boot_time(), "url": url, "log": log}
            for name, pid, url, log in running
        }
        if ending and listing:
            listing[LAUNCHER]["ending"] = True
        write_json(self.files.services, listing)


@contextlib.contextmanager
def bounded_logs(folder: Path, limit: int = LOG_BYTES) -> Iterator[None]:
    """While the block runs, ``bound_log`` each log of ``folder`` in a thread of its own: neither a process that prints
    without end nor a slow disk blocks the launcher's event loop.
    """
    ended = threading.Event()

    def bound() -> None:
        while not ended.wait(_LOG_SECONDS):
            for path in folder.glob("*.log"):
                bound_log(path, limit)

    thread = threading.Thread(target=bound, name="bound-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _output(log: Path) -> str | None:
    """Return ``log`` if this process writes there, as a detached launcher does."""
    try:
        return str(log) if os.path.samestat(os.fstat(1), log.stat()) else None
    except OSError:
        return None
