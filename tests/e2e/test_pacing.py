"""An adapted environment and our Trajectory API: what starts, what an item's end does to its place, what is awaited.

Without a server: groups are made, and a script takes the batches. What the API guarantees for any environments is in
tests/unit/trajectory_api.
"""

# ruff: noqa: F811  (fixtures that are imported)

import asyncio
import contextlib

import pytest
from atroposlib.envs.base import EvalHandlingEnum

from helpers.numbered_env import BATCH, SIZE, NumberEnv, made, make, managed, until  # noqa: F401
from helpers.scripted_trainer import ScriptedTrainer
from helpers.services import get
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.errors import EnvironmentFailure

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def api(tmp_path):
    with running_trajectory_api(tmp_path) as service:
        yield service.url


@contextlib.asynccontextmanager
async def playing(env):
    """Yield the environment and its manager, which runs."""
    async with asyncio.timeout(90), managed(env) as manager:
        yield env, manager


async def test_items_start_as_far_as_the_bound_allows(api, make):
    """Also for a trainer that goes back to a checkpoint: it gets the same batches again."""
    async with playing(make(api)) as (env, manager):
        trainer = ScriptedTrainer(api, BATCH, max_staleness=1)
        assert await trainer.next_batch(manager) == [0, 1, 2]
        assert await trainer.next_batch(manager) == [3, 4, 5]
        await asyncio.sleep(1)
        assert await asyncio.to_thread(trainer.batch) is None and len(env.begun) == 6, "two batches for version 0"
        assert env.backlog == [{"number": 6}], "a checkpoint has what waits for a ticket"
        trainer.push()
        assert await trainer.next_batch(manager) == [6, 7, 8]
        again = ScriptedTrainer(api, BATCH, max_staleness=1, after=1)
        assert [await again.next_batch(manager) for _ in range(2)] == [[3, 4, 5], [6, 7, 8]]
        again.push()
        assert await again.next_batch(manager) == [9, 10, 11]


class TimedEnv(NumberEnv):
    """Item n takes ``seconds(n)``; ``weights[n]`` are those that it started with. One in three gives no group."""

    async def collect_trajectories(self, item):
        number = item["number"]
        self.weights[number] = self.pushed
        await asyncio.sleep(self.seconds(number))
        groups = [made(number)] * (2 if self.uneven and number % 4 == 0 else 1)
        return (None if number % 3 == 1 else groups), []


@pytest.mark.parametrize(
    ("max_staleness", "uneven"),
    [pytest.param(1, False, id="bound"), pytest.param(0, True, id="items_of_several_groups", marks=pytest.mark.slow)],
)
async def test_batches_do_not_depend_on_how_long_items_take(tmp_path, make, max_staleness, uneven):
    """Nor does the bound; where items give other numbers of groups than expected, some may be too old."""

    async def batches(name, seconds):
        found = []
        (tmp_path / name).mkdir()
        with running_trajectory_api(tmp_path / name) as api:
            async with playing(make(api.url, TimedEnv)) as (env, manager):
                env.weights, env.pushed, env.seconds, env.uneven = {}, 0, seconds, uneven
                trainer = ScriptedTrainer(api.url, BATCH, max_staleness)
                for step in range(1, 7):
                    found.append(await trainer.next_batch(manager))
                    assert uneven or step - 1 - min(env.weights[number] for number in found[-1]) <= max_staleness
                    env.pushed = step
                    trainer.push()
        return found

    quick = await batches("quick", lambda number: 0)
    assert quick == await batches("slow", lambda number: 0.07 * (number * 7 % 5))
    if not uneven:
        trained = [number for number in range(99) if number % 3 != 1]
        assert quick == [trained[3 * step : 3 * step + 3] for step in range(6)]


async def test_what_is_not_posted_releases_its_place_by_reason(api, make):
    """The API counts each place once, under the reason that the adapter counts."""
    async with playing(make(api)) as (env, manager):
        trainer = ScriptedTrainer(api, BATCH, max_staleness=0)
        env.faults |= {
            0: [made(0, scores=[1.0, 1.0])],
            1: [ValueError("bad luck") for _ in range(4)],
            2: [None],
            3: [made(3, masks=[["no number"] * 3] * SIZE)],  # found by the client
            4: [made(4, messages=[[{"role": "user"}]] * SIZE)],  # found by the API
            5: [[made(5, scores=[1.0, 1.0]), None]],
        }
        env.gates[6], env.config.worker_timeout = asyncio.Event(), 1.0
        assert await trainer.next_batch(manager) == [7, 8, 9]
        released = {"equal_scores": 1, "failed_ValueError": 1, "malformed": 2, "no_group": 2, "failed_TimeoutError": 1}
        assert await asyncio.to_thread(trainer.counts, "released") == released
        counts = env.report.counts
        assert (counts["not_sent/equal_scores"], counts["not_sent/no_group"], counts["not_sent/malformed"]) == (2, 2, 2)
        assert counts["failed/ValueError"] == counts["failed/TimeoutError"] == 1
        await asyncio.sleep(0.5)
        assert await asyncio.to_thread(trainer.batch) is None and len(env.begun) == 13, "10 items, one of them 4 times"


async def test_an_item_of_several_groups_has_as_many_places(api, make):
    async with playing(make(api, max_num_workers=1)) as (env, manager):
        trainer = ScriptedTrainer(api, BATCH, max_staleness=0)
        env.faults = {number: [[made(number), made(number)]] for number in range(99)}
        env.faults[1] = [[made(1), made(1), made(1)]]
        batches = []
        for _ in range(4):
            batches += await trainer.next_batch(manager)
            trainer.push()
        assert batches == [0, 0, 1, 1, 1, 2, 2, 3, 3], "two items of four sequences do not fit into a batch of six"


@pytest.mark.slow
async def test_an_evaluation_that_stops_training_restarts_items(api, make):
    """What it cancels starts again with a ticket of its own."""

    class Evaluated(NumberEnv):
        async def evaluate(self, *args, **kwargs):
            self.evaluations = getattr(self, "evaluations", 0) + 1
            await self.evaluated.wait()

    async with playing(make(api, Evaluated, steps_per_eval=2, eval_handling=EvalHandlingEnum.STOP_TRAIN)) as (
        env,
        manager,
    ):
        trainer = ScriptedTrainer(api, BATCH, max_staleness=1)
        env.evaluated, env.gates[7] = asyncio.Event(), asyncio.Event()
        assert await trainer.next_batch(manager) == [0, 1, 2]
        trainer.push()
        await until(lambda: len(env.begun) == 9 and env.curr_step == 1, manager)
        assert await trainer.next_batch(manager) == [3, 4, 5]
        await until(lambda: getattr(env, "evaluations", 0) and not env.workers, manager)
        await asyncio.sleep(0.5)
        assert len(env.begun) == 9, "nothing starts while it evaluates"
        assert {*await asyncio.to_thread(trainer.counts, "released")} == {"cancelled"}
        env.gates[7].set()
        env.evaluated.set()
        assert await trainer.next_batch(manager) == [6, 8, 7] and env.begun.count(7) == 2


async def test_evaluation_goes_on_while_a_ticket_is_awaited(api, make):
    class Evaluated(NumberEnv):
        async def evaluate(self, *args, **kwargs):
            self.evaluated.set()

    async with playing(make(api, Evaluated, steps_per_eval=2)) as (env, manager):
        trainer = ScriptedTrainer(api, BATCH, max_staleness=0)
        env.evaluated = asyncio.Event()
        assert await trainer.next_batch(manager) == [0, 1, 2]
        await until(lambda: env.curr_step == 1, manager)
        trainer.push()
        assert await trainer.next_batch(manager) == [3, 4, 5]
        assert not env.workers, "the next ticket is awaited"
        async with asyncio.timeout(5):
            await env.evaluated.wait()


async def test_nothing_starts_beyond_the_batches_that_may_queue(api, make):
    """Without a bound, ``max_batches_offpolicy`` limits what is queued or begun; nothing that runs is cancelled."""
    async with playing(make(api, max_batches_offpolicy=2, max_num_workers=4)) as (env, manager):
        trainer = ScriptedTrainer(api, BATCH)
        env.gates[0] = asyncio.Event()
        await until(lambda: env.report.counts["groups_sent"] == 5, manager)
        await asyncio.sleep(1)
        begun = len(env.begun)
        assert begun == 6 and len(env.workers) == 1, "two batches are queued or begun, and item 0 runs"
        env.gates[0].set()
        assert await trainer.next_batch(manager) == [0, 1, 2]
        await until(lambda: trainer.batch() and len(env.begun) > begun, manager)


async def test_bound_alone_limits_what_is_queued_where_there_is_one(api, make):
    """Not ``max_batches_offpolicy``: the tickets go as far as the bound allows."""
    async with playing(make(api, max_batches_offpolicy=1)) as (env, manager):
        ScriptedTrainer(api, BATCH, max_staleness=3)
        await until(lambda: env.report.counts["groups_sent"] == 12, manager)
        await asyncio.sleep(0.5)
        assert len(env.begun) == 12, "four batches for version 0"


async def test_nothing_starts_once_the_environment_ends(api, make):
    """Nor if its ticket comes at that moment: the item would be posted over a new connection, which nobody closes."""
    async with playing(make(api)) as (env, manager):
        ScriptedTrainer(api, BATCH)
        ticket_came = asyncio.Event()
        await until(lambda: env.begun, manager)
        client = await env._api()
        begin, waiting = client.begin, asyncio.Event()

        async def late(*arguments):
            ticket = await begin(*arguments)
            waiting.set()
            await ticket_came.wait()
            return ticket

        client.begin = late
        await asyncio.wait_for(waiting.wait(), 30)
        begun = len(env.begun)
        manager.cancel()
        ticket_came.set()
        await asyncio.gather(manager, return_exceptions=True)
        await asyncio.sleep(0.2)
        assert len(env.begun) == begun and not env.workers


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False], ids=["a_rollout", "the_trainer"])
async def test_an_environment_that_gets_no_ticket_ends(api, make, hangs):
    """Whether an item never ends or no weights come: it ends with what the API says."""
    async with playing(make(api, worker_timeout=-1)) as (env, manager):
        trainer = ScriptedTrainer(api, BATCH, max_staleness=0)
        env.longest_wait = 2.0
        if hangs:
            env.gates[0] = asyncio.Event()
        with pytest.raises(
            EnvironmentFailure, match=r"after \d+ s: number waits for a ticket: its group .*; [01] items"
        ):
            await asyncio.wait_for(manager, 30)
        assert (await asyncio.to_thread(trainer.batch) is None) == hangs
        assert "gone: number_0 (after " in (await asyncio.to_thread(get, f"{api}/diagnose"))["why"]
