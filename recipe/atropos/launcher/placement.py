"""Which GPUs the run's servers get, and whether there are enough."""

import os
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch
from recipe.atropos.utils.gpus import device_of, visible_gpus
from recipe.atropos.utils.hosts import is_this_host, joins_cluster

# Share of a GPU for a colocated server's weights and KV cache. SGLang's default, nearly the whole GPU, would leave no
# room for the trainer's weights and optimizer moments. Source: docs/gsm8k.md.
COLOCATED_SHARE = 0.4


def place_servers(config: DictConfig) -> str | None:
    """Decide ``inference.colocated`` where it is null: servers share the trainer's GPUs if there are too few for both.

    Returns a message for the user, or None.

    Raises:
        ConfigurationError: this machine has too few GPUs either way.
    """
    inference = config.inference
    if inference.device == "cpu" or device_of(config) == "cpu":
        inference.colocated = bool(inference.colocated)
        return None
    gpus, ranks = visible_gpus(), _ranks_here(config)
    launch = SGLangLaunch("", extra_args=inference.args)
    each, first = launch.gpus, launch.extra_args.get("base_gpu_id")
    servers = inference.servers * each
    decided = inference.colocated is None
    if decided:
        inference.colocated = bool(ranks) and first is None and ranks + servers > gpus
    needed = max(ranks, servers) if inference.colocated else servers + (ranks if first is None else first)
    if needed > gpus:
        raise ConfigurationError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} and inference.servers={inference.servers} of "
            f"{each} GPUs each (inference.args.tp_size) need {needed} GPUs with inference.colocated="
            f"{str(inference.colocated).lower()}, and this machine has {gpus} (nvidia-smi, CUDA_VISIBLE_DEVICES): "
            "lower them, set inference.colocated=true, or trainer.device=cpu"
        )
    if not (decided and inference.colocated):
        return None
    return f"{gpus} GPU{'s'[: gpus != 1]}: trainer and servers share them (inference.colocated=true)"


def goes_over_nccl(config: DictConfig) -> bool:
    """Return whether weights go to GPU servers over the distributed transport, which adapter-only sync never uses."""
    model, transport = config.actor_rollout_ref.model, config.trainer.atropos.weight_sync.transport
    if "cpu" in (config.inference.device, device_of(config)) or (model.lora_rank > 0 and not model.lora.merge):
        return False
    return transport == "distributed" or (transport == "auto" and not config.inference.colocated)


def _ranks_here(config: DictConfig) -> int:
    """Return how many GPUs the trainer uses on this machine; 0 if none, or if all may be on other machines."""
    ray_init = config.ray_kwargs.ray_init
    joined = joins_cluster(ray_init)
    elsewhere = config.trainer.nnodes > 1 or (joined and not is_this_host(_cluster(ray_init)))
    return 0 if elsewhere or device_of(config) == "cpu" else config.trainer.n_gpus_per_node


def _cluster(ray_init: DictConfig) -> str:
    """Return a URL of the Ray cluster to join; "auto" means one with a node on this machine."""
    address = str(ray_init.get("address") or "auto")
    address = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    return f"ray://{'127.0.0.1' if address == 'auto' else address.rpartition('://')[2]}"


def on_gpus(config: DictConfig, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Return server ``number``'s flags with its GPUs: those after the trainer's or, if colocated, the trainer's."""
    colocated = config.inference.colocated
    first = arguments.get("base_gpu_id", 0 if colocated else _ranks_here(config))
    saver = {"enable_memory_saver": True} if colocated else {}
    return saver | arguments | {"base_gpu_id": first + number * SGLangLaunch("", extra_args=arguments).gpus}
