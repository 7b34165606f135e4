"""An adapted environment while the Trajectory API fails, comes back or never comes, and how it ends itself."""

# ruff: noqa: F811  (fixtures that are imported)

import asyncio
import os
import shutil
import signal

import aiohttp
import psutil
import pytest
from aiohttp import web
from atroposlib.utils.io import parse_http_response

from helpers.launchers import environment_process
from helpers.numbered_env import BATCH, SIZE, NumberEnv, api, make, managed, registered, roll_out, until  # noqa: F401
from helpers.scripted_trainer import ScriptedTrainer
from helpers.services import get, running_api
from helpers.stub_sglang import StubSGLang, stub_servers
from helpers.trajectory_api import Api, running_trajectory_api
from recipe.atropos.adapter import lifecycle
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.run import reporting
from recipe.atropos.trajectory_api.client import TrajectoryApiError
from recipe.atropos.utils.files import read_lines
from recipe.atropos.utils.process import free_port

pytestmark = pytest.mark.timeout(120)


async def test_adapted_env_outlives_the_api(make, tmp_path, caplog):
    """The API comes late, and is killed when it has item 0 of the first batch; its store stays."""
    api = Api(tmp_path)
    try:
        env = make(api.url)
        async with managed(env) as manager:
            env.gates[1] = asyncio.Event()
            await asyncio.sleep(0.3)
            assert not manager.done(), "the API has not come yet"
            trainer = ScriptedTrainer(api.start().url, BATCH, max_staleness=0)
            await until(lambda: env.report.counts["groups_sent"] == 2 and len(env.begun) == 3, manager)
            api.kill()
            number = env.env_id
            env.gates[1].set()
            await asyncio.sleep(0.3)
            assert env.report.counts["groups_sent"] == 2 and not manager.done(), "kept"
            api.start()
            assert await trainer.next_batch(manager) == [0, 1, 2]
            assert env.begun == [0, 1, 2] and env.env_id == number, "pacing holds"
            counts = env.report.counts
            assert counts["sent_again"] and counts["groups_sent"] == 3 and not counts["registered_again"]
            assert not any(name.startswith(("not_sent", "failed")) for name in counts), counts
            manager.cancel()
            await asyncio.gather(manager, return_exceptions=True)
            [line] = api.get("/diagnose")["environments"]
            assert not line["alive"] and line["open_tickets"] == 0, "it has left"
    finally:
        api.kill()
    assert "trying again" in caplog.text


@pytest.mark.slow
async def test_an_api_with_other_data_knows_the_environment_again(make, tmp_path):
    """What ran has no ticket there, so it starts again."""
    with running_trajectory_api(tmp_path) as api:
        env = make(api.url)
        async with managed(env) as manager:
            env.gates[0] = asyncio.Event()
            ScriptedTrainer(api.url, BATCH, max_staleness=0)
            await until(lambda: env.report.counts["groups_sent"] == 2, manager)
            api.kill()
            shutil.rmtree(tmp_path / "data")
            trainer = ScriptedTrainer(api.start().url, BATCH, max_staleness=0)
            env.gates[0].set()
            assert sorted(await trainer.next_batch(manager)) == [0, 3, 4]
            assert await asyncio.to_thread(trainer.counts, "released") == {}, "tickets of the other store"
            assert env.report.counts["registered_again"] == 1 and sorted(env.begun) == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("variable", "key", "fits"), [("secret", "x", True), ("", "secret", True), ("", "x", False)])
async def test_an_environment_shows_the_api_its_secret(make, tmp_path, monkeypatch, variable, key, fits):
    """That of the run, else of its SGLang server."""
    monkeypatch.setenv("ATROPOS_API_KEY", variable)
    with running_trajectory_api(tmp_path, secret="secret") as service:
        env = make(service.url, api_key=key)
        env.trainer_timeout = 0
        expected = "which says 'wait for trainer to start'" if fits else "401: .* set .ATROPOS_API_KEY to its secret"
        with pytest.raises(EnvironmentFailure, match=expected):
            await env.env_manager()


class KeepsLimitEnv(NumberEnv):
    """Asks the API by itself, as Atropos' tool_use_interleaved_thinking does."""

    async def get_server_info(self):
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{self.config.rollout_server_url}/info") as answer:
                self.config.batch_size = (await parse_http_response(answer))["batch_size"]


class AsksAfterEnv(NumberEnv):
    async def get_server_info(self):
        await super().get_server_info()
        await KeepsLimitEnv.get_server_info(self)


@pytest.mark.parametrize("environment", [KeepsLimitEnv, AsksAfterEnv])
async def test_environments_own_requests_have_the_apis_key(make, tmp_path, monkeypatch, environment):
    monkeypatch.setenv("ATROPOS_API_KEY", "secret")
    with running_trajectory_api(tmp_path, secret="secret") as service:
        ScriptedTrainer(f"{service.url}/secret", BATCH)
        env = await registered(make(service.url, environment, batch_size=SIZE))
        await env._disconnect()
        assert env.config.batch_size == BATCH
        assert env.config.rollout_server_url == service.url, "the key is for no tracker and no log"


async def test_adapted_env_names_an_api_or_trainer_that_never_comes(make, tmp_path):
    env = make(f"http://127.0.0.1:{free_port()}")
    env.api_timeout = 0.5
    with pytest.raises(TrajectoryApiError, match="got no answer .* for 0.5 s; is the Trajectory API up"):
        await env.env_manager()
    with pytest.raises(EnvironmentFailure, match="--env.rollout_server_url=localhost:8000: no address; give http"):
        await make("localhost:8000").env_manager()
    with running_trajectory_api(tmp_path) as service:
        for config, expected in (
            ({}, "registration at .* which says 'wait for trainer to start'"),
            ({"use_wandb": True}, "waits for a trainer to name the wandb project"),
        ):
            env = make(service.url, **config)
            env.trainer_timeout = 0.5
            with pytest.raises(EnvironmentFailure, match=expected):
                await env.env_manager()


async def test_a_group_that_an_api_never_takes_is_counted(make, tmp_path):
    with running_trajectory_api(tmp_path) as service:
        ScriptedTrainer(service.url, BATCH)
        env = make(service.url)
        env.api_timeout = 0.5
        await registered(env)
    await roll_out(env, 5)
    assert env.report.counts["not_sent/api_unreachable"] == 1 and not env.report.counts["groups_sent"]


async def test_an_adapted_environment_refuses_run_api_by_name(make, tmp_path):
    with running_api(tmp_path) as api:
        env = make(api.url)
        with pytest.raises(EnvironmentFailure, match=f"{api.url}: it is atroposlib's run-api.*; start"):
            await env.get_server_info()


async def test_adapted_env_says_silence_and_compares_tokenizers_late(api, make, monkeypatch):
    async def answer(self, body):
        return web.json_response({"tokens": [5, 6], "tokenizer_path": "the/policys"})

    monkeypatch.setattr(reporting, "_SILENCE", 0.5)
    monkeypatch.setattr(lifecycle, "_ASK_SERVER", 0.2)
    for name in ("_tokenize", "_model_info"):
        monkeypatch.setattr(StubSGLang, name, answer, raising=False)
    async with stub_servers(1) as (server,):
        server.failures = {"/tokenize": 503}
        env = make(api, server_url=f"{server.url}/v1")
        await env.setup()
        env.setup = lambda: asyncio.sleep(0)
        env.faults = {number: [None] for number in range(10**4)}
        manager = asyncio.create_task(env.env_manager())
        await until(lambda: env.report.counts["nothing_sent"], manager)
        server.failures.clear()
        with pytest.raises(EnvironmentFailure, match="is not the tokenizer .* which is the/policys: .* give --env"):
            await asyncio.wait_for(manager, 10)


@pytest.mark.slow
async def test_environment_that_sends_nothing_starts_items_slowly(api, make, monkeypatch):
    """Until a group is sent."""
    monkeypatch.setattr(reporting, "_SILENCE", 0.5)
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(reporting, name, 1000.0)
    env = make(api)
    async with managed(env) as manager:
        env.faults = {number: [None] for number in range(10**5)}
        await until(lambda: env.report.counts["slowed_down"] and not env.workers, manager)
        begun = len(env.begun)
        await asyncio.sleep(0.5)
        assert len(env.begun) <= begun + 1, "at most the one that waited for its ticket"
        env.faults = {}
        await roll_out(env, 3)
        await until(lambda: len(env.begun) > begun + 3, manager)
        assert env.report.counts["slowed_down"] == 1 and env.report.pause == 0


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


@pytest.fixture
def own_api(tmp_path):
    with running_trajectory_api(tmp_path) as service:
        ScriptedTrainer(service.url, BATCH)
        yield service.url


@pytest.mark.slow
async def test_adapted_env_ends_on_sigterm_without_children(own_api, make, model_path, tmp_path):
    """Though a thread hangs; it takes leave of the API."""
    other = await registered(make(own_api))
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    flags = {"env.tokenizer_name": model_path, "env.group_size": SIZE, "env.use_wandb": "false"}
    flags |= {"env.rollout_server_url": own_api, "env.max_token_length": 100, "openai.model_name": model_path}
    flags |= {"openai.server_type": "sglang", "openai.base_url": "http://127.0.0.1:1/v1", "env.wandb_name": "stubborn"}
    report = tmp_path / "report.jsonl"
    flags |= {"adapter.report": report, "env": "stubborn.py"}
    with environment_process(tmp_path, "-m", "recipe.atropos.utils.env_adapter", flags=flags) as service:
        await until(lambda: service.poll() is not None or "ready" in service.tail(200), within=60)
        assert service.poll() is None, service.tail()
        weight = get(f"{own_api}/status-env", {"env_id": other.env_id})["env_weight"]
        (child,) = psutil.Process(service.pid).children()
        os.kill(service.pid, signal.SIGTERM)
        assert service.process.wait(30) == 143, service.tail()
        assert not child.is_running() and "left running" not in service.tail()
    assert read_lines(report)[-1]["in_flight"] > 0
    assert get(f"{own_api}/status-env", {"env_id": other.env_id})["env_weight"] > weight, "its part is the others'"
