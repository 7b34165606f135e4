"""An adapted environment while the Trajectory API fails, comes back or never comes, and how it ends itself."""

# ruff: noqa: F811  (fixtures that are imported)

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

import psutil
import pytest
from aiohttp import web

from helpers.numbered_env import (  # noqa: F401
    BATCH,
    SIZE,
    api,
    make,
    next_batch,
    register_trainer,
    registered,
    roll_out,
)
from helpers.services import get, post, running_api
from recipe.atropos.adapter import durable, lifecycle, reporting
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.utils.files import read_lines
from recipe.atropos.utils.process import free_port, start_service

pytestmark = pytest.mark.timeout(120)

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


def test_adapted_post_is_sent_again_and_given_up_with_a_count(make, monkeypatch):
    """A post that fails is sent again and given up with a count."""
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


def test_adapted_env_registers_again_after_refused_connections(make):
    """An api that refused connections has forgotten though it knows somebody by the same number."""
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


def test_adapted_env_says_silence_and_compares_tokenizers_late(api, make, monkeypatch):
    """While nothing is sent it is said and a tokenizer is compared when the server comes."""
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


def test_adapted_env_names_an_api_or_trainer_that_never_comes(make, tmp_path):
    """An api that never comes and a trainer that never comes end the environment with their names."""
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


def test_adapted_env_outlives_the_api(make, tmp_path, caplog):
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


def test_adapted_env_ends_on_sigterm_without_children(api, make, model_path, tmp_path):
    """Sigterm ends it with a goodbye and without children though a thread hangs."""
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
