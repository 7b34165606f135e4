"""The service at moments that requests from outside do not hit reliably."""

import asyncio
import contextlib
import json
import time
from collections import Counter

import pytest

from recipe.atropos.trajectory_api import database, delivery, ingest, repetitions, status, wire
from recipe.atropos.trajectory_api.messages import (
    Begin,
    EnvIdentifier,
    EnvRegistration,
    Registration,
    RequestRefused,
    Through,
)
from recipe.atropos.trajectory_api.parsing import Parsed
from recipe.atropos.trajectory_api.service import Service, Settings


def registration(batch_size, **fields):
    return Registration("", "", batch_size, 100, "", -1, 0, 10, **fields)


ENVIRONMENT = EnvRegistration(100, "env", 1.0, 4)


async def batches(service, *numbers):
    return [await delivery.numbered_batch(service, number, 0, None) for number in numbers]


def in_service(folder, test, **settings):
    async def run():
        service = Service(Settings(folder, **settings))
        try:
            await asyncio.wait_for(test(service), 30)
        finally:
            service.close()

    asyncio.run(run())


async def post(service, *numbers, env=None, size=4, ticket=None):
    for number in numbers:
        await ingest.post(service, [Parsed(b"%d" % number, env, size, 12)], ticket, None, None)


async def environment(service, **fields):
    return (await ingest.register_env(service, EnvRegistration(100, "e", 1.0, 4, **fields)))["env_id"]


async def begin(service, env):
    return (await ingest.begin(service, Begin(env), lambda: False))["ticket"]


async def batch(service, number):
    return [int(record) for record in await service.store.read(database.read_batch, number)]


def test_no_batch_is_cut_while_others_are_dissolved(tmp_path):
    async def test(service):
        await delivery.register(service, registration(8, after=0))
        await post(service, *range(8))
        assert [await delivery.numbered_batch(service, after, 0, None) for after in range(3)] == [1, 2, 3]
        registering = asyncio.ensure_future(delivery.register(service, registration(12, after=1)))
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="no trainer"):
            await delivery.numbered_batch(service, 3, 0, None)
        await registering
        assert [await delivery.numbered_batch(service, after, 0, None) for after in (1, 2)] == [2, 3]
        assert [await batch(service, number) for number in (1, 2, 3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]

    in_service(tmp_path, test)


def test_posts_amid_a_reset_are_kept_once(tmp_path):
    async def test(service):
        await delivery.register(service, registration(4))
        await post(service, 0)
        posting = [asyncio.ensure_future(post(service, number)) for number in range(1, 10)]
        resetting = asyncio.ensure_future(delivery.reset(service))
        number = 10
        while not resetting.done():
            posting.append(asyncio.ensure_future(post(service, number)))
            number += 1
            await asyncio.sleep(0.0001)
        await asyncio.gather(resetting, *posting)
        stored = [group.id for group in await service.store.read(database.queued)]
        assert sorted(entry.id for entry in service.queue) == stored
        await post(service, number)
        await delivery.register(service, registration(4, after=0))
        found = []
        while (number := await delivery.numbered_batch(service, len(found), 0, None)) is not None:
            found += await batch(service, number)
        assert len(found) == len(set(found)) == len(stored) + 1

    in_service(tmp_path, test)


# ---------------------------------------------------------------------- backpressure


async def is_held(service):
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ingest.hold(service, lambda: False), 0.05)
        return False
    return True


def test_a_batch_of_more_tokens_than_the_limit_comes(tmp_path):
    async def test(service):
        await delivery.register(service, registration(64, after=0))
        env = await environment(service)
        for number in range(16):
            assert await begin(service, env) is not None, "the batch lacks groups"
            await post(service, number, env=env, ticket=number + 1)
            assert await is_held(service) == (number == 15)
        refused = await ingest.begin(service, Begin(env), lambda: False)
        assert refused["reason"] == "batch 1 is complete, and 192 tokens are queued, more than queue-tokens=100"
        assert await delivery.numbered_batch(service, 0, 0, None) == 1
        assert await begin(service, env) is not None and not await is_held(service)

    in_service(tmp_path, test, queue_tokens=100)


def test_a_full_queue_lets_an_awaited_allocation_begin(tmp_path):
    async def test(service):
        await delivery.register(service, registration(16, after=0))
        full, awaited = await environment(service), await environment(service, min_batch_allocation=0.5)
        await post(service, *range(10), env=full)
        assert await delivery.numbered_batch(service, 0, 0, None) is None
        for number in (10, 11):
            assert not await is_held(service)
            await post(service, number, env=awaited, ticket=await begin(service, awaited))
        assert await is_held(service)
        assert await delivery.numbered_batch(service, 0, 0, None) == 1
        assert {10, 11} < {*await batch(service, 1)}

    in_service(tmp_path, test, queue_tokens=100)


def test_groups_set_aside_count_against_the_limit_and_are_named(tmp_path):
    async def test(service):
        await post(service, 1, size=20)
        await delivery.register(service, registration(8, after=0))
        env = await environment(service)
        await post(service, *range(2, 12), env=env, size=9)
        assert not await is_held(service) and "0 of 8" in status.why(service)
        await post(service, 20, 21, env=env)
        assert await is_held(service)
        told = status.diagnose(service)
        assert told["set_aside"] == {"9": 10, "20": 1} and told["queue"]["tokens"] == 13 * 12
        assert told["queue"]["groups"] == 2 and told["queue"]["sizes"] == {"4": 2}
        assert service.counts["set_aside/larger_than_a_batch"] == 11
        assert [line["sizes"] for line in told["environments"]] == [{"20": 1}, {"4": 2, "9": 10}]
        assert "atropos_api_set_aside_groups 11\n" in status.metrics(service)
        assert service.environments.status(env, service.queue)["self_queue_size"] == 2
        await delivery.register(service, registration(20, after=0))
        assert status.diagnose(service)["set_aside"] == {}

    in_service(tmp_path, test, queue_tokens=100)


def test_sizes_that_are_passed_over_are_logged_once(tmp_path, caplog):
    async def test(service):
        await delivery.register(service, registration(8, after=0))
        await post(service, 1, 2, size=3)
        await post(service, *range(100, 140))
        for after in range(20):
            assert await delivery.numbered_batch(service, after, 0, None) == after + 1
        await post(service, 3, size=3)
        assert service.counts["set_aside/fits_no_batch"] == 3
        assert "set aside, since they do not fit: 3 groups, of sizes [3]" in status.why(service)
        await post(service, 4, size=5)
        assert await delivery.numbered_batch(service, 20, 0, None) == 21 and await batch(service, 21) == [1, 4]

    in_service(tmp_path, test)
    assert [line.message for line in caplog.records if "set aside" in line.message] == [
        "groups of 3 sequences fit into no batch, and wait until they do: set aside, see /diagnose"
    ]


def test_a_group_whose_ticket_has_ended_breaks_no_bound(tmp_path):
    """It is in the place of its arrival, like groups without tickets; those that hold tickets come first."""

    async def test(service):
        await delivery.register(service, registration(8, after=0, max_staleness=0))
        env = await environment(service)
        late = await begin(service, env)
        await service.release(late, "environment_gone")
        tickets = [await begin(service, env), await begin(service, env)]
        await post(service, 0, env=env, ticket=late)
        for number, ticket in enumerate(tickets, start=1):
            await post(service, number, env=env, ticket=ticket)
        assert await delivery.numbered_batch(service, 0, 0, None) == 1 and await batch(service, 1) == [1, 2]

    in_service(tmp_path, test)
    in_service(tmp_path, still_without_ticket)


async def still_without_ticket(service):
    assert [entry.due for entry in service.queue] == [0], "after a restart too"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_stock_backlog_does_not_starve_tickets(tmp_path, max_staleness):
    """BaseEnv keeps three batches queued; an adapted environment with half of each batch gets its half."""

    async def test(service):
        await delivery.register(service, registration(16, after=0, max_staleness=max_staleness))
        stock, ours = await environment(service), await environment(service, min_batch_allocation=0.5)
        trained = Counter()
        for after in range(20):
            while service.environments.status(stock, service.queue)["queue_size"] * 4 < 3 * 16:
                await post(service, 0, env=stock)
            while (ticket := await begin(service, ours)) is not None:
                await post(service, 1, env=ours, ticket=ticket)
            assert await delivery.numbered_batch(service, after, 0, None) == after + 1
            trained.update(await batch(service, after + 1))
            await delivery.weights_pushed(service, Through(after + 1), None)
        assert 40 <= trained[1] <= 64  # half, and its part of the rest

    in_service(tmp_path, test)


# ---------------------------------------------------------------------- trainers


def test_each_registration_gets_an_epoch_of_its_own(tmp_path):
    async def test(service):
        answers = await asyncio.gather(*(delivery.register(service, registration(8, after=0)) for _ in range(3)))
        assert [answer["epoch"] for answer in answers] == [1, 2, 3] and service.epoch == 3
        with pytest.raises(RequestRefused, match="registered later"):
            await delivery.numbered_batch(service, 0, 0, 2)

    in_service(tmp_path, test)


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (12, 12), (12, 4)])
def test_registrations_at_once_leave_one_state(tmp_path, sizes):
    """In memory and in the store: the last one's, with each group in one batch."""

    async def test(service):
        await delivery.register(service, registration(8, after=0))
        await post(service, *range(8))
        assert await batches(service, 0, 1, 2) == [1, 2, 3]
        answers = await asyncio.gather(*(delivery.register(service, registration(size, after=1)) for size in sizes))
        stored = await service.store.read(database.read_run)
        assert service.last == stored["last"] == answers[-1]["last"]
        assert (service.epoch, service.queue.batch_size) == (stored["epoch"], sizes[-1])
        found = [
            number
            for after in range(10)
            if await available(service, after)
            for number in await batch(service, after + 1)
        ]
        assert found == sorted(set(found)) and len(found) > 5
        queued = [group.id for group in await service.store.read(database.queued)]
        assert sorted(entry.id for entry in service.queue) == queued

    in_service(tmp_path, test)


async def available(service, after):
    return after <= service.last and await delivery.numbered_batch(service, after, 0, None) is not None


def test_a_registration_that_fails_changes_nothing(tmp_path, monkeypatch):
    def fails(connection, dissolve_after, **values):
        database.dissolve(connection, dissolve_after)
        raise ValueError("a defect")

    async def test(service):
        epoch = (await delivery.register(service, registration(8, after=0)))["epoch"]
        await post(service, *range(4))
        assert await batches(service, 0, 1) == [1, 2]
        with monkeypatch.context() as broken:
            broken.setattr(database, "register", fails)
            with pytest.raises(ValueError, match="a defect"):
                await delivery.register(service, registration(12, after=1))
        assert await delivery.numbered_batch(service, 1, 0, epoch) == 2 and await batch(service, 2) == [2, 3]
        assert await service.store.read(database.queued) == []
        assert (await delivery.register(service, registration(8, after=2)))["epoch"] == epoch + 1

    in_service(tmp_path, test)


def test_a_stock_trainer_gets_no_batch_twice_over_a_restart(tmp_path):
    async def stock(service):
        number = await delivery.stock_batch(service)
        delivery.stock_delivered(service, service.epoch, number, written=len(got) != 2)
        got.append(number)

    async def first(service):
        await delivery.register(service, registration(8))
        await post(service, *range(10))
        await stock(service)
        await stock(service)

    got = []
    in_service(tmp_path, first)
    in_service(tmp_path, stock)  # of which the answer is lost
    in_service(tmp_path, stock)
    in_service(tmp_path, stock)
    assert got == [1, 2, 3, 3, 4]


def test_asking_by_number_takes_nothing_from_a_stock_trainer(tmp_path):
    async def test(service):
        await delivery.register(service, registration(8))
        await post(service, *range(8))
        assert await delivery.stock_batch(service) == 1
        delivery.stock_delivered(service, service.epoch, 1, written=True)
        assert await batches(service, 0, 1, 2) == [1, 2, 3] and service.step() == 1
        assert await delivery.stock_batch(service) == 2

    in_service(tmp_path, test)


def test_a_reset_that_fails_leaves_the_server_usable(tmp_path):
    async def test(service):
        await delivery.register(service, registration(8))
        await post(service, 0, 1)
        (tmp_path / "archive").write_text("no folder")
        with pytest.raises(RequestRefused, match="nothing was reset") as refused:
            await delivery.reset(service)
        assert refused.value.status == 503
        await post(service, 2)
        assert await delivery.stock_batch(service) == 1 and await batch(service, 1) == [0, 1]
        (tmp_path / "archive").unlink()
        await delivery.reset(service)
        assert service.trainer is None and service.queue.groups == 0

    in_service(tmp_path, test)


# ---------------------------------------------------------------------- environments


async def join(service, key=None):
    return (await ingest.register_env(service, ENVIRONMENT, key))["env_id"]


def test_an_environment_of_another_store_is_unknown(tmp_path):
    """A and B joined an earlier run; in the next, and after its reset, none is taken for the other."""
    ids: list[int] = []

    async def test(service):
        for _ in range(2):
            await delivery.register(service, registration(8))
            for id in ids:
                with pytest.raises(RequestRefused, match="no environment has registered"):
                    service.environments.status(id, service.queue)
                assert (await ingest.disconnect_env(service, EnvIdentifier(id)))["status"] == "failure"
            ids.extend([await join(service), await join(service)])
            await post(service, 0)
            await delivery.reset(service)

    for folder in ("one", "two"):
        in_service(tmp_path / folder, test)
    assert len(set(ids)) == 8 and 0 < min(ids) and max(ids) < 2**31


def test_an_environment_that_asks_again_is_registered_once(tmp_path):
    async def first(service):
        await delivery.register(service, registration(8))
        ids.extend([await join(service, "a"), await join(service, "a"), await join(service), await join(service)])

    async def later(service):
        ids.append(await join(service, "a"))
        assert len(service.environments.by_id) == 3

    ids: list[int] = []
    in_service(tmp_path, first)
    in_service(tmp_path, later)
    assert ids == [ids[0], ids[0], ids[0] + 1, ids[0] + 2, ids[0]]


def test_refused_groups_are_counted_of_their_environment(tmp_path):
    """Each group of a refused list, packed or not, and over a restart."""

    async def first(service):
        await delivery.register(service, registration(8))
        ids.extend([await join(service), await join(service)])
        groups = [{"env_id": id, "tokens": [[1]], "masks": [[1]], "scores": ["x"]} for id in (*ids, ids[0], None)]
        record = wire.pack(wire.from_group(groups[1] | {"scores": [float("nan")]}))
        for body, packed in ((json.dumps(groups).encode(), False), (wire.join([record] * 2), True), (b"x", False)):
            with pytest.raises(RequestRefused):
                ingest.parse(service, body, packed, True, None)
        await ingest.post(service, [Parsed(b"0", ids[1], 4, 12)], None, None, None)

    def counted(service):
        return [dict(service.environments.by_id[id].counts) for id in ids], dict(service.counts)

    async def later(service):
        of_each, of_all = counted(service)
        assert of_each[0] == {"refused/nonfinite_scores": 2}
        assert of_each[1] == {"refused/nonfinite_scores": 3, "received": 1}
        assert of_all == {"refused/nonfinite_scores": 6, "refused/malformed": 1, "received": 1}
        [line, _] = [line for line in status.environments(service) if line["env_id"] in ids]
        assert (line["number"], line["queued_groups"], line["sizes"]) == (0, 0, {})
        [line] = [line for line in status.environments(service) if line["env_id"] == ids[1]]
        assert (line["number"], line["queued_groups"], line["sizes"]) == (1, 1, {"4": 1})

    ids: list[int] = []
    in_service(tmp_path, first)
    in_service(tmp_path, later)


# ---------------------------------------------------------------------- posts without a key


async def posted(service, digest, gone, written):
    """What the HTTP server does for a post; ``gone`` and ``written`` are events of its connection."""
    own = service.repetitions.take(digest, gone.is_set)
    if own is None:
        storing = asyncio.ensure_future(ingest.post(service, [Parsed(b"0", None, 4, 12)], None, None, digest))
        own = repetitions.Unanswered(1, storing, gone.is_set)
    with service.repetitions.noted(digest, own):
        await asyncio.shield(own.storing)
        waits = [asyncio.ensure_future(event.wait()) for event in (gone, written)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        own.answered = not gone.is_set()
        for wait in waits:
            wait.cancel()


async def begin_post(service, *events):
    task = asyncio.ensure_future(posted(service, "1.2.3", *events))
    await asyncio.sleep(0.05)
    return task


def events(*which):
    gone, written = asyncio.Event(), asyncio.Event()
    for event in which:
        (gone if event == "gone" else written).set()
    return gone, written


def test_of_equal_posts_in_flight_each_is_stored_once(tmp_path):
    """The first one's connection breaks, and it is repeated; the second is answered."""

    async def test(service):
        await delivery.register(service, registration(8))
        first, second = events(), events()
        tasks = [await begin_post(service, *first), await begin_post(service, *second)]
        first[0].set()
        await tasks[0]
        await begin_post(service, *events("written"))
        second[1].set()
        await tasks[1]
        assert service.queue.groups == 2
        await begin_post(service, *events("written"))
        assert service.queue.groups == 3, "the first one's repetition has come already"

    in_service(tmp_path, test)


def test_an_answered_post_is_no_repetition_over_a_kill(tmp_path):
    async def test(service):
        await delivery.register(service, registration(8))
        await (await begin_post(service, *events("written")))
        await (await begin_post(service, *events("gone")))
        assert service.queue.groups == 2
        async with asyncio.timeout(5):  # no tick saves it: ``run`` is not running
            while len(rows := (await service.store.read(database_rows))) != 1:
                await asyncio.sleep(0.01)
        assert [groups for _, _, groups, _ in rows] == [1]

    def database_rows(connection):
        return connection.execute("SELECT * FROM unanswered_posts").fetchall()

    in_service(tmp_path, test)


@pytest.mark.parametrize("restart", [False, True])
def test_a_broken_post_is_repeated_for_some_minutes_only(tmp_path, monkeypatch, restart):
    async def first(service):
        await delivery.register(service, registration(8))
        await begin_post(service, *events("gone"))
        if not restart:
            await again(service)

    async def again(service):
        with monkeypatch.context() as later:
            later.setattr(repetitions.time, "time", lambda: time.time_ns() / 1e9 + repetitions.KEPT_SECONDS)
            assert service.repetitions.take("1.2.3", lambda: False) is None
            service.repetitions.expire()
            assert len(service.repetitions.forgotten) == 1
        await begin_post(service, *events("written"))
        assert service.queue.groups == 2

    in_service(tmp_path, first)
    if restart:
        in_service(tmp_path, again)
