"""Trajectories of several rows: an agent's session gives several token sequences, which share one score.

Guarantees:

- A trajectory counts once in every mean over sequences, however many rows it has: as the one sequence of all their
  trained tokens.
- What is not defined over several rows is refused by name (``require_defined``, and ``advantages`` for estimators).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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
