"""A data folder outside of its server: list, show and export its batches, and import batches into a new one.

An export has one line of JSON for each batch, ``{"number": N, "batch": [groups]}``, in order; an import of it serves
the same batches under the same numbers.
"""

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from recipe.atropos.data.scored_group import ScoredGroup, unpack
from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.batching import Entry
from recipe.atropos.trajectory_api.store import DATABASE, TrajectoryStore, TrajectoryStoreError, named_errors
from recipe.atropos.utils.files import disk_errors


@contextlib.contextmanager
def _opened(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open a folder's database, or one that is given itself, for reading."""
    path = data_dir / DATABASE if data_dir.is_dir() else data_dir
    if not path.is_file():
        raise TrajectoryStoreError(
            f"data-dir={data_dir}: it has no {DATABASE}; give the folder of a server, or a database"
        )
    with named_errors(path), contextlib.closing(database.connect_to_read(path)) as connection:
        database.check_format(connection)
        yield connection


def list_all(data_dir: Path) -> None:
    """Print a line for each batch that is kept, and what is queued."""
    with _opened(data_dir) as connection:
        print(f"{'batch':>8} {'groups':>8} {'sequences':>10} {'tokens':>12} {'envs':>5}  newest group")
        for number, groups, sequences, tokens, environments, newest in database.list_batches(connection):
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest))
            print(f"{number:8} {groups:8} {sequences:10} {tokens:12} {environments:5}  {at}")
        queued = database.queued(connection)
        print(f"{'queued':>8} {len(queued):8} {sum(entry.size for entry in queued):10}")


def show(data_dir: Path, number: int) -> None:
    """Print a batch as JSON, one group a line."""
    for group in read(data_dir, number):
        print(group.to_json().decode())


def numbers(data_dir: Path) -> set[int]:
    """Return the numbers of the batches that are kept."""
    with _opened(data_dir) as connection:
        return {number for number, *_ in database.list_batches(connection)}


def read(data_dir: Path, number: int) -> list[ScoredGroup]:
    """Return a batch's groups.

    Raises:
        TrajectoryStoreError: there is no such batch, or no store; the message says which batches there are.
    """
    with _opened(data_dir) as connection:
        records = database.read_batch(connection, number)
        if not records:
            kept = [each for each, *_ in database.list_batches(connection)]
            there = f"it has batches {kept[0]} to {kept[-1]}" if kept else "it has none"
            raise TrajectoryStoreError(f"number={number}: {data_dir} has no such batch; {there}")
        return [unpack(record) for record in records]


def export(data_dir: Path, file: Path) -> None:
    """Write all batches that are kept to a file of JSON lines."""
    with _opened(data_dir) as connection, disk_errors(file), open(file, "wb") as lines:
        batches = database.list_batches(connection)
        for number, *_ in batches:
            groups = b",".join(unpack(record).to_json() for record in database.read_batch(connection, number))
            lines.write(b'{"number":%d,"batch":[%b]}\n' % (number, groups))
    print(f"{len(batches)} batches exported to {file}")


def import_(data_dir: Path, file: Path) -> None:
    """Write the batches of an export into a folder that has none yet."""
    store = TrajectoryStore(data_dir)  # takes the folder's lock; its writer is not started
    try:
        connection = store.connection
        if database.list_batches(connection) or database.queued(connection):
            raise TrajectoryStoreError(f"data-dir={data_dir}: it has groups already; give a new folder")
        batches, ids = 0, itertools.count(1)
        with named_errors(store.path), open(file, "rb") as lines:
            connection.execute("BEGIN IMMEDIATE")
            for batches, line in enumerate(lines, start=1):
                try:
                    batch = orjson.loads(line)
                    groups = [ScoredGroup.from_mapping(group) for group in batch["batch"]]
                    number = int(batch["number"])
                except (ValueError, KeyError, TypeError) as error:  # RefusedGroup is a ValueError
                    raise TrajectoryStoreError(
                        f"{file}, line {batches}: it is not an exported batch ({error})"
                    ) from error
                entries = [
                    Entry(id, group.env_id, group.trajectories, len(group.tokens), id)
                    for group, id in zip(groups, ids, strict=False)
                ]
                database.append(connection, entries, [group.record for group in groups])
                database.cut(connection, number, [entry.id for entry in entries])
            database.write_run(connection, numbers=next(ids))
            connection.execute("COMMIT")
    finally:
        store.close()
    print(f"{batches} batches imported into {data_dir}")
