"""The services of one run: which there are, where, and what happens when one ends.

A service for which ``Run.revive`` knows how to start it is started again on the same port, at most so many times; any
other that ends, but for a trainer that is done, ends the run. ``services.json`` always names those that run.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from omegaconf import DictConfig
from rich.console import Console

from recipe.atropos.services.process import Service, ServiceFailed, start_service

console = Console(highlight=False)

_ORPHANS_GRACE = 1.0  # seconds for what a dead service left running, before its successor needs ports and memory


@dataclass
class Revival:
    """How a service is started again. ``kind`` is one name for services of which any one is enough.

    While ``may_start`` says no, the trainer has the memory that it needs: it waits; ``waiting``: that was said.
    """

    start: Callable[[], Service]
    limit: int
    kind: str
    may_start: Callable[[], bool] = lambda: True
    count: int = 0
    waiting: bool = False


@dataclass
class Run:
    """A run's services and files. ``services`` are in the order of their start; they are ended in the reverse."""

    config: DictConfig
    overrides: list[str]
    directory: Path
    services: list[Service] = field(default_factory=list)
    api_key: str = field(default_factory=lambda: secrets.token_hex(16))
    revivals: dict[str, Revival] = field(default_factory=dict)

    def start(self, name: str, command: list[str], url: str | None = None, **env: str) -> Service:
        """In the launcher's own working folder, so that relative paths and local modules mean what the user meant."""
        service = start_service(name, command, log_path=self.log(name), env={"PYTHONUNBUFFERED": "1", **env}, url=url)
        self.add(service)
        return service

    def add(self, service: Service) -> None:
        """A service that was started; it takes the place of one with its name."""
        names = [s.name for s in self.services]
        if service.name in names:
            self.services[names.index(service.name)] = service
        else:
            self.services.append(service)
        self._write_listing()

    def remove(self, service: Service) -> None:
        self.services.remove(service)
        self._write_listing()

    def revive(
        self,
        service: Service,
        start: Callable[[], Service],
        limit: int,
        kind: str,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        """From now on ``service`` is started again when it ends, at most ``limit`` times; see ``Revival``."""
        self.revivals[service.name] = Revival(start, limit, kind, may_start)

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def stop(self, *services: Service) -> None:
        """End the given services, or all, the youngest first."""
        failures = []
        for service in reversed(services or tuple(self.services)):
            try:
                service.stop()
            except ServiceFailed as failure:  # the others are ended all the same
                failures.append(failure)
        if failures:
            raise failures[0]

    def check(self) -> None:
        """Start again what has ended and may be.

        Raises:
            ServiceFailed: another service has ended, or one too often; the trainer may, with status 0.
        """
        for service in tuple(self.services):
            status = service.poll()
            if status is None or (service.name == "trainer" and status == 0):
                continue
            if self._trained():
                self._do_without(service)
            else:
                self._revive(service)

    def _revive(self, service: Service) -> None:
        revival = self.revivals.get(service.name)
        if revival is None:
            raise service.failure("ended while the run needs it")
        if revival.count >= revival.limit:
            raise service.failure(f"ended once more after {revival.count} restarts (inference.max_restarts)")
        service.stop(grace=_ORPHANS_GRACE)
        if not revival.may_start():
            if not revival.waiting:
                told = "it starts again when the trainer gives its memory back"
                console.print(f"[bold]{service.name}[/] ended ({service.poll()}); {told}", soft_wrap=True)
            revival.waiting = True
            return
        revival.waiting = False
        revival.count += 1
        self.add(revival.start())
        console.print(
            f"[bold]{service.name}[/] ended ({service.poll()}), started again at {service.url}: "
            f"{revival.count} of {revival.limit} restarts; see {service.log_path}",
            soft_wrap=True,
        )

    def _do_without(self, service: Service) -> None:
        """Nobody is left who could give a new server the weights: the others of its kind must do."""
        revival = self.revivals.get(service.name)
        kind = [s for s in self.services if revival and (r := self.revivals.get(s.name)) and r.kind == revival.kind]
        if not any(other.poll() is None for other in kind):
            raise service.failure("ended while the run needs it")
        self.remove(service)
        service.stop(grace=_ORPHANS_GRACE)
        console.print(f"[bold]{service.name}[/] ended ({service.poll()}); the others go on", soft_wrap=True)

    def _trained(self) -> bool:
        return any(service.name == "trainer" and service.poll() == 0 for service in self.services)

    def _write_listing(self) -> None:
        listing = {s.name: {"pid": s.pid, "url": s.url, "log": str(s.log_path)} for s in self.services}
        (self.directory / "services.json").write_bytes(orjson.dumps(listing, option=orjson.OPT_INDENT_2))
