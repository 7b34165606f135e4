"""What a step's batch looked like, over all environments and for each of them."""

import numpy as np
import torch
from omegaconf import DictConfig

from recipe.atropos.data.rows import environment_name
from recipe.atropos.verl_ext.algorithm import agg_loss
from recipe.atropos.verl_ext.batch import DataProto


def batch_metrics(rows: DataProto) -> dict[str, float]:
    """Metrics of the rows that were trained on (no padding rows), which have their ``advantages``.

    Over all, and under ``atropos/ENV/`` for each environment (its name, else ``env_ID``, else ``unknown``):

    - ``mean_score``: of the rows; ``mean_raw_score``: before a reward bridge shaped it; ``mean_advantage``: of the
      trained tokens; ``trained_tokens``: how many there are; ``response_length``: tokens a row from the first trained
      one on, environment tokens between turns included;
    - ``groups``, and ``zero_signal_groups`` and ``zero_signal_share``, those of them whose advantages are all 0 (before
      normalizing, which would move them);
    - ``num_environments``, over all only.
    """
    named = zip(rows.non_tensor_batch["env_name"], rows.non_tensor_batch["env_id"], strict=True)
    names = np.array([environment_name(*pair) for pair in named])
    trained = rows.batch["response_mask"].bool().numpy()
    advantages = np.where(trained, rows.batch["advantages"].numpy(), 0.0)
    scores = rows.batch["token_level_scores"].sum(-1).numpy()
    raw_scores = rows.non_tensor_batch["raw_score"]
    lengths = rows.batch["attention_mask"][:, -trained.shape[1] :].sum(-1).numpy()
    groups = rows.non_tensor_batch["uid"]
    signal = rows.non_tensor_batch["has_signal"]

    def describe(chosen: np.ndarray) -> dict[str, float]:
        all_groups, with_signal = set(groups[chosen]), set(groups[chosen & signal])
        silent = len(all_groups) - len(with_signal)
        return {
            "mean_score": float(scores[chosen].mean()),
            "mean_raw_score": float(raw_scores[chosen].mean()),
            "mean_advantage": float(advantages[chosen].sum() / max(1, trained[chosen].sum())),
            "trained_tokens": float(trained[chosen].sum()),
            "response_length": float(lengths[chosen].mean()),
            "groups": float(len(all_groups)),
            "zero_signal_groups": float(silent),
            "zero_signal_share": silent / len(all_groups),
        }

    environments = sorted(set(names))
    metrics = {f"atropos/{key}": value for key, value in describe(np.ones(len(rows), dtype=bool)).items()}
    metrics["atropos/num_environments"] = float(len(environments))
    for name in environments:
        metrics |= {f"atropos/{name}/{key}": value for key, value in describe(names == name).items()}
    return metrics


def mean_entropy(entropies: torch.Tensor, response_mask: torch.Tensor, actor: DictConfig) -> float:
    """Nats, over trained tokens, as the loss of ``actor_rollout_ref.actor`` aggregates; both (B, R)."""
    return agg_loss(
        loss_mat=entropies,
        loss_mask=response_mask,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    ).item()


def staleness_metrics(rows: DataProto, step: int) -> dict[str, float]:
    """Updates between the oldest weights that sampled a row and the policy that update ``step`` starts from.

    Queue time is in it, because versions are compared when a row is trained on. Under ``atropos/staleness/``: ``mean``,
    ``max``, ``min`` and ``rows_N``, how many rows are N updates old; rows of unknown version are in none of these, and
    counted as ``atropos/rows_with/unknown_version``.
    """
    oldest = rows.non_tensor_batch["policy_version_min"]
    known = np.array([step - 1 - version for version in oldest if version is not None], dtype=int)
    metrics = {}
    if len(known) < len(rows):
        metrics["atropos/rows_with/unknown_version"] = float(len(rows) - len(known))
    if len(known):
        metrics |= {f"atropos/staleness/{name}": float(getattr(known, name)()) for name in ("mean", "max", "min")}
        ages, counts = np.unique(known, return_counts=True)
        metrics |= {f"atropos/staleness/rows_{age}": float(n) for age, n in zip(ages, counts, strict=True)}
    return metrics
