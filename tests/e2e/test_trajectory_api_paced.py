"""Environments with tickets and without, a trainer that goes back, and a server that is killed meanwhile."""

import asyncio
import itertools
import random

import pytest

from helpers.services import group
from helpers.trajectory_api import ENVIRONMENT, REGISTRATION, numbers, running_trajectory_api
from recipe.atropos.trajectory_api.client import TrajectoryApiClient

BATCHES = 25


class Run:
    """What environments and trainer do, and what they saw."""

    def __init__(self, api, max_staleness, seed):
        self.api, self.max_staleness, self.random = api, max_staleness, random.Random(seed)
        self.numbers = itertools.count()
        self.ticket_of: dict[int, tuple[int, int]] = {}  # number of a group -> (environment, ticket)
        self.batches: dict[int, list[int]] = {}
        self.acknowledged: set[int] = set()
        self.released = 0

    async def stock(self):
        """An environment without tickets."""
        async with TrajectoryApiClient(self.api.url) as client:
            for number in self.numbers:
                await client.post_groups([group(number)])
                self.acknowledged.add(number)
                await asyncio.sleep(0.1)

    async def environment(self, weight):
        async with TrajectoryApiClient(self.api.url) as client:
            while (answer := await client.register_env(ENVIRONMENT | {"weight": weight}))["status"] != "success":
                await asyncio.sleep(0.05)
            working = [asyncio.create_task(self.worker(client, answer["env_id"])) for _ in range(3)]
            await asyncio.gather(*working)

    async def worker(self, client, env_id):
        while True:
            ticket = await client.begin(env_id, 4, wait=1)
            if ticket is None:
                continue
            await asyncio.sleep(self.random.choice([0, 0.005, 0.05]))
            if self.random.random() < 0.4:
                await client.release(ticket, "equal_scores")
                self.released += 1
                continue
            number = next(self.numbers)
            self.ticket_of[number] = (env_id, ticket)
            await client.post_groups([group(number) | {"env_id": env_id}], ticket)
            self.acknowledged.add(number)

    async def trainer(self):
        after, crashes = 0, 2
        async with TrajectoryApiClient(self.api.url) as client:
            await client.register(REGISTRATION, 0, self.max_staleness)
            while after < BATCHES:
                batch = await client.batch(after, wait=20)
                assert batch is not None, (await client.diagnose())["why"]
                assert self.batches.setdefault(batch.number, numbers(batch.groups)) == numbers(batch.groups)
                after = batch.number
                if after % 10 == 7 and crashes:  # it comes back from an older checkpoint
                    crashes, after = crashes - 1, after - 3
                    await client.register(REGISTRATION, after, self.max_staleness)
                else:
                    await client.call("POST", "/weights", {"through": after})

    async def killer(self, kills):
        for _ in range(kills):
            await asyncio.sleep(self.random.uniform(0.2, 0.6))
            self.api.kill()
            await asyncio.to_thread(self.api.start)

    async def go(self, kills):
        environments = [asyncio.create_task(self.environment(weight)) for weight in (1.0, 1.0, 2.0)]
        environments.append(asyncio.create_task(self.stock()))
        killer = asyncio.create_task(self.killer(kills))
        try:
            await asyncio.wait_for(self.trainer(), 120)
        finally:
            await killer
            for task in environments:
                task.cancel()
            await asyncio.gather(*environments, return_exceptions=True)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_batches_keep_order_and_groups_through_kills(tmp_path, max_staleness, kills):
    """What is acknowledged is in one batch, or queued; with tickets, in their order."""
    with running_trajectory_api(tmp_path) as api:
        run = Run(api, max_staleness, seed=kills)
        asyncio.run(run.go(kills))
        trained = [number for _, batch in sorted(run.batches.items()) for number in batch]
        environments = {env_id for env_id, _ in run.ticket_of.values()}
        for env_id in environments:
            api.post("/disconnect-env", {"env_id": env_id})
        api.register(after=BATCHES)  # without a bound
        found, after = [*trained], BATCHES
        while (batch := api.batch(f"?after={after}")) is not None:
            found, after = found + batch, after + 1
        left = api.get("/status")["queue_size"]
    assert len(trained) == 2 * BATCHES and len(found) == len(set(found)) and left <= 1
    assert len(run.acknowledged - set(found)) <= left
    assert len(found) + left <= len(run.acknowledged) + 10, "each worker has one post without an answer"
    for env_id in environments:
        of_it = [run.ticket_of[number] for number in trained if number in run.ticket_of]
        tickets = [ticket for env, ticket in of_it if env == env_id]
        assert tickets == sorted(tickets), "an environment's groups are trained on in the order of their tickets"
    assert run.released > 3
