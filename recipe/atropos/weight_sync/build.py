"""The manager that a configuration asks for."""

from collections.abc import Callable
from functools import partial

import torch
from omegaconf import DictConfig

from recipe.atropos.data.rows import Row
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.run_dir import RunDir
from recipe.atropos.verl_ext.ranks import RayWorkerGroup
from recipe.atropos.weight_sync.colocated import SharedMemory
from recipe.atropos.weight_sync.fleet import FleetSyncManager, ServerFleet
from recipe.atropos.weight_sync.manager import WeightSyncManager
from recipe.atropos.weight_sync.probe import Probe
from recipe.atropos.weight_sync.servers import reported_versions

_LONGEST_ANSWER = 60.0  # seconds that a busy server may take to say its version


def build_manager(
    config: DictConfig,
    actor_wg: RayWorkerGroup,
    vocab_size: int,
    log_probs_of: Callable[[list[Row]], torch.Tensor],
) -> WeightSyncManager:
    """From the whole configuration; ``log_probs_of`` gives the policy's logprobs, (B, R), of the rows' responses."""
    inference, settings = config.inference, config.trainer.atropos.weight_sync
    key, timeout = inference.api_key, settings.timeout
    fleet = None
    if inference.gateway:
        fleet = ServerFleet(inference.urls, GatewayClient(inference.gateway, key), key, timeout)
    model = config.actor_rollout_ref.model
    adapter_only = model.lora_rank > 0 and not model.lora.merge
    verify = None
    if settings.verify == "probe":
        urls = fleet.targets if fleet else inference.urls
        temperature = config.actor_rollout_ref.rollout.temperature
        probe = Probe(
            urls, key, vocab_size, inference.dtype, temperature, timeout, lambda: fleet.coming if fleet else None
        )
        verify = partial(probe.verify, compute=log_probs_of)
    memory = None
    if inference.colocated:
        urls, mark = fleet.targets if fleet else inference.urls, RunDir(config.run.dir).servers_offloaded
        memory = SharedMemory(urls, key, settings.pause_mode, timeout, mark)
    # Twice: gathering and staging come before the requests that the time-out is for.
    options = {"timeout": 2 * timeout, "verify": verify, "memory": memory}
    if fleet:
        return FleetSyncManager(actor_wg, fleet, adapter_only, **options)
    reported = partial(reported_versions, inference.urls, key, min(timeout, _LONGEST_ANSWER))
    return WeightSyncManager(actor_wg, reported=reported, **options)
