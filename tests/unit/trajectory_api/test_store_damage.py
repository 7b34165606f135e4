"""What is damaged on the disk is named and never served; what cannot be stored ends the server, with its reason."""

import asyncio
import contextlib
import sqlite3

import pytest
from aiohttp.test_utils import RawTestServer

from helpers.disk import flip, size_limit
from helpers.trajectory_service import in_service, open_service, registration
from recipe.atropos.data import scored_group
from recipe.atropos.data.scored_group import ScoredGroup
from recipe.atropos.trajectory_api import app, database, delivery, ingest, records
from recipe.atropos.trajectory_api import service as service_module
from recipe.atropos.trajectory_api.app import Api
from recipe.atropos.trajectory_api.batching import Entry
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.trajectory_api.database import DamagedRecord, TrajectoryStoreError
from recipe.atropos.trajectory_api.parsing import parse_packed
from recipe.atropos.trajectory_api.store import TrajectoryStore

DATABASE = "trajectories.db"


def record(number):
    group = {"tokens": [[1, 2, 3]] * 4, "masks": [[-100, 2, 3]] * 4, "scores": [float(number)] * 4}
    return ScoredGroup.from_mapping(group).pack()


async def fill(service, groups=20):
    """Four sequences a group, 40 a batch; the first batch is cut."""
    await delivery.register(service, registration(40, after=0))
    for number in range(1, groups + 1):
        await ingest.post(service, parse_packed(record(number)), None, None)
    assert await delivery.numbered_batch(service, 0, 0, None) == 1


def change(folder, *statements):
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def flip_token(folder, number):
    """One bit, in the file, of a token of a group."""
    stored = record(number)
    content = (folder / DATABASE).read_bytes()
    assert content.count(stored) == 1
    flip(folder / DATABASE, content.index(stored) + len(stored) - 8 * 4 - 20)  # before the scores


@contextlib.asynccontextmanager
async def client_of(service, retry_timeout):
    async with RawTestServer(Api(service).handle, auto_decompress=False) as server:
        async with TrajectoryApiClient(str(server.make_url("")), retry_timeout=retry_timeout) as client:
            client.epoch = service.epoch
            yield client


DAMAGES = {
    "bit": lambda folder: flip_token(folder, 9),
    "exchanged": lambda folder: change(
        folder, "UPDATE records SET (data, digest) = (SELECT data, digest FROM records WHERE id = 8) WHERE id = 9"
    ),
    "missing": lambda folder: change(folder, "DELETE FROM records WHERE id = 9"),
    "moved": lambda folder: change(folder, "UPDATE groups SET batch = 9 WHERE id = 8"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_digest_a_batch_with_damage_is_never_served(tmp_path, damage):
    await in_service(tmp_path, fill)
    damage(tmp_path)
    named = rf"{tmp_path / DATABASE}, batch 1(: group 9)? is damaged: .*restore it from a copy, or move its folder"
    async with open_service(tmp_path) as service:
        async with client_of(service, retry_timeout=20) as client:
            with pytest.raises(TrajectoryApiError, match=named) as refused:
                await client.batch(0, wait=0)
            assert refused.value.status == 410
        assert await delivery.numbered_batch(service, 1, 0, None) == 2
        undamaged = await service.store.read(database.read_batch, 2)
    assert undamaged == [record(number) for number in range(11, 21)]
    with pytest.raises(DamagedRecord, match=named):
        records.read(tmp_path, 1)


async def test_digest_is_of_the_latest_example_too(tmp_path):
    await in_service(tmp_path, fill)
    flip_token(tmp_path, 20)
    async with open_service(tmp_path) as service:
        with pytest.raises(DamagedRecord, match="group 20"):
            await service.store.read(database.read_record, 20)


def overwrite(at, content):
    def damage(path):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


BROKEN_DATABASES = {
    "text": lambda path: path.write_text("x" * 100_000),
    "header": overwrite(0, b"SQLite format 4"),
    "schema": overwrite(100, bytes(200)),
    "index": overwrite(5 * 16_384, b"\xff" * 16_384 * 2),
    "half": lambda path: path.write_bytes(path.read_bytes()[:40_000]),
    "empty": lambda path: path.write_bytes(b""),
    "value": lambda path: change(path.parent, "UPDATE run SET value = '{' WHERE key = 'registration'"),
    "kind": lambda path: change(path.parent, "UPDATE run SET value = '[]' WHERE key = 'last'"),
    "environment": lambda path: change(path.parent, "INSERT INTO environments VALUES (3, '{}')"),
    "table": lambda path: change(path.parent, "DROP TABLE run", "CREATE TABLE run (key TEXT)"),
}


@pytest.mark.parametrize("damage", BROKEN_DATABASES.values(), ids=BROKEN_DATABASES)
async def test_damage_is_named_at_the_start(tmp_path, damage):
    await in_service(tmp_path, fill)
    damage(tmp_path / DATABASE)
    with pytest.raises(TrajectoryStoreError) as refused:
        await in_service(tmp_path, fill)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / DATABASE} is damaged: ") and "\n" not in message
    assert "restore it from a copy, or move its folder away" in message and "make room" not in message


async def test_damage_of_a_lost_database_is_named(tmp_path):
    """Its log is there."""
    await in_service(tmp_path, fill)
    (tmp_path / DATABASE).rename(tmp_path / f"{DATABASE}-wal")
    with pytest.raises(TrajectoryStoreError, match="has lost its content"):
        TrajectoryStore(tmp_path)


async def test_a_start_that_was_killed_is_no_damage(tmp_path):
    """The database gets its name when it is complete."""
    (tmp_path / "partial.db").write_bytes(b"")
    (tmp_path / "lock").touch()
    await in_service(tmp_path, fill)
    assert not (tmp_path / "partial.db").exists()


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch):
    monkeypatch.setattr(service_module, "_TICK", 0.01)


async def ends(service, match, error=TrajectoryStoreError):
    with pytest.raises(error, match=match):
        await asyncio.wait_for(service.run(), 10)


async def test_damage_of_a_page_that_is_read_ends_the_server(tmp_path):
    await in_service(tmp_path, fill)
    async with open_service(tmp_path) as service:
        overwrite(16_384, b"\xff" * 20 * 16_384)(tmp_path / DATABASE)
        with pytest.raises(TrajectoryStoreError, match="is damaged"):
            await service.store.read(database.list_batches)
        await ends(service, rf"^{tmp_path / DATABASE} is damaged: .*malformed \(SQLITE_CORRUPT.*move its folder")


async def test_damage_of_a_page_that_is_written_ends_the_server(service, tmp_path):
    await fill(service, 30)
    service.store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    service.store.connection.execute("PRAGMA shrink_memory")
    overwrite(16_384, b"\xff" * 20 * 16_384)(tmp_path / DATABASE)
    with pytest.raises(TrajectoryStoreError, match="is damaged"):
        await ingest.post(service, parse_packed(record(31)), None, "key")
    with pytest.raises(TrajectoryStoreError):
        await service.store.write(database.write_run, other=1)
    with pytest.raises(TrajectoryStoreError):
        await service.store.write(database.reset)
    await ends(service, "is damaged: .*malformed")


async def test_an_answer_that_cannot_be_completed_breaks_off(tmp_path, monkeypatch):
    await in_service(tmp_path, fill)
    unpacked = []

    def unpack(record):
        unpacked.append(record)
        if len(unpacked) > 8:
            raise MemoryError
        return scored_group.unpack(record)

    monkeypatch.setattr(app, "unpack", unpack)
    async with open_service(tmp_path) as service, client_of(service, retry_timeout=0) as client:
        with pytest.raises(TrajectoryApiError, match="got no answer"):
            await client._request("GET", "/batch", {}, query={"after": "0"})
    assert len(unpacked) == 9


async def test_others_are_served_while_an_answer_is_made(tmp_path, monkeypatch):
    await in_service(tmp_path, fill)
    turns, seen = 0, []

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(app, "unpack", lambda record: seen.append(turns) or scored_group.unpack(record))
    async with open_service(tmp_path) as service, client_of(service, retry_timeout=0) as client:
        task = asyncio.create_task(other())
        await client._request("GET", "/batch", {}, query={"after": "0"})
        task.cancel()
    assert len(set(seen)) == 10


def grow(connection):
    connection.execute("CREATE TABLE large (data BLOB)")
    connection.execute("INSERT INTO large VALUES (zeroblob(50000000))")


async def test_damage_an_io_error_is_not_a_full_disk(tmp_path):
    async with open_service(tmp_path) as service:
        with size_limit(20_000_000):
            with pytest.raises(TrajectoryStoreError, match=r"disk I/O error \(SQLITE_IOERR.*\); check that disk"):
                await service.store.write(grow)
            assert not service.store.trouble
            await ends(service, "disk I/O error")
    await in_service(tmp_path, fill)


async def test_damage_what_cannot_be_opened_is_not_a_full_disk(service):
    with pytest.raises(TrajectoryStoreError, match=r"unable to open .* \(SQLITE_CANTOPEN\); check that disk"):
        await service.store.read(lambda connection: connection.execute("ATTACH '/nowhere/x.db' AS x"))
    await ends(service, "unable to open")


async def test_damage_a_defect_in_a_write_ends_the_server(service):
    """Nothing is written after it, and the defect keeps its traceback."""

    def defect(connection):
        raise ZeroDivisionError("a defect")

    written = [
        service.store.write(database.write_run, a=1),
        service.store.write(defect),
        service.store.write(database.write_run, b=1),
    ]
    assert len(await asyncio.gather(*written, return_exceptions=True)) == 3
    with pytest.raises(ZeroDivisionError):
        await service.store.write(database.write_run, c=1)
    await ends(service, "a defect", ZeroDivisionError)
    assert "c" not in await service.store.read(database.read_run)


async def test_damage_a_write_that_fails_is_not_half_done(tmp_path):
    await in_service(tmp_path, fill)
    async with open_service(tmp_path) as service:
        with pytest.raises(TrajectoryStoreError, match="UNIQUE"):
            await service.store.write(database.append, [Entry(9, None, 4, 9, 21)] * 2, [b"1"] * 2, {"k": 1})
    async with open_service(tmp_path) as service:
        assert "k" not in service.posts
