"""How much an environment keeps in flight: enough for the servers to be busy while the trainer waits for a batch.

BaseEnv's default is 8 groups for each address, and the gateway is one address, whatever stands behind it.
"""

import math
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.config.env_specs import EnvironmentSpec, environment_specs
from recipe.atropos.config.waits import answer_seconds

_LEAST_GROUPS = 8  # BaseEnv's own
_AHEAD = 1  # batches, where nothing limits how many are sampled ahead
_REQUESTS, _SECONDS = 512, 1200  # atroposlib's own, for a server


def groups_in_flight(config: DictConfig, spec: EnvironmentSpec | None = None) -> int:
    """The batch that is waited for and those that may be sampled ahead, of it the environment's part.

    ``spec``: None for one that joins, which may be alone.
    """
    sequences = _sequences_in_flight(config)
    if spec is None:
        return max(_LEAST_GROUPS, math.ceil(sequences / config.environment.group_size))
    weights = sum(other.weight for other in environment_specs(config).values())
    part = max(spec.weight / weights, spec.min_batch_allocation or 0.0)
    return max(_LEAST_GROUPS, math.ceil(sequences * part / spec.group_size))


def request_limits(config: DictConfig) -> dict[str, Any]:
    """Flags of an environment's server, where atroposlib's own are too low; else the environment's own stay.

    Requests at once: one for each sequence, of which atroposlib gives an environment its part by weight. Seconds for
    one: the longest answer's.
    """
    needed = {
        "num_max_requests_at_once": (_sequences_in_flight(config), _REQUESTS),
        "timeout": (answer_seconds(config), _SECONDS),
    }
    return {name: value for name, (value, default) in needed.items() if value > default}


def _sequences_in_flight(config: DictConfig) -> int:
    bound = config.trainer.atropos.max_staleness
    batches = 1 + (_AHEAD if bound is None else bound)
    return batches * config.data.train_batch_size * config.actor_rollout_ref.rollout.n
