"""Advantages, (B, R): the environment's where it sent them, GRPO over the group elsewhere.

Guarantees:

- ``grpo_atropos``, registered with verl, equals verl's GRPO if no environment sends advantages, except in groups of
  equal scores: their advantage is 0, not the rounding error of the mean divided by an epsilon.
- Advantages that an environment sends reach the loss as sent, position by position; the row's score still counts in
  the mean of its group.
- The mean, standard deviation and other group statistics of an estimator cover all scored rows, including those that
  were dropped (too long, stale, nothing trained, ...) and those whose tokens the off-policy correction rejected. If
  rows were dropped, an estimator that needs more than their scores and lengths is refused by name.
- Normalization and clipping follow any estimator and cover trained tokens only. ``set_advantage_to_zero`` comes last:
  such rows, like tokens with mask 0, have advantage 0 and are excluded from normalization; their scores count in the
  mean of their group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from recipe.atropos.algorithm.off_policy import correct_rollout
from recipe.atropos.data.data_proto import real_rows
from recipe.atropos.data.rows import DroppedRow, environment_name
from recipe.atropos.errors import AtroposError
from recipe.atropos.verl_ext.algorithm import (
    AdaptiveKLController,
    FixedKLController,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
    kl_penalty,
    masked_mean,
    register_adv_est,
)
from recipe.atropos.verl_ext.batch import DataProto

GRPO_ATROPOS = "grpo_atropos"
_ADDED = ("token_level_rewards", "response_mask", "rollout_is_weights", "advantages", "returns")
_EPSILON = 1e-8
_SMALLEST_GROUP = {"grpo_passk": 2}  # compares the best row with the second best
_OF_NO_GROUP = {"reinforce_plus_plus"}  # a row's advantage does not depend on the others of its group
_WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}  # over the batch's trained tokens
_ESTIMATOR_TENSORS = ("token_level_rewards", "response_mask")
_TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
_TOKEN_BASELINE_TENSORS = (*_ESTIMATOR_TENSORS, "old_log_probs", "sum_pi_squared", "rollout_is_weights")
# These read only the scores of a group's rows (opo also the lengths), so they can include dropped rows.
_OF_SCORES = {
    GRPO_ATROPOS,
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
}


class MissingAdvantages(AtroposError, ValueError):
    """A row's environment sent no advantages, and ``fallback_to_grpo`` is off."""


class IncompleteGroup(AtroposError, ValueError):
    """Rows of a group were dropped, and the algorithm needs more than their scores and lengths."""


@dataclass(frozen=True)
class AdvantageConfig:
    """How advantages are chosen, normalized and clipped; keys of ``trainer.atropos``.

    ``use_advantages``: use the environment's where it sends them. ``fallback_to_grpo``: compute the others from the
    group's scores; if false, a row without any raises. ``advantage_normalization``: "none", "batch" (mean 0 and
    standard deviation 1 over the batch's trained tokens) or "global" (over those of the whole run, this batch
    included). ``advantage_clipping``: bounds (low, high), applied after normalizing.
    """

    use_advantages: bool = True
    fallback_to_grpo: bool = True
    advantage_normalization: Literal["none", "batch", "global"] = "none"
    advantage_clipping: tuple[float, float] | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "AdvantageConfig":
        """Build from ``trainer.atropos``, which ``config.schema`` has validated; its other keys are ignored."""
        given = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if isinstance(given.get("advantage_clipping"), Sequence) and not isinstance(given["advantage_clipping"], str):
            given["advantage_clipping"] = tuple(given["advantage_clipping"])
        return cls(**given)


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations of all values so far, in float64 (Chan et al., 1983)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, values: torch.Tensor) -> None:
        """Add values of any shape."""
        n = values.numel()
        if n == 0:
            return
        values = values.double()
        mean = values.mean().item()
        delta, total = mean - self.mean, self.count + n
        self.m2 += (values - mean).square().sum().item() + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation (divided by the count); 0 if there are no values."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.m2 = int(state["count"]), float(state["mean"]), float(state["m2"])


@register_adv_est(GRPO_ATROPOS)
def compute_grpo_atropos_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    atropos_advantages: torch.Tensor | None = None,
    has_advantages: np.ndarray | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GRPO over each group; use the environment's advantages in the rows that have them.

    Args:
        token_level_rewards: (B, R) float32; only their sum over a row counts.
        response_mask: (B, R), 1 on trained tokens.
        index: (B,), the group id of each row.
        config: verl's ``algorithm``; ``norm_adv_by_std_in_grpo`` (default true) divides by the standard deviation.
        atropos_advantages: (B, R) float32, read where ``has_advantages``, (B,) bool, is true.

    Returns:
        Advantages and returns, the same (B, R) float32 tensor twice, 0 where the mask is 0.
    """
    by_std = True if config is None else config.norm_adv_by_std_in_grpo
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=by_std
    )
    advantages[_all_equal(token_level_rewards.sum(-1), index)] = 0.0
    if atropos_advantages is not None and has_advantages is not None:
        own = torch.from_numpy(np.asarray(has_advantages, dtype=bool))[:, None]
        advantages = torch.where(own, atropos_advantages * response_mask, advantages)
    return advantages, advantages


def _all_equal(scores: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """Return (B,) bool: whether a row's group has several rows, all with the same score; ``scores`` is (B,)."""
    _, group = np.unique(index.astype(str), return_inverse=True)
    group = torch.from_numpy(group)
    count = torch.bincount(group)
    lowest, highest = (
        torch.zeros(len(count), dtype=scores.dtype).scatter_reduce(0, group, scores, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return ((lowest == highest) & (count > 1))[group]


def add_advantages(
    batch: DataProto, algorithm: DictConfig, config: "AdvantageConfig", moments: "RunningMoments", kl_controller: Any
) -> dict[str, float]:
    """Add rewards, off-policy correction and advantages, (B, R) each, with 0 in padding rows; return metrics.

    ``kl_controller`` is used if the KL to the reference policy is part of the reward. That KL affects advantages
    computed from rewards, not those that the environment sent.
    """
    metrics: dict[str, float] = {}
    rows = real_rows(batch)
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    if algorithm.use_kl_in_reward:
        metrics |= subtract_kl(rows, kl_controller, algorithm.kl_penalty)
    rows.batch["sampled_mask"] = rows.batch["response_mask"]  # before any rejection
    if "rollout_log_probs" in rows.batch and not algorithm.rollout_correction.bypass_mode:
        metrics |= correct_rollout(rows, algorithm.rollout_correction)
    if rows.batch["response_mask"].any():
        compute_advantages(rows, algorithm, config, moments)
    else:
        rows.batch["advantages"] = rows.batch["returns"] = torch.zeros_like(rows.batch["token_level_rewards"])
        rows.non_tensor_batch["has_signal"] = np.zeros(len(rows), dtype=bool)
    real = torch.from_numpy(~batch.non_tensor_batch["is_padding"])
    for key in set(_ADDED) & set(rows.batch.keys()):
        values = rows.batch[key].new_zeros(len(batch), *rows.batch[key].shape[1:])
        values[real] = rows.batch[key]
        batch.batch[key] = values
    batch.non_tensor_batch["has_signal"] = np.zeros(len(batch), dtype=bool)
    batch.non_tensor_batch["has_signal"][real.numpy()] = rows.non_tensor_batch["has_signal"]
    return metrics


def compute_advantages(
    rows: DataProto, algorithm: DictConfig, config: AdvantageConfig, moments: RunningMoments
) -> None:
    """Add ``advantages`` and ``returns``, (B, R) float32, to rows (no padding rows) with ``token_level_rewards``.

    Also add ``has_signal``, (B,) bool: whether a trained token's advantage was nonzero before normalization, by more
    than rounding and verl's whitening.
    ``moments`` is updated with this batch if normalization is "global".

    Raises:
        MissingAdvantages: a row's environment sent none and ``fallback_to_grpo`` is off.
        IncompleteGroup: rows were dropped, and the estimator or the KL in the reward needs their logprobs.
    """
    tensors, others, silent = rows.batch, rows.non_tensor_batch, torch.tensor(False)
    scored = _scored_rows(rows, algorithm)
    if algorithm.adv_estimator == GRPO_ATROPOS:
        own = others["has_advantages"] & config.use_advantages
        if not (config.fallback_to_grpo or own.all()):
            row = np.flatnonzero(~own)[0]
            raise MissingAdvantages(
                f"group {others['uid'][row]} of {environment_name(others['env_name'][row], others['env_id'][row])}: "
                f"{(~own).sum()} of {len(rows)} rows came without advantages and trainer.atropos.fallback_to_grpo is "
                "false; set it to true, or let the environment send them"
            )
        n = len(scored) - len(rows)
        advantages, returns = get_adv_estimator_fn(GRPO_ATROPOS)(
            token_level_rewards=scored.batch["token_level_rewards"],
            response_mask=scored.batch["response_mask"],
            index=scored.non_tensor_batch["uid"],
            config=algorithm,
            atropos_advantages=F.pad(tensors["atropos_advantages"], (0, 0, 0, n)),
            has_advantages=np.pad(own, (0, n)),
        )
    else:
        advantages, returns = _verls_advantages(scored, algorithm)
        silent = _equal_returns(scored, returns, algorithm.adv_estimator)[: len(rows), None]
    tensors["advantages"], tensors["returns"] = (
        torch.where(tensors["response_mask"].bool(), values[: len(rows)], 0.0) for values in (advantages, returns)
    )
    trained = tensors["response_mask"].bool() & torch.from_numpy(~others["zero_advantage"])[:, None]
    others["has_signal"] = ((tensors["advantages"] != 0) & trained & ~silent).any(-1).numpy()
    tensors["advantages"] = shape_advantages(tensors["advantages"], trained, config, moments)


def _equal_returns(rows: DataProto, returns: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return (B,) bool: whether what a row is compared with, its group or the whole batch, has the same returns."""
    if estimator in _OF_NO_GROUP:
        return (returns[rows.batch["response_mask"].bool()].unique().numel() == 1) * torch.ones(len(rows)).bool()
    return _all_equal(rows.batch["token_level_rewards"].sum(-1), rows.non_tensor_batch["uid"])


def _scored_rows(rows: DataProto, algorithm: DictConfig) -> DataProto:
    """Return the rows, (B, R), followed by a placeholder for each row that was dropped from their groups.

    A placeholder has its score on its first token, with mask 0. For ``opo``, which weights scores by sequence length,
    its mask sums to its number of trained tokens, and the other rows have their mask from before any rejection.

    Raises:
        IncompleteGroup: see ``compute_advantages``.
    """
    estimator, others = algorithm.adv_estimator, rows.non_tensor_batch
    dropped = {} if estimator in _OF_NO_GROUP else dict(zip(others["uid"], others["dropped"], strict=True))
    _refuse_dropped(dropped, algorithm)
    uids = [uid for uid, lost in dropped.items() for _ in lost]
    lost = [row for group in dropped.values() for row in group]
    tensors = {
        key: F.pad(rows.batch[key], (0, 0, 0, len(lost))) for key in _TOKEN_BASELINE_TENSORS if key in rows.batch
    }
    tensors["token_level_rewards"][len(rows) :, 0] = torch.tensor([row.score for row in lost])
    if estimator == "opo":
        tensors["response_mask"][: len(rows)] = rows.batch.get("sampled_mask", rows.batch["response_mask"])
        tensors["response_mask"][len(rows) :, 0] = torch.tensor([row.trained_tokens for row in lost])
    return DataProto.from_dict(tensors, {"uid": np.array([*others["uid"], *uids], dtype=object)})


def _refuse_dropped(dropped: Mapping[str, Sequence[DroppedRow]], algorithm: DictConfig) -> None:
    """Raise IncompleteGroup if a dropped row is needed; one without trained tokens has no KL or baseline weight."""
    group, reasons = next(
        ((uid, {row.reason for row in rows}) for uid, rows in dropped.items() if any(r.trained_tokens for r in rows)),
        (None, ()),
    )
    if group is None:
        return
    lost = f"rows of group {group} were dropped ({', '.join(sorted(reasons))}), and"
    if algorithm.adv_estimator not in _OF_SCORES:
        raise IncompleteGroup(
            f"algorithm.adv_estimator={algorithm.adv_estimator}: {lost} its baseline needs their logprobs; choose one "
            f"of {', '.join(sorted(_OF_SCORES))}"
        )
    if algorithm.use_kl_in_reward:
        raise IncompleteGroup(
            f"algorithm.use_kl_in_reward=true: {lost} the KL in their rewards is not known, which the mean of their "
            "group is over; set it to false and actor_rollout_ref.actor.use_kl_loss=true"
        )


def _verls_advantages(rows: DataProto, algorithm: DictConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, (B, R), by verl's estimator; 0 in groups that are too small for it, and where a
    single token is whitened, which verl refuses.
    """
    _, group, count = np.unique(rows.non_tensor_batch["uid"].astype(str), return_inverse=True, return_counts=True)
    enough = np.flatnonzero(count[group] >= _SMALLEST_GROUP.get(algorithm.adv_estimator, 1))
    advantages, returns = (torch.zeros_like(rows.batch["token_level_rewards"]) for _ in range(2))
    if enough.size and not (algorithm.adv_estimator in _WHITENED and rows.batch["response_mask"].sum() < 2):
        chosen = rows.select_idxs(enough)
        keys = _TOKEN_BASELINE_TENSORS if algorithm.adv_estimator in _TOKEN_BASELINES else _ESTIMATOR_TENSORS
        given = {key: chosen.batch[key] for key in keys if key in chosen.batch}
        given |= {"index": chosen.non_tensor_batch["uid"], "config": algorithm}
        if algorithm.adv_estimator in ("grpo", "grpo_vectorized"):  # the others read it from the configuration
            given["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std_in_grpo
        found = get_adv_estimator_fn(algorithm.adv_estimator)(**given)
        advantages[enough], returns[enough] = (values.to(advantages.dtype) for values in found)
    return advantages, returns


def subtract_kl(
    rows: DataProto, controller: AdaptiveKLController | FixedKLController, estimator: str
) -> dict[str, float]:
    """Set rewards, (B, R), to ``token_level_scores`` minus coefficient * KL(policy, reference) at each token.

    ``estimator`` is verl's ``algorithm.kl_penalty``; ``controller`` adapts the coefficient to the measured KL. Returns
    the KL, in nats, and the coefficient as metrics.
    """
    mask, coefficient = rows.batch["response_mask"], controller.value
    kl = kl_penalty(rows.batch["old_log_probs"], rows.batch["ref_log_prob"], kl_penalty=estimator) * mask
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"] - coefficient * kl
    mean = masked_mean(kl, mask=mask, axis=-1).mean().item()
    controller.update(current_kl=mean, n_steps=len(rows))
    return {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coefficient}


def shape_advantages(
    advantages: torch.Tensor, trained: torch.Tensor, config: AdvantageConfig, moments: RunningMoments
) -> torch.Tensor:
    """Return normalized and clipped advantages, 0 where not ``trained``; all (B, R) float32 except the bool mask."""
    if config.advantage_normalization != "none":
        if config.advantage_normalization == "batch":
            moments = RunningMoments()
        moments.update(advantages[trained])
        advantages = (advantages - moments.mean) / (moments.std + _EPSILON)
    if config.advantage_clipping is not None:
        advantages = advantages.clamp(*config.advantage_clipping)
    return torch.where(trained, advantages, 0.0)


class KLCoefficient:
    """Checkpoint state of verl's KL controllers: the coefficient that an adaptive one has reached.

    A fixed one keeps that of the configuration, which may have been changed before the run was resumed.
    """

    def __init__(self, controller: AdaptiveKLController | FixedKLController):
        self.controller = controller

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.controller.value)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if isinstance(self.controller, AdaptiveKLController):
            self.controller.value = state["value"]
