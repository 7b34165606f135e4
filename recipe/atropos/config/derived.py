"""What the configuration leaves open: timeouts, derived from the maximum answer length, the hosts of services, and how
many groups an environment keeps in flight, enough to keep servers busy while the trainer waits for a batch.

BaseEnv's default is 8 groups per server address, and the gateway is one address for any number of servers.
"""

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.config.env_specs import EnvironmentSpec, environment_specs
from recipe.atropos.utils.hosts import address_for_nodes, cluster_address

_SLOWEST = 5.0  # tokens per second of one sequence among many
# Timeouts that may be null: how many of the longest answers they wait for, and how many seconds at least.
_WAITS = {"trainer.atropos.max_wait_time": (4, 600.0), "evaluation.timeout": (2, 300.0)}
_LEAST_GROUPS = 8  # BaseEnv's default
_AHEAD = 1  # batches sampled ahead where max_staleness sets no limit
_REQUESTS, _SECONDS = 512, 1200  # atroposlib's defaults for a server


def derived_wait(key: str, max_response_length: int) -> float:
    """Return the seconds of a timeout that is null; ``max_response_length`` in tokens."""
    answers, least = _WAITS[key]
    return max(least, answers * float(math.ceil(max_response_length / _SLOWEST)))


def worker_timeout(config: DictConfig) -> float:
    """Return the seconds that an environment's item may take: well below the longest wait for a batch, so that a hung
    item is replaced before the run ends for want of its group.
    """
    return config.trainer.atropos.max_wait_time / 2


def set_derived(config: DictConfig) -> DictConfig:
    """Set null timeouts for a batch and an evaluation, and null hosts: other nodes reach these if Ray places an
    environment.

    A run's ``config.yaml`` keeps null: the next run that uses it may have longer answers, or another head.
    """
    for key in _WAITS:
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, derived_wait(key, config.data.max_response_length))
    cluster, host = cluster_address(config.ray_kwargs.ray_init), "127.0.0.1"
    if cluster and any(spec.placement == "ray" for spec in environment_specs(config).values()):
        host = address_for_nodes(cluster)
    config.api.host, config.inference.host = config.api.host or host, config.inference.host or host
    return config


def groups_in_flight(config: DictConfig, spec: EnvironmentSpec | None = None) -> int:
    """Return the environment's share of the groups in the current batch and in the batches sampled ahead, of a replica
    its part of that.

    ``spec``: None for an environment that joins, which may be the only one.
    """
    sequences = sequences_in_flight(config)
    if spec is None:
        return max(_LEAST_GROUPS, math.ceil(sequences / config.environment.group_size))
    weights = sum(other.weight for other in environment_specs(config).values())
    part = max(spec.weight / weights, spec.min_batch_allocation or 0.0)
    return max(_LEAST_GROUPS, math.ceil(sequences * part / spec.group_size / spec.replicas))


def request_limits(config: DictConfig) -> dict[str, Any]:
    """Return flags for an environment's server where atroposlib's defaults are too low; the rest stay as they are.

    ``num_max_requests_at_once``: one per sequence in flight; atroposlib gives each environment its share by weight.
    ``timeout``: the seconds that the longest answer may take.
    """
    needed = {
        "num_max_requests_at_once": (sequences_in_flight(config), _REQUESTS),
        "timeout": (math.ceil(config.data.max_response_length / _SLOWEST), _SECONDS),
    }
    return {name: value for name, (value, default) in needed.items() if value > default}


def sequences_in_flight(config: DictConfig) -> int:
    bound = config.trainer.atropos.max_staleness
    batches = 1 + (_AHEAD if bound is None else bound)
    return batches * config.data.train_batch_size * config.actor_rollout_ref.rollout.n
