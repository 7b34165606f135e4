"""Which GPUs the run's servers get, and whether there are enough."""

import os
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch
from recipe.atropos.utils.gpus import device_of, visible_gpus
from recipe.atropos.utils.hosts import is_this_host, joins_cluster

# Of a GPU, for a colocated server's weights and KV cache: SGLang's own choice, nearly all of it, would leave no room
# for the trainer's weights and moments. docs/gsm8k.md has the source.
COLOCATED_SHARE = 0.4


def place_servers(config: DictConfig) -> str | None:
    """Decide ``inference.colocated`` where it is null: servers share the trainer's GPUs if there are too few for both.

    Returns what the user should know, if anything.

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
    """Whether weights reach servers on GPUs by the distributed transport; adapter-only LoRA sync never does."""
    model, transport = config.actor_rollout_ref.model, config.trainer.atropos.weight_sync.transport
    if "cpu" in (config.inference.device, device_of(config)) or (model.lora_rank > 0 and not model.lora.merge):
        return False
    return transport == "distributed" or (transport == "auto" and not config.inference.colocated)


def _ranks_here(config: DictConfig) -> int:
    """The trainer's GPUs on this machine; 0 where it has none, or other machines may have them all."""
    ray_init = config.ray_kwargs.ray_init
    joined = joins_cluster(ray_init)
    elsewhere = config.trainer.nnodes > 1 or (joined and not is_this_host(_cluster(ray_init)))
    return 0 if elsewhere or device_of(config) == "cpu" else config.trainer.n_gpus_per_node


def _cluster(ray_init: DictConfig) -> str:
    """A URL of the cluster that is joined; "auto" is one with a node here."""
    address = str(ray_init.get("address") or "auto")
    address = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    return f"ray://{'127.0.0.1' if address == 'auto' else address.rpartition('://')[2]}"


def on_gpus(config: DictConfig, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """The flags of server ``number`` on its own GPUs: after the trainer's, or the trainer's where they are shared."""
    colocated = config.inference.colocated
    first = arguments.get("base_gpu_id", 0 if colocated else _ranks_here(config))
    saver = {"enable_memory_saver": True} if colocated else {}
    return saver | arguments | {"base_gpu_id": first + number * SGLangLaunch("", extra_args=arguments).gpus}
