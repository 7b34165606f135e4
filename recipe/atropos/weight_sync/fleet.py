"""The trainer's SGLang servers, which may come and go: which ones answer, and which hold the active version.

The gateway in front of them sends no requests to servers that lack it.

- A server that does not answer is removed: logged once, counted (``weight_sync/servers_removed``), not pushed to.
- All must answer before the first push, within ``trainer.atropos.startup_timeout`` seconds.
- If later no server answers, the trainer waits for one, at most ``trainer.atropos.weight_sync.timeout`` seconds; then
  the error names them all.
- The gateway admits exactly the servers that hold the active version, also after the gateway restarts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient

logger = logging.getLogger(__name__)

_LONGEST_ANSWER = 60.0  # seconds that a busy server may take to report its version
_ANSWER_OF_ONE_OUT = 2.0  # for a server that is out of rotation; the whole step waits for it
_DYING_SECONDS = 5.0  # from the death of an engine's process to the end of its HTTP server
_LOOK_SECONDS = 1.0  # between polls of the servers


class ServersGone(AtroposError, RuntimeError):
    """No SGLang server answers, or, colocated with the trainer, not all do; reports each missing server's error; or a
    server died in each of several consecutive pushes.
    """


@dataclass
class ServerFleet:
    """State of the servers of ``urls``. ``holding``: those that hold the active version; ``removed``: the errors of
    those that do not answer, by URL.

    ``adapter``: name of the active adapter, None if all weights are pushed.
    ``timeout``: seconds for one request by ``ask``, and to wait until enough servers answer.
    """

    urls: Sequence[str]
    gateway: GatewayClient
    api_key: str | None = None
    timeout: float = 600.0
    holding: set[str] = field(default_factory=set)
    adapter: str | None = None
    removed: dict[str, str] = field(default_factory=dict)
    _level: int = logging.INFO  # of what is missing: servers may still load until the first push

    def __post_init__(self) -> None:
        self.urls = [url.rstrip("/") for url in self.urls]

    def ask(
        self,
        action: Callable[[SGLangClient], Awaitable[Any]],
        urls: Collection[str],
        timeouts: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Run ``action`` on each server; return its result or InferenceError by URL. ``timeouts``: seconds per call."""

        async def ask_all() -> list[Any]:
            limits = dict.fromkeys(urls, self.timeout) if timeouts is None else timeouts
            clients = [SGLangClient(url, self.api_key, timeout=limits[url]) for url in urls]
            return await asyncio.gather(*map(action, clients), return_exceptions=True)

        answers = dict(zip(urls, asyncio.run(ask_all()), strict=True))
        for error in answers.values():
            if isinstance(error, BaseException) and not isinstance(error, InferenceError):
                raise error
        return answers

    def look(self, longest: float = _LONGEST_ANSWER) -> dict[str, str]:
        """Return the weight version of each server that answers in time; remove the others from rotation."""
        longest = min(self.timeout, longest)
        versions, errors = self._ask({url: _ANSWER_OF_ONE_OUT if url in self.removed else longest for url in self.urls})
        for url in self.removed.keys() & versions.keys():
            logger.warning("SGLang server %s answers, with weight version %s", url, versions[url])
            del self.removed[url]
        self._remove(errors)
        return versions

    def wait_for(
        self, least: int, meanwhile: Callable[[], object] = lambda: None, limit: float | None = None
    ) -> dict[str, str]:
        """Poll until ``least`` servers answer, and call ``meanwhile`` each time; return the weight version of each.

        Raises:
            ServersGone: fewer than ``least`` answer within ``limit`` seconds, by default ``timeout``.
        """
        limit = self.timeout if limit is None else limit
        deadline = time.monotonic() + limit
        if len(versions := self.look(min(limit, _LONGEST_ANSWER))) < least:
            logger.log(self._level, "%d SGLang servers answer, %d must: waiting %g s", len(versions), least, limit)
        while len(versions) < least:
            if time.monotonic() > deadline:
                who = f"only {len(versions)} of {len(self.urls)} SGLang servers" if versions else "no SGLang server"
                reasons = "; ".join(self.removed.values())
                fix = "see their logs, or correct inference.urls"
                raise ServersGone(f"{who} answered for {limit:g} s; {fix}: {reasons}")
            meanwhile()
            time.sleep(_LOOK_SECONDS)
            versions = self.look()
        return versions

    def died(self, targets: Sequence[str]) -> bool:
        """Return whether a server of a failed push is gone or hangs; a dying one is given time to go down."""
        deadline = time.monotonic() + _DYING_SECONDS
        while True:
            _, errors = self._ask(dict.fromkeys(targets, _DYING_SECONDS))
            if errors or time.monotonic() > deadline:
                self._remove(errors)
                return bool(errors)
            time.sleep(_LOOK_SECONDS)

    def _ask(self, timeouts: dict[str, float]) -> tuple[dict[str, str], dict[str, str]]:
        """Return weight versions and errors, each by URL; raise the error of a wrong API key."""
        answers = self.ask(lambda client: client.weight_version(), timeouts, timeouts)
        errors = {url: answer for url, answer in answers.items() if isinstance(answer, InferenceError)}
        for error in errors.values():
            if error.status in (401, 403):
                raise error
        versions = {url: version for url, version in answers.items() if url not in errors}
        return versions, {url: str(error) for url, error in errors.items()}

    def _remove(self, errors: dict[str, str]) -> None:
        for url in errors.keys() - self.removed.keys():
            logger.log(
                self._level, "SGLang server %s does not answer, and gets no weights until it does: %s", url, errors[url]
            )
        self.removed |= errors
        self.holding -= errors.keys()

    def admit(self, version: int, urls: Sequence[str]) -> None:
        """Record that exactly ``urls`` hold ``version``; tell the gateway unless it already knows."""
        self.holding, self._level = set(urls), logging.ERROR
        if self.gateway.serves() != (version, self.holding, self.adapter):
            self.gateway.announce(version, sorted(urls), adapter=self.adapter)

    def metrics(self) -> dict[str, float]:
        return {"weight_sync/servers_removed": float(len(self.removed))}
