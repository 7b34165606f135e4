"""Off-policy correction for the difference between the engine's logprobs and the trainer's.

They differ because the kernels differ and because the policy has been updated since. verl's rollout correction
(``algorithm.rollout_correction``) does the work; this module leaves out rows without logprobs: their weight is 1, none
of their tokens is rejected, and they are in no metric. (In bypass mode the loss does the correction itself; there such
a row has the trainer's own logprobs, so its ratio starts at 1.)
"""

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, open_dict

from recipe.atropos.data.data_proto import rows_where
from recipe.atropos.verl_ext.algorithm import (
    calculate_debug_metrics,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from recipe.atropos.verl_ext.batch import DataProto

_WEIGHTED_BY = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
_ROWS_AT_ONCE = 16  # which remain in the cache: verl makes many tensors of their size
COMPARED = ["rollout_log_probs", "old_log_probs", "response_mask", "responses"]


def with_log_probs(rows: DataProto) -> tuple[DataProto | None, np.ndarray]:
    """Return the rows whose engine logprobs are known (or None), and their indices. Padding rows have none."""
    known = rows.non_tensor_batch["has_log_probs"]
    return (rows_where(rows.select(COMPARED), known) if known.any() else None), np.flatnonzero(known)


def compare_with_engine(rows: DataProto, version: int, correction: DictConfig) -> dict[str, float]:
    """Return metrics that compare the engine's ``rollout_log_probs`` with the trainer's ``old_log_probs``.

    ``atropos/logprob_diff/mean`` and ``max`` are of the absolute difference over trained tokens, in nats;
    ``fresh_mean`` covers only rows sampled by the policy's own ``version``, if there are any. Only kernels and rounding
    contribute to it, so a value above ``trainer.atropos.logprob_tolerance`` raises an alarm. verl's ``rollout_corr/``
    tell what ``correct_rollout`` does to ``rows``; give them as they are before it.
    """
    known, _ = with_log_probs(rows)
    if known is None:
        return {}
    mask = known.batch["response_mask"].bool()
    difference = (known.batch["rollout_log_probs"] - known.batch["old_log_probs"]).abs()[mask]
    fresh = torch.from_numpy(known.non_tensor_batch["policy_version_min"] == version)
    metrics = {
        **calculate_debug_metrics(known),
        "atropos/logprob_diff/mean": difference.mean().item(),
        "atropos/logprob_diff/max": difference.max().item(),
    }
    if mask[fresh].any():
        fresh = fresh.repeat_interleave(mask.sum(-1))
        metrics["atropos/logprob_diff/fresh_mean"] = difference[fresh].mean().item()
    if not correction.bypass_mode:
        try:
            metrics |= compute_rollout_correction_and_add_to_batch(known, correction)[1]
        except ZeroDivisionError:  # as in ``_weights``; the size is what verl divides by
            metrics["rollout_corr/rollout_is_eff_sample_size"] = 0.0
    return metrics


def correct_rollout(rows: DataProto, config: DictConfig) -> None:
    """Apply the importance weights and rejection of ``config``.

    Sets ``rollout_is_weights``, (B, R) float32, if ``rollout_is`` is set, and removes rejected tokens from
    ``response_mask``. The ``token_level_rewards`` of rejected tokens move to the row's last kept token, because some
    estimators read rewards through the mask, and the score is on the last trained token.
    """
    known, indices = with_log_probs(rows)
    weights = rows.batch["response_mask"].float()
    if known is not None:  # verl's metrics of all this take much longer: see ``compare_with_engine``
        tensors = known.batch
        sampled = {"log_ratio": tensors["old_log_probs"] - tensors["rollout_log_probs"]}
        sampled["response_mask"] = tensors["response_mask"]
        if config.rollout_is:
            options = {key: config[key] for key in _WEIGHTED_BY}
            at_once = len(indices) if config.rollout_is_batch_normalize else _ROWS_AT_ONCE  # it is over all rows
            parts = zip(*(values.split(at_once) for values in sampled.values()), strict=True)
            weights[indices] = torch.cat([_weights(*part, **options) for part in parts])
        if config.rollout_rs:
            options = {key: config[key] for key in ("rollout_rs", "rollout_rs_threshold")}
            kept, _ = compute_rollout_rejection_mask(**sampled, **options)
            mask = rows.batch["response_mask"].clone()
            mask[indices] = kept.to(mask.dtype)
            rows.batch["response_mask"] = mask
            rows.batch["token_level_rewards"] = _rewards_on(rows.batch["token_level_rewards"], mask.bool())
    if config.rollout_is:
        rows.batch["rollout_is_weights"] = weights


def _weights(log_ratio: torch.Tensor, response_mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return verl's importance weights, (B, R)."""
    try:
        return compute_rollout_correction_weights(log_ratio, response_mask, **options)[0]
    except ZeroDivisionError:  # in verl's metrics of weights that are all 0, as IcePop's may be
        return torch.zeros_like(log_ratio)


def _rewards_on(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return (B, R) rewards in which those of rejected tokens are added to the row's last kept token; row sums stay,
    and rows without a kept token are unchanged.
    """
    lost = torch.where(kept, 0.0, rewards).sum(-1)
    last = torch.where(kept, torch.arange(kept.shape[1]), -1).amax(-1)
    moved = torch.where(kept, rewards, 0.0)
    some = last >= 0
    moved[some, last[some]] += lost[some]
    return torch.where(some[:, None], moved, rewards)


def configure_bypass_mode(config: DictConfig) -> None:
    """Do what verl's ``apply_bypass_mode`` does, but before workers are built, as their loss does the correction."""
    if config.algorithm.rollout_correction.bypass_mode:
        with open_dict(config):
            policy_loss = config.actor_rollout_ref.actor.policy_loss
            policy_loss.loss_mode = "bypass_mode"
            policy_loss.rollout_correction = config.algorithm.rollout_correction
