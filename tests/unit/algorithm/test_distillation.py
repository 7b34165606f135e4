"""Distillation: the KL to a teacher's top-k, against its definition and a teacher's full distribution."""

import math

import pytest
import torch
import torch.nn.functional as F
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from helpers.loss import distilling, loss_of
from helpers.trainer import actor_of
from recipe.atropos.algorithm.losses import finished_metrics, forward_kl_top_k
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import NO_TEACHER, RowLimits

pytestmark = pytest.mark.usefixtures("several_chunks")

V = 11


def teacher(rng, n, k):
    """(full log distribution (N, V), its top-k ids, their logprobs)."""
    full = torch.randn(n, V, generator=rng, dtype=torch.float64).log_softmax(-1)
    top = full.topk(k)
    return full, top.indices, top.values


def test_distilling_beside_another_top_k_changes_nothing(rng):
    """A row of 2 beside one of 4, as the row contract lays them side by side; the policy favours token 0."""
    length = 6
    tokens = [[1] * length, [1] * length]
    full = torch.randn(2, length, V, generator=rng).log_softmax(-1)
    tops = [full[i].topk(k) for i, k in enumerate((2, 4))]
    group = {
        "tokens": tokens,
        "masks": [[-100, -100, 1, 1, 1, 1]] * 2,
        "scores": [0.0, 1.0],
        "distill_token_ids": [[[]] * 2 + top.indices[2:].tolist() for top in tops],
        "distill_logprobs": [[[]] * 2 + top.values[2:].tolist() for top in tops],
    }
    limits = RowLimits(60, 0, vocab_size=V)
    both, _ = groups_to_data_proto([group], limits)
    alone = {key: values[:1] for key, values in group.items()}
    one, _ = groups_to_data_proto([alone], limits)
    logits = torch.randn(length, V, generator=rng)
    logits[:, 0] += 4
    results = []
    for data in (both, one):
        leaf = logits.clone().requires_grad_()
        kl, _ = forward_kl_top_k(leaf, data.batch["teacher_ids"][0], data.batch["teacher_logprobs"][0])
        kl.sum().backward()
        results.append((kl.detach(), leaf.grad))
    torch.testing.assert_close(*(r[0] for r in results))
    torch.testing.assert_close(*(r[1] for r in results))
    wanted = 0.0
    for t in range(2, length):
        p, at = tops[0].values[t].exp(), tops[0].indices[t]
        q = logits[t - 1].softmax(-1)[at]
        wanted += (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
    assert results[0][0].sum().item() == pytest.approx(wanted.item(), rel=1e-3)


@pytest.mark.parametrize("k", [1, 3, V - 1, V])
def test_distilling_a_top_k_moves_the_rest_as_one(rng, k):
    """softmax - p over the top-k; the rest keeps its own proportions and moves by the difference of the masses.

    Of all tokens, it is the KL of the distributions.
    """
    logits = torch.randn(20, V, generator=rng, dtype=torch.float64).requires_grad_()
    full, ids, logprobs = teacher(rng, 20, k)
    kl, mass = forward_kl_top_k(logits, ids, logprobs)
    whole = F.kl_div(logits.log_softmax(-1), full, log_target=True, reduction="none").sum(-1)
    assert (kl >= 0).all() and (kl <= whole + 1e-6).all()
    assert k < V or torch.allclose(kl.double(), whole, atol=1e-5)
    torch.testing.assert_close(mass.double(), logprobs.exp().sum(-1), atol=1e-6, rtol=0)
    kl.sum().backward()
    policy = logits.detach().softmax(-1)
    outside = torch.ones(20, V, dtype=torch.bool).scatter(-1, ids, False)
    shares = torch.where(outside, policy, 0.0)
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    target = torch.zeros(20, V, dtype=torch.float64).scatter(-1, ids, logprobs.exp())
    target = target + shares * (1 - target.sum(-1, keepdim=True))
    torch.testing.assert_close(logits.grad, policy - target, atol=1e-5, rtol=1e-4)


def test_distillation_is_zero_where_policy_and_teacher_agree(rng):
    """And where there is no teacher."""
    logits = torch.randn(4, V, generator=rng).requires_grad_()
    top = logits.detach().log_softmax(-1).topk(4)
    logprobs = top.values.clone()
    logprobs[2:] = float(NO_TEACHER)
    kl, mass = forward_kl_top_k(logits, top.indices, logprobs)
    assert kl.abs().max() < 1e-6 and mass[2:].tolist() == [0, 0] and (mass[:2] > 0).all()
    kl.sum().backward()
    assert logits.grad.abs().max() < 1e-6
    moved, _ = forward_kl_top_k(logits.roll(1, dims=0), top.indices, logprobs)
    assert (moved[:2] > 1e-3).all() and not moved[2:].any()
    logits.grad = None
    untaught, _ = forward_kl_top_k(logits, top.indices, torch.full((4, 4), float(NO_TEACHER)))
    untaught.sum().backward()
    assert logits.grad is not None and not logits.grad.any(), "FSDP waits for every rank's backward pass"


@pytest.mark.parametrize("sequences", [2, 8], ids=["whole", "survivors_of_a_part"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_distillation_is_averaged_over_all_trained_tokens(rng, mode, sequences):
    """Of two rows of four trained tokens, the teacher has a mass at two of the first row's, and at none of the other's.

    The KL of an untaught token is 0, and it counts in the mean: a token's weight does not depend on the others. The
    rows may be a part of ``sequences``, whose other parts have as many tokens.
    """
    length, k = 6, 2
    top = torch.randn(length, V, generator=rng).log_softmax(-1).topk(k)
    logprobs = top.values.clone()
    logprobs[4:] = float(NO_TEACHER)
    group = {
        "tokens": [[1] * length] * 2,
        "masks": [[-100, -100, 1, 1, 1, 1]] * 2,
        "scores": [0.0, 1.0],
        "distill_token_ids": [[[]] * 2 + top.indices[2:].tolist(), []],
        "distill_logprobs": [[[]] * 2 + logprobs[2:].tolist(), []],
    }
    data, report = groups_to_data_proto([group], RowLimits(60, 0, vocab_size=V))
    assert not report.dropped
    data = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=4 * sequences, global_batch_size=sequences)
    config = actor_of(f"actor_rollout_ref.actor.loss_agg_mode={mode}")
    distillation = distilling(loss_coef=0.5, use_policy_loss=False)
    logits = torch.randn(1, 2 * length, V, generator=rng)
    loss, metrics = loss_of(config, distillation, data, logits)
    kl, mass = forward_kl_top_k(logits[0, 1:3], top.indices[2:4], top.values[2:4])
    tokens, rows = 4, sequences
    mean = (
        kl.sum() / {"token-mean": tokens * rows, "seq-mean-token-mean": tokens * rows, "seq-mean-token-sum": rows}[mode]
    )
    assert kl.sum() > 0.1 and loss.item() == pytest.approx(0.5 * mean.item(), rel=1e-4)
    assert metrics["actor/distillation_loss"].aggregate() == pytest.approx(mean.item(), rel=1e-4)
    metrics = finished_metrics({name: [metric.aggregate()] for name, metric in metrics.items()})
    assert metrics["actor/distillation_kl"] == pytest.approx([kl.mean().item()], rel=1e-4), "of taught tokens"
    assert metrics["actor/teacher_mass"] == pytest.approx([mass.mean().item()], rel=1e-4)


def test_distillation_is_finite_where_the_top_k_holds_all_mass(rng):
    """Two tokens of eleven with all of the mass; and eleven of eleven with a little less than all of it."""
    logits = torch.randn(1, V, generator=rng)
    log_policy = logits.log_softmax(-1)
    ids, logprobs = torch.tensor([[3, 5]]), torch.tensor([[0.25, 0.75]]).log()
    kl, mass = forward_kl_top_k(logits, ids, logprobs)
    wanted = (logprobs.exp() * (logprobs - log_policy.gather(-1, ids))).sum()
    assert kl.item() == pytest.approx(wanted.item(), rel=1e-5) and mass.item() == pytest.approx(1)
    every, less = torch.arange(V)[None], log_policy + math.log(0.99)
    kl, _ = forward_kl_top_k(logits, every, less)
    assert kl.item() == pytest.approx(0.99 * math.log(0.99), rel=1e-3)


def test_distillation_of_a_policy_that_masks_a_token_is_finite(rng):
    """The policy never gives token 0; of the positions, every second one has a teacher."""
    logits = torch.randn(20, V, generator=rng)
    logits[:, 0] = -math.inf
    logits.requires_grad_()
    top = torch.randn(20, V - 1, generator=rng).log_softmax(-1).topk(3)
    top.values[::2] = float(NO_TEACHER)
    kl, _ = forward_kl_top_k(logits, top.indices + 1, top.values)
    kl.sum().backward()
    assert kl.isfinite().all() and (kl[::2] == 0).all() and (kl[1::2] > 0).all()
    assert logits.grad.isfinite().all()
