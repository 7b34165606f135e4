"""The store keeps what it has answered, through full disks, restarts and archives; one process at a time."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.batching import Entry
from recipe.atropos.trajectory_api.store import Store, TrajectoryStoreError


async def append(store, *ids, padding=b"", **names):
    records = [b"record %d" % id + padding for id in ids]
    await store.write(database.append, [Entry(id, None, 2, 20, id) for id in ids], records, **names)


@contextlib.asynccontextmanager
async def open_store(folder, durability="normal"):
    """Yield a store and what it loaded."""
    store = Store(folder, durability)
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
        await append(store, 1, 2, key="post")
        await append(store, 3, ticket=7)
        await store.write(database.cut, 1, [2])
        await store.write(database.count, {"received": 2})
        await store.write(database.count, {"received": 1})
        await store.write(database.write_run, epoch=4)
    async with open_store(tmp_path, durability) as (store, loaded):
        assert [entry.id for entry in loaded.entries if not entry.is_open] == [1, 3] and loaded.last_id == 3
        assert loaded.run | {"epoch": 4, "last": 1} == loaded.run
        [ticket] = [entry for entry in loaded.entries if entry.is_open]
        assert (ticket.number, ticket.env, ticket.size, ticket.due) == (8, 0, 4, 3)
        assert loaded.posts == {"post": 2}
        assert (loaded.counts, loaded.environments) == ({"received": 3}, {0: {"name": "one"}})
        assert await store.read(database.read_batch, 1) == [b"record 2"]


async def test_batches_keep_the_order_that_they_were_cut_in(store):
    await append(store, 1, 2, 3, 4)
    await store.write(database.cut, 1, [3, 1])
    assert await store.read(database.read_batch, 1) == [b"record 3", b"record 1"]
    assert await store.read(database.read_batch, 2) == []


async def test_batches_that_are_queued_again_return_in_order(store):
    await append(store, 1, 2, 3, 4, 5)
    for number, ids in enumerate(([2], [4, 1], [3]), start=1):
        await store.write(database.cut, number, ids)
    assert [entry.id for entry in await store.write(database.register, 1, last=1)] == [1, 3, 4]
    assert [entry.id for entry in await store.read(database.queued)] == [1, 3, 4, 5]
    assert (await store.read(database.read_run))["last"] == 1


async def test_deleted_batches_leave_the_others(store):
    await append(store, 1, 2, 3)
    for number in (1, 2, 3):
        await store.write(database.cut, number, [number])
    assert await store.write(database.delete_batches, 2, 1)
    while await store.write(database.delete_batches, 2):
        pass
    assert [batch["number"] for batch in await store.read(database.list_batches)] == [3]
    assert await store.read(database.read_record, 1) is None


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


async def test_an_archive_keeps_everything_and_begins_anew(tmp_path):
    async with open_store(tmp_path) as (store, _):
        await append(store, 1)
        await store.write(database.cut, 1, [1])
        assert await store.read(database.read_batch, 1)
        await store.archive()
        await append(store, 1)
        assert await store.read(database.read_batch, 1) == []
        assert len(await store.read(database.queued)) == 1
        await store.archive()
        await store.archive()  # there is nothing to keep
    archived = [database.connect_to_read(path) for path in sorted((tmp_path / "archive").iterdir())]
    assert [database.read_batch(connection, 1) for connection in archived] == [[b"record 1"], []]


async def test_an_archive_that_fails_changes_nothing(tmp_path):
    async with open_store(tmp_path) as (store, _):
        await append(store, 1)
        (tmp_path / "archive").write_text("no folder")
        with pytest.raises(FileExistsError):
            await store.archive(epoch=3)
        assert [entry.id for entry in await store.read(database.queued)] == [1]
        (tmp_path / "archive").unlink()
        (tmp_path / "archive").mkdir()
        with connect_elsewhere(tmp_path) as reader:
            with pytest.raises(OSError, match="another process reads it"):
                await asyncio.wait_for(store.archive(epoch=3), 60)
            assert len(reader.execute("SELECT * FROM groups").fetchall()) == 1
        await append(store, 2)
        assert [entry.id for entry in await store.read(database.queued)] == [1, 2]
        await store.archive(epoch=3)
        assert await store.read(database.queued) == [] and (await store.read(database.read_run))["epoch"] == 3
    archived = database.connect_to_read(tmp_path / "archive/0001.db")
    assert [entry.id for entry in database.queued(archived)] == [1, 2]


@contextlib.contextmanager
def connect_elsewhere(folder):
    """A connection in the midst of reading, which the write-ahead log must be kept for."""
    with contextlib.closing(database.connect_to_read(folder / "trajectories.db")) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT * FROM groups").fetchall()
        yield connection


@pytest.mark.parametrize("step", ["connect", "rename"])
async def test_an_archive_that_fails_midway_is_undone(store, tmp_path, monkeypatch, step):
    """At the new database, after the old one was moved."""
    await append(store, 1)
    with monkeypatch.context() as broken:
        opened, renamed = database.connect, Path.rename

        def connect(path, durability):
            if path.name == "trajectories.db" and list((tmp_path / "archive").iterdir()):
                opened(path, durability).close()
                raise sqlite3.OperationalError("disk I/O error")
            return opened(path, durability)

        def rename(path, to):
            if path.name == "fresh.db":
                raise PermissionError("denied")
            return renamed(path, to)

        broken.setattr(*((database, "connect", connect) if step == "connect" else (Path, "rename", rename)))
        with pytest.raises((sqlite3.OperationalError, PermissionError)):
            await store.archive(epoch=3)
    await append(store, 2)
    assert [entry.id for entry in await store.read(database.queued)] == [1, 2]
    assert not list((tmp_path / "archive").iterdir())


async def test_a_kill_amid_an_archive_leaves_the_new_store(tmp_path):
    """At the worst moment: the old database has its new name, and the new one not yet."""
    async with open_store(tmp_path) as (store, _):
        await append(store, 1)
        store._prepare({"epoch": 3})
    (tmp_path / "trajectories.db").rename(tmp_path / "archive/0001.db")
    async with open_store(tmp_path) as (_, loaded):
        assert loaded.run["epoch"] == 3 and not loaded.entries


async def test_the_size_is_told_while_the_store_is_moved(store, tmp_path, monkeypatch):
    assert store.size() > 0
    store.path = tmp_path / "moved" / "trajectories.db"
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as it was when it was looked for
    assert store.size() == 0
    monkeypatch.undo()
    store.path = tmp_path / "trajectories.db"


async def test_a_folder_is_used_by_one_server(tmp_path):
    async with open_store(tmp_path) as (store, _):
        with pytest.raises(TrajectoryStoreError, match="another server"):
            Store(tmp_path)
    async with open_store(tmp_path) as (store, _):
        await append(store, 1)


async def test_folders_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="data-dir"):
        Store(tmp_path / "file" / "x")
    with pytest.raises(ConfigurationError, match="durability=fast"):
        Store(tmp_path, "fast")
    async with open_store(tmp_path / "other") as (store, _):
        await store.write(database.write_run, format=99)
    with pytest.raises(TrajectoryStoreError, match="format 99"):
        Store(tmp_path / "other")
