"""A server that is full, and one whose groups do not fit: environments are slowed, never refused, and go on."""

import asyncio
import contextlib

import pytest

from helpers.numbered_env import stock_env
from helpers.trajectory_api import running_trajectory_api

pytestmark = pytest.mark.timeout(120)


@contextlib.asynccontextmanager
async def stock_environment(api, model_path):
    """``BaseEnv`` itself, whose own limit is far away."""
    environment = stock_env(api.url, model_path, max_batches_offpolicy=100)
    manager = asyncio.create_task(environment.env_manager())
    try:
        yield
        assert not manager.done(), manager.exception()
    finally:
        manager.cancel()
        await asyncio.gather(manager, return_exceptions=True)


async def received(api, groups):
    """Wait until the server has stored so many groups."""
    async with asyncio.timeout(40):
        while (found := (await asyncio.to_thread(api.get, "/diagnose"))["received"]) < groups:
            await asyncio.sleep(0.05)
    return found


def all_batches(api):
    found = []
    while batch := api.batch():
        found += batch
    return found


async def test_a_held_stock_environment_is_answered_in_time(tmp_path, model_path):
    """Nobody takes batches, and its posts are answered all the same; none is sent again or lost."""
    with running_trajectory_api(tmp_path, "--queue-tokens", "1", "--hold-seconds", "1") as api:
        api.register(batch_size=4)
        async with stock_environment(api, model_path):
            await received(api, 8)
        counts = api.get("/diagnose")["counts"]
        found = all_batches(api)
    assert not [name for name in counts if name.startswith(("repeated", "refused"))]
    assert sorted(found) == list(range(len(found))) and len(found) >= 8
