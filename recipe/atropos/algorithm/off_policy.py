"""Off-policy correction: the engine sampled with other logprobs than the trainer computes, because its kernels differ
and because the policy has moved on.

verl's rollout correction does the work (``algorithm.rollout_correction``); here it meets rows that came without
logprobs. These are left out: their weight is 1, nothing of them is rejected, and no metric sees them. (In bypass mode
the loss corrects by itself; there such a row has the trainer's own logprobs, so its ratio begins at 1.)
"""

import numpy as np
import torch
from omegaconf import DictConfig, open_dict

from recipe.atropos.verl_ext.algorithm import calculate_debug_metrics, compute_rollout_correction_and_add_to_batch
from recipe.atropos.verl_ext.batch import DataProto


def with_log_probs(rows: DataProto) -> tuple[DataProto | None, np.ndarray]:
    """The rows whose engine logprobs are known, and their indices. Padding rows have none."""
    known = np.flatnonzero(rows.non_tensor_batch["has_log_probs"])
    return (rows.select_idxs(known) if known.size else None), known


def compare_with_engine(rows: DataProto, version: int) -> dict[str, float]:
    """How far the engine's logprobs (``rollout_log_probs``) are from the trainer's (``old_log_probs``), as metrics.

    ``atropos/logprob_diff/mean`` and ``max`` are of the absolute difference over trained tokens, in nats;
    ``fresh_mean`` over those of the rows that the policy's own ``version`` sampled, where there are any. Nothing but
    kernels and rounding is in that one: above ``trainer.atropos.logprob_tolerance`` it is an alarm.
    """
    known, _ = with_log_probs(rows)
    if known is None:
        return {}
    difference = (known.batch["rollout_log_probs"] - known.batch["old_log_probs"]).abs()
    mask = known.batch["response_mask"].bool()
    fresh = torch.from_numpy(known.non_tensor_batch["policy_version_min"] == version)[:, None] & mask
    metrics = {
        **calculate_debug_metrics(known),
        "atropos/logprob_diff/mean": difference[mask].mean().item(),
        "atropos/logprob_diff/max": difference[mask].max().item(),
    }
    if fresh.any():
        metrics["atropos/logprob_diff/fresh_mean"] = difference[fresh].mean().item()
    return metrics


def correct_rollout(rows: DataProto, config: DictConfig) -> dict[str, float]:
    """Importance weights and rejection by ``algorithm.rollout_correction``; returns verl's ``rollout_corr/`` metrics.

    Sets ``rollout_is_weights``, (B, R) float32, where ``rollout_is`` is set, and takes rejected tokens out of
    ``response_mask``. What ``token_level_rewards`` hold on a rejected token moves to the row's last token that stays:
    some estimators read rewards through the mask, and a score stands on the last trained token.
    """
    known, indices = with_log_probs(rows)
    weights = torch.ones_like(rows.batch["old_log_probs"]) * rows.batch["response_mask"]
    metrics: dict[str, float] = {}
    if known is not None:
        known, metrics = compute_rollout_correction_and_add_to_batch(known, config)
        mask = rows.batch["response_mask"].clone()
        mask[indices] = known.batch["response_mask"].to(mask.dtype)
        rows.batch["response_mask"] = mask
        rows.batch["token_level_rewards"] = _rewards_on(rows.batch["token_level_rewards"], mask.bool())
        if config.rollout_is:
            weights[indices] = known.batch["rollout_is_weights"]
    if config.rollout_is:
        rows.batch["rollout_is_weights"] = weights
    return metrics


def _rewards_on(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """(B, R) rewards with the same sum in every row that keeps a token, all of it on kept tokens."""
    lost = torch.where(kept, 0.0, rewards).sum(-1)
    positions = torch.arange(kept.shape[1]).expand(kept.shape)
    last = torch.where(kept, positions, -1).amax(-1)
    moved = torch.where(kept, rewards, 0.0)
    some = last >= 0
    moved[some, last[some]] += lost[some]
    return torch.where(some[:, None], moved, rewards)


def configure_bypass_mode(config: DictConfig) -> None:
    """As verl's ``apply_bypass_mode``, which comes too late: workers are built with the loss that they correct in."""
    if config.algorithm.rollout_correction.bypass_mode:
        with open_dict(config):
            policy_loss = config.actor_rollout_ref.actor.policy_loss
            policy_loss.loss_mode = "bypass_mode"
            policy_loss.rollout_correction = config.algorithm.rollout_correction
