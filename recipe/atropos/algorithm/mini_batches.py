"""Which rows share an optimizer step, and on which rank each of them is computed.

Guarantees:

- A mini-batch is whole groups, consecutive in the order of arrival. Which ones is settled by the number of sequences
  that each group was sent with: not by ranks, lengths or padding, nor by what was dropped of a group.
- Each mini-batch has padding rows of its own, up to a size that is the same for all and that the ranks share evenly.
- Balancing moves rows between ranks, never between mini-batches.

verl gives every rank a consecutive part of the batch, and each rank cuts its part into consecutive mini-batches: so
rows are laid out rank by rank, and within a rank mini-batch by mini-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from recipe.atropos.algorithm.losses import finished_metrics
from recipe.atropos.data.rows import Row
from recipe.atropos.verl_ext.batch import (
    DataProto,
    calculate_workload,
    get_seqlen_balanced_partitions,
    left_right_2_no_padding,
    log_seqlen_unbalance,
    rename_dict,
)
from recipe.atropos.verl_ext.batch import tensordict_utils as tu
from recipe.atropos.verl_ext.ranks import RayWorkerGroup


@dataclass(frozen=True)
class Layout:
    """``rows`` as verl's ranks cut them up, None for a padding row, in ``mini_batches`` mini-batches of equal size."""

    rows: list[Row | None]
    mini_batches: int
    metrics: dict[str, float]  # verl's ``global_seqlen/``: tokens of the lightest and the heaviest rank


def mini_batch_of_groups(sizes: Sequence[int], sequences: int) -> list[int]:
    """The mini-batch of each group, in the order of arrival, so that each holds about ``sequences`` sequences.

    There are ``sum(sizes) / sequences`` of them, rounded, and at least one; each boundary is the one between two groups
    that is nearest to an even split. Groups of one size that divides ``sequences`` make mini-batches of exactly that
    many sequences.
    """
    total, start, chosen = sum(sizes), 0, []
    parts = max(1, (2 * total + sequences) // (2 * sequences))
    for size in sizes:  # the part that the group's middle falls into, in whole numbers
        chosen.append((2 * start + size) * parts // (2 * total))
        start += size
    return chosen


def lay_out(
    rows: Sequence[Row], sizes: Sequence[int], sequences: int, ranks: int, multiple_of: int = 1, balance: bool = True
) -> Layout:
    """Rows, and padding rows, in the order that makes whole groups of verl's mini-batches.

    Args:
        rows: those that are trained on; ``uid`` is the place of a row's group in ``sizes``.
        sizes: sequences that each group of the batch was sent with.
        sequences: of a mini-batch, about.
        ranks: data-parallel ones.
        multiple_of: a rank's part of a mini-batch has a multiple of so many rows (micro-batches of a fixed size).
        balance: give ranks about the same work, else rows in order.

    A mini-batch of which no row is left is not there.
    """
    chosen = mini_batch_of_groups(sizes, sequences)
    parts: dict[int, list[Row | None]] = {}
    for row in sorted(rows, key=lambda row: int(row.uid)):
        parts.setdefault(chosen[int(row.uid)], []).append(row)
    step = ranks * multiple_of
    size = -(-max(map(len, parts.values())) // step) * step
    flat = [row for part in parts.values() for row in part + [None] * (size - len(part))]
    lengths = [1 if row is None else len(row.prompt) + len(row.response) for row in flat]
    work = calculate_workload(torch.tensor(lengths)).tolist()
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(flat), size):
        if balance:
            shares = get_seqlen_balanced_partitions(work[start : start + size], k_partitions=ranks, equal_size=True)
        else:
            share = size // ranks
            shares = [range(rank * share, (rank + 1) * share) for rank in range(ranks)]
        for indices, own in zip(of_rank, shares, strict=True):
            indices += [start + i for i in own]
    return Layout(
        rows=[flat[i] for indices in of_rank for i in indices],
        mini_batches=len(parts),
        metrics=log_seqlen_unbalance(lengths, of_rank, prefix="global_seqlen"),
    )


def update_actor(
    workers: RayWorkerGroup, batch: DataProto, settings: DictConfig, mini_batches: int, ranks: int
) -> dict[str, Any]:
    """``ppo_epochs`` times an optimizer step on each mini-batch of a batch that is laid out as above.

    A mini-batch without a trained token is left out: with momentum or weight decay its step would move the policy. The
    learning rate's schedule goes on by one for the whole, as verl does it.

    Args:
        batch: with what the actor needs, and a trained token.
        settings: ``actor_rollout_ref.actor``.

    Returns:
        Metrics as verl's ``reduce_metrics`` takes them, and under ``atropos/`` the mini-batches that were left out.
    """
    kept = _has_trained_token(batch.batch["response_mask"], mini_batches, ranks)
    steps = int(kept.sum())
    lacking = mini_batches - steps
    if lacking:
        batch = batch.select_idxs(kept[None, :, None].expand(ranks, -1, len(batch) // kept.numel() // ranks).flatten())
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(
        data,
        calculate_entropy=settings.calculate_entropy or settings.entropy_coeff != 0.0,
        mini_batch_size=len(batch) // steps,
        epochs=settings.ppo_epochs,
        seed=settings.data_loader_seed,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    metrics = finished_metrics(rename_dict(tu.get(workers.update_actor(data), "metrics"), "actor/"))
    metrics["perf/mfu/actor"] = metrics.pop("actor/mfu")
    metrics["atropos/mini_batches"] = [steps]
    if lacking:
        metrics["atropos/mini_batches_without_token"] = [lacking]
    return metrics


def _has_trained_token(response_mask: torch.Tensor, mini_batches: int, ranks: int) -> torch.Tensor:
    """(M,) bool for each mini-batch; ``response_mask`` is (B, R), laid out as above."""
    return response_mask.bool().any(-1).view(ranks, mini_batches, -1).any(-1).any(0)


def micro_batch_size(actor_rollout_ref: Any) -> int:
    """What the number of a rank's rows must be a multiple of: 1, but for micro-batches of fixed sizes."""
    actor, rollout, ref = actor_rollout_ref.actor, actor_rollout_ref.rollout, actor_rollout_ref.ref
    fixed = [
        (actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu),
        (rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size_per_gpu),
        (ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu),
    ]
    return math.lcm(*(size for dynamic, size in fixed if not dynamic and size))
