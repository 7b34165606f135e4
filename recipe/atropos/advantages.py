"""Advantages, (B, R): what the environment sent where it sent some, the group's GRPO elsewhere.

The promises:

- ``grpo_atropos``, registered with verl, is verl's own GRPO where no environment sends advantages, but for groups of
  equal scores: their advantage is 0, not the rounding of a mean divided by an epsilon.
- A row's own advantages reach the loss as they were sent, position by position; the row's score still counts in the
  mean of its group.
- Normalising and clipping come after any estimator, over trained tokens alone. ``set_advantage_to_zero`` comes last:
  such rows, like tokens under mask 0, have the advantage 0 and are not normalised with; their scores count in the mean
  of their group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.ray_trainer import compute_advantage

from recipe.atropos.errors import AtroposError
from recipe.atropos.rows import environment_name

GRPO_ATROPOS = "grpo_atropos"
_EPSILON = 1e-8
_SMALLEST_GROUP = {"grpo_passk": 2}  # the best against the second


class MissingAdvantages(AtroposError, ValueError):
    """A row without advantages of its environment where ``fallback_to_grpo`` is off."""


@dataclass(frozen=True)
class AdvantageConfig:
    """What becomes of advantages; keys of ``trainer.atropos``.

    ``use_advantages``: take the environment's where it sends them. ``fallback_to_grpo``: compute the others from the
    group's scores; false refuses a row that has none. ``advantage_normalization``: "none", "batch" (mean 0 and
    standard deviation 1 over the batch's trained tokens) or "global" (over those of the whole run, this batch
    included). ``advantage_clipping``: bounds (low, high), applied after normalising.
    """

    use_advantages: bool = True
    fallback_to_grpo: bool = True
    advantage_normalization: Literal["none", "batch", "global"] = "none"
    advantage_clipping: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("use_advantages", "fallback_to_grpo"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"trainer.atropos.{name}={getattr(self, name)!r}: give true or false")
        if not (self.use_advantages or self.fallback_to_grpo):
            raise ValueError(
                "trainer.atropos.use_advantages=false and fallback_to_grpo=false leave no advantage; set one to true"
            )
        if self.advantage_normalization not in ("none", "batch", "global"):
            raise ValueError(
                f"trainer.atropos.advantage_normalization={self.advantage_normalization!r}; "
                "choose none, batch or global"
            )
        bounds = self.advantage_clipping
        numbers = isinstance(bounds, tuple) and all(isinstance(b, int | float) and not math.isnan(b) for b in bounds)
        if bounds is not None and not (numbers and len(bounds) == 2 and bounds[0] < bounds[1]):
            raise ValueError(
                f"trainer.atropos.advantage_clipping={bounds!r}: give [low, high], low below high, or null"
            )

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "AdvantageConfig":
        """From ``trainer.atropos``, which holds other keys too. Raises ValueError, naming key and value."""
        given = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if isinstance(given.get("advantage_clipping"), Sequence) and not isinstance(given["advantage_clipping"], str):
            given["advantage_clipping"] = tuple(given["advantage_clipping"])
        return cls(**given)


@dataclass
class RunningMoments:
    """Count, mean and summed squared deviation of all values so far, in float64 (Chan et al., 1983)."""

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
        """Standard deviation of the values themselves (not of a larger population); 0 of none."""
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
    """GRPO over the group, and the environment's advantages in the rows that have them.

    Args:
        token_level_rewards: (B, R) float32; only their sum over a row counts.
        response_mask: (B, R), 1 on trained tokens.
        index: (B,), rows of a group share one.
        config: verl's ``algorithm``; ``norm_adv_by_std_in_grpo`` (default true) divides by the group's deviation.
        atropos_advantages: (B, R) float32, read where ``has_advantages``, (B,) bool, is true.

    Returns:
        Advantages and returns, the same (B, R) float32 tensor twice, 0 under mask 0.
    """
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=by_std
    )
    advantages[_all_equal(token_level_rewards.sum(-1), index)] = 0.0
    if atropos_advantages is not None and has_advantages is not None:
        own = torch.from_numpy(np.asarray(has_advantages, dtype=bool))[:, None]
        advantages = torch.where(own, atropos_advantages * response_mask, advantages)
    return advantages, advantages


def _all_equal(scores: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """(B,) bool: the row's group has several rows, and all their scores, (B,), are the same."""
    _, group = np.unique(index.astype(str), return_inverse=True)
    group = torch.from_numpy(group)
    count = torch.bincount(group)
    lowest, highest = (
        torch.zeros(len(count), dtype=scores.dtype).scatter_reduce(0, group, scores, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return ((lowest == highest) & (count > 1))[group]


def compute_advantages(
    rows: DataProto, algorithm: DictConfig, config: AdvantageConfig, moments: RunningMoments, group_size: int = 1
) -> None:
    """Put ``advantages`` and ``returns``, (B, R) float32, into rows that have ``token_level_rewards``.

    And ``has_signal``, (B,) bool: the estimator gave some trained token an advantage. No padding rows, please.
    ``moments`` takes in this batch where normalisation is "global".

    Raises:
        MissingAdvantages: a row has none of its environment and ``fallback_to_grpo`` is off.
    """
    tensors, others = rows.batch, rows.non_tensor_batch
    if algorithm.adv_estimator == GRPO_ATROPOS:
        own = others["has_advantages"] & config.use_advantages
        if not (config.fallback_to_grpo or own.all()):
            row = np.flatnonzero(~own)[0]
            raise MissingAdvantages(
                f"group {others['uid'][row]} of {environment_name(others['env_name'][row], others['env_id'][row])}: "
                f"{(~own).sum()} of {len(rows)} rows came without advantages and trainer.atropos.fallback_to_grpo is "
                "false; set it to true, or let the environment send them"
            )
        tensors["advantages"], tensors["returns"] = get_adv_estimator_fn(GRPO_ATROPOS)(
            token_level_rewards=tensors["token_level_rewards"],
            response_mask=tensors["response_mask"],
            index=others["uid"],
            config=algorithm,
            atropos_advantages=tensors["atropos_advantages"],
            has_advantages=own,
        )
    else:
        _verls_advantages(rows, algorithm, group_size)
    trained = tensors["response_mask"].bool() & torch.from_numpy(~others["zero_advantage"])[:, None]
    others["has_signal"] = ((tensors["advantages"] != 0) & trained).any(-1).numpy()
    tensors["advantages"] = shape_advantages(tensors["advantages"], trained, config, moments)


def _verls_advantages(rows: DataProto, algorithm: DictConfig, group_size: int) -> None:
    """``advantages`` and ``returns`` by verl's estimator; 0 in groups that are smaller than it can compare."""
    _, group, count = np.unique(rows.non_tensor_batch["uid"].astype(str), return_inverse=True, return_counts=True)
    enough = np.flatnonzero(count[group] >= _SMALLEST_GROUP.get(algorithm.adv_estimator, 1))
    for key in ("advantages", "returns"):
        rows.batch[key] = torch.zeros_like(rows.batch["token_level_rewards"])
    if not enough.size:
        return
    chosen = compute_advantage(
        rows.select_idxs(enough),
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=group_size,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    for key in ("advantages", "returns"):
        rows.batch[key][enough] = chosen.batch[key].to(rows.batch[key].dtype)


def shape_advantages(
    advantages: torch.Tensor, trained: torch.Tensor, config: AdvantageConfig, moments: RunningMoments
) -> torch.Tensor:
    """Normalised, clipped, and 0 where not ``trained``: all (B, R), float32 but for the bool mask."""
    if config.advantage_normalization != "none":
        if config.advantage_normalization == "batch":
            moments = RunningMoments()
        moments.update(advantages[trained])
        advantages = (advantages - moments.mean) / (moments.std + _EPSILON)
    if config.advantage_clipping is not None:
        advantages = advantages.clamp(*config.advantage_clipping)
    return torch.where(trained, advantages, 0.0)
