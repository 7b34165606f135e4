"""Metrics of a step's batch, over all environments and per environment."""

import numpy as np
import torch
from omegaconf import DictConfig

from recipe.atropos.algorithm.trajectories import shares_of, trajectories_of
from recipe.atropos.data.rows import environment_name
from recipe.atropos.verl_ext.algorithm import agg_loss
from recipe.atropos.verl_ext.batch import DataProto

_TURNS = 8  # of each the share of credit is told


def batch_metrics(rows: DataProto) -> dict[str, float]:
    """Return metrics of the trained rows (no padding rows), which must have ``advantages``.

    Overall under ``atropos/``, and per environment under ``atropos/ENV/`` (name, else ``env_ID``, else ``unknown``):

    - ``mean_score`` over trajectories; ``mean_raw_score``, before a reward bridge shaped it; ``raw_score_min`` and
      ``raw_score_max``, the lowest and highest of these; ``mean_advantage`` over trained tokens; ``trained_tokens``,
      their number; ``response_length``, mean tokens per row from the first trained token on, including environment
      tokens between turns;
    - ``groups``, their number; ``zero_signal_groups`` and ``zero_signal_share``, the number and share of groups whose
      advantages are all 0 (before normalization, which would shift them);
    - ``num_environments``, overall only;
    - ``credit/last_turn_share``, ``credit/turn_share/N`` and ``credit/outcome_correlation``, of rows with a rule of
      credit: ``_credit_metrics``.
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
    first = np.zeros(len(rows), dtype=bool)  # of the rows of a trajectory
    first[np.unique(trajectories_of(rows), return_index=True)[1]] = True

    credited = np.array([rule is not None for rule in rows.non_tensor_batch["credit"]])

    def describe(chosen: np.ndarray) -> dict[str, float]:
        all_groups, with_signal = set(groups[chosen]), set(groups[chosen & signal])
        silent = len(all_groups) - len(with_signal)
        return {
            "mean_score": float(scores[chosen & first].mean()),
            "mean_raw_score": float(raw_scores[chosen & first].mean()),
            "raw_score_min": float(raw_scores[chosen].min()),
            "raw_score_max": float(raw_scores[chosen].max()),
            "mean_advantage": float(advantages[chosen].sum() / max(1, trained[chosen].sum())),
            "trained_tokens": float(trained[chosen].sum()),
            "response_length": float(lengths[chosen].mean()),
            "groups": float(len(all_groups)),
            "zero_signal_groups": float(silent),
            "zero_signal_share": silent / len(all_groups),
            **_credit_metrics(rows, advantages, chosen & credited),
        }

    environments = sorted(set(names))
    metrics = {f"atropos/{key}": value for key, value in describe(np.ones(len(rows), dtype=bool)).items()}
    metrics["atropos/num_environments"] = float(len(environments))
    for name in environments:
        metrics |= {f"atropos/{name}/{key}": value for key, value in describe(names == name).items()}
    return metrics


def _credit_metrics(rows: DataProto, advantages: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
    """Return how credit is spread over the rows that are ``chosen``, (B,) bool; nothing where it is not defined.

    ``advantages``, (B, R), are 0 on what is not trained.

    - ``credit/last_turn_share``: the part of the sum of absolute advantages that is on trajectories' last turns; that
      of outcome GRPO is about their share of tokens, and where it is near 1 at lam 0 the values say nothing, if
      trajectories have several turns (else it is 1);
    - ``credit/turn_share/N``: the part that is on trajectories' turn N, for the first 8; later ones have the rest. A
      branch of a turn tree is counted from the first turn of its own;
    - ``credit/outcome_correlation``: of a row's mean advantage with its score less the mean of its group: values that
      contradict outcomes lower it; that of outcome GRPO is near 1.
    """
    sampled = rows.batch.get("sampled_mask", rows.batch["response_mask"]).bool().numpy()  # before any rejection
    turns = (np.diff(sampled, axis=-1, prepend=False) & sampled).cumsum(-1)  # of each token, and last, their number
    trajectories, places, counts = trajectories_of(rows), rows.non_tensor_batch["sequence"], turns[:, -1].copy()
    same = trajectories == trajectories[:, None]
    turns += (same & (places < places[:, None])) @ counts[:, None]  # those of its trajectory's earlier rows come first
    last_rows = ~(same & (places > places[:, None])).any(-1)
    ends = (turns == turns[:, -1:]) & last_rows[:, None]
    sizes, metrics = np.abs(advantages[chosen]), {}
    if sizes.any():
        metrics["credit/last_turn_share"] = float(sizes[ends[chosen]].sum() / sizes.sum())
        for turn in range(1, min(_TURNS, turns[chosen].max()) + 1):
            metrics[f"credit/turn_share/{turn}"] = float(sizes[turns[chosen] == turn].sum() / sizes.sum())
    scores, groups = rows.batch["token_level_scores"].sum(-1).numpy()[chosen], rows.non_tensor_batch["uid"][chosen]
    outcomes = np.array([score - scores[groups == group].mean() for score, group in zip(scores, groups, strict=True)])
    means = advantages[chosen].sum(-1) / rows.batch["response_mask"].numpy()[chosen].sum(-1).clip(1)
    if len(means) and np.std(means) > 0 and np.std(outcomes) > 0:
        metrics["credit/outcome_correlation"] = float(np.corrcoef(means, outcomes)[0, 1])
    return metrics


def mean_entropy(entropies: torch.Tensor, batch: DataProto, actor: DictConfig) -> float:
    """Return the entropy of trained tokens in nats, (B, R) at all, aggregated like the loss of ``actor``."""
    shares = shares_of(batch)
    if actor.loss_agg_mode == "seq-mean-token-mean":
        entropies = entropies * shares[:, None]
    return agg_loss(
        loss_mat=entropies,
        loss_mask=batch.batch["response_mask"],
        global_batch_size=round(shares.sum().item()),
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    ).item()


def staleness_metrics(rows: DataProto, step: int) -> dict[str, float]:
    """Return staleness: updates between a row's oldest weights and the policy that update ``step`` starts from.

    It includes queue time, because versions are compared when a row is trained on. Under ``atropos/staleness/``:
    ``mean``, ``max``, ``min`` and ``rows_N``, the number of rows that are N updates old. Rows of unknown version are
    only counted, as ``atropos/rows_with/unknown_version``.
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
