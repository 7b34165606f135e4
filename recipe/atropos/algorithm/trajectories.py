"""Trajectories of several rows: an agent's session gives several token sequences, which share one score.

Guarantees:

- A trajectory counts once in every mean over sequences, however many rows it has: as the one sequence of all their
  trained tokens.
- What is not defined over several rows is refused by name (``require_defined``, and ``advantages`` for estimators).

Shapes: B rows with R response tokens, T trajectories with W trained tokens at most.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext.batch import DataProto


def trajectory_of(uids: Sequence[str], numbers: Sequence[int | None]) -> np.ndarray:
    """Return the index of each row's trajectory, (B,) int64, in the order of their first rows.

    Rows of a group with the same number are of one trajectory; one without a number is a trajectory of its own.
    """
    found: dict[Any, int] = {}
    keys = (
        (uid, i if number is None else (number,)) for i, (uid, number) in enumerate(zip(uids, numbers, strict=True))
    )
    return np.array([found.setdefault(key, len(found)) for key in keys], dtype=np.int64)


def trajectories_of(batch: DataProto) -> np.ndarray:
    """Return ``trajectory_of`` the rows of a batch; a padding row is a trajectory of its own."""
    others = batch.non_tensor_batch
    return trajectory_of(others["uid"], others.get("trajectory", [None] * len(batch)))


def has_several_rows(batch: DataProto) -> bool:
    """Return whether a trajectory of the batch has several rows."""
    return len(np.unique(trajectories_of(batch))) < len(batch)


def shares_of(batch: DataProto) -> torch.Tensor:
    """Return each row's part of its trajectory's trained tokens, (B,) float32; 0 in a row without any.

    They sum to the number of trajectories with a trained token.
    """
    index = torch.from_numpy(trajectories_of(batch))
    tokens = batch.batch["response_mask"].sum(-1)
    return (tokens / torch.bincount(index, weights=tokens)[index].clamp(min=1)).float()


class Joined:
    """The trained tokens of each trajectory's rows as one sequence; each trajectory as it is if all have one row.

    ``index``, (B,), is the trajectory of each row; ``mask``, (B, R), is nonzero on trained tokens.
    """

    def __init__(self, index: np.ndarray, mask: torch.Tensor):
        self.index = torch.from_numpy(index)
        self.several = len(np.unique(index)) < len(index)
        _, self.first = np.unique(index, return_index=True)  # (T,), the first row of each trajectory
        self._trained = mask != 0
        in_order = torch.argsort(self.index, stable=True)
        counts = self._trained.sum(-1)
        before = torch.empty_like(counts)
        before[in_order] = (
            counts[in_order].cumsum(0) - counts[in_order]
        )  # tokens of the rows before, of all trajectories
        start = before[self.first][self.index]
        self._row = self.index[:, None].expand(mask.shape)[self._trained]
        self._at = ((before - start)[:, None] + self._trained.cumsum(-1) - 1)[self._trained]
        self._width = int(torch.bincount(self.index, weights=counts).max().clamp(min=1))

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return (T, W) values of trained tokens, 0 elsewhere, of (B, R) values."""
        if not self.several:
            return values
        joined = values.new_zeros(len(self.first), self._width)
        joined[self._row, self._at] = values[self._trained]
        return joined

    def join_rewards(self, rewards: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return (T, W) rewards of (B, R) ones, which contain the score of each row, (B,): once, on the first token."""
        if not self.several:
            return rewards
        others = torch.zeros(len(self.first)).index_add(0, self.index, rewards.sum(-1) - scores)
        return F.pad((scores[self.first] + others)[:, None], (0, self._width - 1))

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Return (B, R) values, 0 where not trained, of (T, W) values."""
        if not self.several:
            return values
        rows = values.new_zeros(self._trained.shape)
        rows[self._trained] = values[self._row, self._at]
        return rows


def require_defined(config: DictConfig) -> None:
    """Refuse losses and corrections that are not defined for a batch in which a trajectory has several rows.

    Raises:
        ConfigurationError: names the key, and what to choose instead.
    """
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    actor_key = "actor_rollout_ref.actor"
    aggregated = f"{actor_key}.policy_loss.loss_mode={mode} with {actor_key}.loss_agg_mode={actor.loss_agg_mode}"
    for refused, key, instead in (
        (mode == "gspo", f"{actor_key}.policy_loss.loss_mode=gspo", "vanilla, whose ratio is a token's"),
        (
            actor.loss_agg_mode == "seq-mean-token-mean" and mode in ("clip_cov", "kl_cov", "bypass_mode"),
            aggregated,
            "token-mean",
        ),
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
            f"{actor_key}.loss_scale_factor=null",
            "a number, since the longest row is no measure",
        ),
        (
            correction.rollout_is == "sequence",
            "algorithm.rollout_correction.rollout_is=sequence",
            "token",
        ),
        (
            "seq" in str(correction.rollout_rs),
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs}",
            "a bound on tokens, such as token_k1",
        ),
    ):
        if refused:
            raise ConfigurationError(f"{key} is not defined for a trajectory of several rows; choose {instead}")
