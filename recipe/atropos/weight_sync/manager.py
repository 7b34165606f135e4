"""The trainer's side of a push: tracks the active version on servers that come and go (see ``fleet``).

- A version is active once every server *that answers* has it.
- A server that answers again is given the active version before the gateway admits it, whatever version it reports:
  it may have been left paused, or with half of a push. If the actor no longer has that version, the next push gives it.
- A push that fails because a server died is repeated, as a whole, to the rest. If a live server refuses the weights,
  the run stops.
- In adapter-only sync, each version's adapter has the same name on all servers, and the gateway knows that name.
"""

import logging
import uuid
from collections.abc import Callable
from functools import partial

import torch
from omegaconf import DictConfig
from ray.exceptions import RayTaskError

from recipe.atropos.data.rows import Row
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.run.folder import RunDir
from recipe.atropos.verl_ext.worker_group import LimitedWorkerGroup
from recipe.atropos.weight_sync.colocated import SharedMemory
from recipe.atropos.weight_sync.fleet import ServerFleet, ServersGone
from recipe.atropos.weight_sync.probe import probe_servers
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports.distributed import JOIN_SECONDS
from recipe.atropos.weight_sync.transports.lora_adapter import ADAPTER_PREFIX

logger = logging.getLogger(__name__)


class WeightSyncManager:
    """Keeps the servers of ``fleet`` in sync with the actor's weights.

    ``version`` is the trainer step whose weights they serve, None before the first push. It advances only after a push
    succeeds on each of its servers and passes ``verify``, if given, which returns metrics or raises. ``memory``, if
    given, is the memory that the servers release to the trainer between ``offload_servers`` and the next push.
    ``adapter_only``: only a LoRA adapter is pushed. ``timeout``: seconds for one push; ``startup_timeout``: in which
    all servers must answer before the first.
    """

    def __init__(
        self,
        actor_wg: LimitedWorkerGroup,
        fleet: ServerFleet,
        *,
        adapter_only: bool,
        timeout: float,
        startup_timeout: float,
        verify: Callable[[int, list[str], str | None], dict[str, float]] | None = None,
        memory: SharedMemory | None = None,
    ):
        self.actor_wg = actor_wg
        self.fleet = fleet
        self.adapter_only = adapter_only
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.verify = verify
        self.memory = memory
        self.version: int | None = None

    def update_weights(self, global_steps: int, meanwhile: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Push the actor's weights as version ``global_steps`` to every server that answers; returns metrics.

        ``meanwhile`` is called every second while no server answers.

        Raises:
            ServersGone: no server is left, or one died in each of several consecutive pushes; before the first push,
                one is missing.
            GatewayError: the gateway does not answer or refuses.
            ray.exceptions.RayTaskError: the push failed (caused by a ``WeightPushError``) although no server died.
            WeightPushError: a server does not compute with the pushed weights.
            RankTimeout: ranks did not finish within ``timeout`` seconds; names them.
        """
        self._make_room(global_steps)  # first, because a server that died can be restarted only then
        attempts, first = len(self.fleet.urls) + 2, self.version is None
        # unique, also among pushes of that version by earlier trainers
        adapter = f"{ADAPTER_PREFIX}{global_steps}-{uuid.uuid4().hex[:8]}" if self.adapter_only else None
        if first:
            self.fleet.wait_for(len(self.fleet.urls), limit=self.startup_timeout)
        for _ in range(attempts):
            targets = sorted(self.fleet.wait_for(1, meanwhile))
            self.fleet.gateway.announce(global_steps, targets, pushing=True)
            metrics = self._push(global_steps, targets, adapter)
            if metrics is not None:
                returned = 0 if first else len(set(targets) - self.fleet.holding)
                self.fleet.adapter = adapter
                return self._admitted(global_steps, targets, metrics, returned)
        raise ServersGone(
            f"a server died in each of {attempts} pushes of version {global_steps}: see the servers' logs"
        )

    def ensure_current(self, global_steps: int, meanwhile: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Remove servers that are gone, and push the actor's weights, those of ``global_steps``, to returning ones.

        Between two pushes the actor's weights are newer than the active ones; a returning server then waits for the
        next push, if others serve. Called before each step and while it waits for its batch. Otherwise as
        ``update_weights``.
        """
        if self.version is None:
            return {}
        versions = self.fleet.look()
        current = [url for url in self.fleet.holding if versions[url] == str(self.version)]
        self.fleet.admit(self.version, current)
        if not current:
            return self.update_weights(global_steps, meanwhile)
        others = sorted(versions.keys() - set(current)) if global_steps == self.version else []
        if others and (metrics := self._push(global_steps, others, self.fleet.adapter)) is not None:
            return self._admitted(global_steps, [*current, *others], metrics, len(others))
        return self.fleet.metrics()

    def offload_servers(self) -> None:
        """Pause the servers and release their memory to the trainer until the next push.

        Waits for all of them: a server that does not answer may be starting, in the memory that training needs.

        Raises:
            ServersGone: a server did not come back.
        """
        if self.memory is not None:
            self.fleet.wait_for(len(self.fleet.urls))
            self.memory.release(self.fleet.urls)

    def onload_servers(self) -> None:
        """Give the servers their memory back, so that the next trainer can push to them; they stay paused.

        Called however training ends. Errors are logged, not raised: they must not mask the one that ended training.
        """
        if self.memory is not None:
            try:
                try:
                    self.memory.resume_weights()
                finally:
                    self.memory.resume_caches()
            except Exception:
                logger.exception("start the servers again before the next trainer: they did not take their memory back")

    def _make_room(self, global_steps: int) -> None:
        """Free the trainer's cached memory, and resume what offloaded servers need to load the weights."""
        if self.memory is not None:
            self.actor_wg.empty_cache()
            self.memory.resume_weights(global_steps)

    def _push(self, global_steps: int, targets: list[str], adapter: str | None) -> dict[str, float] | None:
        """Push to ``targets`` only; return its metrics, or None if one of them died in it."""
        try:
            self._make_room(global_steps)
            pushed = self.actor_wg.update_weights(global_steps, targets, adapter)
            results = self.actor_wg.wait("update_weights", pushed, self.timeout)
            metrics = {key: value for metrics in results for key, value in (metrics or {}).items()}
            if self.memory is not None:
                self.actor_wg.empty_cache()
                self.memory.resume_caches()
                self.memory.resume(targets)
            if self.verify is not None:
                metrics |= self.verify(global_steps, targets, adapter)
        except (RayTaskError, WeightPushError, InferenceError) as error:  # after a RankTimeout, ranks may still push
            if not self.fleet.died(targets):
                raise
            logger.error("the push of version %d to %s failed, a server died in it: %s", global_steps, targets, error)
            if self.memory is not None:
                self.memory.forget(self.fleet.removed)
            return None
        self.version = global_steps
        return metrics

    def _admitted(
        self, global_steps: int, urls: list[str], metrics: dict[str, float], returned: int
    ) -> dict[str, float]:
        self.fleet.admit(global_steps, urls)
        if returned:
            logger.warning("%d SGLang servers are readmitted with version %d", returned, global_steps)
            metrics["weight_sync/servers_readmitted"] = float(returned)
        return metrics | self.fleet.metrics()


def build_manager(
    config: DictConfig,
    actor_wg: LimitedWorkerGroup,
    vocab_size: int,
    log_probs_of: Callable[[list[Row]], torch.Tensor],
) -> WeightSyncManager:
    """Build from the whole configuration; ``log_probs_of``: the policy's logprobs, (B, R), of the rows' responses."""
    inference, settings = config.inference, config.trainer.atropos.weight_sync
    key, timeout = inference.api_key, settings.timeout
    fleet = ServerFleet(inference.urls, GatewayClient(inference.gateway, key), key, timeout)
    model = config.actor_rollout_ref.model
    verify = memory = None
    if settings.verify == "probe":
        verify = partial(
            probe_servers,
            fleet=fleet,
            vocab_size=vocab_size,
            dtype=inference.dtype,
            temperature=config.actor_rollout_ref.rollout.temperature,
            compute=log_probs_of,
        )
    if inference.colocated:
        memory = SharedMemory(fleet, settings.pause_mode, RunDir(config.run.dir).servers_offloaded)
    return WeightSyncManager(
        actor_wg,
        fleet,
        adapter_only=model.lora_rank > 0 and not model.lora.merge,
        timeout=2 * timeout + JOIN_SECONDS,  # for the requests, and before them gathering, staging and joining
        startup_timeout=config.trainer.atropos.startup_timeout,
        verify=verify,
        memory=memory,
    )
