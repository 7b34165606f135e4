"""Where servers and environments run; which GPUs the servers get, and whether there are enough."""

import math
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.config.derived import sequences_in_flight
from recipe.atropos.config.env_specs import EnvironmentSpec
from recipe.atropos.config.preflight import Rules, check_rules
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch, declares_flag, sglang_flags, sglang_python
from recipe.atropos.utils.gpus import visible_gpus
from recipe.atropos.utils.hosts import cluster_address, is_this_host, reachable
from recipe.atropos.utils.machine import gpu_memory
from recipe.atropos.utils.private_process import is_loopback

# Share of a GPU for a colocated server's weights and KV cache. SGLang's default, nearly the whole GPU, would leave no
# room for the trainer's weights and optimizer moments. Source: docs/models.md.
COLOCATED_SHARE = 0.4
_SGLANG_GRAPHS, _LARGE_GPU = 256, 60 << 30  # requests that SGLang captures on a GPU of 60 GiB or more
_MOST_GRAPHS = 1024  # their buffers take about 2 MiB a request (SGLang's own estimate)


def place_servers(config: DictConfig) -> str | None:
    """Decide ``inference.placement`` and ``colocated`` where they are null: servers share the trainer's GPUs if there
    are too few for both, and Ray places them if this machine has too few even so, and a cluster is joined.

    Where ``inference.servers`` is null, colocated servers take all GPUs of the trainer, which would be idle while one
    samples; else it is 1. Returns a message for the user, or None.

    Raises:
        ConfigurationError: this machine has too few GPUs either way, or a setting does not go with Ray's placement.
    """
    inference, joined = config.inference, cluster_address(config.ray_kwargs.ray_init) is not None
    by_ray = inference.placement is None and joined
    if inference.placement == "ray" or (by_ray and config.trainer.nnodes > 1):
        return _place_by_ray(config)
    if "cpu" in (inference.device, config.trainer.device):
        inference.placement, inference.colocated = "launcher", bool(inference.colocated)
        inference.servers = inference.servers or 1
        return None
    gpus, ranks = visible_gpus(), _ranks_here(config)
    launch = SGLangLaunch("", extra_args=inference.args)
    each, first = launch.gpus, launch.extra_args.get("base_gpu_id")
    decided, colocated, servers = inference.colocated is None, inference.colocated, inference.servers
    nodes = config.trainer.nnodes
    several = f"with trainer.nnodes={nodes}: Ray may give these GPUs to ranks"
    check_rules(
        [
            (
                nodes > 1 and not joined,
                f"trainer.nnodes={nodes}: the run joins no Ray cluster; set ray_kwargs.ray_init.address or RAY_ADDRESS",
            ),
            (nodes > 1 and colocated, f"inference.colocated=true {several} of others; leave it out"),
            (
                nodes > 1 and first is None,
                f"inference.placement=launcher {several}: keep some from it (ray start --num-gpus here), and give the "
                "first of them as inference.args.base_gpu_id",
            ),
        ]
    )
    if decided:
        colocated = bool(ranks) and first is None and ranks + (servers or 1) * each > gpus
    if servers is None:
        servers = max(1, ranks // each) if colocated and first is None else 1
    needed = max(ranks, servers * each) if colocated else servers * each + (ranks if first is None else first)
    if needed > gpus and by_ray and first is None and not inference.colocated:
        return _place_by_ray(config)
    if needed > gpus:
        raise ConfigurationError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} and inference.servers={servers} of "
            f"{each} GPUs each (inference.args.tp_size) need {needed} GPUs with inference.colocated="
            f"{str(colocated).lower()}, and this machine has {gpus} (nvidia-smi, CUDA_VISIBLE_DEVICES): "
            "lower them, set inference.colocated=true, or trainer.device=cpu"
        )
    inference.placement, inference.colocated, inference.servers = "launcher", colocated, servers
    if not (decided and colocated):
        return None
    return (
        f"{gpus} GPU{'s'[: gpus != 1]}: the trainer shares them with {servers} server{'s'[: servers != 1]} "
        "(inference.colocated=true)"
    )


def _place_by_ray(config: DictConfig) -> str:
    inference, arguments = config.inference, sglang_flags(config.inference.args)
    given = min({"base_gpu_id", "nnodes"} & arguments.keys(), default="")
    check_rules(
        [
            (
                not cluster_address(config.ray_kwargs.ray_init),
                "inference.placement=ray: the run joins no Ray cluster; set ray_kwargs.ray_init.address or RAY_ADDRESS",
            ),
            (
                inference.colocated,
                "inference.colocated=true with inference.placement=ray: Ray gives a GPU to one of the two; leave it "
                "out",
            ),
            (
                given,
                f"inference.args.{given}={arguments.get(given)} with inference.placement=ray: Ray chooses a server's "
                "GPUs, all on one node; leave it out",
            ),
            (
                inference.port is not None,
                f"inference.port={inference.port} with inference.placement=ray: leave it out",
            ),
        ]
    )
    inference.placement, inference.colocated, inference.servers = "ray", False, inference.servers or 1
    return f"Ray places {inference.servers} server{'s'[: inference.servers != 1]} (inference.placement=ray)"


def check_environments_placement(config: DictConfig, specs: Iterable[EnvironmentSpec]) -> None:
    """Raise ConfigurationError if Ray is to place an environment that could not start, or not reach the services."""
    check_rules(rule for spec in specs if spec.placement == "ray" for rule in _environment_rules(config, spec))


def _environment_rules(config: DictConfig, spec: EnvironmentSpec) -> Rules:
    key = f"{spec.key}.placement=ray"
    yield (
        not cluster_address(config.ray_kwargs.ray_init),
        f"{key}: the run joins no Ray cluster; set ray_kwargs.ray_init.address or RAY_ADDRESS",
    )
    yield (
        spec.python is not None,
        f"{key}: other nodes do not prepare {spec.key}.python; leave one of them out",
    )
    for name, host in {"api.host": config.api.host, "inference.host": config.inference.host}.items():
        yield (
            is_loopback(reachable(host)),
            f"{name}={host} with {key}: other nodes do not reach it; set {name} to this machine's address on the "
            "network of the cluster",
        )


def _ranks_here(config: DictConfig) -> int:
    """Return how many GPUs the trainer uses on this machine; 0 if none, or if all may be on other machines."""
    address = cluster_address(config.ray_kwargs.ray_init) or "auto"  # "auto": a cluster with a node on this machine
    here = config.trainer.nnodes == 1 and (address == "auto" or is_this_host(f"ray://{address.rpartition('://')[2]}"))
    return 0 if not here or config.trainer.device == "cpu" else config.trainer.n_gpus_per_node


def on_gpus(config: DictConfig, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Return server ``number``'s flags with its GPUs: those after the trainer's or, if colocated, the trainer's.

    Those that Ray assigns are the only ones that a server sees. Where no flag concerns CUDA graphs, they are for as
    many requests as are kept in flight.
    """
    if config.inference.placement == "ray":
        return _decode_graphs(config, arguments) | arguments
    colocated = config.inference.colocated
    first = arguments.get("base_gpu_id", 0 if colocated else _ranks_here(config))
    saver = {"enable_memory_saver": True} if colocated else {}
    own = {"base_gpu_id": first + number * SGLangLaunch("", extra_args=arguments).gpus}
    return saver | _decode_graphs(config, arguments) | arguments | own


def _decode_graphs(config: DictConfig, arguments: dict[str, Any]) -> dict[str, int]:
    """Return the flag for decode graphs of more requests than SGLang's own choice, if so many are in flight a server.

    SGLang runs more requests than it has graphs for without them, which is slower. A small GPU keeps its choice, which
    is for its memory.
    """
    requests = math.ceil(sequences_in_flight(config) / (config.inference.servers or 1))
    given = any(flag.startswith(("cuda_graph", "disable_cuda_graph", "max_running_requests")) for flag in arguments)
    if given or requests <= _SGLANG_GRAPHS or (gpu_memory() or 0) < _LARGE_GPU:
        return {}
    newer = "cuda_graph_max_bs_decode"
    declared = declares_flag(sglang_python(config.inference.python), newer)
    return {newer if declared else "cuda_graph_max_bs": min(requests, _MOST_GRAPHS)}
