"""Advantages, (B, R): the environment's where it sent them, GRPO over the group elsewhere.

Guarantees:

- ``grpo_atropos`` equals verl's GRPO if no environment sends advantages, except in groups of equal scores: their
  advantage is 0, not the rounding error of the mean divided by an epsilon.
- Advantages that an environment sends reach the loss as sent, position by position; the row's score still counts in
  the mean of its group.
- The mean, standard deviation and other group statistics of an estimator cover all scored rows, including those that
  were dropped (too long, stale, nothing trained, ...) and those whose tokens the off-policy correction rejected. If
  rows were dropped, an estimator that needs more than their scores and lengths is refused by name.
- A trajectory of several rows counts once, as one sequence (``trajectories``); an estimator for which that is not
  defined is refused by name.
- Normalization and clipping follow any estimator and cover trained tokens only. ``set_advantage_to_zero`` comes last:
  such rows, like tokens with mask 0, have advantage 0 and are excluded from normalization; their scores count in the
  mean of their group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from recipe.atropos.algorithm.estimators import ESTIMATORS, Estimator, equal_scores
from recipe.atropos.algorithm.off_policy import correct_rollout
from recipe.atropos.algorithm.trajectories import shares_of, trajectories_of, trajectory_of
from recipe.atropos.data.data_proto import rows_where
from recipe.atropos.data.rows import DroppedRow, environment_name
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.verl_ext.algorithm import (
    AdaptiveKLController,
    FixedKLController,
    get_adv_estimator_fn,
    kl_penalty,
    masked_mean,
    register_adv_est,
)
from recipe.atropos.verl_ext.batch import DataProto

_ADDED = ("token_level_rewards", "sampled_mask", "response_mask", "rollout_is_weights", "advantages", "returns")
_EPSILON = 1e-8


class MissingAdvantages(AtroposError, ValueError):
    """A row's environment sent no advantages, and ``fallback_to_grpo`` is off."""


class IncompleteGroup(AtroposError, ValueError):
    """Rows of a group were dropped, and the algorithm needs more than their scores and lengths."""


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


def add_advantages(
    batch: DataProto, algorithm: DictConfig, atropos: DictConfig, moments: RunningMoments, kl_controller: Any
) -> dict[str, float]:
    """Add rewards, off-policy correction and advantages, (B, R) each, with 0 in padding rows; return metrics.

    ``algorithm`` and ``atropos`` are these sections of the configuration, the latter ``trainer.atropos``.
    ``kl_controller`` is used if the KL to the reference policy is part of the reward. That KL affects advantages
    computed from rewards, not those that the environment sent.
    """
    real = ~batch.non_tensor_batch["is_padding"]
    rows = rows_where(batch, real)
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    metrics = subtract_kl(rows, kl_controller, algorithm.kl_penalty) if algorithm.use_kl_in_reward else {}
    rows.batch["sampled_mask"] = rows.batch["response_mask"]  # before any rejection
    if "rollout_log_probs" in rows.batch and not algorithm.rollout_correction.bypass_mode:
        correct_rollout(rows, algorithm.rollout_correction)
    compute_advantages(rows, algorithm, atropos, moments)
    for key in set(_ADDED) & set(rows.batch.keys()):
        values = rows.batch[key]
        if not real.all():
            values = values.new_zeros(len(batch), *values.shape[1:])
            values[torch.from_numpy(real)] = rows.batch[key]
        batch.batch[key] = values
    batch.non_tensor_batch["has_signal"] = np.zeros(len(batch), dtype=bool)
    for key in ("has_signal", "credit"):
        batch.non_tensor_batch[key][real] = rows.non_tensor_batch[key]
    return metrics


def compute_advantages(rows: DataProto, algorithm: DictConfig, atropos: DictConfig, moments: RunningMoments) -> None:
    """Add ``advantages`` and ``returns``, (B, R) float32, to rows (no padding rows) with ``token_level_rewards``.

    Also add ``has_signal``, (B,) bool: whether a trained token's advantage was nonzero before normalization, by more
    than rounding and verl's whitening. ``credit``, (B,), stays where it made a row's advantages.
    ``moments`` is updated with this batch if normalization is "global", over the trained tokens of the whole run.

    Raises:
        MissingAdvantages: a row's environment sent none and ``fallback_to_grpo`` is off.
        IncompleteGroup: rows were dropped, and the estimator or the KL in the reward needs their logprobs.
        ConfigurationError: a trajectory has several rows, for which the estimator is not defined.
    """
    tensors, others = rows.batch, rows.non_tensor_batch
    needs = ESTIMATORS[algorithm.adv_estimator]
    own = others["has_advantages"] & (atropos.use_advantages and needs.token_advantages)
    if not (atropos.fallback_to_grpo or own.all()):
        row = np.flatnonzero(~own)[0]
        raise MissingAdvantages(
            f"group {others['uid'][row]} of {environment_name(others['env_name'][row], others['env_id'][row])}: "
            f"{(~own).sum()} of {len(rows)} rows came without advantages and trainer.atropos.fallback_to_grpo is "
            "false; set it to true, or let the environment send them"
        )
    others["credit"] = np.where(own, others["credit"], None)
    scored, index = _scored_trajectories(rows, needs, algorithm.use_kl_in_reward)
    advantages, returns = _estimated(scored, needs, algorithm)
    silent = _equal_returns(scored, returns, needs)[index] & torch.from_numpy(~own)
    kept, sent = tensors["response_mask"].bool(), torch.from_numpy(own)[:, None]
    for key, values in (("advantages", advantages), ("returns", returns)):
        values = values[index, :1] if needs.scores_only else values
        values = torch.where(sent, tensors["atropos_advantages"], values) if own.any() else values
        tensors[key] = torch.where(kept, values, 0.0)
    trained = kept & torch.from_numpy(~others["zero_advantage"])[:, None]
    others["has_signal"] = ((tensors["advantages"] != 0) & trained & ~silent[:, None]).any(-1).numpy()
    tensors["advantages"] = shape_advantages(
        tensors["advantages"], trained, moments, atropos.advantage_normalization, atropos.advantage_clipping
    )


def _equal_returns(rows: DataProto, returns: torch.Tensor, needs: Estimator) -> torch.Tensor:
    """Return (B,) bool: whether what a row is compared with, its group or the whole batch, has the same returns."""
    if not needs.grouped:
        return (returns[rows.batch["response_mask"].bool()].unique().numel() == 1) * torch.ones(len(rows)).bool()
    return equal_scores(rows.batch["token_level_rewards"].sum(-1), rows.non_tensor_batch["uid"])


def _scored_trajectories(rows: DataProto, needs: Estimator, kl_in_reward: bool) -> tuple[DataProto, torch.Tensor]:
    """Return what an estimator is given, and the index in it of each row, (B,) int64.

    That is the rows as they are; but to one of ``scores_only``, trajectories, T of the rows and of those dropped from
    their groups: the reward of each on its first token, and a mask, (T, W), of its trained tokens: all of them for one
    that needs ``lengths`` (including dropped rows, and tokens from before any rejection) or is ``whitened``, else one.

    Raises:
        IncompleteGroup, ConfigurationError: see ``compute_advantages``.
    """
    tensors, others = rows.batch, rows.non_tensor_batch
    dropped = dict(zip(others["uid"], others["dropped"], strict=True)) if needs.grouped else {}
    _refuse_dropped(dropped, needs, kl_in_reward)
    lost = [row for group in dropped.values() for row in group]
    uid = np.array([*others["uid"], *(uid for uid, group in dropped.items() for _ in group)], dtype=object)
    numbers = [*others["trajectory"], *(row.trajectory for row in lost)]
    _, first, index = np.unique(trajectory_of(uid, numbers), return_index=True, return_inverse=True)
    if not needs.scores_only:
        if len(first) < len(index):
            raise ConfigurationError(
                f"algorithm.adv_estimator={needs.name} is not defined for a trajectory of several rows; choose one of "
                f"{_scores_only()}"
            )
        keys = {"token_level_rewards", "response_mask", *needs.tensors} & set(tensors.keys())
        return DataProto.from_dict({key: tensors[key] for key in keys}, {"uid": others["uid"]}), torch.arange(len(rows))
    mask = tensors.get("sampled_mask", tensors["response_mask"]) if needs.lengths else tensors["response_mask"]
    tokens = torch.tensor([*mask.sum(-1).tolist(), *(row.trained_tokens * needs.lengths for row in lost)])
    lengths = torch.bincount(torch.from_numpy(index), weights=tokens)
    scores = torch.cat([tensors["token_level_scores"].sum(-1), torch.tensor([row.score for row in lost])])
    index = torch.from_numpy(index)[: len(rows)]
    rewards = scores[first].index_add(0, index, tensors["token_level_rewards"].sum(-1) - scores[: len(rows)])
    width = int(lengths.max().clamp(min=1)) if needs.lengths or needs.whitened else 1
    mask = (torch.arange(width) < lengths[:, None]).long()
    given = {"token_level_rewards": F.pad(rewards[:, None], (0, mask.shape[1] - 1)), "response_mask": mask}
    return DataProto.from_dict(given, {"uid": uid[first]}), index


def _scores_only() -> str:
    return ", ".join(sorted(name for name, each in ESTIMATORS.items() if each.scores_only))


def _refuse_dropped(dropped: Mapping[str, Sequence[DroppedRow]], needs: Estimator, kl_in_reward: bool) -> None:
    """Raise IncompleteGroup if a dropped row is needed; one without trained tokens has no KL or baseline weight."""
    group, reasons = next(
        ((uid, {row.reason for row in rows}) for uid, rows in dropped.items() if any(r.trained_tokens for r in rows)),
        (None, ()),
    )
    if group is None:
        return
    lost = f"rows of group {group} were dropped ({', '.join(sorted(reasons))}), and"
    if not needs.scores_only:
        raise IncompleteGroup(
            f"algorithm.adv_estimator={needs.name}: {lost} its baseline needs their logprobs; choose one of "
            f"{_scores_only()}"
        )
    if kl_in_reward:
        raise IncompleteGroup(
            f"algorithm.use_kl_in_reward=true: {lost} the KL in their rewards is not known, which the mean of their "
            "group is over; set it to false and actor_rollout_ref.actor.use_kl_loss=true"
        )


def _estimated(rows: DataProto, needs: Estimator, algorithm: DictConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, (B, R), by the estimator; 0 in groups that are too small for it, where no token is
    left, and where a single one is whitened, which verl refuses.
    """
    _, group, count = np.unique(rows.non_tensor_batch["uid"].astype(str), return_inverse=True, return_counts=True)
    enough = np.flatnonzero(count[group] >= needs.smallest_group)
    advantages, returns = (torch.zeros_like(rows.batch["token_level_rewards"]) for _ in range(2))
    if enough.size and rows.batch["response_mask"].sum() >= (2 if needs.whitened else 1):
        chosen = rows.select_idxs(enough)
        given = {**chosen.batch, "index": chosen.non_tensor_batch["uid"], "config": algorithm}
        given["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std_in_grpo
        compute = register_adv_est(needs.name)(needs.compute) if needs.compute else get_adv_estimator_fn(needs.name)
        advantages[enough], returns[enough] = (values.to(advantages.dtype) for values in compute(**given))
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
    trajectories = len(set(trajectories_of(rows)))
    mean = (masked_mean(kl, mask=mask, axis=-1) * shares_of(rows) * (len(rows) / trajectories)).mean().item()
    controller.update(current_kl=mean, n_steps=trajectories)
    return {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coefficient}


def shape_advantages(
    advantages: torch.Tensor,
    trained: torch.Tensor,
    moments: RunningMoments,
    normalization: str,
    clipping: Sequence[float] | None,
) -> torch.Tensor:
    """Return normalized, then clipped advantages, 0 where not ``trained``; all (B, R) float32 except the bool mask.

    ``normalization``: "none", "batch" (mean 0 and standard deviation 1 over the batch's trained tokens) or "global"
    (over those of the whole run, in ``moments``, this batch included). ``clipping``: bounds, low and high.
    """
    if normalization != "none":
        if normalization == "batch":
            moments = RunningMoments()
        moments.update(advantages[trained])
        advantages = (advantages - moments.mean) / (moments.std + _EPSILON)
    if clipping is not None:
        advantages = advantages.clamp(*clipping)
    return torch.where(trained, advantages, 0.0)


@dataclass
class KLCoefficient:
    """Checkpoint state of verl's KL controllers: the coefficient that an adaptive one has reached.

    A fixed one keeps that of the configuration, which may have been changed before the run was resumed.
    """

    controller: AdaptiveKLController | FixedKLController

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.controller.value)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if isinstance(self.controller, AdaptiveKLController):
            self.controller.value = state["value"]
