"""What of a group arrives in the policy's loss: through the row contract and verl's removal of padding, no workers."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from helpers.trainer import actor_of, configured
from recipe.atropos.algorithm.advantages import RunningMoments, compute_advantages
from recipe.atropos.algorithm.losses import atropos_loss
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits


class Arrived(NamedTuple):
    """``advantages[row][t]``: what the loss weighs token t with; 0 where it is in no loss.

    ``logits``, (T, V), are those of a random policy, ``gradient`` that of the distillation term, where there is one.
    """

    advantages: list[list[float]]
    logits: torch.Tensor
    gradient: torch.Tensor
    metrics: dict[str, float]


def distilling(loss_coef: float = 0.0, use_policy_loss: bool = True) -> SimpleNamespace:
    """The section ``trainer.atropos.distillation``."""
    return SimpleNamespace(loss_coef=loss_coef, use_policy_loss=use_policy_loss)


def loss_of(
    actor: Any,
    distillation: Any,
    batch: Any,
    logits: torch.Tensor,
    log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """What verl's engine gets for a micro-batch without padding: loss and metrics.

    ``logits``, (1, N, V), are the policy's, ``log_probs``, (N,), of the tokens that follow.
    """
    values = {} if log_probs is None else {"log_probs": log_probs}
    if "teacher_ids" in batch:
        carried = atropos_loss(actor, distillation, data=batch, student_logits=logits)
        values |= {key: per_token[0] for key, per_token in carried.items()}
    offsets = batch["input_ids"].offsets()
    output = {key: torch.nested.nested_tensor_from_jagged(each, offsets) for key, each in values.items()}
    return atropos_loss(actor, distillation, model_output=output, data=batch)


def unpadded(data: Any, log_probs: torch.Tensor, **info: int) -> tuple[Any, torch.Tensor]:
    """A batch without padding, and ``log_probs``, (B, R), flat: at t stands that of token t + 1.

    ``info``: what verl tells of the mini-batch, if the batch is not the whole of it.
    """
    whole = {"dp_size": 1, "batch_num_tokens": int(data.batch["response_mask"].sum()), "global_batch_size": len(data)}
    sizes = data.batch["attention_mask"][:, -log_probs.shape[1] :].sum(-1).tolist()
    batch = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(batch, **whole | info)
    ends = batch["input_ids"].offsets()[1:].tolist()
    flat = torch.zeros(ends[-1])
    for values, end, size in zip(log_probs, ends, sizes, strict=True):
        flat[end - 1 - size : end - 1] = values[:size]
    return batch, flat.requires_grad_()


def in_the_loss(groups: list[dict[str, Any]], vocab_size: int, *overrides: str) -> Arrived:
    """One update's loss of a policy that still has the logprobs that the groups were sampled with."""
    config = configured(*overrides)
    data, report = groups_to_data_proto(groups, RowLimits(4000, 0, vocab_size=vocab_size))
    assert not report.dropped, report.messages
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    compute_advantages(data, config.algorithm, config.trainer.atropos, RunningMoments())
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]
    batch, log_probs = unpadded(data, data.batch["old_log_probs"])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(log_probs), vocab_size, generator=generator).requires_grad_()
    loss, metrics = loss_of(actor_of(*overrides), distilling(loss_coef=1.0), batch, logits[None], log_probs)
    by_log_probs, by_logits = torch.autograd.grad(loss, (log_probs, logits), allow_unused=True)
    advantages = -data.batch["response_mask"].sum() * by_log_probs.roll(1)  # of token t at t
    offsets = batch["input_ids"].offsets().tolist()
    rows = [[0.0, *advantages[start + 1 : end].tolist()] for start, end in pairwise(offsets)]
    named = {name: metric.aggregate() for name, metric in metrics.items() if hasattr(metric, "aggregate")}
    return Arrived(rows, logits.detach(), torch.zeros_like(logits) if by_logits is None else by_logits, named)


def assert_taught(groups: list[dict[str, Any]], found: Arrived) -> None:
    """The gradient of KL(teacher || policy), by its definition, with what the groups sent, and nothing else."""
    rows = [(group, i) for group in groups for i in range(len(group["tokens"]))]
    trained = sum(mask != -100 for group, i in rows for mask in group["masks"][i])
    wanted, at, kl, mass = torch.zeros_like(found.gradient), 0, 0.0, 0.0
    for group, i in rows:
        for t, mask in enumerate(group["masks"][i]):
            if mask == -100:
                continue
            ids = torch.tensor(group["distill_token_ids"][i][t])
            teacher = torch.tensor(group["distill_logprobs"][i][t]).exp()
            rest = 1 - teacher.sum()
            others = torch.ones(found.logits.shape[1], dtype=torch.bool).index_fill(0, ids, False)
            logits = found.logits[at + t - 1].clone().requires_grad_()
            log_policy = logits.log_softmax(-1)
            divergence = (teacher * (teacher.log() - log_policy[ids])).sum()
            if rest > 1e-4:
                divergence = divergence + rest * (rest.log() - log_policy[others].logsumexp(-1))
            wanted[at + t - 1] = torch.autograd.grad(divergence / trained, logits)[0]
            kl, mass = kl + divergence.item(), mass + teacher.sum().item()
        at += len(group["tokens"][i])
    torch.testing.assert_close(found.gradient, wanted, atol=1e-5, rtol=1e-3)
    assert abs(found.metrics["actor/distillation_kl"] - kl / trained) < 1e-3 * max(1.0, kl / trained)
    assert abs(found.metrics["actor/teacher_mass"] - mass / trained) < 1e-3
    assert wanted.abs().max() > 1e-4 / trained
