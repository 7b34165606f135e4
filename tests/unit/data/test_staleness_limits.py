"""The trainer's side of the staleness bound: which rows are dropped, and which bounds are refused."""

import pytest

from helpers.services import group
from helpers.trainer import compose_config
from recipe.atropos.config.preflight import ConfigurationError, check_config
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits, VersionLimits
from recipe.atropos.inference.sampled import NOT_PUSHED


def versioned(number, oldest, newest):
    return group(number) | {
        "group_overrides": {"policy_version_min": oldest, "policy_version_max": newest, "env_name": "math"}
    }


def test_staleness_rows_out_of_bounds_are_dropped_and_counted():
    """Those of weights that were never pushed, and of an abandoned policy, for any bound."""
    groups = [versioned(0, [5, 3, 2, None], [5, 6, 5, None]), versioned(1, [6, 7, 4, 4], [6, 7, 7, 6])]
    groups.append(versioned(2, [6, NOT_PUSHED, NOT_PUSHED, 6], [6, NOT_PUSHED, 6, 6]))
    always = {"future_version": 2, "not_pushed": 2}
    expected = {
        None: ({}, [5, 3, 2, None, 6, 4, 6, 6]),
        2: ({"stale": 2, "unknown_version": 1}, [5, 6, 4, 6, 6]),
        0: ({"stale": 4, "unknown_version": 1}, [6, 6, 6]),
    }
    for max_staleness, (dropped, kept) in expected.items():
        dropped |= always
        rows, report = groups_to_data_proto(groups, RowLimits(20, 0), 4, VersionLimits(6, max_staleness))
        assert report.dropped == dropped and report.rows == len(kept)
        real = ~rows.non_tensor_batch["is_padding"]
        assert rows.non_tensor_batch["policy_version_min"][real].tolist() == kept
        for reason, count in dropped.items():
            assert report.metrics()[f"atropos/math/dropped/{reason}"] == count


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
