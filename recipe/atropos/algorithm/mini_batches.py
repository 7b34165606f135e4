"""Assign rows to mini-batches, each of which is one optimizer step, and to ranks.

Guarantees:

- A mini-batch consists of whole groups, consecutive in order of arrival. The split depends only on the number of
  trajectories that each group was sent with, not on their rows, ranks, lengths, padding or dropped rows.
- All mini-batches are padded to the same size, which divides evenly among the ranks.
- Balancing moves rows between ranks, never between mini-batches.

verl gives every rank a contiguous slice of the batch, and each rank splits its slice into contiguous mini-batches. So
rows are ordered by rank, and within a rank by mini-batch.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from recipe.atropos.algorithm.losses import finished_metrics
from recipe.atropos.data.rows import Row
from recipe.atropos.verl_ext.batch import (
    DataProto,
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rename_dict,
)
from recipe.atropos.verl_ext.batch import tensordict_utils as tu
from recipe.atropos.verl_ext.ranks import RayWorkerGroup


def mini_batch_of_groups(sizes: Sequence[int], sequences: int) -> list[int]:
    """Return the mini-batch index of each group, in order of arrival, for about ``sequences`` sequences in each.

    There are ``sum(sizes) / sequences`` mini-batches, rounded, and at least one; each boundary is the group boundary
    nearest to an even split. If all groups have one size that divides ``sequences``, which divides the total, each
    mini-batch has exactly ``sequences``.
    """
    total, start, chosen = sum(sizes), 0, []
    parts = max(1, (2 * total + sequences) // (2 * sequences))
    for size in sizes:  # the part that holds the group's midpoint, in integer arithmetic
        chosen.append((2 * start + size) * parts // (2 * total))
        start += size
    return chosen


def lay_out(
    rows: Sequence[Row], sizes: Sequence[int], sequences: int, ranks: int, multiple_of: int = 1, balance: bool = True
) -> tuple[list[Row | None], int, dict[str, float]]:
    """Order rows, with padding rows, so that verl's mini-batches consist of whole groups.

    Returns the rows by rank, then by mini-batch (None is a padding row), the number of mini-batches, all of one size,
    and verl's metrics ``global_seqlen/``, the tokens of the lightest and the heaviest rank.

    Args:
        rows: the rows to train on; ``uid`` is the index of a row's group in ``sizes``.
        sizes: number of trajectories that each group of the batch was sent with.
        sequences: approximate number of trajectories in a mini-batch.
        ranks: number of data-parallel ranks.
        multiple_of: number that must divide a rank's rows in a mini-batch (for micro-batches of a fixed size).
        balance: give ranks about the same amount of work; if false, keep rows in order.

    A mini-batch with no rows left is omitted.
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
    ordered = [flat[i] for indices in of_rank for i in indices]
    return ordered, len(parts), log_seqlen_unbalance(lengths, of_rank, prefix="global_seqlen")


def update_actor(
    workers: RayWorkerGroup,
    batch: DataProto,
    learned: torch.Tensor,
    settings: DictConfig,
    mini_batches: int,
    ranks: int,
) -> dict[str, Any]:
    """Run ``ppo_epochs`` epochs, with one optimizer step per mini-batch, on a batch ordered by ``lay_out``.

    A mini-batch of which nothing is learned is skipped: with momentum or weight decay its step would move the policy.
    The learning-rate schedule advances once for the whole batch, as in verl.

    Args:
        batch: has the tensors that the actor needs.
        learned: (B,) bool, the rows that the loss depends on, one at least.
        settings: ``actor_rollout_ref.actor``.

    Returns:
        Metrics for verl's ``reduce_metrics``, with the numbers of used and skipped mini-batches under ``atropos/``.
    """
    kept = learned.view(ranks, mini_batches, -1).any(-1).any(0)  # of mini-batches
    steps = int(kept.sum())
    lacking = mini_batches - steps
    if lacking:
        batch = batch.select_idxs(kept[None, :, None].expand(ranks, -1, len(batch) // kept.numel() // ranks).flatten())
    data = without_padding(batch)
    tu.assign_non_tensor(
        data,
        calculate_entropy=settings.calculate_entropy or settings.entropy_coeff != 0.0,
        mini_batch_size=len(batch) // steps,
        epochs=settings.ppo_epochs,
        dataloader_kwargs={"shuffle": False},
    )
    metrics = finished_metrics(rename_dict(tu.get(workers.update_actor(data), "metrics"), "actor/"))
    metrics["perf/mfu/actor"] = metrics.pop("actor/mfu")
    metrics["atropos/mini_batches"] = [steps]
    if lacking:
        metrics["atropos/mini_batches_without_token"] = [lacking]
    return metrics


def without_padding(batch: DataProto) -> TensorDict:
    """Return a batch as verl's engine reads it, in as few bytes as it can be: Ray copies them several times.

    That is what verl's ``left_right_2_no_padding`` returns, without its loop over rows, and with these changes:
    ``input_ids`` are int32, and ``position_ids`` are left out, until ``CompactBatches``; masks are bools; ``prompts``
    and ``responses``, whose tokens ``input_ids`` has, are masks too, since only their widths are read; what verl adds
    to find a token in the padded batch, of which every rank would get all, is left out.
    """
    data = batch.to_tensordict()
    mask = data["attention_mask"] = data["attention_mask"].bool()
    data["response_mask"] = data["loss_mask"] = data["response_mask"].bool()
    data["prompts"], data["responses"] = mask.split([data["prompts"].shape[1], data["responses"].shape[1]], dim=1)
    tokens, lengths = mask.flatten().nonzero().squeeze(-1), mask.sum(-1)
    data["input_ids"] = data["input_ids"].int()
    for key in {"input_ids", "teacher_ids", "teacher_logprobs"} & set(data.keys()):
        data[key] = torch.nested.nested_tensor_from_jagged(data[key].flatten(0, 1)[tokens], lengths=lengths)
    tu.assign_non_tensor(data, max_seq_len=mask.shape[1], max_response_len=data["response_mask"].shape[1])
    return data


def micro_batch_size(actor_rollout_ref: Any) -> int:
    """Return the number that must divide a rank's row count: 1, unless micro-batches have fixed sizes."""
    actor, rollout, ref = actor_rollout_ref.actor, actor_rollout_ref.rollout, actor_rollout_ref.ref
    fixed = [
        (actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu),
        (rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size_per_gpu),
        (ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu),
    ]
    return math.lcm(*(size for dynamic, size in fixed if not dynamic and size))
