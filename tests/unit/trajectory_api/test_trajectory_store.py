"""The store keeps what it has answered, through full disks, restarts and resets; one process at a time."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from orjson import dumps

from helpers.disk import size_limit
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.trajectory_api import database, records
from recipe.atropos.trajectory_api.__main__ import main
from recipe.atropos.trajectory_api.batching import Entry
from recipe.atropos.trajectory_api.store import TrajectoryStore, TrajectoryStoreError


async def append(store, *ids, padding=b"", **names):
    records = [b"record %d" % id + padding for id in ids]
    await store.write(database.append, [Entry(id, None, 2, 20, id) for id in ids], records, **names)


@contextlib.asynccontextmanager
async def open_store(folder, durability="normal"):
    """Yield a store and what it loaded."""
    store = TrajectoryStore(folder, durability)
    try:
        async with asyncio.timeout(60):
            yield store, store.load()
    finally:
        store.close()


@pytest.fixture
async def store(tmp_path):
    async with open_store(tmp_path) as (store, _):
        yield store


@pytest.mark.parametrize("durability", ["none", "normal", "full"])
async def test_what_was_written_is_loaded(tmp_path, durability):
    async with open_store(tmp_path, durability) as (store, _):
        await store.write(database.write_environment, 0, {"name": "one"})
        await store.write(database.begin_ticket, 7, 0, 4, 3)
        await store.write(database.begin_ticket, 8, 0, 4, 3)
        await append(store, 1, 2, digests={"post": 2})
        await append(store, 3, ticket=7)
        await store.write(database.cut, 1, [2])
        await store.write(database.write_run, epoch=4)
    async with open_store(tmp_path, durability) as (store, loaded):
        assert [entry.id for entry in loaded.entries if not entry.is_open] == [1, 3] and loaded.last_id == 3
        assert loaded.run | {"epoch": 4, "last": 1} == loaded.run
        [ticket] = [entry for entry in loaded.entries if entry.is_open]
        assert (ticket.number, ticket.env, ticket.size, ticket.due) == (8, 0, 4, 3)
        assert loaded.posts == {"post": 2}
        assert loaded.environments == {0: {"name": "one"}}
        assert await store.read(database.read_batch, 1) == [b"record 2"]


async def test_batches_keep_their_order_and_return_in_that_of_groups(store):
    """Where they are queued again; those that are deleted leave the others."""
    await append(store, 1, 2, 3, 4, 5)
    for number, ids in enumerate(([2], [4, 1], [3]), start=1):
        await store.write(database.cut, number, ids)
    assert await store.read(database.read_batch, 2) == [b"record 4", b"record 1"]
    assert await store.read(database.read_batch, 4) == []
    assert await store.write(database.delete_batches, 1, 1), "more may be left"
    assert not await store.write(database.delete_batches, 1, 1)
    assert [number for number, *_ in await store.read(database.list_batches)] == [2, 3]
    assert await store.read(database.read_record, 2) is None
    assert [entry.id for entry in await store.write(database.register, last=1)] == [1, 3, 4]
    assert [entry.id for entry in await store.read(database.queued)] == [1, 3, 4, 5]
    assert (await store.read(database.read_run))["last"] == 1


async def test_a_full_disk_holds_writes_until_there_is_room(store, tmp_path):
    await append(store, 1)
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count = {pages}")
    held = [asyncio.ensure_future(append(store, id, padding=bytes(20_000))) for id in range(2, 200)]
    while not store.trouble:
        await asyncio.sleep(0.01)
    assert "full" in store.trouble and str(tmp_path) in store.trouble
    assert len(await store.read(database.queued)) == 1, "reading goes on"
    store.connection.execute("PRAGMA max_page_count = 100000")
    await asyncio.gather(*held)
    assert not store.trouble
    assert len(await store.read(database.queued)) == 199


async def test_a_reset_begins_anew_and_deletes_no_record(tmp_path):
    async with open_store(tmp_path) as (store, _):
        await append(store, 1, 2, digests={"post": 2})
        await store.write(database.cut, 1, [1])
        await store.write(database.write_environment, 0, {"name": "one"})
        await store.write(database.begin_ticket, 7, 0, 4, 3)
        loaded = await store.write(database.reset, epoch=3)
        assert loaded == database.Loaded({"epoch": 3, "format": database.FORMAT}, {}, [], 2, {})
        assert await store.read(database.read_batch, 1) == [] and await store.read(database.list_batches) == []
        await append(store, 3)
        await store.write(database.cut, 1, [3])
    async with open_store(tmp_path) as (store, loaded):
        assert (loaded.run["epoch"], loaded.entries, loaded.last_id) == (3, [], 3)
        assert await store.read(database.read_batch, 1) == [b"record 3"]
        assert [await store.read(database.read_record, id) for id in (1, 2)] == [b"record 1", b"record 2"]


def test_files_that_cannot_be_used_are_named_in_a_line(tmp_path):
    """Of the command line's import and export; after a disk that is full, an import may be repeated."""
    data, exported, other = (str(tmp_path / name) for name in ("data", "exported", "other"))
    group = {"tokens": [list(range(10_000, 30_000))], "masks": [list(range(10_000, 30_000))], "scores": [1.0]}
    Path(exported).write_bytes(b"".join(b'{"number":%d,"batch":[%b]}\n' % (n, dumps(group)) for n in range(1, 20)))
    with pytest.raises(SystemExit, match="error: .*no-file"):
        main(["import", data, str(tmp_path / "no-file")])
    with size_limit(600_000), pytest.raises(SystemExit, match="error: .*trajectories.db: disk I/O error"):
        main(["import", data, exported])
    main(["import", data, exported])
    with pytest.raises(SystemExit, match=f"error: .*{tmp_path}"):
        main(["export", data, str(tmp_path)])
    main(["export", data, other])
    assert len(Path(other).read_bytes().splitlines()) == 19


async def test_a_folder_is_used_by_one_server(tmp_path):
    async with open_store(tmp_path) as (store, _):
        with pytest.raises(TrajectoryStoreError, match="another server"):
            TrajectoryStore(tmp_path)
    async with open_store(tmp_path) as (store, _):
        await append(store, 1)


async def test_folders_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="data-dir"):
        TrajectoryStore(tmp_path / "file" / "x")
    async with open_store(tmp_path / "other") as (store, _):
        await store.write(database.write_run, format=1)
    for refuses in (TrajectoryStore, records.list_all):
        with pytest.raises(TrajectoryStoreError, match=f"^{tmp_path}/other/trajectories.db has format 1, and"):
            refuses(tmp_path / "other")
