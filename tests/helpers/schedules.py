"""Random schedules of environments and a trainer on the real Trajectory API's service, in virtual time.

Only the clock, and the thread of the store, are replaced: a write is done at once, on the real database.
"""

import asyncio
import heapq
import itertools
import random
import time as real_time
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from recipe.atropos.trajectory_api import batching, database, delivery, environments, ingest, service
from recipe.atropos.trajectory_api.messages import (
    BatchNumber,
    Begin,
    EnvIdentifier,
    EnvRegistration,
    Registration,
    Release,
    Through,
)
from recipe.atropos.trajectory_api.parsing import Parsed

TRAIN_SECONDS, FETCHED_AHEAD = 5.0, 1
_MODULES = (batching, delivery, environments, ingest, service)
_FOREVER = 1e9


@dataclass
class Environment:
    """``sizes``: what its groups may have, the first at the most asked for. ``seconds``: of its items. It dies, and
    returns, at ``away``. ``stock``: it posts without tickets, and keeps ``stock`` groups queued.
    """

    sizes: tuple[int, ...]
    weight: float = 1.0
    allocation: float = 0.0
    workers: int = 4
    seconds: tuple[float, float] = (1.0, 4.0)
    failures: float = 0.0
    larger: float = 0.0  # how often a group is larger than its ticket
    stock: int = 0
    away: tuple[float, float] = (_FOREVER, _FOREVER)
    id: int = 0
    running: int = 0
    is_away: bool = False
    held: set[int] = field(default_factory=set)


@dataclass
class Group:
    env: int
    size: int
    ticket: int | None
    asked: int
    weights: int  # updates in the weights that it was sampled with
    batch: int | None = None


class Schedule:
    """``empty``: how often a batch has nothing to train on; ``every``: updates between pushes."""

    def __init__(self, envs, batch_size, bound, batches=12, seed=0, empty=0.0, every=1):
        self.envs, self.batch_size, self.bound, self.batches = envs, batch_size, bound, batches
        self.empty, self.every = empty, every
        self.random, self.now = random.Random(seed), 0.0
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._of: dict[int, Environment] = {}
        self.groups: dict[int, Group] = {}
        self.cut: dict[int, list[int]] = {}
        self.steps: dict[int, int] = {}  # batch -> the updates before it
        self.updates = self.pushed = 0
        self.shares: list[tuple[int, dict[int, float]]] = []  # after each batch
        self.failed: list[BaseException | None] = []

    # ------------------------------------------------------------------ time

    def after(self, seconds, action):
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    async def run(self, folder, monkeypatch):
        clock = SimpleNamespace(monotonic=lambda: self.now + 1000.0, time=lambda: self.now)
        for module in _MODULES:
            monkeypatch.setattr(module, "time", clock)
        self.service = service.Service(service.Settings(folder, durability="none"))
        monkeypatch.setattr(self.service.store, "write", self._write)
        try:
            await self._play()
            self._check()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            self.service.close()

    def _write(self, function, *args, **kwargs):
        future = asyncio.get_running_loop().create_future()
        future.set_result(function(self.service.store.connection, *args, **kwargs))
        return future

    async def _play(self):
        fields = {"after": 0, "max_staleness": self.bound}
        await delivery.register(self.service, Registration("", "", self.batch_size, 100, "", -1, 0, 10**6, **fields))
        await asyncio.gather(*map(self._join, self.envs))
        self._fetching = asyncio.ensure_future(self._train())
        self.after(1.0, self._tick)
        deadline = real_time.monotonic() + 60
        while len(self.steps) < self.batches:
            await self._settle()
            if self._fetching.done():
                self._fetching.result()
                return
            assert not any(self.failed), self.failed
            assert self.now < 100_000 and real_time.monotonic() < deadline, self._stalled()
            self.now, _, action = heapq.heappop(self._events)
            found = action()
            if asyncio.iscoroutine(found):
                asyncio.ensure_future(found).add_done_callback(lambda task: task.cancelled() or task.result())
        await self._settle()

    async def _settle(self):
        for _ in range(12):
            await asyncio.sleep(0)

    def _stalled(self):
        return f"stalled after {len(self.steps)} batches: {self.service.queue.plan().why}; {self.service.queue.order}"

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        self.after(seconds, lambda: woken.done() or woken.set_result(None))
        await woken

    def _tick(self):
        """What the service does each second, and its long polls, which wait in real time."""
        for environment in self.service.environments:
            env = self._of[environment.id]
            if environment.id == env.id and not env.is_away:
                self.service.environments.see(environment.id)
            self.service.apply_share(environment)
        self.service.release_dead()
        self.service.release_hung()
        self.service.changed()
        self.after(1.0, self._tick)

    # ------------------------------------------------------------------ environments

    async def _join(self, env):
        message = EnvRegistration(100, "env", env.weight, env.sizes[0], env.allocation or None)
        env.id, env.is_away = (await ingest.register_env(self.service, message))["env_id"], False
        env.running, env.held, self._of[env.id] = 0, set(), env
        env.tasks = []
        await asyncio.sleep(0)
        self._start(env, self._stock(env) if env.stock else self._begin(env))
        self.after(env.away[0], lambda: self._leave(env))

    async def _leave(self, env):
        env.is_away = True
        for task in env.tasks:
            task.cancel()
        await ingest.disconnect_env(self.service, EnvIdentifier(env.id))
        seconds, env.away = env.away[1], (_FOREVER, _FOREVER)
        self.after(seconds, lambda: self._join(env))

    async def _begin(self, env):
        """Ask for one ticket after the other, as the adapter does, while there are workers."""
        while True:
            await asyncio.sleep(0)  # others ask at the same time
            if env.running >= env.workers:
                await self.sleep(0.1)
                continue
            more = env.running + 1 < env.workers
            message = Begin(env.id, env.sizes[0], [*env.held], more=more, wait=30.0)
            ticket = (await ingest.begin(self.service, message, lambda: env.is_away))["ticket"]
            if ticket is not None:
                env.held.add(ticket)
                env.running += 1
                self._start(env, self._work(env, ticket, self.pushed))

    def _start(self, env, work):
        env.tasks.append(asyncio.ensure_future(work))
        env.tasks[-1].add_done_callback(lambda task: self.failed.extend([] if task.cancelled() else [task.exception()]))

    async def _work(self, env, ticket, weights):
        await self.sleep(self.random.uniform(*env.seconds))
        if self.random.random() < env.failures:
            await ingest.release(self.service, Release(ticket, "equal_scores"))
        else:
            larger = self.random.random() < env.larger
            size = min(self.batch_size, 2 * env.sizes[0]) if larger else self.random.choice(env.sizes)
            await self._post(env, size, ticket, weights)
        env.running -= 1
        env.held.discard(ticket)

    async def _stock(self, env):
        while True:
            if self.service.environments.status(env.id, self.service.queue)["self_queue_size"] < env.stock:
                await self._post(env, self.random.choice(env.sizes), None, self.pushed)
                await self.sleep(self.random.uniform(*env.seconds) / env.workers)
            else:
                await self.sleep(0.2)

    async def _post(self, env, size, ticket, weights):
        id = self.service.next_id
        self.groups[id] = Group(env.id, size, ticket, env.sizes[0], weights)
        await ingest.post(self.service, [Parsed(b"%d" % id, env.id, size, 10 * size)], ticket, None)

    # ------------------------------------------------------------------ trainer

    async def _fetch(self, after):
        while (number := await delivery.numbered_batch(self.service, after, 30.0, None)) is None:
            pass
        ids = [int(record) for record in database.read_batch(self.service.store.connection, number)]
        assert number not in self.cut, "each batch is fetched once"
        self.cut[number] = ids
        for id in ids:
            assert self.groups[id].batch is None, "each group is in one batch"
            self.groups[id].batch = number
        present = [env for env in self.service.queue.environments if env is not None]
        self.shares.append((number, {env: self.service.queue.share(env) for env in present}))
        return number

    async def _train(self):
        number = await self._fetch(0)
        while True:
            ahead = asyncio.ensure_future(self._fetch(number))
            self.steps[number] = self.updates
            if self.random.random() < self.empty:
                await delivery.batch_is_empty(self.service, BatchNumber(number), None)
            else:
                await self.sleep(TRAIN_SECONDS)
                self.updates += 1
                if self.updates % self.every == 0:
                    self.pushed = self.updates
                    await delivery.weights_pushed(self.service, Through(number), None)
            number = await ahead

    # ------------------------------------------------------------------ what must hold

    def _check(self):
        """No group is lost or doubled, none is late but after one larger than its ticket, and batches are full."""
        queued = {entry.id for entry in self.service.queue if not entry.is_open}
        batched = {id for ids in self.cut.values() for id in ids}
        assert not queued & batched
        last = max(self.cut)
        rows = self.service.store.connection.execute("SELECT id FROM groups WHERE batch > ?", (last,))
        stored = {id for (id,) in rows}  # not fetched yet
        assert queued | batched | stored == set(self.groups), "each is in a batch or queued"
        largest = max(size for env in self.envs for size in (*env.sizes, *(2 * s for s in env.sizes if env.larger)))
        for number, ids in self.cut.items():
            filled = sum(self.groups[id].size for id in ids)
            assert self.batch_size - min(largest, self.batch_size) + 1 <= filled <= self.batch_size, (number, filled)
        if self.bound is not None:
            self._check_bound()

    def _check_bound(self):
        larger = [group.ticket for group in self.groups.values() if group.ticket and group.size > group.asked]
        for number, ids in self.cut.items():
            for id in ids:
                group = self.groups[id]
                if group.ticket is None or number not in self.steps or any(ticket <= group.ticket for ticket in larger):
                    continue
                staleness = self.steps[number] - group.weights
                assert staleness <= self.bound, f"group {id}, ticket {group.ticket}: {staleness} updates old"

    def deviations(self, after):
        """Yield how many sequences more than its share each environment has had after each batch, counted from batch
        ``after`` on, and the size of its groups.
        """
        had, due = defaultdict(float), defaultdict(float)
        for number, shares in self.shares[after:]:
            filled = sum(self.groups[id].size for id in self.cut[number])
            for id in self.cut[number]:
                had[self.groups[id].env] += self.groups[id].size
            for env, share in shares.items():
                due[env] += share * filled
            for env in shares:
                yield had[env] - due[env], max(self._of[env].sizes)


def drawn(seed):
    """A schedule: 1 to 6 environments of any sizes up to a batch, with failures, deaths, returns, and stock ones."""
    rng = random.Random(seed)
    batch_size = rng.choice([4, 8, 12, 16, 30, 48, 64])
    bound = rng.choice([None, 0, 0, 1, 2, 3, 4])
    larger = 0.2 if rng.random() < 0.2 else 0.0
    envs = []
    for _ in range(rng.randint(1, 6)):
        most = rng.randint(1, batch_size)
        slow = rng.choice([1.0, 4.0, 20.0])
        envs.append(
            Environment(
                sizes=(most, *(rng.randint(1, most) for _ in range(rng.choice([0, 0, 2])))),
                weight=rng.choice([0.05, 1.0, 1.0, 2.0, 9.0]),
                allocation=rng.choice([0.0, 0.0, 0.0, 0.1, 0.3]),
                workers=rng.choice([1, 2, 8, 40]),
                seconds=(0.1, slow),
                failures=rng.choice([0.0, 0.0, 0.3, 0.8]),
                larger=larger,
                stock=rng.choice([0, 0, 0, 2, 5]) * (batch_size // most + 1),
                away=(rng.uniform(5, 60), rng.uniform(1, 100)) if rng.random() < 0.3 else (1e9, 1e9),
            )
        )
    empty = rng.choice([0.0, 0.0, 0.3])
    every = rng.choice([1, 2]) if bound is None or bound > 0 else 1
    return Schedule(envs, batch_size, bound, seed=seed, empty=empty, every=every)


def play(schedule, folder, monkeypatch):
    asyncio.run(schedule.run(folder, monkeypatch))
    return schedule
