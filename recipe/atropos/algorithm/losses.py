"""Losses that verl lacks: advantage-weighted SFT, and distillation from a teacher's top-k.

``advantage_weighted_sft`` is registered as a verl policy loss, for ``actor.policy_loss.loss_mode``. Distillation
uses verl's hook for losses that need logits: the engine calls the loss function once with the logits, before they are
freed, and once with everything else. Every actor of this recipe uses ``atropos_loss``.

Shapes: B rows, R response tokens, S tokens, V vocabulary, K the teacher's top-k, N tokens of a micro-batch unpadded.
"""

from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.utils.checkpoint import checkpoint

from recipe.atropos.verl_ext.algorithm import (
    ActorConfig,
    AggregationType,
    Metric,
    agg_loss,
    masked_mean,
    ppo_loss,
    register_policy_loss,
)
from recipe.atropos.verl_ext.batch import no_padding_2_padding
from recipe.atropos.verl_ext.batch import tensordict_utils as tu

_TAIL = 1e-6  # teacher mass outside the top-k is treated as rounding error below this
# The means over tokens among verl's rollout_corr/ metrics in bypass mode. verl computes the others (over sequences,
# extremes, deviations) per micro-batch, with padding rows, so their mean is undefined and they are not reported.
_TOKEN_MEANS = {
    f"rollout_corr/{name}" for name in ("chi2_token", "k3_kl", "kl", "rollout_is_mean", "rollout_is_oob_ratio")
}
# Over the tokens that have a teacher, a share of a mini-batch's tokens.
_DISTILLED, _SUBSET_METRICS = "actor/distilled_fraction", {"actor/distillation_kl", "actor/teacher_mass"}
_LOSSES = {"actor/pg_loss", "actor/entropy_loss", "kl_loss"}  # verl's metrics that are aggregated as the loss
_CHUNK = 1024  # positions whose float32 distributions over the vocabulary are in memory at a time


@register_policy_loss("advantage_weighted_sft")
def compute_policy_loss_advantage_weighted_sft(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute cross-entropy x advantage x mask: ``-advantage * log_prob``, without ratio or clipping.

    All tensors are (B, R). The gradient equals the policy gradient at ratio 1. A negative advantage lowers a token's
    probability without bound, so keep steps small or advantages positive. ``rollout_is_weights`` multiply the loss.
    Returns the loss, aggregated by ``loss_agg_mode``, and metrics.
    """
    losses = -advantages * log_prob
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    batch_info = config.global_batch_info if config is not None else {}
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **batch_info)
    metrics = {
        "actor/cross_entropy": masked_mean(-log_prob.detach(), response_mask).item(),
        "actor/ppo_kl": masked_mean(old_log_prob - log_prob.detach(), response_mask).item(),
    }
    return loss, metrics


def compute_advantage_weighted_sft_loss(
    input_ids: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    logits: torch.Tensor,
    loss_agg_mode: str = "token-mean",
) -> torch.Tensor:
    """Compute advantage-weighted SFT on logits, outside Ray: the masked mean of ``advantage * cross-entropy``.

    All inputs are aligned with ``input_ids``: ``advantages[b, t]`` weights token t, which ``logits[b, t - 1]`` predict.
    The first token of a row has no prediction and never counts.

    Args:
        input_ids: (B, S) int64.
        advantages: (B, S) float, or (B,) for one value per sequence.
        loss_mask: (B, S), 1 (or true) where the token is trained on, else 0; for Atropos masks, ``masks != -100``.
        logits: (B, S, V), as ``model(input_ids).logits``.
        loss_agg_mode: verl's: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean.

    Returns:
        A scalar that is differentiable in ``logits``.

    Raises:
        ValueError: shapes do not match, the mask has values other than 0 and 1, an advantage of a trained token is not
            finite, or no token that has a prediction is trained on.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(input_ids.shape)
    for name, tensor in (("advantages", advantages), ("loss_mask", loss_mask), ("logits", logits[..., 0])):
        if tensor.shape != input_ids.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, input_ids is {tuple(input_ids.shape)}")
    strange = loss_mask[(loss_mask != 0) & (loss_mask != 1)]
    if len(strange):
        raise ValueError(f"loss_mask holds {strange[0]}; give 1 and 0, for Atropos masks: masks != -100")
    mask = loss_mask[:, 1:].bool()
    weights = advantages[:, 1:]
    bad = (~torch.isfinite(weights) & mask).nonzero()
    if len(bad):
        row, position = bad[0].tolist()
        raise ValueError(f"advantages[{row}, {position + 1}] is {weights[row, position]}; it must be finite")
    if not mask.any():
        raise ValueError("loss_mask has no token that another one predicts; there is nothing to train on")
    cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten(), reduction="none")
    losses = cross_entropy.view(mask.shape) * torch.where(mask, weights, 0.0)
    return agg_loss(loss_mat=losses, loss_mask=mask, loss_agg_mode=loss_agg_mode)


def forward_kl_top_k(
    logits: torch.Tensor, teacher_ids: torch.Tensor, teacher_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the per-token KL(teacher || policy) over K + 1 outcomes: the teacher's top-k, and all other tokens as one.

    This is a divergence for any k: nonnegative, at most the KL of the full distributions (by the data-processing
    inequality), and equal to it if the top-k holds all of the teacher's mass.

    Args:
        logits: (N, V), any float dtype; computed in float32.
        teacher_ids, teacher_logprobs: (N, K). Ids with mass are distinct; an id without mass repeats one of them. A
            position with mass 0 has no teacher, and its KL is 0.

    Returns:
        The KL, (N,) float32, differentiable in ``logits``; and the mass of the teacher's top-k, (N,) float32.
    """
    mass = teacher_logprobs.float().exp().sum(-1)
    kl = logits[:, :0].float().sum(1)  # 0, tied to the graph where no teacher is: FSDP waits for every rank's backward
    for chunk in (mass > 0).nonzero().squeeze(-1).split(_CHUNK):
        # logits[chunk] is a private copy: other kernels may overwrite the logits in their own backward pass.
        arguments = (logits[chunk], teacher_ids[chunk], teacher_logprobs[chunk].float())
        kl = kl.index_add(0, chunk, checkpoint(_kl, *arguments, use_reentrant=False))
    return kl, mass


def _kl(logits: torch.Tensor, ids: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the KL of ``forward_kl_top_k`` at positions that have a teacher; (N,) float32."""
    log_policy = F.log_softmax(logits.float(), dim=-1)
    probs = teacher_logprobs.exp()
    divergence = (probs * (teacher_logprobs - log_policy.gather(-1, ids))).sum(-1)
    rest = 1 - probs.sum(-1)
    open_ended = (rest > _TAIL).nonzero().squeeze(-1)
    if len(open_ended) and ids.shape[-1] < logits.shape[-1]:
        others = log_policy[open_ended].scatter(-1, ids[open_ended], float("-inf"))
        rest = rest[open_ended]
        divergence = divergence.index_add(0, open_ended, rest * (rest.log() - others.logsumexp(-1)))
    return divergence


def atropos_loss(
    config: ActorConfig,
    distillation: DictConfig,
    model_output: dict[str, torch.Tensor] | None = None,
    data: TensorDict | None = None,
    dp_group: Any = None,
    student_logits: torch.Tensor | None = None,
    data_format: str = "thd",
) -> Any:
    """Compute verl's policy loss plus ``loss_coef`` times KL(teacher || policy); a loss function for verl's engine.

    ``distillation`` is ``trainer.atropos.distillation``: that weight, and whether the policy loss is kept.
    ``loss_agg_mode`` aggregates the KL like the policy loss, over all trained tokens: a token without a teacher adds 0,
    so a token's weight does not depend on how many others have a teacher. The policy's temperature is
    ``rollout.temperature``, or the row's own. ``trajectory_share``, (B,), is in the batch if a trajectory has several
    rows: the row's part of its trained tokens.

    With ``student_logits``, (1, N, V), return the per-token values that the engine passes to the second call; without
    them, return the loss and its metrics, for ``finished_metrics``.
    """
    if student_logits is not None:
        kl, mass = forward_kl_top_k(student_logits[0], data["teacher_ids"].values(), data["teacher_logprobs"].values())
        return {"distillation_losses": kl[None], "teacher_mass": mass[None]}
    # rejection can leave 0 tokens, and the mean would be 0 / 0
    tu.assign_non_tensor(data, batch_num_tokens=max(1, data["batch_num_tokens"]))
    shares = data.get("trajectory_share") if config.loss_agg_mode == "seq-mean-token-mean" else None
    if not distillation.use_policy_loss:
        loss, metrics = 0.0, {}
    elif shares is not None:
        loss, metrics = _loss_of_trajectories(config, model_output, data, dp_group, shares)
    else:
        loss, metrics = _policy_loss(config, model_output, data, dp_group)
    if "distillation_losses" not in model_output:  # no row of this batch has a teacher
        return loss, metrics

    mask = data["response_mask"].bool()
    kl = no_padding_2_padding(model_output["distillation_losses"], data)
    mass = no_padding_2_padding(model_output["teacher_mass"], data)
    distillation_loss = agg_loss(
        loss_mat=kl if shares is None else kl * shares[:, None],
        loss_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
    distilled = mask & (mass > 0)
    metrics["actor/distillation_loss"] = Metric(value=distillation_loss, aggregation=AggregationType.SUM)
    for name, values in (
        ("distillation_kl", kl.detach()),
        ("teacher_mass", mass),
        ("distilled_fraction", distilled.float()),
    ):
        share = torch.where(distilled, values, 0.0).sum() / data["batch_num_tokens"] * data["dp_size"]
        metrics[f"actor/{name}"] = Metric(value=share, aggregation=AggregationType.SUM)
    return loss + distillation.loss_coef * distillation_loss, metrics


def _policy_loss(
    config: ActorConfig, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return verl's policy loss, and its metrics, which sum to those of the mini-batch."""
    empty_bypass = config.policy_loss.loss_mode == "bypass_mode" and not data["response_mask"].any()
    compute = _empty_bypass_loss if empty_bypass else ppo_loss
    loss, metrics = compute(config, model_output, data, dp_group)
    return loss, _over_tokens(_rename_misnamed(metrics, config.policy_loss.loss_mode), data)


def _loss_of_trajectories(
    config: ActorConfig, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any, shares: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return ``_policy_loss`` with seq-mean-token-mean over trajectories of several rows.

    verl takes the mean over a row's tokens; a row with a part of its trajectory's tokens, ``shares``, (B,), has that
    weight. Rows of one weight are computed at once, with the others masked.
    """
    total, summed = 0.0, {}
    for share in shares.unique().tolist():
        part = data.copy()
        part["response_mask"] = data["response_mask"] * (shares == share)[:, None]
        loss, metrics = _policy_loss(config, model_output, part, dp_group)
        total = total + share * loss
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                weight = share if name in _LOSSES else 1.0
                value = weight * metric.aggregate() + (summed[name].aggregate() if name in summed else 0.0)
                metric = Metric(value=value, aggregation=AggregationType.SUM)
            summed[name] = metric
    return total, summed


def _rename_misnamed(metrics: dict[str, Any], loss_mode: str) -> dict[str, Any]:
    """Return verl's metrics of a loss, with misnamed ones renamed or dropped.

    ``sapo`` reports a clip fraction although it never clips; ``kl_cov`` reports the mean *absolute* log-ratio as KL.
    """
    renamed = {"kl_cov": {"actor/ppo_kl": "actor/ppo_kl_abs"}}.get(loss_mode, {})
    dropped = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower") if loss_mode == "sapo" else ()
    return {renamed.get(name, name): metric for name, metric in metrics.items() if name not in dropped}


def _over_tokens(metrics: dict[str, Any], data: TensorDict) -> dict[str, Any]:
    """Weight verl's metrics of a micro-batch so that they sum to means over the mini-batch's trained tokens.

    verl averages the means of micro-batches and ranks regardless of their token counts. Here each is weighted by its
    share of the tokens, and summed.
    """
    tokens = data["response_mask"].sum().item()
    share = tokens * data["dp_size"] / data["batch_num_tokens"]
    summed: dict[str, Any] = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or metric.aggregation is not AggregationType.MEAN:
            summed[name] = metric
        elif not name.startswith("rollout_corr/") or name in _TOKEN_MEANS:
            summed[name] = Metric(value=metric.aggregate() * share if tokens else 0.0, aggregation=AggregationType.SUM)
    return summed


def finished_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Divide a teacher's metrics of verl's ranks, {name: [value per optimizer step]}, by the share of its tokens.

    A step in which no token had a teacher has no value for them.
    """
    finished = dict(metrics)
    for name in _SUBSET_METRICS & metrics.keys():
        finished[name] = [v / share for v, share in zip(metrics[name], metrics[_DISTILLED], strict=True) if share]
    return {name: values for name, values in finished.items() if not (isinstance(values, list) and not values)}


def _empty_bypass_loss(
    config: ActorConfig, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a loss of 0 that is connected to the autograd graph, and every metric, for a micro-batch without a trained
    token, where verl's loss raises.

    Other ranks have tokens, and wait for this rank's backward pass and metrics.
    """
    log_prob = no_padding_2_padding(model_output["log_probs"], data).detach()
    neutral = data.copy()
    neutral["response_mask"] = torch.zeros_like(data["response_mask"])
    neutral["response_mask"][0, 0] = 1
    neutral["advantages"] = torch.zeros_like(data["advantages"])
    for key in ("old_log_probs", "ref_log_prob"):
        if key in data:
            neutral[key] = log_prob.to(data[key].dtype)
    loss, metrics = ppo_loss(config, model_output, neutral, dp_group)
    return loss * 0.0, metrics
