"""An environment that makes numbered groups without a server, adapted, and the trainer's side of a real API."""

import asyncio
import time

import numpy as np
import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from helpers.services import get, post, running_api
from recipe.atropos.adapter.adapted_env import AdaptedEnv, adapt
from recipe.atropos.adapter.settings import AdapterSettings

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
