"""The service at moments that requests from outside do not hit reliably."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from helpers.trajectory_service import batch, batches, begin, in_service, join, open_service, post, registration
from recipe.atropos.data.scored_group import ScoredGroup
from recipe.atropos.trajectory_api import database, delivery, ingest, status
from recipe.atropos.trajectory_api.endpoints import Caller, RequestRefused
from recipe.atropos.trajectory_api.service import FORGET_SECONDS, TRAINER_SECONDS


async def test_no_batch_is_cut_while_others_are_requeued(service):
    await delivery.register(service, registration(8, after=0))
    await post(service, *range(8))
    assert [await delivery.numbered_batch(service, after, 0, None) for after in range(3)] == [1, 2, 3]
    registering = asyncio.ensure_future(delivery.register(service, registration(12, after=1)))
    await asyncio.sleep(0)
    assert await delivery.numbered_batch(service, 3, 0, None) is None
    while service.trainer is not None:
        await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="no trainer"):
        await delivery.numbered_batch(service, 3, 0, None)
    await registering
    assert [await delivery.numbered_batch(service, after, 0, None) for after in (1, 2)] == [2, 3]
    assert [await batch(service, number) for number in (1, 2, 3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


async def test_a_registration_that_is_refused_ends_no_trainer(service):
    """Of a second trainer with another batch size, while the disk is slow."""
    await delivery.register(service, registration(8, after=0))
    await post(service, *range(4))
    assert await batches(service, 0) == [1]
    await delivery.commit(service, 1)
    registering = asyncio.ensure_future(delivery.register(service, registration(12, after=0)))
    await asyncio.sleep(0)
    assert await delivery.numbered_batch(service, 0, 0, 1) == 1
    await delivery.weights_pushed(service, 1, Caller(epoch=1))
    with pytest.raises(RequestRefused, match="batches through 1 are committed in another size") as refused:
        await registering
    assert refused.value.status == 409
    assert await delivery.numbered_batch(service, 1, 0, 1) == 2


async def test_sizes_are_told_while_a_trainer_registers_again(service):
    """Its first attempt took so long that it sent another; environments that join meanwhile ask once."""
    await delivery.register(service, registration(8, after=0))
    registering = asyncio.ensure_future(delivery.register(service, registration(8, after=0)))
    await asyncio.sleep(0)
    await join(service)
    assert service.trainer is None and not registering.done()
    assert await status.info(service) == {"batch_size": 8, "max_token_len": 100}
    await registering


async def test_posts_amid_a_reset_are_kept_once(service):
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


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (12, 12), (12, 4)])
async def test_registrations_at_once_leave_one_state(service, sizes):
    """In memory and in the store: the last one's, with each group in one batch."""
    await delivery.register(service, registration(8, after=0))
    await post(service, *range(8))
    assert await batches(service, 0, 1, 2) == [1, 2, 3]
    answers = await asyncio.gather(*(delivery.register(service, registration(size, after=1)) for size in sizes))
    stored = await service.store.read(database.read_run)
    assert service.last == stored["last"] == answers[-1]["last"]
    assert (service.epoch, service.queue.batch_size) == (stored["epoch"], sizes[-1])
    found = [
        number for after in range(10) if await available(service, after) for number in await batch(service, after + 1)
    ]
    assert found == sorted(set(found)) and len(found) > 5
    queued = [group.id for group in await service.store.read(database.queued)]
    assert sorted(entry.id for entry in service.queue) == queued


async def available(service, after):
    return after <= service.last and await delivery.numbered_batch(service, after, 0, None) is not None


async def test_a_registration_that_fails_changes_nothing(tmp_path, monkeypatch):
    """It ends the server; the next one has the trainer, the batches and the epoch that it had."""
    register = database.register

    def fails(connection, **values):
        register(connection, **values)
        raise ValueError("a defect")

    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8, after=0))
        await post(service, *range(4))
        assert await batches(service, 0, 1) == [1, 2]
        with monkeypatch.context() as broken:
            broken.setattr(database, "register", fails)
            with pytest.raises(ValueError, match="a defect"):
                await delivery.register(service, registration(12, after=1))
    async with open_service(tmp_path) as service:
        assert await delivery.numbered_batch(service, 1, 0, 1) == 2 and await batch(service, 2) == [2, 3]
        assert await service.store.read(database.queued) == []
        assert (await delivery.register(service, registration(8, after=2)))["epoch"] == 2


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("size", [8, 12])
async def test_a_number_beyond_an_empty_store_is_not_kept(tmp_path, size, committed):
    """A trainer with batches of another store comes, and then one without any; over a restart too."""
    async with open_service(tmp_path) as service:
        assert (await delivery.register(service, registration(8, after=50)))["last"] == 50
        if committed:
            await delivery.commit(service, 50)
        await post(service, 0, 1)
    async with open_service(tmp_path) as service:
        assert (await delivery.register(service, registration(size, after=0)))["last"] == 0
        await post(service, 2)
        assert await delivery.numbered_batch(service, 0, 0, None) == 1
        assert (await batch(service, 1))[:2] == [0, 1] and service.committed == 0
        assert (await service.store.read(database.read_run))["committed"] == 0


@pytest.mark.parametrize(("field", "value"), [("after", -1), ("max_staleness", -1), ("batch_size", 0)])
async def test_a_registration_below_zero_is_refused(service, field, value):
    with pytest.raises(RequestRefused, match=f"{field}={value}: give") as refused:
        await delivery.register(service, registration(**{"batch_size": 4, "after": 0, field: value}))
    assert refused.value.status == 422 and service.trainer is None and service.epoch == 0


async def test_pushed_weights_are_those_told_and_survive_restarts(tmp_path):
    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(4, after=0))
        await post(service, 0, 1, 2)
        assert await batches(service, 0, 1, 2) == [1, 2, 3]
        await delivery.weights_pushed(service, 2)
        assert service.trainer.weights == 2, "not the last batch that was cut"
    async with open_service(tmp_path) as service:
        assert service.trainer.weights == 2


async def test_ids_of_deleted_groups_are_not_used_again(tmp_path):
    """Also where the newest groups were deleted, and the server started anew."""
    async with open_service(tmp_path, retention="committed") as service:
        await delivery.register(service, registration(4, after=0))
        await post(service, 0, 1)
        assert await batches(service, 0, 1) == [1, 2]
        await delivery.commit(service, 2)
        assert not await service.store.read(database.list_batches)
    async with open_service(tmp_path) as service:
        assert (service.next_id, service.latest) == (3, 2)


async def test_a_stock_trainer_gets_full_batches_after_another(tmp_path):
    """One that numbers them left some that are not full, and a restart of the server comes between."""
    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8, after=0))
        env = await join(service)
        for number, size in enumerate((4, 4, 2, 4, 4, 2, 4, 2, 2)):
            await post(service, number, env=env, size=size)
        assert await batches(service, 0, 1) == [1, 2] and await batch(service, 2) == [2, 3]
        await delivery.commit(service, 1)
    async with open_service(tmp_path) as service:
        service.trainer.seen -= 1000
        assert (await delivery.register(service, registration(8)))["last"] == 1
        for number, expected in ((2, [3, 4]), (3, [2, 5, 7, 8])):
            assert await delivery.stock_batch(service) == number and await batch(service, number) == expected
            delivery.stock_delivered(service, service.epoch, number)


async def test_asking_without_number_takes_nothing_from_a_dead_one(tmp_path):
    """A trainer that numbers its batches has died; what its checkpoint lacks is kept, and it counts as dead."""
    async with open_service(tmp_path, retention="committed") as service:
        await delivery.register(service, registration(4, after=0))
        await post(service, *range(4))
        assert await batches(service, 0, 1, 2) == [1, 2, 3]
        await delivery.commit(service, 1)
        service.trainer.seen -= TRAINER_SECONDS
        with pytest.raises(RequestRefused, match="batches are numbered; call /register first") as refused:
            await delivery.stock_batch(service)
        assert refused.value.status == 409 and not service.trainer.live
        assert (await delivery.register(service, registration(4, after=1)))["last"] == 3
        assert await batches(service, 1, 2, 3) == [2, 3, 4] and await batch(service, 2) == [1]


async def test_asking_by_number_takes_nothing_from_a_stock_trainer(service):
    await delivery.register(service, registration(8))
    await post(service, *range(8))
    assert await delivery.stock_batch(service) == 1
    delivery.stock_delivered(service, service.epoch, 1)
    assert await batches(service, 0, 1, 2) == [1, 2, 3] and service.step() == 1
    assert await delivery.stock_batch(service) == 2


async def test_a_reset_leaves_no_example_and_no_number_twice(service):
    await delivery.register(service, registration(8))
    await post(service, 0, 1)
    assert service.latest == 2
    await delivery.reset(service)
    assert service.trainer is None and service.queue.sizes.total() == 0 and service.latest is None
    await delivery.register(service, registration(8))
    await post(service, 2, 3)
    assert await delivery.stock_batch(service) == 1 and await batch(service, 1) == [2, 3]
    assert service.next_id == 5


async def test_what_is_noted_amid_a_reset_does_no_harm(tmp_path):
    """An answer that is written, a batch that is asked for: in the new store, of the old run."""

    async def begin_anew(service):
        assert (service.last, service.served, service.cursor) == (0, 0, 0)
        await delivery.register(service, registration(8))
        await post(service, 6, 7)
        assert await delivery.stock_batch(service) == 1 and await batch(service, 1) == [6, 7]
        await delivery.reset(service)

    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8))
        await join(service)
        await post(service, *range(6))
        assert await delivery.stock_batch(service) == 1
        resetting = asyncio.ensure_future(delivery.reset(service))
        await asyncio.sleep(0)
        delivery.stock_delivered(service, service.epoch, 1)
        assert await delivery.stock_batch(service) is None
        await resetting
        await begin_anew(service)
    await in_service(tmp_path, begin_anew)


async def test_an_environment_of_another_store_is_unknown(tmp_path):
    """A and B joined an earlier run; in the next, and after its reset, none is taken for the other."""
    ids: list[int] = []
    for folder in ("one", "two"):
        async with open_service(tmp_path / folder) as service:
            for _ in range(2):
                await delivery.register(service, registration(8))
                for id in ids:
                    with pytest.raises(RequestRefused, match="no environment has registered"):
                        service.environments.status(id, service.queue)
                    assert (await ingest.disconnect_env(service, id))["status"] == "failure"
                ids.extend([await join(service), await join(service)])
                await post(service, 0)
                await delivery.reset(service)
    assert len(set(ids)) == 8 and 0 < min(ids) and max(ids) < 2**31


async def test_an_environment_that_asks_again_is_registered_once(tmp_path):
    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8))
        ids = [await join(service, "a"), await join(service, "a"), await join(service), await join(service)]
    async with open_service(tmp_path) as service:
        ids.append(await join(service, "a"))
        assert len(service.environments.by_id) == 3
    assert ids == [ids[0], ids[0], ids[0] + 1, ids[0] + 2, ids[0]]


async def test_environments_that_are_long_gone_are_forgotten(tmp_path):
    """But for those with a group or a ticket, and the last; no number or name is used again, and totals keep the
    counts.
    """

    async def check(service, numbers):
        assert [number % 1000 for number in service.environments.by_id] == numbers
        assert [one.name for one in service.environments] == [f"env_{number}" for number in numbers]
        lines = status.environments(service)
        assert [line["number"] for line in lines if line["env_id"] is not None] == numbers

    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(4, after=0))
        gone, with_group, with_ticket, _, last = [await join(service) for _ in range(5)]
        for env in (gone, with_group):
            await post(service, env, env=env)
        assert await batches(service, 0) == [1] and await batch(service, 1) == [gone]
        assert await begin(service, with_ticket)
        for env in (gone, with_group, with_ticket, last):
            service.environments.by_id[env].seen -= FORGET_SECONDS + 1
        service.forget_gone()
        assert service.counts["received"] == 2
        await check(service, [1, 2, 3, 4])
        assert await join(service) == last + 1 and await batches(service, 1) == [2]
    await in_service(tmp_path, lambda service: check(service, [1, 2, 3, 4, 5]))


async def test_refused_groups_are_counted_of_their_environment(service):
    """Each group of a refused list, packed or not."""
    await delivery.register(service, registration(8))
    ids = [await join(service), await join(service)]
    groups = [{"env_id": id, "tokens": [[1]], "masks": [[1]], "scores": ["x"]} for id in (*ids, ids[0], None)]
    good = ScoredGroup.from_mapping(groups[1] | {"scores": [1.0]})
    record = replace(good, scores=np.array([np.nan])).pack()
    for body, packed in ((json.dumps(groups).encode(), False), (record * 2, True), (b"x", False)):
        with pytest.raises(RequestRefused):
            ingest.parse(service, body, packed, True, None)
    await post(service, 0, env=ids[1])
    of_each = [service.environments.by_id[id].counts for id in ids]
    assert of_each == [{"refused/nonfinite_scores": 2}, {"refused/nonfinite_scores": 3, "received": 1}]
    assert service.counts == {"refused/nonfinite_scores": 6, "refused/malformed": 1, "received": 1}
    lines = [line for line in status.environments(service) if line["env_id"] in ids]
    found = [(line["number"], line["queued_groups"], line["sizes"]) for line in lines]
    assert found == [(0, 0, {}), (1, 1, {"4": 1})]


async def test_waiting_names_failures_and_why_environments_left(service):
    """Until a group comes; the launcher, which reports the end of the process, does not overwrite the reason."""
    await delivery.register(service, registration(8, after=0))
    first, second = await join(service), await join(service)
    for n in range(2):
        ticket = await begin(service, first)
        await ingest.release(service, ticket, "failed/KeyError", f"KeyError({n})\n at 7")
        assert await ingest.release(service, ticket) == {"status": "not open"}
    assert "; env_0: 2 items without a group, the last: KeyError(1) at 7" in status.why(service)
    await ingest.disconnect_env(service, second, "max_token_length=2048: too long")
    await ingest.disconnect_env(service, second)
    assert status.why(service).endswith("; gone: env_1 (max_token_length=2048: too long)")
    await post(service, 1, env=first)
    assert "failed" not in status.why(service)
