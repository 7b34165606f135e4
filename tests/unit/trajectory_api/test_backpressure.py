"""What the service does with a full queue, with groups that do not fit, and with those that have no ticket."""

import asyncio
import contextlib
import json
import time
import tracemalloc
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.test_utils import RawTestServer

from helpers.services import group
from helpers.trajectory_service import batch, batches, begin, join, open_service, post, registration
from recipe.atropos.trajectory_api import batching, delivery, environments, ingest, status
from recipe.atropos.trajectory_api import service as service_module
from recipe.atropos.trajectory_api.app import Api
from recipe.atropos.trajectory_api.endpoints import Caller, RequestRefused


async def needs_evaluation(service):
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ingest.hold(service, lambda: False), 0.05)
        return False
    return True


async def test_held_posts_cost_nothing_when_something_changes(tmp_path, monkeypatch):
    """Whether the queue is full is found once, and none of them wakes; it is found after a restart too."""
    plan, evaluations, looks = batching.Queue.plan, [], []
    async with open_service(tmp_path, queue_tokens=1) as service:
        await delivery.register(service, registration(4, after=0))
        await post(service, 0)
    async with open_service(tmp_path, queue_tokens=1) as service:
        held = [asyncio.ensure_future(ingest.hold(service, lambda: looks.append(1))) for _ in range(100)]
        monkeypatch.setattr(batching.Queue, "plan", lambda queue: evaluations.append(queue) or plan(queue))
        for number in range(1, 11):
            await post(service, number)
            await asyncio.sleep(0)
        assert len(evaluations) <= 20 and len(looks) == 100 and not any(post.done() for post in held)
        assert await batches(service, *range(11)) == [*range(1, 12)]
        await asyncio.gather(*held)


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
async def test_held_posts_keep_no_body_in_memory(tmp_path, path):
    """Nor what was read from it: the group is stored."""
    body = {"tokens": [[1] * 20_000] * 4, "masks": [[1] * 20_000] * 4, "scores": [1.0] * 4}
    body = json.dumps([body] if path.endswith("list") else body).encode()
    async with open_service(tmp_path, queue_tokens=1) as service:
        server = RawTestServer(Api(service).handle, auto_decompress=False)
        async with server, aiohttp.ClientSession(server.make_url("")) as session:
            await delivery.register(service, registration(4, after=0))
            await post(service, 0)
            tracemalloc.start()
            held = []
            for number in range(1, 25):
                held.append(asyncio.ensure_future(session.post(path, data=body)))
                while service.counts["received"] < number + 1:
                    await asyncio.sleep(0.01)
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert not any(post.done() for post in held) and kept < 10 * len(body), f"{kept / len(body):.1f} bodies"
            assert await batches(service, *range(25)) == [*range(1, 26)]
            assert {reply.status for reply in await asyncio.gather(*held)} == {200}


async def test_held_posts_are_released_by_time_alone(tmp_path, monkeypatch):
    """By the client's end, and when nobody asks any more for a group that had no room in the batch."""
    monkeypatch.setattr(service_module, "_TICK", 0.01)
    async with open_service(tmp_path, queue_tokens=1) as service:
        await delivery.register(service, registration(8, after=0))
        asks, posts = SimpleNamespace(gone=False), SimpleNamespace(gone=False)
        await post(service, 0)
        env, running = await join(service), asyncio.ensure_future(service.run())
        asking = asyncio.ensure_future(ingest.begin(service, env, 8, wait=20, caller=Caller(gone=lambda: asks.gone)))
        await asyncio.sleep(0.05)
        left, held = (asyncio.ensure_future(ingest.hold(service, gone)) for gone in (lambda: posts.gone, lambda: False))
        await asyncio.sleep(0.05)
        assert not left.done() and not held.done() and service.full()
        posts.gone = True
        await asyncio.wait_for(left, 0.5)
        assert not held.done()
        asks.gone = True
        await asyncio.wait_for(held, 0.5)
        asking.cancel()
        running.cancel()


def parse_a_group(service, size):
    ingest.parse(service, json.dumps(group(0, size)).encode(), False, False, None)


async def test_a_batch_of_more_tokens_than_the_limit_comes(tmp_path):
    async with open_service(tmp_path, queue_tokens=100) as service:
        await delivery.register(service, registration(64, after=0))
        env = await join(service)
        for number in range(16):
            assert await begin(service, env) is not None, "the batch lacks groups"
            await post(service, number, env=env, ticket=number + 1)
            assert await needs_evaluation(service) == (number == 15)
        refused = await ingest.begin(service, env)
        assert refused["ticket"] is None and refused["retry_after"] > 0
        assert refused["reason"] == "batch 1 is complete, and 192 tokens are queued, more than queue-tokens=100"
        assert await delivery.numbered_batch(service, 0, 0, None) == 1
        assert await begin(service, env) is not None and not await needs_evaluation(service)


async def test_groups_larger_than_a_batch_are_refused_or_dropped(tmp_path):
    """By name before they are stored; those that were queued before the trainer came are dropped, and counted."""
    async with open_service(tmp_path) as service:
        await post(service, 1, size=20)
        await post(service, 2)
        await delivery.register(service, registration(8, after=0))
        assert service.counts["dropped/larger_than_batch"] == 1 and service.queue.sizes == {4: 1}
        with pytest.raises(RequestRefused, match="a group of 9 sequences: the trainer's batch has 8"):
            parse_a_group(service, size=9)
        assert service.counts["refused/larger_than_batch"] == 1
        await post(service, 3)
        assert await delivery.numbered_batch(service, 0, 0, None) == 1 and await batch(service, 1) == [2, 3]
    async with open_service(tmp_path) as service:
        assert not list(service.queue)


async def test_waiting_for_weights_is_said_of_groups_that_wait(service):
    """Of a stock environment, which asks for no ticket; a client that posts no /weights would look for them in vain."""
    await delivery.register(service, registration(8, after=0, max_staleness=0))
    await post(service, 1, 2, 3, 4)
    assert await delivery.numbered_batch(service, 0, 0, None) == 1
    assert await delivery.numbered_batch(service, 1, 0, None) is None
    why = "its group would be in batch 2, and may be in 1 at most: the servers' weights have the batches through 0"
    assert status.why(service).endswith(f"an unknown environment waits: {why}")
    await delivery.weights_pushed(service, 1)
    assert "batch 2 is complete" in status.why(service)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_an_empty_batch_extends_the_bound_by_one_batch(tmp_path, max_staleness):
    """Without a push, over a restart too; and once weights with it are pushed, the bound is as before."""

    async def fill(service, env):
        while (ticket := await begin(service, env)) is not None:
            await post(service, 0, env=env, ticket=ticket)

    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8, after=0, max_staleness=max_staleness))
        env = await join(service)
        for number in range(1, 2 + max_staleness):
            await fill(service, env)
            assert await delivery.numbered_batch(service, number - 1, 0, None) == number
        assert await begin(service, env) is None
        for number in range(1, 4):
            assert (await delivery.batch_is_empty(service, number))["status"] == "noted"
            await delivery.batch_is_empty(service, number)  # sent again
            await fill(service, env)
            assert await begin(service, env) is None, "one batch more, and no other"
            assert await delivery.numbered_batch(service, number + max_staleness, 0, None) == number + 1 + max_staleness
        assert service.counts["empty_batches"] == 3
        assert status.diagnose(service)["trainer"]["empty_batches_in_a_row"] == 3
    async with open_service(tmp_path) as service:
        assert service.trainer.empty == {1, 2, 3} and service.trainer.weights == 0
        assert await begin(service, env) is None
        await delivery.weights_pushed(service, 4)
        assert service.trainer.empty == set() and status.diagnose(service)["trainer"]["empty_batches_in_a_row"] == 0
        await fill(service, env)
        assert await delivery.numbered_batch(service, 4 + max_staleness, 0, None) == 5 + max_staleness
        assert await begin(service, env) is None


@pytest.fixture
def clock(monkeypatch):
    """The service's; its ``now`` moves by hand."""
    clock = SimpleNamespace(now=time.monotonic(), monotonic=lambda: clock.now, time=time.time)
    for module in (batching, delivery, environments, ingest, service_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


async def take_batches(service, clock, env, seconds):
    """All that ten groups make, each of which takes so many seconds."""
    for _ in range(10):
        ticket = await begin(service, env)
        clock.now += seconds
        await post(service, 0, env=env, ticket=ticket)
        await delivery.numbered_batch(service, service.last, 0, None)


def stays(service, clock, ticket, seconds):
    """Whether a ticket is still open after so many seconds more."""
    clock.now += seconds
    service.release_hung()
    return ticket in service.queue.tickets


async def test_a_hung_ticket_holds_a_batch_only_for_a_while(service, clock, caplog):
    """Three times as long as its environment's tickets took at most, and 30 s: then it is released, by name."""
    await delivery.register(service, registration(8, after=0))
    env = await join(service)
    await take_batches(service, clock, env, seconds=20)
    assert service.last == 5
    hung = await begin(service, env)
    for _ in range(3):
        await post(service, 1, env=env, ticket=await begin(service, env))
    assert await delivery.numbered_batch(service, 5, 0, None, prefetch=True) is None
    assert stays(service, clock, hung, seconds=61), "the trainer has a batch to train on"
    assert await delivery.numbered_batch(service, 5, 0, None) is None
    assert stays(service, clock, hung, seconds=59)
    assert not stays(service, clock, hung, seconds=2) and service.counts["released/hung"] == 1
    assert await delivery.numbered_batch(service, 5, 0, None) == 6
    await post(service, 2, env=env, ticket=hung)
    assert service.queue.sequences == 8, "what it gives after all is a group without a ticket"
    assert "of env_0, whose groups take 20 s at most: released" in caplog.text


async def test_no_ticket_hangs_while_no_trainer_waits(service, clock, monkeypatch):
    """One that has died while it waited: servers may rest until the next one."""
    monkeypatch.setattr(service_module, "_TICK", 0.001)
    await delivery.register(service, registration(4, after=0))
    env = await join(service)
    await take_batches(service, clock, env, seconds=5)
    hung = await begin(service, env)
    running = asyncio.ensure_future(service.run())

    async def minutes(asks):
        for _ in range(20):
            if asks:
                assert await delivery.numbered_batch(service, 10, 0, None) is None
            clock.now += 5
            service.environments.touch(env)
            await asyncio.sleep(0.005)

    assert await delivery.numbered_batch(service, 10, 0, None) is None
    await minutes(asks=False)
    assert hung in service.queue.tickets and service.trainer.waiting_since is None
    await minutes(asks=True)
    assert hung not in service.queue.tickets and service.counts["released/hung"] == 1
    running.cancel()


async def test_an_environment_that_hangs_from_the_first_stops_nobody(service, clock):
    """Then it is what others take, and at least 120 s. A group that comes after all tells its own."""
    await delivery.register(service, registration(8, after=0))
    first, slow = await join(service), await join(service)
    hung = await begin(service, slow)
    ticket = await begin(service, first)
    assert await delivery.numbered_batch(service, 0, 0, None) is None
    assert stays(service, clock, hung, seconds=1000), "of nobody is it known how long groups take"
    await delivery.register(service, registration(8, after=0))
    await post(service, 1, env=first, ticket=ticket)
    assert await delivery.numbered_batch(service, 0, 0, None) is None
    assert stays(service, clock, hung, seconds=2999)
    assert not stays(service, clock, hung, seconds=2) and service.counts["released/hung"] == 1
    await post(service, 2, env=slow, ticket=hung)
    assert service.queue.environments[slow].seconds[0] == pytest.approx(4001), "it is late, and known now"
    assert not service.queue.hung


@pytest.mark.parametrize("ending", ["dies", "lost them"])
async def test_tickets_that_end_at_once_are_one_change(service, monkeypatch, ending):
    """The turns, and what the queue holds, are found once for all of them."""
    turn, turns = batching.Queue.turn, []
    await delivery.register(service, registration(400, after=0))
    env = await join(service)
    tickets = [await begin(service, env) for _ in range(50)]
    monkeypatch.setattr(batching.Queue, "turn", lambda queue: turns.append(queue) or turn(queue))
    if ending == "dies":
        service.environments.by_id[env].connected = False
        service.release_dead()
    else:
        await ingest.begin(service, env, held=[tickets[0]])
    assert len(turns) < 5 and service.counts.total() in (50, 49)
    stored = await service.store.write(lambda connection: connection.execute("SELECT * FROM tickets").fetchall())
    assert len(stored) == len(service.queue.tickets) == (0 if ending == "dies" else 2)


async def test_two_posts_under_one_ticket_get_one_place(service):
    await delivery.register(service, registration(12, after=0, max_staleness=0))
    env = await join(service)
    ticket = await begin(service, env)
    await asyncio.gather(*(post(service, number, env=env, ticket=ticket) for number in (1, 2)))
    assert sorted(entry.due for entry in service.queue) == [0, 1]


async def test_a_group_whose_ticket_has_ended_breaks_no_bound(tmp_path):
    """It waits for its environment's turn, like groups without tickets; those that hold tickets come first."""
    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8, after=0, max_staleness=0))
        env = await join(service)
        late = await begin(service, env)
        await service.release("environment_gone", late)
        tickets = [await begin(service, env), await begin(service, env)]
        await post(service, 0, env=env, ticket=late)
        for number, ticket in enumerate(tickets, start=1):
            await post(service, number, env=env, ticket=ticket)
        assert await delivery.numbered_batch(service, 0, 0, None) == 1 and await batch(service, 1) == [1, 2]
    async with open_service(tmp_path) as service:
        assert [entry.due for entry in service.queue] == [0], "after a restart too"
