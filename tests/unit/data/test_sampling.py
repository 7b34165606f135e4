"""What a row was sampled with comes with it, and is compared with what the trainer computes."""

import json
import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.runs import metrics_line
from helpers.sampled import I, three_rows
from helpers.sglang import make_tiny_model
from helpers.trainer import compose_config
from recipe.atropos.adapter.completion_cache import CompletionCache
from recipe.atropos.adapter.restore import restore_group
from recipe.atropos.algorithm.off_policy import compare_with_engine
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.preflight import check_config
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.data.sampling import (
    TEMPERATURE_VARIABLE,
    SamplingCheck,
    SamplingMismatch,
    SamplingParams,
    default_temperature,
)
from recipe.atropos.errors import AtroposError
from recipe.atropos.launcher import launch
from recipe.atropos.watchdog import alarms
from recipe.atropos.watchdog.history import logprob_tolerance

LIMITS = RowLimits(20, 0)


@pytest.mark.parametrize(("told", "temperature"), [("0.7", 0.7), ("", 1.0), (None, 1.0)])
def test_sampling_temperature_is_the_trainers_or_1(told, temperature, monkeypatch):
    monkeypatch.delenv(TEMPERATURE_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(TEMPERATURE_VARIABLE, told)
    assert default_temperature() == temperature


def test_sampling_check_has_the_keys_of_the_configuration():
    options = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.temperature=0.7"]
    assert SamplingCheck.from_config(load_config(options)) == SamplingCheck(0.7)
    options += ["trainer.atropos.sampling_mismatch=warn", "trainer.atropos.allow_truncated_sampling=true"]
    options += ["+environments.a.target=recipe.atropos.environments.gsm8k"]
    assert SamplingCheck.from_config(load_config(options)) == SamplingCheck(0.7, "warn", True, True)


def test_sampling_parameters_of_a_request_are_sglangs_defaults():
    neutral = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0}
    expected = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0} | neutral
    assert SamplingParams(1.0).request() == expected


@pytest.mark.parametrize(
    ("request_params", "expected", "kinds"),
    [
        ({}, SamplingParams(1.0), ""),
        (
            {"temperature": 1, "top_p": 1.0, "top_k": -1, "stop": ["x"], "max_new_tokens": 9, "n": 4},
            SamplingParams(1.0),
            "",
        ),
        ({"temperature": None, "top_k": 1 << 30, "regex": ""}, SamplingParams(1.0, top_k=1 << 30), ""),
        ({"temperature": 0.7}, SamplingParams(temperature=0.7), ""),
        ({"temperature": 0}, SamplingParams(temperature=0.0), "truncated"),
        ({"top_p": 0.9}, SamplingParams(1.0, top_p=0.9), "truncated"),
        ({"top_k": 5}, SamplingParams(1.0, top_k=5), "truncated"),
        ({"top_k": 0}, SamplingParams(1.0, top_k=0), ""),
        pytest.param({"top_k": 1}, SamplingParams(1.0, top_k=1), "truncated", id="survivors-top_k-of-1"),
        ({"min_p": 0.1}, SamplingParams(1.0, min_p=0.1), "truncated"),
        ({"frequency_penalty": 0.5}, SamplingParams(1.0, frequency_penalty=0.5), "penalized"),
        ({"presence_penalty": -0.5}, SamplingParams(1.0, presence_penalty=-0.5), "penalized"),
        ({"repetition_penalty": 1.1}, SamplingParams(1.0, repetition_penalty=1.1), "penalized"),
        ({"min_new_tokens": 3}, SamplingParams(1.0, min_new_tokens=3), "penalized"),
        ({"logit_bias": {"5": 2, "3": -1.5}}, SamplingParams(1.0, logit_bias={3: -1.5, 5: 2.0}), "penalized"),
        ({"regex": "a+", "watermark": True}, SamplingParams(1.0, constraints=("regex", "watermark")), "penalized"),
    ],
)
def test_sampling_parameters_of_a_request(request_params, expected, kinds):
    """And as they travel: JSON there and back."""
    params = SamplingParams.from_request(request_params)
    assert params == expected
    assert (params.truncated, params.penalized) == ("truncated" in kinds, "penalized" in kinds)
    travelled = msgspec.json.decode(json.dumps(params.to_mapping()), type=SamplingParams)
    assert travelled == params and hash(travelled) == hash(params)


def test_sampling_of_each_trained_span_is_stamped_once(tmp_path):
    """A span that is not trained on does not count; of a reply without parameters nothing is known."""
    cache = CompletionCache(AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, seed=0)))
    warm, cold = SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=0.2)
    first, second = np.array([1, 2], np.int32), np.array([1, 2, 5, 6, 9], np.int32)
    cache.add(first, [5, 6], [-0.1, -0.2], sampling=warm)
    cache.add(second, [7], [-0.5], sampling=cold)
    same = np.array([1, 2, 5, 6, 9, 7, 9], np.int32)
    cache.add(same, [4], [-0.5], sampling=warm)
    cache.add(first, [8], [-0.5])
    group = three_rows(
        tokens=[[1, 2, 5, 6], [1, 2, 5, 6, 9, 7, 9, 4], [1, 2, 8], [1, 2, 5, 6, 9, 7]],
        masks=[[I, I, 5, 6], [I, I, 5, 6, I, 7, I, 4], [I, I, 8], [I, I, I, I, I, 7]],
        inference_logprobs=None,
        scores=[0.0] * 4,
    )
    restore_group(cache, group, Counter(), None)
    warm_mapping, cold_mapping = {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.2}
    expected = [[warm_mapping], [warm_mapping, cold_mapping], None, [cold_mapping]]
    assert group["group_overrides"]["sampling_params"] == expected
    batch, _ = groups_to_data_proto([group], LIMITS, multiple_of=5)
    assert batch.non_tensor_batch["sampling"].tolist() == [(warm,), (warm, cold), None, (cold,), None]


def test_sampling_declared_by_a_group_is_of_its_unknown_rows():
    """As an environment without the adapter may post it."""
    group = three_rows(generation_params={"temperature": 0.6, "top_k": 20, "max_tokens": 5})
    rows, _ = read_groups([group, three_rows(generation_params={"max_tokens": 5})], LIMITS)
    declared = (SamplingParams(temperature=0.6, top_k=20),)
    assert [row.sampling for row in rows] == [declared] * 3 + [None] * 3
    group["group_overrides"] = {"sampling_params": [None, [{"temperature": 1.0}], None]}
    rows, _ = read_groups([group], LIMITS)
    assert [row.sampling for row in rows] == [declared, (SamplingParams(1.0),), declared]


def test_whole_numbers_may_be_written_as_floats():
    """As JSON from other languages has them."""
    [row] = read_groups(
        [three_rows(group_overrides={"sampling_params": [[{"temperature": 1, "top_k": 50.0}]] * 3})], LIMITS
    )[0][:1]
    assert row.sampling == (SamplingParams(1.0, top_k=50),) and row.sampling[0].truncated


def at(*temperatures, **others):
    return tuple(SamplingParams(temperature=t, **others) for t in temperatures)


@pytest.mark.parametrize("trainer", [1.0, 0.7])
@pytest.mark.parametrize("environment", [1.0, 0.7])
def test_sampling_mismatch_is_between_environment_and_trainer(environment, trainer):
    """By default an error that names environment, both values and the options; else counted for each environment."""
    rows, names = [at(trainer), at(environment), at(environment), None], ["right", "math", "math", "stock"]
    known = {"atropos/rows_with/unknown_sampling": 1, "atropos/stock/rows_with/unknown_sampling": 1}
    counted = {"atropos/rows_with/other_temperature": 2, "atropos/math/rows_with/other_temperature": 2}
    if environment == trainer:
        counted = {}
        assert SamplingCheck(trainer).metrics(rows, names) == known
    else:
        with pytest.raises(SamplingMismatch) as caught:
            SamplingCheck(trainer).metrics(rows, names)
        assert isinstance(caught.value, AtroposError)
        for words in (
            f"environment math sampled at temperature {environment:g}",
            f"actor_rollout_ref.rollout.temperature={trainer:g};",
            f"environment.args.temperature={trainer:g}",
            f"or actor_rollout_ref.rollout.temperature={environment:g}",
            "trainer.atropos.sampling_mismatch=per_row",
        ):
            assert words in str(caught.value)
        with pytest.raises(SamplingMismatch, match=r"environments\.math\.args\.temperature"):
            SamplingCheck(trainer, several=True).metrics(rows, names)
    for mode in ("warn", "per_row"):
        assert SamplingCheck(trainer, mode).metrics(rows, names) == known | counted


@pytest.mark.parametrize(
    ("sampled", "kind"),
    [(at(1.0, top_p=0.9), "truncated"), (at(1.0, min_new_tokens=2), "penalized"), (at(0.0), "truncated")],
    ids=["top_p", "penalty", "greedy"],
)
def test_sampling_that_no_temperature_describes_is_an_error(sampled, kind):
    """Unless it is allowed; always counted. The fix that is offered works: no trainer has the temperature 0."""
    rows, names = [sampled, at(1.0)], ["math", "math"]
    with pytest.raises(SamplingMismatch, match=f"math used {kind} sampling.*allow_truncated_sampling=true"):
        SamplingCheck(1.0).metrics(rows, names)
    counted = {f"atropos/rows_with/{kind}_sampling": 1, f"atropos/math/rows_with/{kind}_sampling": 1}
    for check in (SamplingCheck(1.0, allow_truncated=True), SamplingCheck(1.0, "warn"), SamplingCheck(1.0, "per_row")):
        assert check.metrics(rows, names) == counted
        assert alarms.raised_by(counted, 1e-4, check.mode) == {f"{kind}_sampling": 1}


def test_sampling_greedily_is_at_temperature_1():
    with pytest.raises(SamplingMismatch, match="sampled at temperature 1"):
        SamplingCheck(0.7, allow_truncated=True).metrics([at(0.0)], ["math"])


@pytest.mark.parametrize(
    ("metrics", "name"),
    [({"actor/grad_norm": math.nan}, "gradient_not_finite"), ({"actor/grad_norm": math.inf}, "gradient_not_finite")]
    + [({"atropos/rows_with/unknown_sampling": 3.0, "actor/grad_norm": 0.5}, "unknown_sampling")],
)
def test_sampling_alarms_of_steps_and_rows_nobody_checks(metrics, name):
    assert [*alarms.raised_by(metrics, 1e-4, "error")] == [name]
    assert alarms.describe(name, metrics.get("atropos/rows_with/unknown_sampling"), 1e-4)


def test_sampling_temperature_of_each_row():
    """The trainer's for unknown and padding rows; of greedy rows SGLang reports logprobs at 1."""
    rows = [at(0.7), None, at(1.0), at(0.0)]
    np.testing.assert_array_equal(
        SamplingCheck(0.5, "per_row").temperatures(rows), np.array([0.7, 0.5, 1.0, 1.0], np.float32)
    )
    assert SamplingCheck(0.5, "per_row").temperatures([at(0.5), None]) is None
    assert SamplingCheck(0.5, "warn").temperatures(rows) is SamplingCheck(0.5, "error").temperatures(rows) is None
    with pytest.raises(SamplingMismatch, match=r"math sampled the turns of one sequence at temperatures 0\.7, 0\.2"):
        SamplingCheck(0.5, "per_row").metrics([at(0.7, 0.2)], ["math"])


def test_sampling_per_row_needs_a_loss_without_fused_kernels():
    overrides = ["trainer.atropos.sampling_mismatch=per_row", "actor_rollout_ref.model.use_fused_kernels=true"]
    with pytest.raises(AtroposError, match="sampling_mismatch=per_row with actor_rollout_ref.model.use_fused_kernels"):
        check_config(load_config(["actor_rollout_ref.model.path=org/model", *overrides]))


def test_sampling_alarm_is_on_fresh_rows_beyond_the_tolerance():
    """Older rows differ because the policy has moved on; rows without logprobs are in no comparison."""
    overrides = {"policy_version_min": [4, 3, 4], "policy_version_max": [4, 4, 4]}
    group = three_rows(group_overrides=overrides)
    group["inference_logprobs"][2] = [1.0, 1.0, 1.0]
    batch, _ = groups_to_data_proto([group], LIMITS)
    ours = batch.batch["rollout_log_probs"].clone()
    ours[0, 0] += 0.002  # one of the two trained tokens of the only fresh row with logprobs
    ours[1:] += 1.0
    batch.batch["old_log_probs"] = ours
    correction = compose_config("actor_rollout_ref.model.path=none").algorithm.rollout_correction
    metrics = compare_with_engine(batch, 4, correction)
    assert metrics["atropos/logprob_diff/fresh_mean"] == pytest.approx(0.001, rel=1e-4)
    assert metrics["atropos/logprob_diff/mean"] > 0.5
    assert "atropos/logprob_diff/fresh_mean" not in compare_with_engine(batch, 5, correction)

    float32, bfloat16 = (logprob_tolerance(None, dtype) for dtype in ("float32", "bfloat16"))
    assert (float32, bfloat16, logprob_tolerance(0.5, "float32")) == (1e-4, 0.0104, 0.5)
    assert alarms.raised_by(metrics, bfloat16, "error") == {}
    raised = alarms.raised_by(metrics, float32, "error")
    assert raised == {"logprob_difference": pytest.approx(0.001, rel=1e-4)}
    what = alarms.describe("logprob_difference", 0.02, float32)
    causes = [
        what.index(cause) for cause in ("0.02 nats", "sampling parameters", "tensors missing", "dtype", "kernels")
    ]
    assert causes == sorted(causes)


def test_sampling_alarms_of_a_step_are_beside_it():
    line = metrics_line(3, **{"atropos/rows": 8.0, "phase_s/wait": 0.0, "atropos/policy_version": 3})
    raised = {"atropos/alarms/logprob_difference": 0.0059, "atropos/alarms/truncated_sampling": 4.0}
    assert str(launch._step(line | raised)).endswith("version 3  logprob_difference, truncated_sampling")
    assert str(launch._step(line)).endswith("version 3")


def test_sampling_parameters_leave_out_what_is_sglangs_default():
    """Also where a request names it, as those of environments do: a group's sequences each have them."""
    asked = SamplingParams.from_request({"temperature": 0.5, "top_p": 1.0, "min_p": 0, "top_k": -1, "logit_bias": {}})
    assert asked.to_mapping() == {"temperature": 0.5}
    assert SamplingParams(1.0, top_k=5, logit_bias={3: -1.0}).to_mapping() == {
        "temperature": 1.0, "top_k": 5, "logit_bias": {"3": -1.0}
    }  # fmt: skip
