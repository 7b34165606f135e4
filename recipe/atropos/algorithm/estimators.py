"""The advantage estimators that ``algorithm.adv_estimator`` can choose, each with what it needs.

A new one is a function under ``@estimator(NAME, ...)``, which is called by verl's convention: with
``token_level_rewards`` and ``response_mask``, (B, R), ``index``, (B,), ``config``, ``norm_adv_by_std_in_grpo``, and the
tensors that it needs; it returns advantages and returns, (B, R) each. Guarantees:

- the configuration accepts every estimator declared here, and no other;
- importing this module imports neither torch nor verl, so that a wrong value is reported quickly. verl learns of an
  estimator of this recipe at its first use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

_BASELINE_TENSORS = ("old_log_probs", "sum_pi_squared", "rollout_is_weights")


@dataclass(frozen=True)
class Estimator:
    """What an estimator needs; ``compute`` is None for one of verl's.

    ``tensors``: of a batch, (B, R), beside rewards and mask, as far as it has them. ``scores_only``: all trained tokens
    of a row have one advantage, of scores alone, so that dropped rows can be included, and a trajectory has one row,
    whose tokens are its first columns; ``lengths``: of scores and numbers of trained tokens. ``grouped``: a row's
    advantage depends on the others of its group. ``smallest_group``: rows that a group must have. ``whitened``: over
    the batch's trained tokens. ``token_advantages``: rows with advantages of the environment keep them.
    """

    name: str
    compute: Callable[..., tuple["torch.Tensor", "torch.Tensor"]] | None = None
    tensors: tuple[str, ...] = ()
    scores_only: bool = False
    lengths: bool = False
    grouped: bool = True
    smallest_group: int = 1
    whitened: bool = False
    token_advantages: bool = False


_VERLS = (
    Estimator("gpg", scores_only=True),
    Estimator("grpo", scores_only=True),
    Estimator("grpo_passk", scores_only=True, smallest_group=2),  # compares the best row with the second best
    Estimator("grpo_vectorized", scores_only=True),
    Estimator("opo", scores_only=True, lengths=True),
    Estimator("optimal_token_baseline", tensors=_BASELINE_TENSORS),
    Estimator("reinforce_plus_plus", grouped=False, whitened=True),
    Estimator("reinforce_plus_plus_baseline", scores_only=True, whitened=True),
    Estimator("rloo", scores_only=True),
    Estimator("rloo_vectorized", scores_only=True),
    Estimator("tir_optimal_token_baseline", tensors=_BASELINE_TENSORS),
)
ESTIMATORS = {each.name: each for each in _VERLS}


def estimator(name: str, **needs: Any) -> Callable[[Callable], Callable]:
    """Declare a function as the estimator ``name``; ``needs`` are those of ``Estimator``."""

    def declare(compute: Callable) -> Callable:
        ESTIMATORS[name] = Estimator(name, compute, **needs)
        return compute

    return declare


@estimator("grpo_atropos", scores_only=True, token_advantages=True)
def compute_grpo_atropos_advantage(
    token_level_rewards: "torch.Tensor",
    response_mask: "torch.Tensor",
    index: "np.ndarray",
    norm_adv_by_std_in_grpo: bool = True,
    **_: Any,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Compute GRPO over each group, without verl's rounding error where all scores are equal.

    Args:
        token_level_rewards: (B, R) float32; only their sum over a row counts.
        response_mask: (B, R), 1 on trained tokens.
        index: (B,), the group id of each row.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.

    Returns:
        Advantages and returns, the same (B, R) float32 tensor twice, 0 where the mask is 0.
    """
    from recipe.atropos.verl_ext.algorithm import compute_grpo_outcome_advantage

    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo
    )
    advantages[equal_scores(token_level_rewards.sum(-1), index)] = 0.0
    return advantages, advantages


def equal_scores(scores: "torch.Tensor", index: "np.ndarray") -> "torch.Tensor":
    """Return (B,) bool: whether a row's group has several rows, all with the same score; both arguments are (B,)."""
    import numpy as np
    import torch

    _, first, group, count = np.unique(index.astype(str), return_index=True, return_inverse=True, return_counts=True)
    values = scores.numpy()
    different = np.bincount(group, weights=values != values[first[group]])
    return torch.from_numpy(((different == 0) & (count > 1))[group])
