"""An adapted environment over the real Trajectory API: what it loses, keeps, counts and says when things fail.

The environments here make their groups without any server, so of the pipeline one step is left out, that which sends
nothing that no server sampled; what a server does is in test_gsm8k_upstream and test_sampled.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import psutil
import pytest
from aiohttp import web
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from helpers.services import get, post, running_api
from recipe.atropos.adapter import durable, lifecycle, reporting
from recipe.atropos.adapter.adapted_env import AdaptedEnv, adapt
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.utils.files import read_lines
from recipe.atropos.utils.process import free_port, start_service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BATCH, SIZE = 6, 2


class NumberEnv(BaseEnv):
    """Item n is a group that tells n by its first score. ``faults[n]`` comes in its place, ``gates[n]`` holds it up."""

    name = "number"
    retry_seconds = (0.01, 0.01, 0.01)

    async def setup(self):
        self.number, self.faults, self.gates, self.begun = 0, {}, {}, []

    async def evaluate(self, *args, **kwargs):
        pass

    async def get_next_item(self):
        self.number += 1
        return {"number": self.number - 1}

    async def collect_trajectories(self, item):
        number = item["number"]
        self.begun.append(number)
        if number in self.gates:
            await self.gates[number].wait()
        if faults := self.faults.get(number):
            fault = faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault, []
        return made(number), []


def made(number, **fields):
    tokens = [[1, 2, 3 + number]] * SIZE
    group = {"tokens": tokens, "masks": tokens, "scores": np.array([number, -1], dtype=np.float32)}
    return group | {"group_overrides": None} | fields


def register_trainer(api):
    registration = {"wandb_group": "", "wandb_project": "", "batch_size": BATCH, "max_token_len": 100}
    steps = {"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 9}
    post(f"{api}/register", registration | steps)
    return batch(api)  # now the API lets environments in


def batch(api):
    """The numbers of the items of the next batch, None if there is none."""
    groups = get(f"{api}/batch")["batch"]
    return groups and [int(group["scores"][0]) for group in groups]


async def next_batch(api, manager, within=30):
    async with asyncio.timeout(within):
        while (numbers := await asyncio.to_thread(batch, api)) is None:
            assert not manager.done(), manager.exception()
            await asyncio.sleep(0.05)
    return numbers


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with running_api(tmp_path_factory.mktemp("api")) as service:
        assert register_trainer(service.url) is None
        yield service.url


@pytest.fixture
def make(model_path, monkeypatch):
    monkeypatch.setattr(AdaptedEnv, "_restore", lambda self, group: None)

    def made_env(url, environment=NumberEnv, server_url="http://127.0.0.1:1/v1", max_staleness=None, **config):
        server = APIServerConfig(
            model_name=str(model_path), base_url=server_url, server_type="sglang", api_key="x", health_check=True
        )
        fields = {"tokenizer_name": str(model_path), "group_size": SIZE, "use_wandb": False, "max_token_length": 100}
        fields |= {"rollout_server_url": url, "total_steps": 10**6, "batch_size": BATCH}
        settings = AdapterSettings(max_staleness=max_staleness)
        return adapt(environment, settings=settings)(BaseEnvConfig(**(fields | config)), [server])

    return made_env


async def roll_out(env, number):
    """One item through ``handle_env``, as the manager would do it."""
    env.running_items["uuid"] = {"item": {"number": number}, "worker": None, "start_time": time.time()}
    return await env.handle_env("uuid")


def registered(env):
    async def inner():
        await env.setup()
        await env.register_env()
        await env.get_server_info()

    asyncio.run(inner())
    return env


# ---------------------------------------------------------------------- groups and items


def test_numpy_scores_and_no_overrides_arrive_and_what_arrived_is_counted(api, make):
    env = registered(make(api))
    for number in range(BATCH // SIZE):
        asyncio.run(roll_out(env, number))
    assert batch(api) == [0, 1, 2]
    assert env.report.counts["groups_sent"] == env.report.counts["items"] == 3
    assert env.report.metrics()["env/score"] == 0.0, "the mean over 0, 1, 2 and three times -1"
    assert not env.server.servers[0].config.health_check, "no health completions"


def test_what_is_not_sent_is_counted_by_its_reason(api, make, caplog):
    env = registered(make(api))
    faults = {
        "equal_scores": made(0, scores=[1.0, 1.0]),
        "too_long": made(0, tokens=[[1] * 100] * SIZE, masks=[[1] * 100] * SIZE),
        "wrong_size": made(0, tokens=[[1, 2]], masks=[[1, 2]], scores=[1.0]),
        "no_group": None,
        "nan_score": made(0, scores=[float("nan"), 1.0]),
        "http_422": made(0, masks=[["no number"] * 3] * SIZE),
    }
    for number, (reason, fault) in enumerate(faults.items()):
        env.faults[number] = [fault]
        assert env.report.counts[f"not_sent/{reason}"] == 0
        asyncio.run(roll_out(env, number))
        assert env.report.counts[f"not_sent/{reason}"] == 1 and f"not sent, {reason}" in caplog.text
    env.faults[9] = [[made(0, scores=[1.0, 1.0]), None, made(7)]]
    asyncio.run(roll_out(env, 9))
    counts = env.report.counts
    assert (counts["not_sent/equal_scores"], counts["not_sent/no_group"], counts["groups_sent"]) == (2, 2, 1)
    assert counts["items"] == len(faults) + 1
    assert get(f"{api}/latest_example")["scores"][0] == 7.0


def test_an_item_that_fails_is_tried_again_and_one_that_always_fails_is_counted_with_its_exception(api, make, caplog):
    env = registered(make(api))
    env.faults[1] = [OSError("server away"), ValueError("bad luck"), OSError("server away")]
    env.faults[2] = [ValueError("bad luck") for _ in range(9)]
    asyncio.run(roll_out(env, 1))
    assert get(f"{api}/latest_example")["scores"][0] == 1.0 and env.report.counts["groups_sent"] == 1
    assert asyncio.run(roll_out(env, 2)) is None
    counts = env.report.counts
    assert (counts["failed/ValueError"], counts["failed/OSError"]) == (1, 0)
    assert (counts["tried_again/ValueError"], counts["tried_again/OSError"]) == (4, 2)
    assert len(env.faults[2]) == 5 and counts["items"] == 2
    assert caplog.text.count("ValueError: bad luck") == 1 and "Traceback" in caplog.text, "once a kind"


def test_a_cancelled_task_of_the_environments_own_is_a_failure_and_no_backlog_is_an_empty_one(api, make):
    class Careless(NumberEnv):
        async def collect_trajectories(self, item):
            if item["number"] == 1:
                waiting = asyncio.create_task(asyncio.sleep(9))
                waiting.cancel()
                await waiting
            group, _ = await super().collect_trajectories(item)
            return group, None

    env = registered(make(api, environment=Careless))
    assert asyncio.run(roll_out(env, 1)) is None
    counts = env.report.counts
    assert (counts["failed/RuntimeError"], counts["items"]) == (1, 1) and not env.running_items
    asyncio.run(roll_out(env, 2))
    assert counts["groups_sent"] == 1 and not env.running_items


def test_a_worker_that_takes_too_long_is_counted_and_one_that_is_cancelled_keeps_its_item(api, make):
    async def scene():
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

    asyncio.run(scene())


def test_what_an_environment_does_beside_costs_no_group_and_is_counted(api, make):
    class Careless(NumberEnv):
        def cleanup(self):  # not even a coroutine
            self.cleaned = True

        async def add_rollouts_for_wandb(self, *args, **kwargs):
            raise IndexError("no third answer")

    env = registered(make(api, environment=Careless))
    asyncio.run(roll_out(env, 1))
    assert env.cleaned and env.report.counts["groups_sent"] == 1
    assert [name for name in env.report.counts if name.startswith("failed/")] == ["failed/IndexError"]


def test_process_ends_where_no_item_gives_a_group_and_says_how_many_were_written(make, monkeypatch, tmp_path, caplog):
    class Seldom(NumberEnv):
        every = 3

        async def collect_trajectories(self, item):
            return await super().collect_trajectories(item) if item["number"] % self.every == 0 else (None, [])

    def process(groups):
        url = f"http://127.0.0.1:{free_port()}"
        env = make(url, environment=Seldom, data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
        env.n_groups_to_process, env.group_size_to_process = groups, env.config.group_size
        asyncio.run(env.process_manager())
        return env.report.counts

    monkeypatch.setattr(lifecycle, "_FRUITLESS", 5)
    counts = process(4)
    assert counts["groups_written"] == 4 and counts["items"] >= 10
    Seldom.every = 10**6
    with pytest.raises(EnvironmentFailure, match="of 5 items in a row no group was written"):
        process(4)


def test_an_environment_without_items_says_so_once_and_counts(api, make, caplog):
    class Empty(NumberEnv):
        async def get_next_item(self):
            return None

    env = make(api, environment=Empty)
    for _ in range(3):
        assert asyncio.run(env.get_next_item()) is None
    assert env.report.counts["no_item"] == 3 and caplog.text.count("no more items") == 1


def test_an_evaluation_that_fails_is_counted(api, make, caplog):
    class Failing(NumberEnv):
        async def evaluate(self, *args, **kwargs):
            raise KeyError("answer")

    async def scene():
        env = make(api, environment=Failing, steps_per_eval=2)
        await env.setup()
        env.curr_step, env.status_dict = 1, {"current_step": 2}
        await env.env_step_checks()
        await asyncio.sleep(0.01)
        assert env.report.counts["failed/KeyError"] == 1 and "evaluate failed" in caplog.text

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"group_size": 4}, "--env.group_size=4: .* batch of 6 .* give one of 2, 3, 6"),
        ({"max_token_length": 101}, "--env.max_token_length=101 is more than the 100 tokens"),
    ],
)
def test_an_environment_that_the_trainer_cannot_pack_ends_with_the_flag_that_is_wrong(api, make, config, expected):
    with pytest.raises(EnvironmentFailure, match=expected):
        asyncio.run(make(api, **config).env_manager())


# ---------------------------------------------------------------------- an API that fails


@contextlib.asynccontextmanager
async def stand_in(port, **answers):
    """A server whose endpoints say what cannot be had of the real one: values, or functions of the request."""
    app = web.Application()
    for name, answer in answers.items():

        async def handle(request, answer=answer):
            answer = answer(await request.read()) if callable(answer) else answer
            answer = await answer if inspect.isawaitable(answer) else answer
            return answer if isinstance(answer, web.Response) else web.json_response(answer)

        app.router.add_route("*", f"/{name.replace('__', '-')}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def test_a_post_that_fails_is_sent_again_and_given_up_with_a_count(make, monkeypatch):
    monkeypatch.setattr(durable, "_LONGEST_PAUSE", 0.01)

    async def scene(statuses, expected):
        answers, posts = list(statuses), []

        def take(body):
            posts.append(body)
            return web.json_response({}, status=answers.pop(0) if len(answers) > 1 else answers[0])

        async with stand_in(free_port(), scored_data=take) as url:
            env = make(url)
            await env.setup()
            await roll_out(env, 5)
        assert {name: n for name, n in env.report.counts.items() if name in expected} == expected
        return len(posts)

    assert asyncio.run(scene([500, 503, 200], {"posted_again": 2, "groups_sent": 1})) == 3
    assert asyncio.run(scene([500], {"posted_again": 4, "not_sent/http_500": 1})) == 5
    assert asyncio.run(scene([413], {"not_sent/http_413": 1})) == 1

    async def nobody_there():
        env = make(f"http://127.0.0.1:{free_port()}")
        env.api_timeout = 0.1
        await env.setup()
        await roll_out(env, 5)
        assert env.report.counts["not_sent/api_unreachable"] == 1

    asyncio.run(nobody_there())


def test_a_post_without_an_answer_is_sent_again(make, monkeypatch):
    monkeypatch.setattr(durable, "_LONGEST_POST", 0.5)
    monkeypatch.setattr(durable, "_LONGEST_PAUSE", 0.01)

    async def scene():
        posts = []

        async def take(body):
            posts.append(body)
            await asyncio.sleep(5 if len(posts) == 1 else 0)
            return {"status": "received"}

        async with stand_in(free_port(), scored_data=take) as url:
            env = make(url)
            await env.setup()
            await roll_out(env, 5)
        assert len(posts) == 2 and env.report.counts["posted_again"] == env.report.counts["groups_sent"] == 1

    asyncio.run(scene())


def test_an_api_that_refused_connections_has_forgotten_though_it_knows_somebody_by_the_same_number(make):
    port = free_port()
    taken = {
        "status": "success",
        "wandb_name": "n",
        "starting_step": 0,
        "checkpoint_dir": "",
        "checkpoint_interval": -1,
    }
    status = {"current_step": 0, "queue_size": 0, "env_weight": 1.0}
    always = {"status__env": status, "info": {"batch_size": BATCH, "max_token_len": 100}}

    async def scene():
        async with stand_in(port, register__env=taken | {"env_id": 0}, **always) as url:
            env = make(url)
            await env.setup()
            await env.register_env()
            await env.get_status()
        asked = asyncio.create_task(env.get_status())
        await asyncio.sleep(0.2)
        async with stand_in(port, register__env=taken | {"env_id": 1}, **always):
            await asyncio.wait_for(asked, 10)
        assert env.env_id == 1 and env.report.counts["registered_again"] == 1

    asyncio.run(scene())


def test_an_api_that_was_reset_knows_the_environment_again(make, tmp_path):
    with running_api(tmp_path) as service:
        register_trainer(service.url)
        env = registered(make(service.url))
        with urllib.request.urlopen(f"{service.url}/reset_data", timeout=10):
            pass
        register_trainer(service.url)
        with pytest.raises(urllib.error.HTTPError):
            get_status(service.url, env.env_id)
        asyncio.run(env.get_status())
        assert env.report.counts["registered_again"] == 1 and get_status(service.url, env.env_id)


def test_while_nothing_is_sent_it_is_said_and_a_tokenizer_is_compared_when_the_server_comes(api, make, monkeypatch):
    monkeypatch.setattr(reporting, "_SILENCE", 0.5)
    monkeypatch.setattr(lifecycle, "_ASK_SERVER", 0.2)
    port = free_port()

    async def scene():
        env = make(api, server_url=f"http://127.0.0.1:{port}/v1")
        await env.setup()
        env.setup = lambda: asyncio.sleep(0)
        env.faults = {number: [None] for number in range(10**4)}
        manager = asyncio.create_task(env.env_manager())
        async with asyncio.timeout(30):
            while not env.report.counts["nothing_sent"]:
                assert not manager.done(), manager.exception()
                await asyncio.sleep(0.05)
        model_info = {"tokenizer_path": "the/policys", "weight_version": "0"}
        async with stand_in(port, tokenize={"tokens": [5, 6]}, model_info=model_info):
            with pytest.raises(EnvironmentFailure, match="is not the tokenizer .* which is the/policys: .* give --env"):
                await asyncio.wait_for(manager, 10)

    asyncio.run(scene())


def test_an_api_that_never_comes_and_a_trainer_that_never_comes_end_the_environment_with_their_names(make, tmp_path):
    env = make(f"http://127.0.0.1:{free_port()}")
    env.api_timeout = 0.5
    with pytest.raises(
        EnvironmentFailure, match="the Trajectory API at .*register-env does not answer .* is run-api up"
    ):
        asyncio.run(env.env_manager())
    with running_api(tmp_path) as service:
        for config, expected in (
            ({}, "registration at .* which says 'wait for trainer to start'"),
            ({"use_wandb": True}, "waits for a trainer to name the wandb project"),
        ):
            env = make(service.url, **config)
            env.trainer_timeout = 0.5
            with pytest.raises(EnvironmentFailure, match=expected):
                asyncio.run(env.env_manager())


def test_an_environment_outlives_the_api_and_what_was_in_flight_arrives_once_and_in_order(make, tmp_path, caplog):
    """Paced at staleness 0: items 0 to 2 belong to version 0, and the API dies when it has item 0 of them."""
    version, port, server_port = ["0"], free_port(), free_port()
    url = f"http://127.0.0.1:{port}"

    async def scene():
        env = make(url, server_url=f"http://127.0.0.1:{server_port}/v1", max_staleness=0)
        await env.setup()
        env.setup = lambda: asyncio.sleep(0)  # it has been: the gate stands
        env.gates[1] = asyncio.Event()
        manager = asyncio.create_task(env.env_manager())
        await asyncio.sleep(1.5)
        assert not manager.done(), "the API has not come yet"
        with contextlib.ExitStack() as first:
            first.enter_context(running_api(tmp_path, port))
            await asyncio.sleep(1)
            assert register_trainer(url) is None
            async with asyncio.timeout(30):
                while len(env.begun) < 3 or env.status_dict["self_queue_size"] < 1:
                    await asyncio.sleep(0.05)
        env.gates[1].set()
        await asyncio.sleep(1.5)
        assert not manager.done() and env.report.counts["groups_sent"] == 1, "kept"
        assert [item["start_time"] for item in env.running_items.values()] == [math.inf] * 2, "no time-out ends them"
        with running_api(tmp_path, port):
            await asyncio.sleep(1.5)
            assert get(f"{url}/status")["queue_size"] == 0, "nothing before the trainer: it could not register"
            post(f"{url}/register-env", {"max_token_length": 9, "desired_name": "o", "weight": 1.0, "group_size": 2})
            assert register_trainer(url) is None
            async with asyncio.timeout(30):
                while env.report.counts["groups_sent"] < 3:
                    assert not manager.done(), manager.exception()
                    await asyncio.sleep(0.05)
            assert env.begun == [0, 1, 2], "pacing holds"
            version[0] = "1"
            assert await next_batch(url, manager) == [1, 2, 3]
            counts = env.report.counts
            assert (counts["registered_again"], counts["api_lost"], counts["lost_with_api"]) == (1, 1, 1)
            assert not any(name.startswith(("not_sent", "failed")) for name in counts), counts
            assert get_status(url, env.env_id)
            manager.cancel()
            await asyncio.gather(manager, return_exceptions=True)
            with pytest.raises(urllib.error.HTTPError):  # the API divides by the weight of those connected
                get_status(url, env.env_id)

    async def with_server():
        async with stand_in(server_port, model_info=lambda _: {"weight_version": version[0]}):
            await scene()

    asyncio.run(with_server())
    assert "does not answer" in caplog.text and "wait for trainer to start" in caplog.text


def get_status(url, env_id):
    request = urllib.request.Request(f"{url}/status-env", json.dumps({"env_id": env_id}).encode(), method="GET")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


# ---------------------------------------------------------------------- the end


STUBBORN = """
import asyncio, subprocess, sys, time
from atroposlib.envs.base import BaseEnv

class Stubborn(BaseEnv):
    async def setup(self):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)

    async def get_next_item(self):
        print("ready", flush=True)
        return {}

    async def collect_trajectories(self, item):
        await asyncio.sleep(1000)

    async def evaluate(self): ...
"""


def test_sigterm_ends_it_with_a_goodbye_and_without_children_though_a_thread_hangs(api, make, model_path, tmp_path):
    registered(make(api))  # another one, of which the API tells its part
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    flags = {"env.tokenizer_name": model_path, "env.group_size": SIZE, "env.use_wandb": "false"}
    flags |= {"env.rollout_server_url": api, "env.max_token_length": 100, "openai.model_name": model_path}
    flags |= {"openai.server_type": "sglang", "openai.base_url": "http://127.0.0.1:1/v1", "env.wandb_name": "stubborn"}
    command = [sys.executable, "-m", "recipe.atropos.utils.env_adapter", "serve", "--env", "stubborn.py"]
    report = tmp_path / "report.jsonl"
    command += [f"--{key}={value}" for key, value in (flags | {"adapter.report": report}).items()]
    service = start_service("stubborn", command, log_path=tmp_path / "log", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while "ready" not in service.tail(200):
            assert service.poll() is None and time.monotonic() < deadline, service.tail()
            time.sleep(0.1)
        weight = get_status(api, 0)["env_weight"]
        (child,) = psutil.Process(service.pid).children()
        os.kill(service.pid, signal.SIGTERM)
        assert service.process.wait(30) == 143, service.tail()
        assert not child.is_running() and "left running" not in service.tail()
    finally:
        service.stop(grace=0)
    assert read_lines(report)[-1]["in_flight"] > 0
    assert get_status(api, 0)["env_weight"] > weight, "its part is the others'"
