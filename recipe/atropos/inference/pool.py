"""Pool of SGLang servers: which ones are admitted, and the requests that wait for one.

Guarantees:

- only the trainer admits a server (`ServerPool.admit`); before its first announcement none is admitted;
- a removed server (`ServerPool.remove`) gets nothing until the trainer admits it again, and its requests in flight are
  handed back to be sent to another server;
- the caller chooses among the admitted servers;
- a request waits at most `max_wait` seconds for a server, and its error says what it waited for.

During a push (`pushing=True`) servers move from one version to the next, so both are accepted. The announcement that
ends the push leaves only the new one and, if the policy is an adapter, switches requests to the new adapter. A reply
may be checked against `accepted` only if its request was sent in the current `epoch`: a reply that was in flight during
an announcement may reflect the earlier state.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger(__name__)


class NothingAdmitted(Exception):
    """No server could take a request in time; the message says what it waited for."""


@dataclass(eq=False)
class Server:
    """One SGLang server. ``requests`` counts what was sent to it, ``failures`` how often it was removed."""

    url: str
    state: Literal["admitted", "waiting", "down"] = "waiting"
    requests: int = 0
    failures: int = 0
    last_error: str | None = None
    _exchanges: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def inflight(self) -> int:
        return len(self._exchanges)

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[None]:
        """Wrap one request to this server; raise TimeoutError as soon as the server is no longer admitted."""
        async with asyncio.timeout(None) as limit:
            self._exchanges.add(limit)
            self.requests += 1
            try:
                yield
            finally:
                self._exchanges.discard(limit)

    def leave(self, state: Literal["waiting", "down"]) -> None:
        self.state = state
        for limit in self._exchanges:
            if not limit.expired():
                limit.reschedule(0)  # a time in the past: expires at once

    def status(self) -> dict[str, Any]:
        names = ("url", "state", "inflight", "requests", "failures", "last_error")
        return {name: getattr(self, name) for name in names}


class ServerPool:
    """Pool for one event loop; see the module. ``version``: the active one, None before the first push."""

    def __init__(self, urls: Sequence[str], max_wait: float):
        self.servers = {url.rstrip("/"): Server(url.rstrip("/")) for url in urls}
        self.max_wait = max_wait
        self.version: int | None = None
        self.adapter: str | None = None
        self.accepted: frozenset[str] = frozenset()
        self.epoch = 0
        self.held = 0
        self._admission = asyncio.Event()

    @property
    def admitted(self) -> list[Server]:
        return [server for server in self.servers.values() if server.state == "admitted"]

    def admit(self, version: int, urls: Sequence[str], pushing: bool = False, adapter: str | None = None) -> None:
        """Apply an announcement: ``urls`` hold ``version`` or, if ``pushing``, those admitted among them will.

        ``adapter``: its name on the servers, if the version is an adapter.

        Raises:
            ValueError: a URL that this pool was not started with.
        """
        listed = {url.rstrip("/") for url in urls}
        if unknown := sorted(listed - set(self.servers)):
            raise ValueError(f"servers {unknown} are none of --servers {','.join(self.servers)}: give the same URLs")
        self.epoch += 1
        for server in self.servers.values():
            if server.url in listed and not pushing:
                if server.state != "admitted":
                    logger.info("%s is admitted with version %d", server.url, version)
                server.state = "admitted"
            elif server.url not in listed and server.state == "admitted":
                logger.warning(
                    "%s is removed from rotation: the trainer left it out of version %d", server.url, version
                )
                server.leave("waiting")
        if pushing:
            self.accepted |= {str(version)}
            return
        self.version, self.adapter, self.accepted = version, adapter, frozenset({str(version)})
        self._admission.set()
        self._admission = asyncio.Event()

    def remove(self, server: Server, why: str) -> None:
        """Remove a server from rotation until it is admitted again; do nothing if it is not admitted."""
        if server.state != "admitted":
            return
        logger.error("%s is removed from rotation: %s", server.url, why)
        server.failures += 1
        server.last_error = why
        server.leave("down")

    async def acquire(self, choose: Callable[[list[Server]], Server], waited: float = 0.0) -> Server:
        """Return the admitted server that ``choose`` picks, as soon as there is one.

        Raises:
            NothingAdmitted: none within ``max_wait`` seconds, minus those that the request has ``waited`` before.
        """
        if not self.admitted:
            await self._wait_for_admission(max(0.0, self.max_wait - waited))
        return choose(self.admitted)

    async def _wait_for_admission(self, timeout: float) -> None:
        self.held += 1
        try:
            async with asyncio.timeout(timeout):
                while not self.admitted:
                    await self._admission.wait()
        except TimeoutError:
            states = "; ".join(
                f"{server.url} is {server.state}{f' ({server.last_error})' if server.last_error else ''}"
                for server in self.servers.values()
            )
            raise NothingAdmitted(
                f"waited {self.max_wait:g} s for the trainer to give its weights to an SGLang server and to admit it; "
                f"{states}. See the trainer's log, and the server's"
            ) from None
        finally:
            self.held -= 1

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "adapter": self.adapter,
            "servers": [server.status() for server in self.servers.values()],
            "held": self.held,
        }
