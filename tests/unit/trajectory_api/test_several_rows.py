"""Trajectories of several rows: what a group's size is, everywhere that the Trajectory API counts one."""

import sqlite3
from contextlib import closing

import orjson
import pytest

from helpers.trajectory_service import begin, join, registration
from recipe.atropos.data.scored_group import ScoredGroup, unpack
from recipe.atropos.trajectory_api import database, delivery, ingest, records, status
from recipe.atropos.trajectory_api.endpoints import RequestRefused
from recipe.atropos.trajectory_api.parsing import parse_json, parse_packed
from recipe.atropos.trajectory_api.store import DATABASE


def a_group(numbers):
    """A group of a sequence for each number, which is its trajectory and its score."""
    return {
        "tokens": [[1, 2]] * len(numbers),
        "masks": [[-100, 2]] * len(numbers),
        "scores": [float(number) for number in numbers],
        "group_overrides": {"trajectory": numbers},
    }


def test_a_groups_size_is_its_number_of_trajectories():
    plain = a_group([7, 7, 3, 7])
    assert ScoredGroup.from_mapping(plain).trajectories == 2
    for numbers, size in ((None, 4), ([1, 2, 3, 4], 4), ([-1, -1, -1, -1], 1)):
        plain["scores"], plain["group_overrides"] = [1.0] * 4, {"trajectory": numbers}
        assert ScoredGroup.from_mapping(plain).trajectories == size
    [parsed] = parse_json(orjson.dumps(a_group([7, 7, 3, 7])), several=False)
    [packed] = parse_packed(parsed.record)
    assert parsed.record == packed.record
    for one in (parsed, packed):
        assert (one.trajectories, len(one.lengths), len(one.tokens)) == (2, 4, 8)
    assert orjson.loads(unpack(parsed.record).to_json())["group_overrides"] == {"trajectory": [7, 7, 3, 7]}


async def test_batches_count_trajectories_and_split_none(service):
    await delivery.register(service, registration(4, after=0))
    env = await join(service)

    async def post(numbers, ticket=None):
        body = orjson.dumps(a_group(numbers) | {"env_id": env})
        await ingest.post(service, ingest.parse(service, body, False, False, ticket), ticket, None)

    first = await begin(service, env)  # for group_size 4
    await post([0, 0, 0, 1, 2, 3, 3], first)
    assert service.counts["larger_than_ticket"] == 0 and service.queue.sequences == 4
    for numbers in ([0, 0, 1], [5, 5, 5, 5, 5], [0, 1, 1]):  # of sizes 2, 1 and 2: the last does not fit
        await post(numbers)
    with pytest.raises(RequestRefused, match="a group of 5 sequences: the trainer's batch has 4"):
        await post([0, 1, 2, 3, 4, 4])
    service.advance()
    assert await delivery.numbered_batch(service, 0, 0, None) == 1
    assert await delivery.numbered_batch(service, 1, 0, None) == 2
    assert await delivery.numbered_batch(service, 2, 0, None) is None
    records = [await service.store.read(database.read_batch, number) for number in (1, 2)]
    found = [[unpack(record).field("group_overrides")["trajectory"] for record in batch] for batch in records]
    assert found == [[[0, 0, 0, 1, 2, 3, 3]], [[0, 0, 1], [5, 5, 5, 5, 5]]]
    assert status.diagnose(service)["queue"]["sequences"] == 2


def test_exports_and_imports_keep_trajectories(tmp_path):
    group = a_group([3, 4, 3])
    exported, store = tmp_path / "batches.jsonl", tmp_path / "store"
    exported.write_bytes(orjson.dumps({"number": 1, "batch": [group]}))
    records.import_(store, exported)
    [found] = records.read(store, 1)
    assert found.field("group_overrides") == {"trajectory": [3, 4, 3]} and found.trajectories == 2
    records.export(store, tmp_path / "again.jsonl")
    [again] = orjson.loads((tmp_path / "again.jsonl").read_bytes())["batch"]
    assert {key: again[key] for key in group} == group
    with closing(sqlite3.connect(store / DATABASE)) as connection:
        assert connection.execute("SELECT sequences, tokens FROM groups").fetchall() == [(2, 6)]


async def test_a_stock_trainer_gets_no_trajectory_of_several_rows(service):
    await delivery.register(service, registration(4))
    parse = lambda numbers: ingest.parse(service, orjson.dumps(a_group(numbers)), False, False, None)  # noqa: E731
    assert len(parse([1, 2, 3, 4])) == 1
    with pytest.raises(RequestRefused, match="5 sequences are rows of 4 trajectories: .* post one row of each"):
        parse([1, 2, 3, 4, 4])
