"""The losses that verl lacks: advantage-weighted SFT, and distillation from the top-k of a teacher.

``advantage_weighted_sft`` is registered as a policy loss of verl, for ``actor.policy_loss.loss_mode``. Distillation
rides on verl's own seam for losses that need logits: the engine calls the loss function once with the logits, before
they are freed, and once with everything else. ``atropos_loss`` is the function that every actor of this recipe has.

Shapes: B rows, R response tokens, S tokens, V vocabulary, K the teacher's top-k, N tokens of a micro-batch unpadded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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

_TAIL = 1e-6  # a teacher's mass outside its top-k below this is rounding
# Of what verl reports of bypass mode under rollout_corr/: the means over tokens. The others (of sequences, extremes,
# deviations) verl takes of each micro-batch, padding rows included, so that their mean has no definition: not reported.
_TOKEN_MEANS = {
    f"rollout_corr/{name}"
    for name in ("chi2_token", "k3_kl", "kl", "rollout_is_mean", "rollout_is_oob_ratio", "rollout_rs_masked_fraction")
}
_KEPT, _TAUGHT = "actor/kept_fraction", "actor/taught_fraction"
# Metrics over a part of a mini-batch's tokens, and the share of all its tokens that the part is.
_OVER_A_PART = {
    "actor/pg_clipfrac": _KEPT,
    "actor/pg_clipfrac_lower": _KEPT,
    "actor/ppo_kl": _KEPT,
    "actor/distillation_kl": _TAUGHT,
    "actor/teacher_mass": _TAUGHT,
}
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
    """Cross-entropy x advantage x mask: ``-advantage * log_prob``, without ratio and clipping.

    All tensors (B, R). Its gradient is that of the policy gradient at ratio 1; a negative advantage pushes a token's
    probability down, without bound, so keep steps small or advantages positive. ``rollout_is_weights`` multiply it.
    Returns the loss, aggregated as ``loss_agg_mode`` says, and metrics.
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
    """Advantage-weighted SFT on a model's logits, outside Ray: ``mean over the mask of advantage * cross-entropy``.

    Everything is aligned with ``input_ids``: ``advantages[b, t]`` weighs token t, which ``logits[b, t - 1]`` predict.
    The first token of a row is predicted by nothing and never counts.

    Args:
        input_ids: (B, S) int64.
        advantages: (B, S) float, or (B,) for one a sequence.
        loss_mask: (B, S), 1 (or true) where the token is trained on, else 0: of Atropos masks, ``masks != -100``.
        logits: (B, S, V), as ``model(input_ids).logits``.
        loss_agg_mode: verl's: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean.

    Returns:
        A scalar that is differentiable in ``logits``.

    Raises:
        ValueError: shapes do not fit, the mask holds other numbers than 0 and 1, an advantage under it is not finite,
            or nothing is under it.
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


@dataclass(frozen=True)
class DistillationConfig:
    """``trainer.atropos.distillation``: the weight of KL(teacher || policy), and whether the policy loss is kept."""

    loss_coef: float = 0.0
    use_policy_loss: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.loss_coef, int | float) or not 0 <= self.loss_coef < float("inf"):
            raise ValueError(f"trainer.atropos.distillation.loss_coef={self.loss_coef!r}: give a number from 0 upwards")
        if not isinstance(self.use_policy_loss, bool):
            raise ValueError(
                f"trainer.atropos.distillation.use_policy_loss={self.use_policy_loss!r}: give true or false"
            )
        if not (self.enabled or self.use_policy_loss):
            raise ValueError(
                "trainer.atropos.distillation.use_policy_loss=false leaves no loss at loss_coef=0; give a loss_coef"
            )

    @property
    def enabled(self) -> bool:
        return self.loss_coef > 0

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "DistillationConfig":
        """Raises ValueError or TypeError, naming the key."""
        return cls(**values)


def forward_kl_top_k(
    logits: torch.Tensor, teacher_ids: torch.Tensor, teacher_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || policy) of each token over K + 1 outcomes: the teacher's top-k, and all the rest as one.

    That is a divergence for any k, never negative, at most the KL of the full distributions (by the data-processing
    inequality), and equal to it where the top-k holds all of the teacher's mass.

    Args:
        logits: (N, V), any float dtype; computed in float32.
        teacher_ids, teacher_logprobs: (N, K), each token at most once among those with a mass; an id without mass
            repeats one of them. Mass 0 at a position: there is no teacher, and its KL is 0.

    Returns:
        The KL, (N,) float32, differentiable in ``logits``; and the mass of the teacher's top-k, (N,) float32.
    """
    mass = teacher_logprobs.float().exp().sum(-1)
    kl = logits[:, 0].float() * 0.0  # tied to the graph where no teacher is: FSDP waits for every rank's backward
    at = (mass > 0).nonzero().squeeze(-1)
    for chunk in at.split(_CHUNK):
        # logits[chunk] is a copy that nobody else writes to: kernels may reuse the logits in their own backward pass.
        arguments = (logits[chunk], teacher_ids[chunk], teacher_logprobs[chunk].float())
        kl = kl.index_add(0, chunk, checkpoint(_kl, *arguments, use_reentrant=False))
    return kl, mass


def _kl(logits: torch.Tensor, ids: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """``forward_kl_top_k`` at positions that have a teacher; (N,) float32."""
    log_policy = F.log_softmax(logits.float(), dim=-1)
    probs = teacher_logprobs.exp()
    divergence = (probs * (teacher_logprobs - log_policy.gather(-1, ids))).sum(-1)
    rest = (1 - probs.sum(-1)).clamp(min=0)
    open_ended = (rest > _TAIL).nonzero().squeeze(-1)
    if len(open_ended) and ids.shape[-1] < logits.shape[-1]:
        others = log_policy[open_ended].scatter(-1, ids[open_ended], float("-inf"))
        rest = rest[open_ended]
        divergence = divergence.index_add(0, open_ended, rest * (rest.log() - others.logsumexp(-1)))
    return divergence


def atropos_loss(
    config: ActorConfig,
    distillation: DistillationConfig,
    model_output: dict[str, torch.Tensor] | None = None,
    data: TensorDict | None = None,
    dp_group: Any = None,
    student_logits: torch.Tensor | None = None,
    data_format: str = "thd",
) -> Any:
    """verl's policy loss plus ``loss_coef`` times KL(teacher || policy); a loss function of verl's engine.

    The KL is averaged as ``loss_agg_mode`` averages the policy loss, over all trained tokens: a token without a teacher
    adds 0, so a token's weight does not depend on how many others have one. The policy is taken at
    ``rollout.temperature``, or at its row's own.

    With ``student_logits``, (1, N, V), returns the per-token values that the engine carries to the second call; without
    them, the loss and its metrics, to be read by ``finished_metrics``.
    """
    if student_logits is not None:
        kl, mass = forward_kl_top_k(student_logits[0], data["teacher_ids"].values(), data["teacher_logprobs"].values())
        return {"distillation_losses": kl[None], "teacher_mass": mass[None]}
    tu.assign_non_tensor(data, batch_num_tokens=max(1, data["batch_num_tokens"]))  # rejection can leave 0 / 0
    if not distillation.use_policy_loss:
        loss, metrics = 0.0, {}
    elif config.policy_loss.loss_mode == "bypass_mode" and not data["response_mask"].any():
        loss, metrics = _bypass_loss_of_nothing(config, model_output, data, dp_group)
    else:
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    metrics = _over_tokens(_by_their_names(metrics, config.policy_loss.loss_mode), data)
    if "distillation_losses" not in model_output:  # no row of this batch has a teacher
        return loss, metrics

    mask = data["response_mask"].bool()
    kl = no_padding_2_padding(model_output["distillation_losses"], data)
    mass = no_padding_2_padding(model_output["teacher_mass"], data)
    distillation_loss = agg_loss(
        loss_mat=kl,
        loss_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
    taught = mask & (mass > 0)
    metrics["actor/distillation_loss"] = Metric(value=distillation_loss, aggregation=AggregationType.SUM)
    for name, values in (("distillation_kl", kl.detach()), ("teacher_mass", mass), ("taught_fraction", taught.float())):
        share = torch.where(taught, values, 0.0).sum() / data["batch_num_tokens"] * data["dp_size"]
        metrics[f"actor/{name}"] = Metric(value=share, aggregation=AggregationType.SUM)
    return loss + distillation.loss_coef * distillation_loss, metrics


def _by_their_names(metrics: dict[str, Any], loss_mode: str) -> dict[str, Any]:
    """verl's metrics of a loss, without those that are something else than their name says.

    ``sapo`` clips nothing and reports 0 for it; ``kl_cov`` reports the mean *absolute* log-ratio as ``ppo_kl``.
    """
    renamed = {"kl_cov": {"actor/ppo_kl": "actor/ppo_kl_abs"}}.get(loss_mode, {})
    dropped = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower") if loss_mode == "sapo" else ()
    return {renamed.get(name, name): metric for name, metric in metrics.items() if name not in dropped}


def _over_tokens(metrics: dict[str, Any], data: TensorDict) -> dict[str, Any]:
    """verl's metrics of a micro-batch, so that they add up to means over the trained tokens of the mini-batch.

    verl averages the means of micro-batches and ranks, however few tokens one has. Here each is weighed with its share
    of the tokens, and summed. In bypass mode, where the loss rejects tokens by itself, the policy's metrics are over
    those that it kept: ``actor/kept_fraction`` of all.
    """
    tokens = data["response_mask"].sum().item()
    share = tokens * data["dp_size"] / data["batch_num_tokens"]
    rejected = metrics.get("rollout_corr/rollout_rs_masked_fraction")
    kept = share if rejected is None else share * (1 - rejected.aggregate())
    summed: dict[str, Any] = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or metric.aggregation is not AggregationType.MEAN:
            summed[name] = metric
        elif not name.startswith("rollout_corr/") or name in _TOKEN_MEANS:
            weight = kept if _OVER_A_PART.get(name) == _KEPT else share
            summed[name] = Metric(value=metric.aggregate() * weight if tokens else 0.0, aggregation=AggregationType.SUM)
    if rejected is not None:
        summed[_KEPT] = Metric(value=kept, aggregation=AggregationType.SUM)
    return summed


def finished_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics as verl's ranks return them, {name: a value for each optimizer step}, over the tokens that they are of.

    A step of which no token was kept, or taught, has no value there.
    """
    finished = dict(metrics)
    for name, part in _OVER_A_PART.items():
        if name in metrics and part in metrics:
            finished[name] = [value / share for value, share in zip(metrics[name], metrics[part], strict=True) if share]
    return {name: values for name, values in finished.items() if not (isinstance(values, list) and not values)}


def _bypass_loss_of_nothing(
    config: ActorConfig, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """0, tied to the graph, and every metric, for a micro-batch without a trained token: verl's own raises there.

    Other ranks have tokens, and wait for this one's backward pass and metrics.
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
