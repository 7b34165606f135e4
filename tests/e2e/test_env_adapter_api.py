"""An adapted environment over the real Trajectory API: what it loses, keeps, counts and says when things fail.

The environments here make their groups without any server, so of the pipeline one step is left out, that which sends
nothing that no server sampled; what a server does is in test_gsm8k_upstream and test_sampled.
"""

# ruff: noqa: F811  (fixtures that are imported)

import asyncio

import pytest
from atroposlib.envs.base import BaseEnv

from helpers.numbered_env import (  # noqa: F401
    BATCH,
    SIZE,
    NumberEnv,
    api,
    made,
    make,
    managed,
    registered,
    roll_out,
    until,
)
from helpers.scripted_trainer import ScriptedTrainer
from helpers.services import get
from recipe.atropos.adapter import lifecycle
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.utils.process import free_port

pytestmark = pytest.mark.timeout(120)


async def test_adapted_numpy_scores_arrive_and_are_counted(api, make):
    env = await registered(make(api))
    for number in range(BATCH // SIZE):
        await roll_out(env, number)
    assert ScriptedTrainer(api, BATCH).batch() == [0, 1, 2]
    assert env.report.counts["groups_sent"] == env.report.counts["items"] == 3
    assert env.report.metrics()["env/score"] == 0.0, "the mean over 0, 1, 2 and three times -1"
    assert not env.server.servers[0].config.health_check, "no health completions"


async def test_what_is_not_sent_is_counted_by_its_reason(api, make, caplog):
    env = await registered(make(api))
    faults = {
        "equal_scores": made(0, scores=[1.0, 1.0]),
        "too_long": made(0, tokens=[[1] * 101] * SIZE, masks=[[1] * 101] * SIZE),
        "wrong_size": made(0, tokens=[[1, 2]], masks=[[1, 2]], scores=[1.0]),
        "no_group": None,
        "nonfinite_scores": made(0, scores=[float("nan"), 1.0]),
        "malformed": made(0, messages=[[{"role": "user"}]] * SIZE),  # which the API finds
    }
    for number, (reason, fault) in enumerate(faults.items()):
        env.faults[number] = [fault]
        assert env.report.counts[f"not_sent/{reason}"] == 0
        await roll_out(env, number)
        assert env.report.counts[f"not_sent/{reason}"] == 1 and f"not sent, {reason}" in caplog.text
    env.faults[9] = [[made(0, scores=[1.0, 1.0]), None, made(7)]]
    await roll_out(env, 9)
    counts = env.report.counts
    assert (counts["not_sent/equal_scores"], counts["not_sent/no_group"], counts["groups_sent"]) == (2, 2, 1)
    assert counts["items"] == len(faults) + 1
    assert get(f"{api}/latest_example")["scores"][0] == 7.0


async def test_adapted_sequences_may_be_as_long_as_the_trainer_takes(api, make):
    """As answers are that an environment lets take what the prompt leaves of max_token_length."""
    env = await registered(make(api))
    longest = [[1] * env.config.max_token_length] * SIZE
    env.faults[0] = [made(0, tokens=longest, masks=longest)]
    await roll_out(env, 0)
    assert get(f"{api}/info")["max_token_len"] == env.config.max_token_length and env.report.counts["groups_sent"] == 1


async def test_an_item_without_a_group_has_one_reason(api, make):
    """Also one whose environment posts its group itself, and one whose single trajectories are too few."""

    class Own(NumberEnv):
        async def collect_trajectories(self, item):
            await self.handle_send_to_api(made(item["number"]), item)
            return None, []

    class Seldom(NumberEnv):
        collect_trajectories = BaseEnv.collect_trajectories

        async def collect_trajectory(self, item):
            return None, []

    for environment, outcome in ((Own, "groups_sent"), (Seldom, "not_sent/missing_trajectories")):
        env = make(api, environment=environment, max_num_workers=1)
        async with managed(env) as manager:
            await until(lambda env=env: env.report.counts["items"] >= 3, manager)
        counts = env.report.counts
        assert counts[outcome] >= 3 and not counts["not_sent/no_group"], counts
    assert get(f"{api}/diagnose")["counts"]["released/missing_trajectories"] >= 2


async def test_adapted_items_that_fail_are_tried_again_and_counted(api, make, caplog):
    env = await registered(make(api))
    env.faults[1] = [OSError("server away"), ValueError("bad luck"), OSError("server away")]
    env.faults[2] = [ValueError("bad luck") for _ in range(9)]
    await roll_out(env, 1)
    assert get(f"{api}/latest_example")["scores"][0] == 1.0 and env.report.counts["groups_sent"] == 1
    assert await roll_out(env, 2) is None
    counts = env.report.counts
    assert (counts["failed/ValueError"], counts["failed/OSError"]) == (1, 0)
    assert (counts["retried/ValueError"], counts["retried/OSError"]) == (4, 2)
    assert len(env.faults[2]) == 5 and counts["items"] == 2
    assert caplog.text.count("ValueError: bad luck") == 1 and "Traceback" in caplog.text, "once a kind"
    env.retry_seconds, env.faults[3] = (), [OSError("server away")]
    assert await roll_out(env, 3) is None
    assert (counts["failed/OSError"], counts["retried/OSError"], counts["items"]) == (1, 2, 3)


async def test_adapted_cancelled_task_is_a_failure(api, make):
    """One of the environment's own; and no backlog is an empty one."""

    class Careless(NumberEnv):
        async def collect_trajectories(self, item):
            if item["number"] == 1:
                waiting = asyncio.create_task(asyncio.sleep(9))
                waiting.cancel()
                await waiting
            group, _ = await super().collect_trajectories(item)
            return group, None

    env = await registered(make(api, environment=Careless))
    assert await roll_out(env, 1) is None
    counts = env.report.counts
    assert (counts["failed/CancelledError"], counts["items"]) == (1, 1) and not env.running_items
    await roll_out(env, 2)
    assert counts["groups_sent"] == 1 and not env.running_items


@pytest.mark.parametrize("raised", [SystemExit, pytest.fail.Exception])
async def test_adapted_item_that_exits_is_a_failure(api, make, raised):
    """The process goes on, whether a group raises what is no Exception or one trajectory of it, whose siblings end."""
    running = set()

    class Exits(NumberEnv):
        async def collect_trajectory(self, item):
            running.add(asyncio.current_task())
            try:
                await asyncio.sleep(0.01 if len(running) == 1 else 60)
                raise raised("of its own")
            finally:
                running.remove(asyncio.current_task())

        async def collect_trajectories(self, item):
            if item["number"] == 1:
                raise raised("of its own")
            return await super().collect_trajectories(item)

    class Each(Exits):
        collect_trajectories = BaseEnv.collect_trajectories

    for environment in (Exits, Each):
        env = await registered(make(api, environment=environment))
        assert await roll_out(env, 1) is None
        counts = env.report.counts
        assert (counts[f"failed/{raised.__name__}"], counts["items"]) == (1, 1) and not running


async def test_adapted_slow_worker_is_counted_and_keeps_its_item(api, make):
    env = make(api, worker_timeout=0.2)
    await env.setup()
    env.gates = {0: asyncio.Event()}
    for waited, expected in ((0.0, 0), (0.3, 1)):
        work = asyncio.create_task(roll_out(env, 0))
        await asyncio.sleep(waited + 0.05)
        assert "uuid" in env.running_items, "whoever cancels it finds its item there"
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert env.report.counts["failed/TimeoutError"] == expected


async def test_adapted_failures_beside_a_group_do_not_cost_it(api, make):
    class Careless(NumberEnv):
        def cleanup(self):  # not even a coroutine
            self.cleaned = True

        async def add_rollouts_for_wandb(self, *args, **kwargs):
            raise IndexError("no third answer")

    env = await registered(make(api, environment=Careless))
    await roll_out(env, 1)
    assert env.cleaned and env.report.counts["groups_sent"] == 1
    assert [name for name in env.report.counts if name.startswith("failed/")] == ["failed/IndexError"]


async def test_adapted_process_ends_where_no_item_gives_a_group(make, monkeypatch, tmp_path, caplog):
    class Seldom(NumberEnv):
        every = 3

        async def collect_trajectories(self, item):
            return await super().collect_trajectories(item) if item["number"] % self.every == 0 else (None, [])

    async def process(groups):
        url = f"http://127.0.0.1:{free_port()}"
        env = make(url, environment=Seldom, data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
        env.n_groups_to_process, env.group_size_to_process = groups, env.config.group_size
        await env.process_manager()
        return env.report.counts

    monkeypatch.setattr(lifecycle, "_FRUITLESS", 5)
    counts = await process(4)
    assert counts["groups_written"] == 4 and counts["items"] >= 10
    Seldom.every = 10**6
    with pytest.raises(EnvironmentFailure, match="of 5 items in a row no group was written"):
        await process(4)


async def test_an_environment_without_items_says_so_once_and_counts(api, make, caplog):
    class Empty(NumberEnv):
        async def get_next_item(self):
            return None

    env = make(api, environment=Empty)
    for _ in range(3):
        assert await env.get_next_item() is None
    assert env.report.counts["no_item"] == 3 and caplog.text.count("no more items") == 1


async def test_an_evaluation_that_fails_is_counted(api, make, caplog):
    class Failing(NumberEnv):
        async def evaluate(self, *args, **kwargs):
            raise KeyError("answer")

    env = make(api, environment=Failing, steps_per_eval=2)
    await env.setup()
    env.curr_step, env.status_dict = 1, {"current_step": 2}
    await env.env_step_checks()
    await asyncio.sleep(0.01)
    assert env.report.counts["failed/KeyError"] == 1 and "evaluate failed" in caplog.text


async def test_adapted_sizes_that_cannot_be_packed_name_the_flag(api, make):
    with pytest.raises(EnvironmentFailure, match="--env.group_size=7: the trainer.s batch has 6 sequences"):
        await make(api, group_size=7).env_manager()
