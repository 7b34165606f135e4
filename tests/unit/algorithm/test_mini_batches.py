"""Which rows share an optimizer step: whole groups, whatever the ranks, the lengths and what was dropped."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.atropos.algorithm.mini_batches import (
    lay_out,
    micro_batch_size,
    mini_batch_of_groups,
    update_actor,
    without_padding,
)
from recipe.atropos.data.data_proto import rows_to_data_proto
from recipe.atropos.data.rows import Row, RowLimits
from recipe.atropos.verl_ext.engines import CompactBatches


def some_rows(sizes, lengths, dropped=()):
    """Rows of groups of these sizes, numbered by their first token, without those numbered in ``dropped``."""
    uids = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    rows = []
    for i, (uid, length) in enumerate(zip(uids, lengths, strict=False)):
        if i not in dropped:
            rows.append(Row(np.array([i]), np.arange(length), np.ones(length, dtype=bool), 0.0, uid))
    return rows


def members(rows, mini_batches, ranks):
    """The numbers of the rows of each mini-batch, as verl's ranks cut the batch."""
    share = len(rows) // ranks // mini_batches
    parts = [set() for _ in range(mini_batches)]
    for at, row in enumerate(rows):
        if row is not None:
            parts[at // share % mini_batches].add(int(row.prompt[0]))
    return parts


@pytest.mark.parametrize(
    ("sizes", "sequences", "expected"),
    [
        ([8] * 4, 16, [0, 0, 1, 1]),
        ([8] * 4, 32, [0, 0, 0, 0]),
        ([8] * 4, 8, [0, 1, 2, 3]),
        ([8, 4, 4, 4, 8, 4], 16, [0, 0, 0, 1, 1, 1]),
        ([4, 8, 4, 16], 16, [0, 0, 0, 1]),
        ([2, 2, 2, 12, 2], 10, [0, 0, 0, 1, 1]),
        ([8, 8, 8, 1], 8, [0, 1, 2, 2]),  # a group that is none counts as one sequence
        ([3], 16, [0]),
        ([8] * 3, 16, [0, 1, 1]),  # half a mini-batch more is one more
        ([7, 8, 8], 16, [0, 0, 0]),
    ],
    ids=str,
)
def test_mini_batch_of_groups_by_hand(sizes, sequences, expected):
    assert mini_batch_of_groups(sizes, sequences) == expected


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=9),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
def test_mini_batches_are_whole_groups_for_any_ranks(sizes, sequences, ranks, multiple_of, balance, data):
    total = sum(sizes)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=total, max_size=total))
    dropped = data.draw(st.sets(st.integers(0, total - 1), max_size=total - 1))
    rows = some_rows(sizes, lengths, dropped)
    ordered, mini_batches, _ = lay_out(rows, sizes, sequences, ranks, multiple_of, balance)
    parts = members(ordered, mini_batches, ranks)
    assert sum(map(len, parts)) == len(rows) and set().union(*parts) == set(range(total)) - dropped
    assert len(ordered) % (ranks * multiple_of * mini_batches) == 0

    # Of the same groups, by the order of arrival alone: each mini-batch is what is left of consecutive whole groups.
    of_group = np.repeat(mini_batch_of_groups(sizes, sequences), sizes)
    assert list(of_group) == sorted(of_group)
    expected = [{i for i in range(total) if of_group[i] == m and i not in dropped} for m in range(total)]
    assert parts == [part for part in expected if part]
    longest = max(map(len, parts))
    step = ranks * multiple_of
    assert len(ordered) == -(-longest // step) * step * mini_batches, "no more padding than needed"


def test_mini_batches_are_balanced_over_the_ranks_within_each():
    lengths = [100, 1, 1, 100, 100, 100, 1, 1]
    rows, mini_batches, metrics = lay_out(some_rows([4, 4], lengths), [4, 4], 4, ranks=2)
    tokens = [0 if row is None else len(row.response) for row in rows]
    assert mini_batches == 2 and [sum(tokens[i : i + 2]) for i in range(0, 8, 2)] == [101] * 4
    assert metrics["global_seqlen/balanced_min"] == metrics["global_seqlen/balanced_max"] == 206
    in_order, *_ = lay_out(some_rows([4, 4], lengths), [4, 4], 4, ranks=2, balance=False)
    assert [int(row.prompt[0]) for row in in_order] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_mini_batches_padding_rows_stand_in_their_places():
    rows, *_ = lay_out(some_rows([3, 1], [4, 5, 6, 7]), [3, 1], 2, ranks=2)
    batch = rows_to_data_proto(rows, RowLimits(15, pad_token_id=0))
    padding = batch.non_tensor_batch["is_padding"]
    assert padding.tolist() == [row is None for row in rows] and padding.sum() == 4
    assert (
        not batch.batch["response_mask"][padding].any() and (batch.batch["attention_mask"][padding].sum(-1) == 1).all()
    )
    assert len(set(batch.non_tensor_batch["uid"][padding])) == 4
    assert not batch.non_tensor_batch["zero_advantage"].any(), "unless a row says so"
    for i, row in enumerate(rows):
        assert row is None or batch.batch["responses"][i, : len(row.response)].tolist() == row.response.tolist()


class Workers:
    """In the place of the ranks: what the actor is told."""

    def update_actor(self, data):
        keys = ("calculate_entropy", "mini_batch_size", "epochs", "dataloader_kwargs")
        self.told = {key: tu.get(data, key) for key in keys}
        self.first_tokens = [ids[0].item() for ids in data["input_ids"].unbind()]
        return tu.get_tensordict({}, {"metrics": {"loss": [0.0], "mfu": 0.5}})


@pytest.mark.parametrize(
    ("asked", "coefficient", "calculated"),
    [(False, 0.0, False), (True, 0.0, True), (False, 0.1, True), (False, 1.0, True), (False, -0.1, True)],
)
def test_mini_batches_calculate_the_entropy_where_it_is_used(asked, coefficient, calculated):
    rows = some_rows([2, 2], [3, 4, 5, 6])
    batch = rows_to_data_proto(rows, RowLimits(12, 0))
    settings = OmegaConf.create(
        {"calculate_entropy": asked, "entropy_coeff": coefficient, "ppo_epochs": 3, "data_loader_seed": 1}
    )
    workers = Workers()
    metrics = update_actor(workers, batch, torch.ones(4).bool(), settings, mini_batches=2, ranks=1)
    in_order = {"dataloader_kwargs": {"shuffle": False}}
    assert workers.told == {"calculate_entropy": calculated, "mini_batch_size": 2, "epochs": 3} | in_order
    assert workers.first_tokens == [0, 1, 2, 3]
    assert metrics == {"actor/loss": [0.0], "perf/mfu/actor": 0.5, "atropos/mini_batches": [2]}


def test_mini_batches_of_which_nothing_is_learned_are_left_out():
    """Of three on two ranks, the second; the others keep their places."""
    batch = rows_to_data_proto(some_rows([12], [3] * 12), RowLimits(12, 0))
    learned = torch.ones(12, dtype=torch.bool)
    learned[[0, 1, 2, 3, 6, 8, 9]] = False  # of the first, the last row of the second rank is left
    workers, settings = Workers(), {"calculate_entropy": True, "ppo_epochs": 1, "data_loader_seed": 1}
    metrics = update_actor(workers, batch, learned, OmegaConf.create(settings), mini_batches=3, ranks=2)
    assert workers.first_tokens == [0, 1, 4, 5, 6, 7, 10, 11] and workers.told["mini_batch_size"] == 4
    assert metrics["atropos/mini_batches"] == [2] and metrics["atropos/mini_batches_without_token"] == [1]


class Inputs:
    """In the place of verl's engine: what the model would be given."""

    def prepare_model_inputs(self, micro_batch):
        return {key: micro_batch[key] for key in ("input_ids", "position_ids")}


def test_batches_without_padding_are_verls():
    """The tokens, in verl's own order, of rows that are padded on both sides, and of a padding row; in the engine their
    positions too.
    """
    batch = rows_to_data_proto(some_rows([2, 2], [3, 4, 5, 6]), RowLimits(12, 0), multiple_of=5)
    shape = (*batch.batch["input_ids"].shape, 2)
    batch.batch["teacher_ids"], batch.batch["teacher_logprobs"] = torch.randint(9, shape), torch.randn(shape)
    found, expected = without_padding(batch), left_right_2_no_padding(batch.to_tensordict())
    for key in ("input_ids", "teacher_ids", "teacher_logprobs"):
        assert torch.equal(found[key].values(), expected[key].values()), key
        assert found[key].offsets().tolist() == expected[key].offsets().tolist()
    for key in ("max_seq_len", "max_response_len"):
        assert tu.get(found, key) == tu.get(expected, key)
    for key in ("attention_mask", "response_mask", "loss_mask"):
        assert torch.equal(found[key], expected[key].bool())
    engine = type("Engine", (CompactBatches, Inputs), {})()
    for key, values in engine.prepare_model_inputs(found).items():
        assert torch.equal(values.values(), expected[key].values()) and values.dtype == torch.int64, key
        assert values.offsets().tolist() == expected[key].offsets().tolist()


@pytest.mark.parametrize(
    ("dynamic", "sizes", "multiple"),
    [
        ((True, True, True), (None, None, None), 1),
        ((True, True, True), (4, 6, 10), 1),
        ((False, True, True), (4, 6, 10), 4),
        ((False, False, True), (4, 6, None), 12),
        ((False, False, False), (4, 6, 10), 60),
        ((False, False, False), (4, 4, None), 4),  # no reference policy
    ],
    ids=str,
)
def test_micro_batches_of_fixed_sizes_divide_a_ranks_rows(dynamic, sizes, multiple):
    actor, rollout, ref = zip(dynamic, sizes, strict=True)
    settings = {"actor": dict(zip(("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"), actor, strict=True))}
    names = ("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu")
    settings |= {"rollout": dict(zip(names, rollout, strict=True)), "ref": dict(zip(names, ref, strict=True))}
    assert micro_batch_size(OmegaConf.create(settings)) == multiple
