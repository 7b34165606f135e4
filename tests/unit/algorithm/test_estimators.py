"""The numbers that the loss is multiplied with, against plain Python over one sequence at a time."""

import importlib
import math
import statistics
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from helpers.loss import in_the_loss
from helpers.trainer import compose_config, configured, random_group
from recipe.atropos.algorithm.advantages import (
    IncompleteGroup,
    MissingAdvantages,
    RunningMoments,
    add_advantages,
    compute_advantages,
    shape_advantages,
)
from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.algorithm.metrics import batch_metrics
from recipe.atropos.config.compose import resolved
from recipe.atropos.config.preflight import check_config
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits, VersionLimits
from recipe.atropos.data.scored_group import LARGEST
from recipe.atropos.errors import ConfigurationError

LIMITS = RowLimits(max_length=90, pad_token_id=0)
OF_SCORES = "gpg grpo grpo_atropos grpo_passk grpo_vectorized opo rloo rloo_vectorized".split()


def of_one_token(*scores):
    """A group of rows with one trained token each."""
    n = len(scores)
    return {"tokens": [[1, 2]] * n, "masks": [[-100, 2]] * n, "scores": list(scores)}


@pytest.mark.parametrize("estimator", OF_SCORES)
@pytest.mark.parametrize("scores", [(LARGEST, LARGEST, 0.0, 0.0), (LARGEST, -LARGEST, 1.0, 0.0)])
def test_advantages_of_the_largest_scores_are_finite(estimator, scores):
    """And so are the running moments, which a checkpoint keeps."""
    unscaled = ["algorithm.norm_adv_by_std_in_grpo=false"] if "grpo" in estimator else []
    config = compose_config("actor_rollout_ref.model.path=none", f"algorithm.adv_estimator={estimator}", *unscaled)
    batch, _ = groups_to_data_proto([of_one_token(*scores)], LIMITS)
    moments = RunningMoments()
    settings = config.trainer.atropos
    settings.advantage_normalization = "global"
    add_advantages(batch, config.algorithm, settings, moments, None)
    assert torch.isfinite(batch.batch["advantages"]).all() and np.isfinite([moments.mean, moments.m2]).all()


def with_advantages(group, rng, rows=None):
    """The group with an advantage a token, in ``rows`` (all), as environments send them: also under the prompt."""
    chosen = range(len(group["tokens"])) if rows is None else rows
    lists = [rng.normal(size=len(t)).tolist() if i in chosen else [] for i, t in enumerate(group["tokens"])]
    return group | {"advantages": lists}


def mixed_groups(seed=0):
    """Unequal sizes, two turns; group 1 has advantages of its own, group 2 in some rows; rows and a group set to 0."""
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, 50, turns=2, size=size) for size in (4, 3, 6, 2)]
    for group in groups:
        group["scores"] = rng.normal(size=len(group["scores"])).tolist()
    groups[1] = with_advantages(groups[1], rng)
    groups[2] = with_advantages(groups[2], rng, rows=(0, 4))
    groups[0]["overrides"] = [{}, {"set_advantage_to_zero": True}, {}, {}]
    groups[3]["group_overrides"] = {"set_advantage_to_zero": True}
    return groups


def expected_advantages(groups, by_std=True, use_own=True):
    """A list over rows of {position in the response: advantage}, for trained positions; by the definitions."""
    rows = []
    for group in groups:
        mean = statistics.fmean(group["scores"])
        std = statistics.stdev(group["scores"]) if by_std else 1.0
        for i, (mask, score) in enumerate(zip(group["masks"], group["scores"], strict=True)):
            first = next(t for t, m in enumerate(mask) if m != -100)
            own = (group.get("advantages") or [[]] * len(group["masks"]))[i] if use_own else []
            zero = (group.get("overrides") or [{}] * len(group["masks"]))[i].get("set_advantage_to_zero", False)
            zero = zero or (group.get("group_overrides") or {}).get("set_advantage_to_zero", False)
            value = (score - mean) / (std + 1e-6) if by_std else score - mean
            rows.append(
                {
                    t - first: 0.0 if zero else own[t] if own else value
                    for t in range(first, len(mask))
                    if mask[t] != -100
                }
            )
    return rows


def estimate(groups, *overrides, moments=None, limits=LIMITS, versions=None, rejected=None, **settings):
    """The advantages, (B, R), that the trainer computes with these configuration overrides.

    ``rejected``, a bool (B,), are rows of which the off-policy correction rejects every token.
    """
    config = configured(*overrides)
    data, _ = groups_to_data_proto(groups, limits, versions=versions)
    data.batch["sampled_mask"] = data.batch["response_mask"]
    if rejected is not None:
        data.batch["response_mask"] = data.batch["response_mask"] * torch.tensor(~np.array(rejected))[:, None]
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    data.batch["old_log_probs"] = torch.full_like(data.batch["token_level_scores"], -0.7)
    data.batch["sum_pi_squared"] = torch.full_like(data.batch["token_level_scores"], 0.3)
    atropos = OmegaConf.merge(config.trainer.atropos, settings)
    compute_advantages(data, config.algorithm, atropos, RunningMoments() if moments is None else moments)
    return data


def as_rows(data):
    trained = data.batch["response_mask"].bool()
    assert not any(data.batch[key][~trained].any() for key in ("advantages", "returns")), "nothing under mask 0"
    return [
        {t: row[t].item() for t in range(len(row)) if mask[t]}
        for row, mask in zip(data.batch["advantages"], trained, strict=True)
    ]


def assert_same(rows, expected, tolerance=1e-4):
    assert len(rows) == len(expected)
    for ours, wanted in zip(rows, expected, strict=True):
        assert ours == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("by_std", [True, False], ids=["by_std", "mean_only"])
@pytest.mark.parametrize("use_own", [True, False], ids=["own", "computed"])
def test_environment_advantages_reach_their_tokens(by_std, use_own):
    """GRPO's reach the other rows."""
    groups = mixed_groups()
    data = estimate(groups, f"algorithm.norm_adv_by_std_in_grpo={str(by_std).lower()}", use_advantages=use_own)
    assert_same(as_rows(data), expected_advantages(groups, by_std, use_own))
    assert any(value < 0 for row in as_rows(data) for value in row.values())
    assert data.non_tensor_batch["has_signal"].tolist() == [any(row.values()) for row in as_rows(data)]


@pytest.mark.parametrize(("use_own", "told"), [(True, ["lam=0", "lam=0", None]), (False, [None] * 3)])
def test_credit_is_told_where_it_made_the_advantages(use_own, told):
    credited = {"advantages": [[0.0, 1.0]] * 2, "group_overrides": {"credit": "lam=0"}}
    data = estimate([of_one_token(0.0, 1.0) | credited, of_one_token(1.0)], use_advantages=use_own)
    assert data.non_tensor_batch["credit"].tolist() == told


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk"])
def test_estimators_divide_by_the_deviation_only_if_told(name):
    """Of four scores 0, 0, 0, 1, with mean 1/4 and deviation 1/2; pass@k compares the best with the second best."""
    group = of_one_token(0.0, 0.0, 0.0, 1.0)
    plain = [0.0, 0.0, 0.0, 1.0] if name == "grpo_passk" else [-0.25, -0.25, -0.25, 0.75]
    for by_std, scale in (("true", 2.0), ("false", 1.0)):
        data = estimate([group], f"algorithm.adv_estimator={name}", f"algorithm.norm_adv_by_std_in_grpo={by_std}")
        assert data.batch["advantages"][:, 0].tolist() == pytest.approx([scale * x for x in plain], abs=1e-4), by_std


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitened_batch_of_one_token_has_no_advantage(name):
    """A value is its own mean; also beside a dropped row."""
    two = of_one_token(3.0, 5.0)
    for group in (of_one_token(3.0), two | {"masks": [[-100, 2], [-100, -100]]}):
        data = estimate([group], f"algorithm.adv_estimator={name}")
        assert data.batch["advantages"].tolist() == [[0.0]] and data.non_tensor_batch["has_signal"].tolist() == [False]
    assert estimate([two], f"algorithm.adv_estimator={name}").batch["advantages"].abs().min() > 0.5


@pytest.mark.parametrize("name", ESTIMATORS, ids=str)
def test_zero_signal_groups_are_counted_for_every_estimator(name):
    """Of scores of 100.1, rounding and whitening leave no exact 0, nor does normalizing, before which is counted.

    Without groups, the whole batch is compared.
    """
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 50, turns=2, size=8) | {"scores": [100.1] * 8} for _ in range(2)]
    if name != "reinforce_plus_plus":
        groups.append(random_group(rng, 50, turns=2, size=3) | {"scores": [1.0, 2.0, 4.0]})

    def metrics():
        data = estimate(groups, f"algorithm.adv_estimator={name}", advantage_normalization="batch")
        assert data.batch["advantages"][0].any() or name == "reinforce_plus_plus"
        return batch_metrics(data)

    found = metrics()
    assert (found["atropos/zero_signal_groups"], found["atropos/groups"]) == (2, len(groups))
    groups[0]["scores"][0] = 101.0
    assert metrics()["atropos/zero_signal_groups"] == (name != "reinforce_plus_plus")


def test_group_of_equal_scores_has_no_advantage():
    """Eight scores of 100.1: the rounding of their mean, over an epsilon, makes verl's own GRPO 0.83 of them."""
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 50, turns=2, size=8) | {"scores": [100.1] * 8}, *mixed_groups(seed=1)[1:2]]
    ours, verls = (estimate(groups, f"algorithm.adv_estimator={name}") for name in ("grpo_atropos", "grpo"))
    assert verls.batch["advantages"][:8].abs().max() > 0.5
    assert not ours.batch["advantages"][:8].any()
    assert_same(as_rows(ours)[8:], expected_advantages(groups[1:]))


@pytest.mark.parametrize("name", ["grpo_atropos", "grpo", "rloo"])
def test_a_group_of_one_row_has_its_score_as_advantage(name):
    """Nothing is known that it could be compared with."""
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 50, size=1) | {"scores": [2.5]}, random_group(rng, 50, size=1) | {"scores": [-1.5]}]
    data = estimate(groups, f"algorithm.adv_estimator={name}")
    rows = as_rows(data)
    assert_same(rows, [dict.fromkeys(row, score) for row, score in zip(rows, (2.5, -1.5), strict=True)])
    assert data.non_tensor_batch["has_signal"].all()


@pytest.mark.parametrize(
    "name", [*sorted(set(ADV_ESTIMATOR_REGISTRY) - {"gae", "remax", "gdpo", "grpo_atropos"}), "grpo_atropos"]
)
def test_verls_estimators_give_what_they_give_on_verls_data(name):
    """Called as verl calls them on the same rows; ``set_advantage_to_zero`` is all that differs. Ours is its GRPO."""
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 50, turns=2) | {"scores": rng.normal(size=4).tolist()} for _ in range(4)]
    groups[1]["overrides"] = [{}, {"set_advantage_to_zero": True}, {}, {}]
    data = estimate(groups, f"algorithm.adv_estimator={name}")
    config = configured(f"algorithm.adv_estimator={name}")
    arguments = {"sum_pi_squared", "old_log_probs"} if "token_baseline" in name else set()
    wanted, _ = get_adv_estimator_fn(name.removesuffix("_atropos"))(
        token_level_rewards=data.batch["token_level_scores"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=config.algorithm,
        **{key: data.batch[key] for key in arguments},
    )
    wanted = wanted * data.batch["response_mask"]
    wanted[5] = 0.0
    assert wanted.any() and torch.isfinite(wanted).all()
    torch.testing.assert_close(data.batch["advantages"], wanted)


def test_group_too_small_for_an_estimator_is_counted():
    rng = np.random.default_rng(0)
    groups = [random_group(rng, 50, size=size) | {"scores": rng.normal(size=size).tolist()} for size in (2, 1)]
    data = estimate(groups, "algorithm.adv_estimator=grpo_passk")
    assert data.batch["advantages"][:2].any() and not data.batch["advantages"][2].any()
    assert batch_metrics(data)["atropos/zero_signal_groups"] == 1


def trained_after_prompt(kept):
    return [5, 6, 7, 8], [False, True, True, False]


@pytest.mark.parametrize(
    ("reason", "rows", "version"),
    [
        (
            "overlong_response",
            lambda kept: ([5, 6, 7, 8] + [9] * 9 * (not kept), [False] + [True] * (12 - 9 * kept)),
            8,
        ),
        ("no_trained_token", lambda kept: ([5, 6, 7], [False, kept, False]), 8),
        ("no_prompt", lambda kept: ([5, 6, 7], [not kept, True, True]), 8),
        ("stale", trained_after_prompt, 5),
        ("future_version", trained_after_prompt, 9),
        ("not_pushed", trained_after_prompt, -1),
        ("unknown_version", trained_after_prompt, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_baseline_counts_the_rows_that_were_dropped(reason, rows, version):
    """All but the second, which alone is kept."""
    made, versions = [rows(i == 1) for i in range(4)], [8 if i == 1 else version for i in range(4)]
    group = {
        "tokens": [tokens for tokens, _ in made],
        "masks": [[token if trained else -100 for token, trained in zip(*row, strict=True)] for row in made],
        "scores": [100.0, 101.0, 99.0, 100.0],
        "group_overrides": {"policy_version_min": versions, "policy_version_max": versions},
    }
    limits = replace(LIMITS, max_length=6)
    data = estimate([group], limits=limits, versions=VersionLimits(8, max_staleness=2))
    _, report = groups_to_data_proto([group], limits, versions=VersionLimits(8, max_staleness=2))
    assert len(data) == 1 and report.dropped == {reason: 3}
    values = [value for row in as_rows(data) for value in row.values()]
    assert values == pytest.approx([(101 - 100) / math.sqrt(2 / 3)] * len(values), rel=1e-4)


SHORT = replace(LIMITS, max_length=20)


def groups_that_lose_rows():
    """(groups, bool for each row: it is longer than SHORT allows); each group keeps and loses a row, one its best."""
    rng = np.random.default_rng(6)
    groups = [random_group(rng, 50, turns=2, size=size) for size in (4, 5, 2, 6)]
    lost = []
    for group in groups:
        group["scores"] = rng.normal(size=len(group["scores"])).tolist()
        lost += [len(tokens) > SHORT.max_length for tokens in group["tokens"]]
        assert 0 < sum(lost[-len(group["scores"]) :]) < len(group["scores"])
    return groups, np.array(lost)


@pytest.mark.parametrize("name", OF_SCORES, ids=str)
@pytest.mark.parametrize("how", ["dropped", "rejected"])
def test_baseline_of_verls_estimators_is_that_of_the_whole_group(name, how):
    """What a surviving row gets is what it got with all rows there; also if the correction rejects the others."""
    groups, lost = groups_that_lose_rows()
    whole = estimate(groups, f"algorithm.adv_estimator={name}")
    lacking = {"limits": SHORT} if how == "dropped" else {"rejected": lost}
    data = estimate(groups, f"algorithm.adv_estimator={name}", **lacking)
    kept = np.arange(len(data)) if how == "dropped" else np.flatnonzero(~lost)
    survivors = [row for row, gone in zip(as_rows(whole), lost, strict=True) if not gone]
    assert_same([as_rows(data)[i] for i in kept], survivors)
    alone = [value for row in survivors for value in row.values()]
    assert any(alone) and len(set(alone)) >= 3


def test_baseline_of_reinforce_plus_plus_counts_dropped_rows():
    """The mean is of the whole group; the whitening that follows is over the trained tokens."""
    groups, lost = groups_that_lose_rows()
    data = estimate(groups, "algorithm.adv_estimator=reinforce_plus_plus_baseline", limits=SHORT)
    centered = [score - statistics.fmean(group["scores"]) for group in groups for score in group["scores"]]
    centered = [value for value, gone in zip(centered, lost, strict=True) if not gone]
    plain = [value for row, value in zip(as_rows(data), centered, strict=True) for _ in row]
    mean, std = statistics.fmean(plain), statistics.stdev(plain)
    assert_same(
        as_rows(data), [dict.fromkeys(r, (v - mean) / std) for r, v in zip(as_rows(data), centered, strict=True)]
    )
    # Without a baseline there is nothing to count.
    name = "algorithm.adv_estimator=reinforce_plus_plus"
    kept = [
        {
            k: [v for v, g in zip(values, lost[:4], strict=True) if not g]
            for k, values in groups[0].items()
            if k != "env_id"
        }
    ]
    assert_same(as_rows(estimate(groups[:1], name, limits=SHORT)), as_rows(estimate(kept, name)))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_baseline_that_needs_dropped_rows_whole_is_refused(name):
    groups, _ = groups_that_lose_rows()
    with pytest.raises(
        IncompleteGroup, match=rf"adv_estimator={name}: rows of group 0 .*\(overlong_response\).* choose one of .*opo"
    ):
        estimate(groups, f"algorithm.adv_estimator={name}", limits=SHORT)
    groups[0]["masks"][0] = [-100] * len(groups[0]["masks"][0])  # nothing of it would weigh anything
    assert len(estimate(groups, f"algorithm.adv_estimator={name}")) == 16


def test_baseline_with_kl_in_the_reward_refuses_dropped_rows():
    groups, _ = groups_that_lose_rows()
    with pytest.raises(IncompleteGroup, match="use_kl_in_reward=true: .*use_kl_loss=true"):
        estimate(groups, "algorithm.use_kl_in_reward=true", limits=SHORT)
    estimate(groups, "algorithm.use_kl_in_reward=true")


def _group_of(groups):
    """For each row whether it is trained on."""
    return [
        not (group.get("overrides") or [{}] * len(group["scores"]))[i].get("set_advantage_to_zero")
        and not (group.get("group_overrides") or {}).get("set_advantage_to_zero")
        for group in groups
        for i in range(len(group["scores"]))
    ]


@pytest.mark.parametrize("over", ["batch", "global"])
def test_normalized_advantage_has_mean_0_and_deviation_1(over):
    """Of the trained tokens of a batch, or of all batches so far, also after a restart."""
    moments, seen = RunningMoments(), []
    for seed in range(4):
        groups = mixed_groups(seed)
        used, resumed = _group_of(groups), RunningMoments()
        plain = [v for keep, row in zip(used, as_rows(estimate(groups)), strict=True) for v in row.values() if keep]
        seen = seen * (over == "global") + plain
        resumed.load_state_dict(moments.state_dict())
        data, moments = estimate(groups, advantage_normalization=over, moments=resumed), resumed
        values = [v for keep, row in zip(used, as_rows(data), strict=True) for v in row.values() if keep]
        mean, std = statistics.fmean(seen), statistics.pstdev(seen)
        assert values == pytest.approx([(value - mean) / std for value in plain], abs=1e-4)
        for keep, row in zip(used, as_rows(data), strict=True):
            assert keep or not any(row.values()), "set_advantage_to_zero holds"
    assert moments.count == len(seen) * (over == "global")


def test_clipping_bounds_advantages_after_normalizing():
    groups = mixed_groups()
    free = as_rows(estimate(groups, advantage_normalization="batch"))
    for low in (-0.5, 0.5):  # above 0, too, what was set to zero stays
        clipped = estimate(groups, advantage_normalization="batch", advantage_clipping=[low, 1])
        wanted = [{t: min(max(v, low), 1.0) if v else 0.0 for t, v in row.items()} for row in free]
        assert_same(as_rows(clipped), wanted, 1e-6)
        assert low in clipped.batch["advantages"] and clipped.batch["advantages"].max() == 1


def test_row_without_own_advantages_can_be_an_error():
    """The message names group and environment."""
    groups = mixed_groups()
    groups[0]["group_overrides"] = {"env_name": "gsm8k_0"}
    with pytest.raises(MissingAdvantages, match=r"group 0 of gsm8k_0: 10 of 15 rows .*fallback_to_grpo"):
        estimate(groups, fallback_to_grpo=False)
    estimate(groups[1:2], fallback_to_grpo=False)


def test_moments_of_nothing_change_nothing():
    moments = RunningMoments()
    assert (moments.count, moments.mean, moments.m2, moments.std) == (0, 0.0, 0.0, 0.0)
    moments.update(torch.tensor([]))
    assert moments == RunningMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    moments.update(torch.tensor([]))
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, 1.0)
    shaped = shape_advantages(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), moments, "global", None)
    assert not shaped.any() and moments.count == 2


CHOSEN = "algorithm.adv_estimator=median"


@pytest.fixture
def median(monkeypatch):
    """Declared while the test runs."""
    for registry in (ESTIMATORS, ADV_ESTIMATOR_REGISTRY):
        monkeypatch.setitem(registry, "median", None)
        del registry["median"]
    importlib.import_module("helpers.median_estimator")
    yield
    del sys.modules["helpers.median_estimator"]


def test_a_new_estimator_is_accepted_once_it_is_declared(median, model_path, monkeypatch):
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}", "data.max_prompt_length=16", "data.max_response_length=16", CHOSEN
    )
    check_config(config)
    config.trainer.atropos.fallback_to_grpo = False
    with pytest.raises(ConfigurationError, match="adv_estimator=median, which reads no advantages"):
        check_config(config)
    monkeypatch.delitem(ESTIMATORS, "median")
    with pytest.raises(ConfigurationError, match="adv_estimator=median; choose one of gpg, grpo, grpo_atropos, .*rloo"):
        resolved(config)


def test_a_new_estimator_weighs_the_tokens_of_a_step(median):
    """Of real rows, in verl's loss; a group that is smaller than it needs gets nothing."""
    groups = [random_group(np.random.default_rng(seed), 50, turns=2, size=size) for seed, size in enumerate((5, 4, 1))]
    for group, scores in zip(groups, ([0.0, 1.0, 3.0, 4.0, 9.0], [2.0, 2.0, 5.0, 7.0], [8.0]), strict=True):
        group["scores"] = scores
    wanted = [score - 3.0 for score in groups[0]["scores"]] + [score - 3.5 for score in groups[1]["scores"]] + [0.0]
    masks = [mask for group in groups for mask in group["masks"]]
    found = in_the_loss(groups, 50, CHOSEN).advantages
    for row, mask, value in zip(found, masks, wanted, strict=True):
        assert row == pytest.approx([0.0 if token == -100 else value for token in mask], abs=1e-4)
    assert "median" in ADV_ESTIMATOR_REGISTRY
