"""The Trajectory API's service in this process, and what trainers and environments ask of it."""

import asyncio
import contextlib
from types import SimpleNamespace

from recipe.atropos.trajectory_api import database, delivery, ingest
from recipe.atropos.trajectory_api.endpoints import Caller, EnvRegistration, Registration
from recipe.atropos.trajectory_api.service import Settings, TrajectoryService


def registration(batch_size, **fields):
    return Registration("", "", batch_size, 100, "", -1, 0, 10, **fields)


@contextlib.asynccontextmanager
async def open_service(folder, **settings):
    service = TrajectoryService(Settings(folder, **settings))
    try:
        async with asyncio.timeout(60):
            yield service
    finally:
        service.store.close()


async def in_service(folder, test, **settings):
    """Run ``test(service)`` on a service of its own, and return what it returns."""
    async with open_service(folder, **settings) as service:
        return await test(service)


def stored(record, env, size, tokens):
    """What is stored of a group, whose record is only a number."""
    counts = {"trajectories": size, "tokens": bytes(tokens), "irregular": ()}
    return SimpleNamespace(record=b"%d" % record, env_id=env, **counts)


async def post(service, *numbers, env=None, size=4, ticket=None):
    """Post a group for each number, which is its record."""
    for number in numbers:
        await ingest.post(service, [stored(number, env, size, 12)], ticket, None)


async def batch(service, number):
    """The numbers of a batch's groups."""
    return [int(record) for record in await service.store.read(database.read_batch, number)]


async def batches(service, *numbers):
    """The numbers of the batches after these, None where there is none."""
    return [await delivery.numbered_batch(service, number, 0, None) for number in numbers]


async def join(service, key=None, name="env", **fields):
    message = EnvRegistration(100, name, 1.0, 4, **fields)
    return (await ingest.register_env(service, message, Caller(key=key)))["env_id"]


async def begin(service, env):
    return (await ingest.begin(service, env))["ticket"]
