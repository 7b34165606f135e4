"""Replicas of an environment at the Trajectory API: they count as one."""

import asyncio
from collections import Counter

import pytest

from helpers.trajectory_service import batches, begin, join, open_service, post, registration
from recipe.atropos.trajectory_api import delivery, ingest, status
from recipe.atropos.trajectory_api.batching import UNBOUNDED, BatchRequest, Queue
from recipe.atropos.trajectory_api.environments import RegisteredEnvironment


@pytest.mark.parametrize(("minimum", "part"), [(0.0, 0.5), (0.2, 0.6)])
def test_replicas_take_turns_as_one_environment(minimum, part):
    """Three of them that always ask, beside one environment: their weight and allocation count once."""
    queue, issued = Queue(), Counter()
    queue.set_batch_size(8)
    for env in (1, 2, 3):
        queue.set_share(env, "a", 1.0, minimum, of=1)
    queue.set_share(4, "b", 1.0, 0.0)
    for number in range(1, 401):
        for env in (1, 2, 3, 4):
            if not any(ask.env == env for ask in queue.environments[env].asks):
                queue.ask(BatchRequest(env, 2, False, 3, lambda: False, lambda _: None))
        asked, entry = queue.issue(queue.turn(), number, UNBOUNDED)
        issued[asked.env] += 1
        queue.close(queue.claim(number))
    assert sum(issued[env] for env in (1, 2, 3)) == pytest.approx(400 * part, abs=4)
    assert max(issued[env] for env in (1, 2, 3)) - min(issued[env] for env in (1, 2, 3)) <= 1


async def test_replicas_have_one_share_and_one_line(service):
    """Whichever of them lives has all of it; an environment without replicas is another one."""
    await delivery.register(service, registration(8, after=0))
    a, again = [await join(service, name="a", replica=replica, min_batch_allocation=0.5) for replica in (0, 1)]
    b = await join(service, name="b")
    same = await join(service, name="a")

    def weights(*envs):
        return [service.environments.status(env, service.queue)["env_weight"] for env in envs]

    assert weights(a, again, b, same) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])
    assert status.status_env(service, b)["unallocated_fraction"] == 0.5
    await post(service, 1, env=a)
    await post(service, 2, env=again)
    found = {line["env_id"]: line for line in status.environments(service)}
    assert found.keys() == {again, b, same}
    line = found[again]
    assert (line["replicas"], line["queued_sequences"], line["counts"]["received"]) == (2, 8, 2)
    assert status.status_env(service, b)["queue_size"] == 1, "of 8 sequences 4 are allocated, once"

    await ingest.disconnect_env(service, again)
    service.environments.apply_shares(service.queue)
    assert weights(a, b, same) == pytest.approx([1 / 3] * 3)
    [line] = [line for line in status.environments(service) if line["env_id"] == again]
    assert (line["replicas"], line["alive"], line["min_batch_allocation"]) == (1, True, 0.5)
    restarted = await join(service, name="a", replica=1, min_batch_allocation=0.5)
    assert service.queue.environments[restarted] is service.queue.environments[a]
    for env in (a, restarted):
        await ingest.disconnect_env(service, env)
    service.environments.apply_shares(service.queue)
    assert service.queue.environments[a].minimum == 0.0 and status.status_env(service, b)["env_weight"] == 0.5


async def test_shares_cost_a_look_at_each_registration(service, monkeypatch):
    """However many have been made in an hour."""
    looks, unit = [], RegisteredEnvironment.unit.fget
    await delivery.register(service, registration(8, after=0))
    for n in range(50):
        await join(service, name=f"env{n % 5}", replica=n)
    monkeypatch.setattr(RegisteredEnvironment, "unit", property(lambda one: looks.append(one) or unit(one)))
    service.environments.apply_shares(service.queue)
    assert len(looks) <= 2 * 50


async def test_replicas_are_one_environment_after_a_restart(tmp_path):
    """Of the API: from its store, with their tickets, of which the dead one's are released."""
    async with open_service(tmp_path) as service:
        await delivery.register(service, registration(8, after=0))
        a, b = envs = [await join(service, name="a", replica=replica) for replica in (0, 1)]
        tickets = [await begin(service, env) for env in envs]
    async with open_service(tmp_path) as service:
        assert (
            service.queue.environments[a] is service.queue.environments[b] and service.queue.environments[a].begun == 8
        )
        await ingest.disconnect_env(service, a)
        assert [*service.queue.tickets] == [tickets[1]]
        await post(service, 1, env=b, ticket=tickets[1])
        await post(service, 2, env=b, ticket=await begin(service, b))
        service.advance()
        assert len(await asyncio.wait_for(batches(service, 0), 10)) == 1
        assert service.queue.environments[a].seconds
