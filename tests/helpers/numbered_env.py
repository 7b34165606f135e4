"""An environment that makes numbered groups without a server, adapted, on a real Trajectory API."""

import asyncio
import contextlib
import time

import numpy as np
import pytest
from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from helpers.scripted_trainer import ScriptedTrainer
from helpers.services import group
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.adapter.adapted_env import AdaptedEnv, adapt
from recipe.atropos.trajectory_api.client import TrajectoryApiError

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


class StockEnv(NumberEnv):
    """For ``BaseEnv`` itself, which posts plain values only."""

    async def collect_trajectories(self, item):
        numbered = group(item["number"], size=SIZE)
        return numbered | {"scores": [float(item["number"]), -1.0], "group_overrides": {}, "overrides": None}, []


def configured(url, model_path, server_url="http://127.0.0.1:1/v1", api_key="x", **fields):
    """Configuration and servers."""
    handle = {"base_url": server_url, "server_type": "sglang", "api_key": api_key, "health_check": True}
    sizes = {"group_size": SIZE, "max_token_length": 100, "total_steps": 10**6, "batch_size": BATCH}
    common = {"tokenizer_name": str(model_path), "use_wandb": False, "rollout_server_url": url}
    return BaseEnvConfig(**(common | sizes | fields)), [APIServerConfig(model_name=str(model_path), **handle)]


def stock_env(url, model_path, **fields):
    """A ``StockEnv`` as it is, not adapted."""
    sizes = {"max_token_length": 64, "total_steps": 1000, "batch_size": 4, "max_num_workers": 2}
    config, [server] = configured(url, model_path, **(sizes | fields))
    server.health_check = False
    return StockEnv(config, [server], slurm=False)


def made(number, **fields):
    tokens = [[1, 2, 3 + number]] * SIZE
    group = {"tokens": tokens, "masks": tokens, "scores": np.array([number, -1], dtype=np.float32)}
    return group | {"group_overrides": None} | fields


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with running_trajectory_api(tmp_path_factory.mktemp("api")) as service:
        ScriptedTrainer(service.url, BATCH)
        yield service.url


class _Impatient:
    """asyncio for ``BaseEnv``, but that it begins at once, not after five seconds in which others may start."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await asyncio.sleep(0 if seconds == 5 else seconds)


def begin_at_once(monkeypatch):
    """Let environments of this process begin without that pause."""
    monkeypatch.setattr(base, "asyncio", _Impatient())


@pytest.fixture
async def make(model_path, monkeypatch):
    monkeypatch.setattr(AdaptedEnv, "_restore", lambda self, group: None)
    begin_at_once(monkeypatch)
    made_here = []

    def made_env(url, environment=NumberEnv, **fields):
        made_here.append(adapt(environment)(*configured(url, model_path, **fields)))
        return made_here[-1]

    yield made_env
    for env in made_here:
        with contextlib.suppress(TrajectoryApiError, TimeoutError):
            await asyncio.wait_for(env._disconnect(), 5)


async def roll_out(env, number):
    """One item through ``handle_env``, as the manager would do it, but without a ticket."""
    env.running_items["uuid"] = {"item": {"number": number}, "worker": None, "start_time": time.time()}
    return await env.handle_env("uuid")


async def registered(env):
    await env.setup()
    await env.register_env()
    await env.get_server_info()
    return env


@contextlib.asynccontextmanager
async def managed(env):
    """The task of a set-up environment's manager, which is cancelled at the end; later setups leave it as it is."""
    await env.setup()
    env.setup = lambda: asyncio.sleep(0)
    manager = asyncio.create_task(env.env_manager())
    try:
        yield manager
    finally:
        manager.cancel()
        await asyncio.gather(manager, return_exceptions=True)


async def until(condition, manager=None, within=30):
    async with asyncio.timeout(within):
        while not condition():
            assert manager is None or not manager.done(), manager.exception()
            await asyncio.sleep(0.02)
