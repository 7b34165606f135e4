"""Trajectories of several rows count once: in baselines, losses, metrics and mini-batches; no workers here."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import left_right_2_no_padding

from helpers.loss import distilling
from helpers.trainer import actor_of, configured
from recipe.atropos.algorithm.advantages import RunningMoments, add_advantages, compute_advantages
from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.algorithm.losses import atropos_loss
from recipe.atropos.algorithm.metrics import batch_metrics, mean_entropy
from recipe.atropos.algorithm.trajectories import has_several_rows, require_defined, shares_of
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext.algorithm import AdaptiveKLController

LIMITS = RowLimits(max_length=40, pad_token_id=0)
SCORES_ONLY = [name for name, needs in ESTIMATORS.items() if needs.scores_only]
# Numbers of trained tokens of each row, of each trajectory, and the trajectories' scores; two groups.
GROUPS = (([[2, 3], [1], [4, 1, 2]], [1.0, 0.0, 4.0]), ([[3], [2, 1]], [2.0, -1.0]))


def in_rows(sizes, scores, token):
    """A group with a row for each number, the second rows after all first ones; trained tokens count from ``token``."""
    rows = [(at, number) for at in range(3) for number, each in enumerate(sizes) if at < len(each)]
    start = {}
    for number, each in enumerate(sizes):
        for at, n in enumerate(each):
            start[at, number], token = token, token + n
    tokens = [[1, *range(start[at, number], start[at, number] + sizes[number][at])] for at, number in rows]
    return {
        "tokens": tokens,
        "masks": [[-100, *ids[1:]] for ids in tokens],
        "scores": [scores[number] for _, number in rows],
        "group_overrides": {"trajectory": [number + 10 for _, number in rows]},
    }


def whole(sizes, scores, token):
    """The same group with all trained tokens of a trajectory in one sequence."""
    tokens = []
    for each in sizes:
        tokens.append([1, *range(token, token + sum(each))])
        token += sum(each)
    return {"tokens": tokens, "masks": [[-100, *ids[1:]] for ids in tokens], "scores": scores}


def both(**fields):
    """The batches of ``GROUPS`` in rows, and whole; token ids from 2 on are the trained tokens, each once."""
    found = []
    for make in (in_rows, whole):
        groups = [make(*GROUPS[0], 2) | fields, make(*GROUPS[1], 15) | fields]
        batch, report = groups_to_data_proto(groups, LIMITS)
        assert not report.dropped
        found.append(batch)
    return found


def by_token(batch, values):
    """{trained token: value} of (B, R) values."""
    mask = batch.batch["response_mask"].bool()
    return dict(zip(batch.batch["responses"][mask].tolist(), values[mask].tolist(), strict=True))


def estimated(batch, name, **settings):
    config = configured(f"algorithm.adv_estimator={name}")
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    atropos = OmegaConf.merge(config.trainer.atropos, settings)
    compute_advantages(batch, config.algorithm, atropos, RunningMoments())
    return batch


def test_the_two_batches_have_the_same_trained_tokens():
    rows, one = both()
    assert (len(rows), len(one)) == (9, 5) and has_several_rows(rows) and not has_several_rows(one)
    assert by_token(rows, rows.batch["responses"]).keys() == by_token(one, one.batch["responses"]).keys()
    assert rows.non_tensor_batch["trajectory"].tolist() == [10, 11, 12, 10, 12, 12, 10, 11, 11]
    assert one.non_tensor_batch["trajectory"].tolist() == [None] * 5
    shares = [2 / 5, 1, 4 / 7, 3 / 5, 1 / 7, 2 / 7, 1, 2 / 3, 1 / 3]
    assert shares_of(rows).tolist() == pytest.approx(shares) and shares_of(one).tolist() == [1.0] * 5


@pytest.mark.parametrize("name", SCORES_ONLY)
def test_baselines_count_a_trajectory_once(name):
    rows, one = (estimated(batch, name) for batch in both())
    found, wanted = (by_token(batch, batch.batch["advantages"]) for batch in (rows, one))
    assert found == pytest.approx(wanted, abs=1e-6) and len(set(wanted.values())) > 2
    assert not rows.batch["advantages"][~rows.batch["response_mask"].bool()].any()
    returns = by_token(one, one.batch["returns"])
    assert by_token(rows, rows.batch["returns"]) == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo_atropos", "opo"])
def test_dropped_rows_of_a_trajectory_count_once(name):
    """Of the first trajectory one row is left, of the last none; both lose rows that are too long."""
    sizes, scores = [[2, 30], [1], [28, 29]], [1.0, 0.0, 4.0]
    short = RowLimits(max_length=20, pad_token_id=0)
    batch, report = groups_to_data_proto([in_rows(sizes, scores, 2)], short)
    assert report.dropped == {"overlong_response": 3} and (report.received, report.group_sizes) == (5, [3])
    found = by_token(batch, estimated(batch, name).batch["advantages"])
    whole_batch, _ = groups_to_data_proto([whole(sizes, scores, 2)], RowLimits(200, 0))
    wanted = by_token(whole_batch, estimated(whole_batch, name).batch["advantages"])
    assert found == pytest.approx({token: wanted[token] for token in found}, rel=1e-5) and len(found) == 3
    assert len(set(found.values())) == 2


def test_equal_scores_of_trajectories_are_no_signal():
    """Two rows of one trajectory are no group of equal scores."""
    batch, _ = groups_to_data_proto([in_rows([[1, 1]], [2.0], 2), in_rows([[1, 2], [1]], [3.0, 3.0], 9)], LIMITS)
    estimated(batch, "grpo_atropos")
    assert batch.non_tensor_batch["has_signal"].tolist() == [True, True, False, False, False]
    assert batch.batch["advantages"][:2, 0].tolist() == pytest.approx([2.0, 2.0], rel=1e-5)
    assert not batch.batch["advantages"][2:].any()


def test_advantages_of_the_environment_stay_on_their_rows():
    """A row set to zero stays at 0, and its trajectory's others do not."""
    group = in_rows([[2, 3], [1]], [1.0, 0.0], 2)
    group["advantages"] = [[9.0, 0.5, -1.0], [9.0, 2.0], [9.0, 3.0, 4.0, 5.0]]
    group["overrides"] = [{}, {}, {"set_advantage_to_zero": True}]
    batch, _ = groups_to_data_proto([group], LIMITS)
    assert estimated(batch, "grpo_atropos").batch["advantages"].tolist() == [[0.5, -1.0, 0], [2.0, 0, 0], [0.0] * 3]
    group["advantages"][2] = []
    batch, report = groups_to_data_proto([group], LIMITS)
    assert batch is None and report.dropped == {"malformed": 3} and report.group_sizes == [2]
    assert "some rows of a trajectory have advantages, others have none" in report.messages[0]


def with_kl(batch):
    """The batch with a KL of a tenth of its id at each token."""
    ids = batch.batch["responses"].float()
    batch.batch["old_log_probs"], batch.batch["ref_log_prob"] = -torch.ones_like(ids), -1 - ids / 10
    controller = AdaptiveKLController(0.1, target_kl=100.0, horizon=10)
    config = configured("algorithm.use_kl_in_reward=true", "algorithm.rollout_correction.rollout_is=null")
    metrics = add_advantages(batch, config.algorithm, config.trainer.atropos, RunningMoments(), controller)
    return metrics["actor/reward_kl_penalty"], controller.value, by_token(batch, batch.batch["advantages"])


def test_kl_in_the_reward_is_of_whole_trajectories():
    (found, coefficient, advantages), wanted = map(with_kl, both())
    assert (found, coefficient) == pytest.approx(wanted[:2], rel=1e-5)
    assert advantages == pytest.approx(wanted[2], rel=1e-4)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - set(SCORES_ONLY)))
def test_estimators_along_tokens_are_refused_by_name(name):
    rows, one = both()
    for batch in (rows, one):
        batch.batch["old_log_probs"] = batch.batch["sum_pi_squared"] = torch.full(batch.batch["responses"].shape, 0.3)
    with pytest.raises(
        ConfigurationError, match=f"adv_estimator={name} is not defined .* choose one of .*grpo_atropos"
    ):
        estimated(rows, name)
    estimated(one, name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "loss_mode=gspo is not defined .* choose vanilla"),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean "
            "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
            "loss_mode=kl_cov with .*seq-mean-token-mean .*choose token-mean",
        ),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
            "actor_rollout_ref.actor.loss_scale_factor=null",
            "loss_scale_factor=null .*choose a number",
        ),
        ("algorithm.rollout_correction.rollout_is=sequence", "rollout_is=sequence .*choose token"),
        (
            "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2",
            "rollout_rs=seq_mean_k1 .*choose a bound on tokens",
        ),
    ],
    ids=range(5),
)
def test_losses_over_whole_sequences_are_refused_by_name(options, words):
    with pytest.raises(ConfigurationError, match=words):
        require_defined(configured(*options.split()))
    require_defined(configured())


def values_of(ids, scale):
    """A number for each token, of (B, R) or (N,) ids, which does not depend on its place."""
    return torch.sin(ids.double() * scale)


def loss_and_gradient(batch, config, micro_batches, trajectories):
    """(loss, {token: its derivative by the token's logprob and entropy}, metrics)."""
    ids, tensors = batch.batch["responses"], batch.batch
    tensors["old_log_probs"], tensors["ref_log_prob"] = values_of(ids, 0.7), values_of(ids, 1.3)
    tensors["advantages"] = values_of(ids, 2.1) * tensors["response_mask"]
    if has_several_rows(batch):
        tensors["trajectory_share"] = shares_of(batch)
    tokens, total, gradient, metrics = int(tensors["response_mask"].sum()), 0.0, {}, {}
    for rows in micro_batches:
        micro = left_right_2_no_padding(batch.select_idxs(np.array(rows)).to_tensordict())
        tu.assign_non_tensor(micro, dp_size=1, batch_num_tokens=tokens, global_batch_size=trajectories)
        following = micro["input_ids"].values().roll(-1)
        log_probs = (values_of(following, 0.7) + 0.3 * values_of(following, 5.0)).requires_grad_()
        entropy = values_of(following, 3.0).requires_grad_()
        offsets = micro["input_ids"].offsets()
        nested = {"log_probs": log_probs, "entropy": entropy}
        output = {key: torch.nested.nested_tensor_from_jagged(each, offsets) for key, each in nested.items()}
        loss, found = atropos_loss(config, distilling(), model_output=output, data=micro)
        loss.backward()
        total += loss.item()
        for token, *of_token in zip(following.tolist(), log_probs.grad.tolist(), entropy.grad.tolist(), strict=True):
            if any(of_token):
                gradient[token] = of_token
        for key, metric in found.items():
            if isinstance(metric, Metric):
                metrics[key] = metrics.get(key, 0.0) + metric.aggregate()
    return total, gradient, metrics


AGGREGATED = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize(
    ("agg", "mode"),
    [
        *((agg, mode) for agg in AGGREGATED for mode in ("vanilla", "dro", "advantage_weighted_sft")),
        ("seq-mean-token-mean", "sapo"),
    ],
)
def test_losses_are_those_of_one_sequence_for_a_trajectory(agg, mode):
    """With entropy and KL, in any micro-batches: values, gradients and metrics."""
    options = [f"loss_agg_mode={agg}", f"policy_loss.loss_mode={mode}", "use_kl_loss=true", "entropy_coeff=0.2"]
    options += ["policy_loss.dro_beta=0.1"] * (mode == "dro")
    config = actor_of(*(f"actor_rollout_ref.actor.{option}" for option in options))
    rows, one = both()
    wanted = loss_and_gradient(one, config, [range(5)], 5)
    assert len(wanted[1]) == 19 and wanted[0] != 0
    for micro_batches in ([range(9)], [[0], [4, 8, 7], [1, 2, 3, 5, 6]]):
        loss, gradient, metrics = loss_and_gradient(rows, config, micro_batches, 5)
        assert loss == pytest.approx(wanted[0], rel=1e-5)
        assert gradient.keys() == wanted[1].keys()
        for token in gradient:
            assert gradient[token] == pytest.approx(wanted[1][token], rel=1e-5), token
        assert metrics == pytest.approx(wanted[2], rel=1e-5)


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_entropy_in_the_metrics_is_that_of_trajectories(agg):
    actor = SimpleNamespace(loss_agg_mode=agg, loss_scale_factor=None)
    rows, one = (mean_entropy(values_of(batch.batch["responses"], 3.0), batch, actor) for batch in both())
    assert rows == pytest.approx(one, rel=1e-6)


def test_mean_score_counts_a_trajectory_once():
    rows, one = (estimated(batch, "grpo_atropos") for batch in both())
    found, wanted = batch_metrics(rows), batch_metrics(one)
    assert found["atropos/mean_score"] == wanted["atropos/mean_score"] == pytest.approx(6 / 5)
    assert found["atropos/mean_raw_score"] == wanted["atropos/mean_raw_score"] == pytest.approx(6 / 5)
    assert found["atropos/trained_tokens"] == 19 and found["atropos/mean_advantage"] == pytest.approx(
        wanted["atropos/mean_advantage"], abs=1e-6
    )
