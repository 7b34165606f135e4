"""Which staleness bounds are refused."""

import pytest

from helpers.trainer import compose_config
from recipe.atropos.config.preflight import ConfigurationError, check_config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("max_staleness=-1", "max_staleness=-1: give 0 or more"),
        ("max_staleness=1.5", "max_staleness=1.5: give a whole number"),
        ("max_staleness=true", "max_staleness=true: give a whole number"),
        ("max_staleness=2 trainer.atropos.weight_sync.every=4", "max_staleness=2 with weight_sync.every=4: .*for ever"),
        ("max_staleness=3 trainer.atropos.weight_sync.every=4", None),
        ("max_staleness=0", None),
    ],
)
def test_staleness_bound_that_would_deadlock_is_refused(overrides, expected):
    options = [
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    ]
    config = compose_config(*options, *f"trainer.atropos.{overrides}".split())
    if expected is None:
        return check_config(config)
    with pytest.raises(ConfigurationError, match=expected):
        check_config(config)
