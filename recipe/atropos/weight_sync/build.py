"""Construction of the weight-sync manager from the configuration."""

from collections.abc import Callable
from functools import partial

import torch
from omegaconf import DictConfig

from recipe.atropos.data.rows import Row
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.run.folder import RunDir
from recipe.atropos.verl_ext.worker_group import LimitedWorkerGroup
from recipe.atropos.weight_sync.colocated import SharedMemory
from recipe.atropos.weight_sync.fleet import ServerFleet
from recipe.atropos.weight_sync.manager import WeightSyncManager
from recipe.atropos.weight_sync.probe import Probe


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
        temperature = config.actor_rollout_ref.rollout.temperature
        probe = Probe(fleet, vocab_size, inference.dtype, temperature)
        verify = partial(probe.verify, compute=log_probs_of)
    if inference.colocated:
        memory = SharedMemory(fleet, settings.pause_mode, RunDir(config.run.dir).servers_offloaded)
    return WeightSyncManager(
        actor_wg,
        fleet,
        adapter_only=model.lora_rank > 0 and not model.lora.merge,
        timeout=2 * timeout,  # gathering and staging precede the requests that the timeout is for
        verify=verify,
        memory=memory,
    )
