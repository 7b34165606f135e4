"""How many groups an environment keeps in flight: enough to keep servers busy while the trainer waits for a batch.

BaseEnv's default is 8 groups per server address, and the gateway is one address for any number of servers.
"""

import math
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.config.derived_timeouts import answer_seconds
from recipe.atropos.config.env_specs import EnvironmentSpec, environment_specs

_LEAST_GROUPS = 8  # BaseEnv's default
_AHEAD = 1  # batches sampled ahead where max_staleness sets no limit
_REQUESTS, _SECONDS = 512, 1200  # atroposlib's defaults for a server


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
        "timeout": (answer_seconds(config), _SECONDS),
    }
    return {name: value for name, (value, default) in needed.items() if value > default}


def sequences_in_flight(config: DictConfig) -> int:
    bound = config.trainer.atropos.max_staleness
    batches = 1 + (_AHEAD if bound is None else bound)
    return batches * config.data.train_batch_size * config.actor_rollout_ref.rollout.n
