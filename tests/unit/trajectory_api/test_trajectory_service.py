"""The service at moments that requests from outside do not hit reliably."""

import asyncio

import pytest

from recipe.atropos.trajectory_api import database, delivery, ingest
from recipe.atropos.trajectory_api.messages import Registration, RequestRefused
from recipe.atropos.trajectory_api.parsing import Parsed
from recipe.atropos.trajectory_api.service import Service, Settings


def registration(batch_size, **fields):
    return Registration("", "", batch_size, 100, "", -1, 0, 10, **fields)


def in_service(folder, test):
    async def run():
        service = Service(Settings(folder))
        try:
            await asyncio.wait_for(test(service), 30)
        finally:
            service.close()

    asyncio.run(run())


async def post(service, *numbers):
    for number in numbers:
        await ingest.post(service, [Parsed(b"%d" % number, None, 4, 12)], None, None, None)


async def batch(service, number):
    return [int(record) for record in await service.store.read(database.read_batch, number)]


def test_no_batch_is_cut_while_others_are_dissolved(tmp_path):
    async def test(service):
        await delivery.register(service, registration(8, after=0))
        await post(service, *range(8))
        assert [await delivery.numbered_batch(service, after, 0, None) for after in range(3)] == [1, 2, 3]
        registering = asyncio.ensure_future(delivery.register(service, registration(12, after=1)))
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="no trainer"):
            await delivery.numbered_batch(service, 3, 0, None)
        await registering
        assert [await delivery.numbered_batch(service, after, 0, None) for after in (1, 2)] == [2, 3]
        assert [await batch(service, number) for number in (1, 2, 3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]

    in_service(tmp_path, test)


def test_posts_amid_a_reset_are_kept_once(tmp_path):
    async def test(service):
        await delivery.register(service, registration(4))
        await post(service, 0)
        posting = [asyncio.ensure_future(post(service, number)) for number in range(1, 10)]
        resetting = asyncio.ensure_future(delivery.reset(service))
        number = 10
        while not resetting.done():
            posting.append(asyncio.ensure_future(post(service, number)))
            number += 1
            await asyncio.sleep(0.0001)
        await asyncio.gather(resetting, *posting)
        stored = [group.id for group in await service.store.read(database.queued)]
        assert sorted(entry.id for entry in service.queue) == stored
        await post(service, number)
        await delivery.register(service, registration(4, after=0))
        found = []
        while (number := await delivery.numbered_batch(service, len(found), 0, None)) is not None:
            found += await batch(service, number)
        assert len(found) == len(set(found)) == len(stored) + 1

    in_service(tmp_path, test)
