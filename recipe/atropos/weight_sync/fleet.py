"""Servers that come and go while the trainer goes on; needs the gateway, which keeps requests from those that lack it.

- A server that does not answer is removed: named once, counted (``weight_sync/servers_removed``), not pushed to.
- One that answers again is given the weights before the gateway admits it, whatever version it reports: it may have
  been left paused, or with half of a push.
- A push that fails because a server died is repeated, as a whole, to the rest. A server that lives and refuses the
  weights stops the run.
- Without any server the trainer waits for one, at most the push's time-out; then the error names them all.
- The gateway admits the servers that hold the active version, and no others, also after it was started anew.
- Where versions are adapters beside base weights that stay, each has one name on all servers, and the gateway knows it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import GetTimeoutError, RayTaskError

from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.verl_ext.ranks import RayWorkerGroup
from recipe.atropos.weight_sync.manager import WeightSyncManager
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports.lora_adapter import adapter_name

logger = logging.getLogger(__name__)

_LONGEST_ANSWER = 60.0  # seconds that a busy server may take to say its version
_ANSWER_OF_ONE_OUT = 2.0  # the whole step waits for it
_DYING_SECONDS = 5.0  # from the death of an engine's process to the end of its HTTP server
_LOOK_SECONDS = 1.0  # between looks for the first server that answers


class ServersGone(AtroposError, RuntimeError):
    """No SGLang server is left, or, on the trainer's own GPUs, not all are; names who is out and what each said."""


@dataclass
class ServerFleet:
    """Who of ``urls`` is there. ``holding`` are those that hold the active version.

    ``targets`` are the servers of the push that is going on; the same list always, so that the probe can keep it.
    ``adapter`` is the name of the active one, ``coming`` of that of the push; None where all weights are pushed.
    ``timeout``: seconds to wait for the first of them, if all are gone.
    """

    urls: Sequence[str]
    gateway: GatewayClient
    api_key: str | None = None
    timeout: float = 600.0
    holding: set[str] = field(default_factory=set)
    targets: list[str] = field(default_factory=list)
    adapter: str | None = None
    coming: str | None = None
    _errors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.urls = [url.rstrip("/") for url in self.urls]
        self.targets.extend(self.urls)

    def look(self) -> dict[str, str]:
        """The weight version that each server which answers reports; those that don't are out from now on."""
        timeouts = {url: _ANSWER_OF_ONE_OUT if url in self._errors else _LONGEST_ANSWER for url in self.urls}
        versions, errors = _ask(timeouts, self.api_key)
        for url in self._errors.keys() & versions.keys():
            logger.warning("SGLang server %s answers again, with weight version %s", url, versions[url])
            del self._errors[url]
        self._remove(errors)
        return versions

    def wait_for(self, least: int) -> dict[str, str]:
        """``look`` until ``least`` servers answer.

        Raises:
            ServersGone: fewer do, for ``timeout`` seconds.
        """
        deadline = time.monotonic() + self.timeout
        if len(versions := self.look()) < least:
            logger.error("%d SGLang servers answer, %d must: waiting %g s", len(versions), least, self.timeout)
        while len(versions) < least:
            if time.monotonic() > deadline:
                who = f"only {len(versions)} of {len(self.urls)} SGLang servers" if versions else "no SGLang server"
                told = "; ".join(self._errors.values())
                raise ServersGone(f"{who} answered for {self.timeout:g} s; see their logs: {told}")
            time.sleep(_LOOK_SECONDS)
            versions = self.look()
        return versions

    def died(self, targets: Sequence[str]) -> bool:
        """Whether one of the servers of a failed push is gone, or hangs; a dying one is given time to be."""
        deadline = time.monotonic() + _DYING_SECONDS
        while True:
            _, errors = _ask(dict.fromkeys(targets, _DYING_SECONDS), self.api_key)
            if errors or time.monotonic() > deadline:
                self._remove(errors)
                return bool(errors)
            time.sleep(_LOOK_SECONDS)

    def _remove(self, errors: dict[str, str]) -> None:
        for url in errors.keys() - self._errors.keys():
            logger.error("SGLang server %s is removed from rotation until it answers again: %s", url, errors[url])
        self._errors |= errors
        self.holding -= errors.keys()

    def admit(self, version: int, urls: Sequence[str]) -> None:
        """``urls`` hold ``version``, and no others; the gateway is told if it knows it otherwise."""
        self.holding = set(urls)
        if not self.gateway.knows(version, urls, self.adapter):
            self.gateway.announce(version, sorted(urls), adapter=self.adapter)

    @property
    def out(self) -> set[str]:
        """URLs of the servers that do not answer."""
        return set(self._errors)

    def metrics(self) -> dict[str, float]:
        return {"weight_sync/servers_removed": float(len(self._errors))}


class FleetSyncManager(WeightSyncManager):
    """``WeightSyncManager`` over a fleet: a version is active once every server *that answers* has it.

    ``adapter_only``: what is pushed is an adapter.
    """

    def __init__(self, actor_wg: RayWorkerGroup, fleet: ServerFleet, adapter_only: bool = False, **options: Any):
        super().__init__(actor_wg, **options)
        self.fleet = fleet
        self.adapter_only = adapter_only

    def update_weights(self, global_steps: int) -> dict[str, float]:
        """Push the actor's weights as version ``global_steps`` to every server that answers.

        Raises:
            ServersGone: none is left; or one died in each of several pushes in a row.
            GatewayError: the gateway is lost.
            ray.exceptions.RayError, WeightPushError: as in ``WeightSyncManager``; no server has died.
        """
        self._make_room()  # first: a server that died may be started again only then
        attempts, first = len(self.fleet.urls) + 2, self.version is None
        if self.adapter_only:
            self.fleet.coming = adapter_name(global_steps, uuid.uuid4().hex[:8])
        for _ in range(attempts):
            targets = sorted(self.fleet.wait_for(1))
            self.fleet.gateway.announce(global_steps, targets, pushing=True)
            metrics = self._push(global_steps, targets)
            if metrics is not None:
                returned = 0 if first else len(set(targets) - self.fleet.holding)
                return self._admitted(global_steps, targets, metrics, returned)
        raise ServersGone(
            f"a server died in each of {attempts} pushes of version {global_steps}: see the servers' logs"
        )

    def offload_servers(self, urls: Sequence[str]) -> None:
        """All servers are waited for: one that is out may be starting, in the memory that training is to have.

        Raises:
            ServersGone: one did not come back.
        """
        if self.memory is not None:
            self.fleet.wait_for(len(self.fleet.urls))
            super().offload_servers(self.fleet.urls)

    def ensure_current(self, global_steps: int, waiting: bool = False) -> dict[str, float]:
        """Take out who is gone, and give who came back the actor's weights, those of ``global_steps``.

        Called before each step and while it waits for its batch. Returns metrics; raises as ``update_weights``.
        """
        if self.version is None:
            return {}
        versions = self.fleet.look()
        current = [url for url in self.fleet.holding if versions[url] == str(self.version)]
        self.fleet.admit(self.version, current)
        others = sorted(versions.keys() - set(current))
        self.fleet.coming = self.fleet.adapter
        if not versions or (others and global_steps != self.version):
            return self.update_weights(global_steps)  # the active weights are the actor's no more: all get its own
        if others and (metrics := self._push(global_steps, others)) is not None:
            return self._admitted(global_steps, [*current, *others], metrics, len(others))
        return self.fleet.metrics()

    def _push(self, global_steps: int, targets: list[str]) -> dict[str, float] | None:
        """The metrics of a push to ``targets`` alone; None if one of them died in it."""
        self.fleet.targets[:] = targets
        self.actor_wg.set_inference_urls(targets, self.fleet.coming)
        try:
            return super().update_weights(global_steps)
        except (GetTimeoutError, RayTaskError, WeightPushError, InferenceError) as error:
            if not self.fleet.died(targets):
                raise
            logger.error("the push of version %d to %s failed, a server died in it: %s", global_steps, targets, error)
            if self.memory is not None:
                self.memory.forget(self.fleet.out)
            return None

    def _admitted(
        self, global_steps: int, urls: list[str], metrics: dict[str, float], returned: int
    ) -> dict[str, float]:
        self.fleet.adapter = self.fleet.coming
        self.fleet.admit(global_steps, urls)
        if returned:
            logger.warning("%d SGLang servers are readmitted with version %d", returned, global_steps)
            metrics["weight_sync/servers_readmitted"] = float(returned)
        return metrics | self.fleet.metrics()


def _ask(timeouts: dict[str, float], api_key: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """(weight version, error), by URL; each server may take its timeout in seconds."""

    async def ask(url: str) -> str:
        async with SGLangClient(url, api_key, timeout=timeouts[url]) as client:
            return await client.weight_version()

    async def ask_each() -> list[str | BaseException]:
        return await asyncio.gather(*map(ask, timeouts), return_exceptions=True)

    versions, errors = {}, {}
    for url, answer in zip(timeouts, asyncio.run(ask_each()), strict=True):
        if isinstance(answer, str):
            versions[url] = answer
        elif isinstance(answer, InferenceError) and answer.status not in (401, 403):
            errors[url] = str(answer)
        else:
            raise answer  # a wrong key, a fault of ours
    return versions, errors
