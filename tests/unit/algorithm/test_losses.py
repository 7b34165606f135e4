"""Losses on logits, against hand-written gradients, and their metrics. No workers here."""

import math

import numpy as np
import pytest
import torch
from omegaconf import open_dict
from tensordict import TensorDict
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import left_right_2_no_padding

from helpers.loss import distilling, loss_of, unpadded
from helpers.trainer import actor_of, compose_config, random_group
from recipe.atropos.algorithm import losses
from recipe.atropos.algorithm.losses import (
    atropos_loss,
    compute_advantage_weighted_sft_loss,
    finished_metrics,
    forward_kl_top_k,
)
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits

pytestmark = pytest.mark.usefixtures("several_chunks")

B, S, V = 3, 7, 11


def sequences(rng):
    logits = torch.randn(B, S, V, generator=rng, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, V, (B, S), generator=rng)
    advantages = torch.randn(B, S, generator=rng, dtype=torch.float64)
    mask = torch.rand(B, S, generator=rng) < 0.6
    mask[:, :2] = False
    mask[:, -1] = True
    return logits, ids, advantages, mask


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("each", ["token", "sequence"])
def test_advantage_weighted_sft_has_the_hand_written_gradient(rng, mode, each):
    """d/dlogits of -A log softmax(logits)[token] is A (softmax - onehot), at the position before the token.

    A sequence's advantage is that of each token; outside of the mask it may be NaN.
    """
    logits, ids, advantages, mask = sequences(rng)
    if each == "sequence":
        advantages = advantages[:, 3:4].expand(B, S)
    given = advantages[:, 0] if each == "sequence" else torch.where(mask, advantages, math.nan)
    loss = compute_advantage_weighted_sft_loss(ids, given, mask, logits, loss_agg_mode=mode)
    loss.backward()
    wanted, value = torch.zeros_like(logits), 0.0
    for b in range(B):
        for t in range(1, S):
            if mask[b, t]:
                weight = 1 / mask.sum() if mode == "token-mean" else 1 / (mask[b].sum() * B)
                probs = logits[b, t - 1].detach().softmax(-1)
                value -= (weight * advantages[b, t] * probs[ids[b, t]].log()).item()
                probs[ids[b, t]] -= 1
                wanted[b, t - 1] += weight * advantages[b, t] * probs
    assert loss.item() == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(logits.grad, wanted, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantages": torch.zeros(B, S - 1)}, r"advantages is \(3, 6\), input_ids is \(3, 7\)"),
        ({"loss_mask": torch.zeros(B, S)}, "nothing to train on"),
        ({"loss_mask": torch.full((B, S), -100)}, "loss_mask holds -100; .* masks != -100"),
        ({"loss_mask": torch.full((B, S), 2)}, "loss_mask holds 2"),
        ({"loss_mask": torch.full((B, S), 0.5)}, "loss_mask holds 0.5"),
        ({"logits": torch.zeros(B, S - 1, V)}, "logits is"),
        ({"advantages": torch.full((B, S), math.nan)}, r"advantages\[0, \d\] is nan"),
    ],
    ids=range(7),
)
def test_inputs_that_do_not_fit_are_refused_by_name(rng, changes, words):
    logits, ids, advantages, mask = sequences(rng)
    arguments = {"advantages": advantages, "loss_mask": mask, "logits": logits} | changes
    with pytest.raises(ValueError, match=words):
        compute_advantage_weighted_sft_loss(ids, **arguments)


def test_the_policy_loss_has_the_gradient_advantage_times_mask(rng):
    config = actor_of()
    log_prob = torch.randn(B, S, generator=rng).requires_grad_()
    advantages, weights = torch.randn(B, S, generator=rng), torch.rand(B, S, generator=rng)
    mask = (torch.rand(B, S, generator=rng) < 0.6).long()
    loss, metrics = get_policy_loss_fn("advantage_weighted_sft")(
        old_log_prob=log_prob.detach() + 0.1,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantages * weights * mask / mask.sum())
    assert metrics["actor/ppo_kl"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["actor/cross_entropy"] == pytest.approx(-log_prob[mask.bool()].mean().item(), abs=1e-5)
    config.global_batch_info.update({"dp_size": 2, "batch_num_tokens": 100})  # of a mini-batch on two ranks
    of_a_part, _ = get_policy_loss_fn("advantage_weighted_sft")(
        log_prob.detach(), log_prob, advantages, mask, config=config, rollout_is_weights=weights
    )
    assert of_a_part.item() == pytest.approx(loss.item() * mask.sum().item() * 2 / 100, rel=1e-5)


@pytest.fixture
def a_mini_batch(rng):
    """Rows of unequal lengths and three of padding; the logprobs and logits that the policy has for them."""
    source = np.random.default_rng(0)
    groups = [random_group(source, V, turns=2, size=4), random_group(source, V, size=4, longest=30)]
    full = [torch.randn(len(t), V, generator=rng).log_softmax(-1) for t in groups[0]["tokens"]]
    groups[0]["distill_token_ids"] = [[[]] + f.topk(4).indices[1:].tolist() for f in full]
    groups[0]["distill_logprobs"] = [[[]] + f.topk(4).values[1:].tolist() for f in full]
    data, _ = groups_to_data_proto(groups, RowLimits(60, 0, vocab_size=V), multiple_of=11)
    shape = data.batch["responses"].shape
    data.batch["old_log_probs"] = -torch.rand(shape, generator=rng) * data.batch["response_mask"]
    data.batch["advantages"] = torch.randn(shape, generator=rng)
    log_probs = torch.randn(shape, generator=rng) * 0.5 + data.batch["old_log_probs"]
    return data, log_probs * data.batch["response_mask"], torch.randn(1, shape[0] * 100, V, generator=rng)


def reported(config, distillation, mini_batch, ranks):
    """The metrics of ``atropos_loss``; ``ranks`` are lists over micro-batches of lists of rows."""
    data, log_probs, logits = mini_batch
    tokens, gathered = int(data.batch["response_mask"].sum()), []
    for micro_batches in ranks:
        metrics = {}
        for rows in micro_batches:
            info = {"dp_size": len(ranks), "batch_num_tokens": tokens, "global_batch_size": 8}
            micro, flat = unpadded(data.select_idxs(np.array(rows)), log_probs[rows], **info)
            lengths = micro["input_ids"].offsets().diff().tolist()
            of_rows = torch.cat([logits[:, row * 100 : row * 100 + n] for row, n in zip(rows, lengths, strict=True)], 1)
            _, of_micro = loss_of(config, distillation, micro, of_rows, flat)
            for key, metric in of_micro.items():
                if isinstance(metric, Metric):
                    metrics.setdefault(key, metric.init_list()).append(metric)
        gathered.append(metrics)
    summed = {key: [Metric.aggregate_dp([metrics[key] for metrics in gathered])] for key in gathered[0]}
    summed = {key if key.startswith("actor/") else f"actor/{key}": values for key, values in summed.items()}
    return {key: values[0] for key, values in finished_metrics(summed).items()}


SPLITS = {
    "at_once": [[[*range(11)]]],
    "one_row_each": [[[row] for row in range(11)]],
    "unequal": [[[0], [1, 2, 3, 4, 8, 9, 10], [5, 6, 7]]],
    "two_ranks": [[[0, 1, 2], [3]], [[4, 5, 6, 7], [8, 9, 10]]],
    "padding_rank": [[[*range(8)]], [[8, 9, 10]]],
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("mode", ["vanilla", "advantage_weighted_sft", "bypass_mode"])
def test_metrics_are_over_the_tokens_of_the_mini_batches(a_mini_batch, mode, split):
    """Whatever the micro-batches, ranks and padding rows, against their definitions over the trained tokens."""
    data, log_probs, logits = a_mini_batch
    config = actor_of()
    object.__setattr__(config.policy_loss, "loss_mode", mode)
    if mode == "bypass_mode":
        correction = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
        object.__setattr__(config.policy_loss, "rollout_correction", correction)
    metrics = reported(config, distilling(loss_coef=0.7), a_mini_batch, split)

    mask = data.batch["response_mask"].bool()
    new, old, advantage = log_probs[mask], data.batch["old_log_probs"][mask], data.batch["advantages"][mask]
    ratio = (new - old).exp()
    expected = {"ppo_kl": old - new}
    if mode == "bypass_mode":
        gap = new - old
        off_policy = {
            "kl": -gap,
            "k3_kl": ratio - gap - 1,
            "chi2_token": ratio**2 - 1,
            "rollout_is_mean": ratio.clamp(max=2),
        }
        for name, values in off_policy.items():
            assert metrics.pop(f"actor/rollout_corr/{name}") == pytest.approx(values.mean().item(), rel=1e-4), name
    if mode == "advantage_weighted_sft":
        expected["cross_entropy"] = -new
    else:
        clipped = -advantage * ratio.clamp(0.8, 1.2) > -advantage * ratio
        expected["pg_clipfrac"] = clipped.float()
        expected["pg_clipfrac_lower"] = ((advantage < 0) & (torch.maximum(ratio, ratio.clamp(0.8, 1.2)) > 3)).float()
    for name, values in expected.items():
        assert metrics.pop(f"actor/{name}") == pytest.approx(values.mean().item(), rel=1e-4), name

    kl, mass = [], []
    for row in range(4):
        first = int(data.batch["attention_mask"][row].sum() - data.batch["attention_mask"][row, -mask.shape[1] :].sum())
        ids, teacher_log_probs = (
            data.batch[key][row][data.batch["attention_mask"][row].bool()]
            for key in ("teacher_ids", "teacher_logprobs")
        )
        values, masses = forward_kl_top_k(logits[0, row * 100 :][: len(ids)], ids, teacher_log_probs)
        at = first - 1 + mask[row].nonzero()[:, 0]
        kl.append(values[at])
        mass.append(masses[at])
    kl, mass = torch.cat(kl), torch.cat(mass)
    assert metrics.pop("actor/distilled_fraction") == pytest.approx(len(kl) / len(new), rel=1e-5)
    assert metrics.pop("actor/distillation_kl") == pytest.approx(kl.mean().item(), rel=1e-4)
    assert metrics.pop("actor/teacher_mass") == pytest.approx(mass.mean().item(), rel=1e-4)
    assert metrics.pop("actor/distillation_loss") == pytest.approx(kl.sum().item() / len(new), rel=1e-4)
    assert set(metrics) == {"actor/pg_loss"}, "nothing whose definition depends on micro-batches"


def test_metrics_that_are_no_means_stay_what_they_are():
    data = TensorDict({"response_mask": torch.ones(1, 2)}, batch_size=1)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=4)
    largest = Metric(value=3.0, aggregation=AggregationType.MAX)
    mean = Metric(value=3.0, aggregation=AggregationType.MEAN)
    found = losses._over_tokens({"plain": 3.0, "largest": largest, "mean": mean}, data)
    assert found["plain"] == 3.0 and found["largest"] is largest
    assert found["mean"].aggregate() == 1.5, "of half of the tokens"


def test_metrics_of_no_token_have_no_value():
    """Of mini-batches' steps, one without a taught token says nothing of the teacher."""
    metrics = {"actor/teacher_mass": [0.2, 0.0], "actor/distilled_fraction": [0.5, 0.0], "actor/lr": [1.0]}
    assert finished_metrics(metrics) == metrics | {"actor/teacher_mass": [0.4]}
    nothing = {"actor/teacher_mass": [0.0], "actor/distilled_fraction": [0.0]}
    assert finished_metrics(nothing) == {"actor/distilled_fraction": [0.0]}


def a_micro_batch(rng, mask):
    """(model's output, data) of verl's engine, two rows, with a leaf that the logprobs follow from."""
    group = random_group(np.random.default_rng(0), V, size=2)
    data, _ = groups_to_data_proto([group], RowLimits(60, 0, vocab_size=V))
    shape = data.batch["responses"].shape
    data.batch["old_log_probs"] = data.batch["ref_log_prob"] = torch.full(shape, -1.0)
    data.batch["advantages"] = torch.randn(shape, generator=rng)
    data.batch["response_mask"] *= mask
    data = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["response_mask"].sum()), global_batch_size=2)
    leaf = torch.full((data["input_ids"].values().numel(),), -1.5, requires_grad=True)
    return {"log_probs": torch.nested.nested_tensor_from_jagged(leaf * 1.0, data["input_ids"].offsets())}, data, leaf


@pytest.mark.parametrize("mode", ["vanilla", "bypass_mode"])
def test_policy_loss_without_a_trained_token_is_0(rng, mode):
    """The loss of a micro-batch is tied to the graph, with the same metrics as the others: other ranks wait for it."""
    overrides = [
        "actor_rollout_ref.model.path=none",
        "algorithm.rollout_correction.bypass_mode=true",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_type=kl",  # whose gradient is not 0 where the policies agree
    ]
    actor = compose_config(*overrides).actor_rollout_ref.actor
    with open_dict(actor):  # as the trainer gives it
        target = "verl.trainer.config.algorithm.RolloutCorrectionConfig"
        actor.policy_loss.rollout_correction = {"_target_": target}
    config = omega_conf_to_dataclass(actor)
    metrics = {}
    for mask in (1, 0):
        output, data, leaf = a_micro_batch(rng, mask)
        loss, metrics[mask] = atropos_loss(config, distilling(), model_output=output, data=data)
        loss.backward()
        assert math.isfinite(loss.item()) and leaf.grad.any() == bool(mask)
    assert loss.item() == 0 and metrics[0].keys() == metrics[1].keys()
    assert metrics[0]["kl_loss"].values == [0.0], "it adds nothing to what the others have"
