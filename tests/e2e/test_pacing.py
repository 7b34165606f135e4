"""A paced BaseEnv and the real API, without a trainer: what it does where versions or batches do not come.

Only the server is a stand-in, one that says the version that a test wants and never samples.
"""

import asyncio
import contextlib

import pytest
from aiohttp import web
from atroposlib.envs.base import APIServerConfig

from helpers.environments.length_env import LengthEnv, LengthEnvConfig
from helpers.services import get, post, running_api
from recipe.atropos.adapter.adapted_env import adapt
from recipe.atropos.adapter.pace import PacingError
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.utils.process import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

GROUPS, SIZE = 3, 2


class InstantEnv(LengthEnv):
    """Item n is ready at once; the API refuses the first groups that are ``broken``."""

    broken, hangs = 0, None

    async def collect_trajectories(self, item):
        number = item["number"]
        if number == self.hangs:
            await asyncio.sleep(1000)
        tokens = [[1, 2, 3 + number]] * SIZE
        masks = [["no number"] * 3] * SIZE if number < self.broken else tokens
        return {"tokens": tokens, "masks": masks, "scores": [float(number), -1.0], "group_overrides": {}}, []


class Stage:
    """The API with a trainer registered, a server that says ``version``, and the environment between them."""

    def __init__(self, api, env):
        self.api, self.env, self.version = api, env, "0"

    def batch(self):
        """The numbers of the items of the next batch, None if there is none."""
        groups = get(f"{self.api}/batch")["batch"]
        return groups and [int(group["scores"][0]) for group in groups]

    async def next_batch(self, within):
        async with asyncio.timeout(within):
            while (numbers := await asyncio.to_thread(self.batch)) is None:
                assert not self.manager.done(), self.manager.exception()
                await asyncio.sleep(0.05)
        return numbers


@contextlib.asynccontextmanager
async def on_stage(api, model_path, max_staleness, stall_timeout=60.0, **attributes):
    port = free_port()
    config = LengthEnvConfig(
        tokenizer_name=str(model_path),
        group_size=SIZE,
        use_wandb=False,
        wandb_name="length",
        rollout_server_url=api,
        total_steps=10**6,
        max_token_length=100,
    )
    server = APIServerConfig(
        model_name=str(model_path),
        base_url=f"http://127.0.0.1:{port}/v1",
        server_type="sglang",
        api_key="x",
        health_check=False,
    )
    settings = AdapterSettings(max_staleness=max_staleness, stall_timeout=stall_timeout)
    env = adapt(InstantEnv, settings=settings)(config, [server])
    env._restore = lambda group: None  # no server sampled these groups
    for name, value in attributes.items():
        setattr(env, name, value)
    stage = Stage(api, env)

    async def model_info(_):
        return web.json_response({"weight_version": stage.version})

    app = web.Application()
    app.router.add_get("/model_info", model_info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    registration = {"wandb_group": "", "wandb_project": "", "batch_size": GROUPS * SIZE, "max_token_len": 100}
    steps = {"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 9}
    post(f"{api}/register", registration | steps)
    assert stage.batch() is None  # now the API lets environments in
    stage.manager = asyncio.create_task(env.env_manager())
    try:
        yield stage
    finally:
        stage.manager.cancel()
        await asyncio.gather(stage.manager, return_exceptions=True)
        await runner.cleanup()


def play(tmp_path, model_path, scene, max_staleness=0, **attributes):
    async def run(api):
        async with asyncio.timeout(90), on_stage(api, model_path, max_staleness, **attributes) as stage:
            await scene(stage)

    with running_api(tmp_path) as api:
        asyncio.run(run(api.url))


def test_paced_begins_a_batch_per_version_and_a_lost_one_again(tmp_path, model_path):
    """A batch comes for each version and one that was lost is begun again."""

    async def scene(stage):
        assert await stage.next_batch(30) == [0, 1, 2]
        with pytest.raises(TimeoutError):
            await stage.next_batch(1)
        stage.version = "1"
        assert await stage.next_batch(5) == [3, 4, 5], "taken, and lost with the trainer that took it"
        assert await stage.next_batch(20) == [6, 7, 8], "after the environment's stall timeout"
        stage.version = "2"
        assert await stage.next_batch(5) == [9, 10, 11]
        stage.version = "0"
        assert await stage.next_batch(5) == [12, 13, 14], "the trainer went back"

    play(tmp_path, model_path, scene, stall_timeout=3.0)


def test_what_the_api_refuses_gives_its_place_back(tmp_path, model_path):
    async def scene(stage):
        assert await stage.next_batch(30) == [2, 3, 4]
        assert await stage.next_batch(5) == [5, 6, 7]
        with pytest.raises(TimeoutError):
            await stage.next_batch(1)

    play(tmp_path, model_path, scene, max_staleness=1, broken=2)


def test_paced_begins_what_an_environment_left_undone(tmp_path, model_path):
    """What a batch lacks of an environment that left is begun by the others."""

    async def scene(stage):
        other = {"max_token_length": 100, "desired_name": "other", "weight": 0.5, "group_size": SIZE}
        number = post(f"{stage.api}/register-env", other)["env_id"]
        with pytest.raises(TimeoutError):
            await stage.next_batch(15)
        assert stage.env._pace.begun == 2 * SIZE, "its own two thirds of a batch"
        post(f"{stage.api}/disconnect-env", {"env_id": number})
        assert await stage.next_batch(15) == [0, 1, 2]
        stage.version = "1"
        assert await stage.next_batch(5) == [3, 4, 5], "from now on a batch is its own"

    play(tmp_path, model_path, scene, left_timeout=1.0)


def test_paced_ends_where_a_rollout_never_ends(tmp_path, model_path):
    """A rollout that never ends and all wait for ends the environment and says so."""

    async def scene(stage):
        stage.env.config.worker_timeout = -1
        with pytest.raises(PacingError, match="2 groups are done and wait for one that began [2-9] s ago"):
            await stage.manager
        assert stage.batch() is None

    play(tmp_path, model_path, scene, longest_wait=2.0, hangs=0)


def test_paced_ends_where_the_server_never_gets_weights(tmp_path, model_path):
    """An environment whose server never gets weights ends and says so."""

    async def scene(stage):
        stage.version = "default"
        with pytest.raises(PacingError, match="weight version 'default': the trainer has pushed nothing to it"):
            await stage.manager
        assert stage.batch() is None, "nothing began"

    play(tmp_path, model_path, scene, longest_wait=2.0)
