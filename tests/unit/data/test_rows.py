"""The row contract at its very bounds: what is just within a limit, and what is just beyond."""

import logging
from collections import Counter

import numpy as np
import pytest

from helpers.configs import changed_config
from helpers.trainer import compose_config
from recipe.atropos.config.compose import resolved
from recipe.atropos.config.preflight import ConfigurationError, check_config
from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rows import (
    IGNORED,
    ConversionReport,
    Row,
    RowLimits,
    VersionLimits,
    describe_drops,
    environment_name,
    trained_spans,
)
from recipe.atropos.data.scored_group import LARGEST

LIMITS = RowLimits(max_length=5, pad_token_id=0, vocab_size=100)


def a_group(**changes):
    return {
        "tokens": [[1, 2, 5, 6], [1, 2, 8]],
        "masks": [[-100, -100, 5, 6], [-100, -100, 8]],
        "scores": [1.0, 2.0],
    } | changes


def read(limits=LIMITS, versions=None, **changes):
    return read_groups([a_group(**changes)], limits, versions)


def teacher(ids=((3, 4), (3, 4)), logprobs=((-1.0, -2.0), (-1.0, -2.0))):
    return {
        "distill_token_ids": [[[], [], *map(list, ids)], []],
        "distill_logprobs": [[[], [], *map(list, logprobs)], None],
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [[0, 99, 0, 99], [1, 2, 8]]},
        {"scores": [LARGEST, -LARGEST]},
        {"scores": [1, 2]},
        {"scores": (1.0, 2.0)},
        {"group_overrides": {"raw_scores": [LARGEST, 0]}},
        {"group_overrides": {"policy_version_min": [4], "policy_version_max": None}},
        {"group_overrides": {"policy_version_min": [4, 4], "policy_version_max": [4, 5]}},
        {"group_overrides": None, "overrides": [{}, {"set_advantage_to_zero": None}]},
        teacher(ids=((0, 99), (1, 2))),
        teacher(logprobs=((np.log(0.5), np.log(0.5)), (-1e4, -1e4))),
        {"advantages": [[-LARGEST] * 4, None], "ref_logprobs": [None, []]},
    ],
    ids=range(11),
)
def test_rows_take_what_is_just_within_the_format(changes):
    rows, report = read(**changes)
    assert len(rows) == 2 == report.rows == report.received and not report.dropped and not report.messages


def test_rows_that_versions_drop_are_logged_with_the_remedy(caplog):
    overrides = {"policy_version_min": [3, 5], "policy_version_max": [5, 5]}
    with caplog.at_level(logging.ERROR):
        rows, report = read(versions=VersionLimits(5, 1), group_overrides=overrides)
    assert [row.versions for row in rows] == [(5, 5)] and report.dropped == {"stale": 1}
    assert "dropped 1 sequences as stale: the policy has version 5, trainer.atropos.max_staleness=1; " in caplog.text
    assert "an environment keeps to it through the adapter" in caplog.text


def test_rows_report_metrics_by_reason_and_environment():
    _, report = read(scores=[None, 0.0], env_id=4)
    assert report.metrics() == {
        "atropos/received": 2.0,
        "atropos/rows": 0.0,
        "atropos/padding_rows": 0.0,
        "atropos/dropped/nonfinite_scores": 2.0,
        "atropos/env_4/dropped/nonfinite_scores": 2.0,
    }
    assert not ConversionReport().dropped and environment_name("a/b", 3) == "a_b"
    assert (environment_name(None, 3), environment_name(None, None)) == ("env_3", "unknown")
    assert environment_name(None, 1_470_294_003) == "env_3", "the same name in each run"


def test_rows_that_were_dropped_are_described_for_an_error():
    lost = {"a": Counter(stale=1, no_prompt=2), "env_3": Counter(malformed=4)}
    assert describe_drops(lost) == "a: no_prompt 2, stale 1; env_3: malformed 4"
    assert describe_drops({}) == "no sequence came"


@pytest.mark.parametrize(("loss_coef", "read_teacher"), [(0.0, False), (0.5, True)])
def test_rows_limits_have_the_keys_of_the_configuration(loss_coef, read_teacher):
    options = ["data.max_prompt_length=7", "data.max_response_length=9", "trainer.atropos.overlong=truncate"]
    options += [f"trainer.atropos.distillation.loss_coef={loss_coef}"]
    limits = RowLimits.from_config(compose_config(*options), pad_token_id=3, vocab_size=100)
    assert limits == RowLimits(16, 3, overlong="truncate", vocab_size=100, read_teacher=read_teacher)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": np.array([], int)},
        {"mask": np.array([False, False])},
        {"mask": np.array([True])},
        {"log_probs": np.zeros(3)},
        {"advantages": np.zeros(1)},
        {"ref_log_probs": np.zeros(1)},
        {"teacher_ids": np.zeros((3, 2), int)},
        {"teacher_log_probs": np.zeros((1, 2))},
    ],
    ids=range(8),
)
def test_rows_cannot_be_made_wrong(changes):
    right = {"prompt": np.array([1]), "response": np.array([2, 3]), "mask": np.array([True, False])}
    Row(**right, score=0.0, uid="0")
    with pytest.raises(AssertionError):
        Row(**(right | changes), score=0.0, uid="0")


@pytest.mark.parametrize(
    ("trained", "spans"), [("", []), ("..", []), ("x", [(0, 1)]), (".xx.x", [(1, 3), (4, 5)]), ("xx..", [(0, 2)])]
)
def test_rows_have_spans_of_trained_tokens(trained, spans):
    assert list(trained_spans([7 if mark == "x" else IGNORED for mark in trained])) == spans


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("max_staleness=-1", "max_staleness=-1: give 0 or more"),
        ("max_staleness=2 trainer.atropos.weight_sync.every=4", "max_staleness=2 with weight_sync.every=4: .*for ever"),
        ("max_staleness=3 trainer.atropos.weight_sync.every=4", None),
        ("max_staleness=0", None),
    ],
)
def test_staleness_bound_that_would_deadlock_is_refused(overrides, expected):
    options = ["actor_rollout_ref.model.path=a/b", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"]
    config = changed_config(compose_config(*options), f"trainer.atropos.{overrides}".split())
    if expected is None:
        return check_config(resolved(config))
    with pytest.raises(ConfigurationError, match=expected):
        check_config(resolved(config))
