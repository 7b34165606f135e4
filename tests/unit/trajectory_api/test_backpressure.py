"""What the service does with a full queue, with groups that do not fit, and with those that have no ticket."""

import asyncio
import contextlib
from collections import Counter

import pytest

from recipe.atropos.trajectory_api import database, delivery, ingest, status
from recipe.atropos.trajectory_api.messages import Begin, EnvRegistration, Registration, Through
from recipe.atropos.trajectory_api.parsing import Parsed
from recipe.atropos.trajectory_api.service import Service, Settings


def registration(batch_size, **fields):
    return Registration("", "", batch_size, 100, "", -1, 0, 10, **fields)


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
