"""The row contract at its very bounds: what is just within a limit, and what is just beyond."""

import logging
from collections import Counter

import numpy as np
import pytest
import torch

from helpers.trainer import compose_config
from recipe.atropos.data.data_proto import groups_to_data_proto
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
from recipe.atropos.data.scored_group import FLOAT32_MAX

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
        {"scores": [FLOAT32_MAX, -FLOAT32_MAX]},
        {"scores": [1, 2]},
        {"scores": (1.0, 2.0)},
        {"group_overrides": {"raw_scores": [FLOAT32_MAX, 0]}},
        {"group_overrides": {"policy_version_min": [4], "policy_version_max": None}},
        {"group_overrides": {"policy_version_min": [4, 4], "policy_version_max": [4, 5]}},
        {"group_overrides": None, "overrides": [{}, {"set_advantage_to_zero": None}]},
        teacher(ids=((0, 99), (1, 2))),
        teacher(logprobs=((np.log(0.5), np.log(0.5)), (-1e4, -1e4))),
        {"advantages": [[-1e30] * 4, None], "ref_logprobs": [None, []]},
    ],
    ids=range(11),
)
def test_rows_take_what_is_just_within_the_format(changes):
    rows, report = read(**changes)
    assert len(rows) == 2 == report.rows == report.received and not report.dropped and not report.messages


def test_rows_are_cut_at_their_very_limits_and_counted():
    group = a_group(
        tokens=[[1, 2, 5, 6, 7], [1, 2, 3, 5, 6, 7, 8], [1, 5, 6, 7, 8, 9], [5, 6], [1, 2]],
        masks=[[-100, -100, 5, 6, 7], [-100] * 3 + [5, 6, 7, 8], [-100, 5, 6, 7, 8, 9], [5, 6], [-100, -100]],
        scores=[0.0, 1.0, 2.0, 3.0, 4.0],
    )
    rows, report = read_groups([group], RowLimits(5, 0, overlong="truncate"))
    assert [row.prompt.tolist() for row in rows] == [[1, 2], [1, 2, 3], [1]]
    assert [row.response.tolist() for row in rows] == [[5, 6, 7], [5, 6], [5, 6, 7, 8]]
    assert report.events == {"response_truncated": 2, "no_logprobs": 3}
    assert report.dropped == {"no_prompt": 1, "no_trained_token": 1}
    expected = [(3.0, 2, "no_prompt"), (4.0, 0, "no_trained_token")]
    assert all(list(row.dropped) == expected for row in rows)
    rows, report = read_groups([group], LIMITS)
    assert [row.score for row in rows] == [0.0] and report.dropped["overlong_response"] == 2
    assert [row.trained_tokens for row in rows[0].dropped] == [4, 5, 2, 0]


def test_rows_events_count_what_a_row_lacks_or_brings():
    changes = {
        "inference_logprobs": [[1.0, 1.0, -0.1, 0.0], [1.0, 1.0, None]],
        "advantages": [None, [9.0, 9.0, 0.5]],
        "overrides": [{"set_advantage_to_zero": True}, {}],
        "group_overrides": {"raw_scores": [7.0, 8]},
    }
    rows, report = read(**changes, **teacher())
    assert report.events == {"no_logprobs": 1, "own_advantages": 1, "teacher": 1, "zero_advantage": 1}
    assert [row.zero_advantage for row in rows] == [True, False] and [row.raw_score for row in rows] == [7.0, 8.0]
    assert rows[0].log_probs.tolist() == pytest.approx([-0.1, 0.0]), "0 is the logarithm of a probability"
    assert rows[1].log_probs is None and rows[1].advantages.tolist() == [0.5] and rows[1].teacher_ids is None
    rows, report = read(RowLimits(5, 0, read_teacher=False), distill_token_ids=["not looked at"])
    assert len(rows) == 2 and rows[0].teacher_ids is None
    rows, _ = read(group_overrides={"set_advantage_to_zero": True})
    assert [row.zero_advantage for row in rows] == [True, True]


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


@pytest.mark.parametrize(("loss_coef", "read_teacher"), [(0.0, False), (0.5, True), (2.0, True)])
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


def test_rows_become_columns_with_padding_that_says_nothing():
    """Everything that is not a tensor over the response, of two rows and a padding row."""
    overrides = {"env_name": "e", "raw_scores": [7.0, 8.0], "policy_version_min": [3, 4], "policy_version_max": [4, 5]}
    group = a_group(
        env_id=4,
        group_overrides=overrides,
        overrides=[{}, {"set_advantage_to_zero": True}],
        inference_logprobs=[[1.0, 1.0, -0.1, -0.2], []],
        ref_logprobs=[[0.0, 0.0, -0.3, -0.4], [0.0, 0.0, -0.5]],
        advantages=[[], [1.0, 1.0, 2.0]],
        **teacher(),
    )
    data, report = groups_to_data_proto([group], LIMITS, multiple_of=3)
    expected = {
        "env_id": [4, 4, None],
        "env_name": ["e", "e", None],
        "policy_version_min": [3, 4, None],
        "policy_version_max": [4, 5, None],
        "raw_score": [7.0, 8.0, 0.0],
        "is_padding": [False, False, True],
        "has_log_probs": [True, False, False],
        "has_advantages": [False, True, False],
        "has_teacher": [True, False, False],
        "zero_advantage": [False, True, False],
        "dropped": [(), (), ()],
    }
    assert {key: data.non_tensor_batch[key].tolist() for key in expected} == expected
    assert len(set(data.non_tensor_batch["uid"])) == 2 and report.padding_rows == 1
    tensors = data.batch
    assert tensors["ref_log_prob"].tolist() == [pytest.approx([-0.3, -0.4]), [-0.5, 0.0], [0.0, 0.0]]
    assert tensors["atropos_advantages"].tolist() == [[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    assert tensors["rollout_log_probs"].tolist() == [pytest.approx([-0.1, -0.2]), [0.0, 0.0], [0.0, 0.0]]
    assert tensors["token_level_scores"].tolist() == [[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 2], [0, 0, 0, 0]]
    assert tensors["teacher_ids"].shape == (3, 4, 2) and tensors["teacher_ids"][0, 1:3].tolist() == [[3, 4]] * 2
    of_scores = {"rollout_log_probs", "ref_log_prob", "atropos_advantages", "token_level_scores", "teacher_logprobs"}
    for key, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if key in of_scores else torch.int64), key
    bare, _ = groups_to_data_proto([a_group()], LIMITS)
    assert not {"rollout_log_probs", "ref_log_prob", "teacher_ids", "teacher_logprobs"} & set(bare.batch.keys())
    assert bare.non_tensor_batch["raw_score"].tolist() == [1.0, 2.0] and not bare.non_tensor_batch["is_padding"].any()
    assert groups_to_data_proto([a_group(scores=[None, None])], LIMITS)[0] is None


@pytest.mark.parametrize(
    ("trained", "spans"), [("", []), ("..", []), ("x", [(0, 1)]), (".xx.x", [(1, 3), (4, 5)]), ("xx..", [(0, 2)])]
)
def test_rows_have_spans_of_trained_tokens(trained, spans):
    assert list(trained_spans([7 if mark == "x" else IGNORED for mark in trained])) == spans
