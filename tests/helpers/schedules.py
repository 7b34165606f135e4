"""Random schedules of environments and a trainer on the real Trajectory API's service, in virtual time.

Only the clock, and the thread of the store, are replaced: a write is done at once, on the real database. Meanwhile the
service restarts from its store, trainers register again, also with another batch size, and everything is reset.
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

from helpers.trajectory_service import stored
from recipe.atropos.trajectory_api import batching, database, delivery, environments, ingest, service
from recipe.atropos.trajectory_api.endpoints import Caller, EnvRegistration, Registration, RequestRefused
from recipe.atropos.trajectory_api.store import TrajectoryStore

TRAIN_SECONDS, WORKER_SECONDS = 5.0, 300.0
_MODULES = (batching, delivery, environments, ingest, service)
_FOREVER = 1e9


@dataclass
class Environment:
    """``sizes``: what its groups may have, the first at the most asked for. ``seconds``: of its items. It dies, and
    returns, at ``away``; ``silent``: without a word, after it has announced another request. ``hung``: how often
    an item does not end before ``WORKER_SECONDS``. ``stock``: it posts without tickets, keeping so many groups queued.
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
    silent: bool = False
    hung: float = 0.0
    id: int = 0
    running: int = 0
    is_away: bool = False
    held: set[int] = field(default_factory=set)
    tasks: list[Any] = field(default_factory=list)


@dataclass
class Group:
    env: int
    size: int
    ticket: int | None  # None as well if it was not open any more
    asked: int
    weights: int  # updates in the weights that it was sampled with


class Schedule:
    """``empty``: how often a batch has nothing to train on; ``every``: updates between pushes. ``stock``: the trainer
    does not number batches. ``actions``: (seconds, name of a method, its arguments).
    """

    def __init__(self, envs, batch_size, bound, batches=12, seed=0, empty=0.0, every=1, stock=False, actions=()):
        self.envs, self.batch_size, self.bound, self.batches = envs, batch_size, bound, batches
        self.empty, self.every, self.stock, self.actions = empty, every, stock, actions
        self.random, self.now = random.Random(seed), 0.0
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._of: dict[int, Environment] = {}
        self._calls: set[asyncio.Task] = set()
        self.trained = 0
        self.shares: list[tuple[int, dict[int, float]]] = []  # after each batch
        self.failed: list[BaseException | None] = []
        self.past: set[int] = set()  # groups from before a reset
        self._begin_anew()

    def _begin_anew(self):
        self.groups: dict[int, Group] = {}
        self.cut: dict[int, list[int]] = {}
        self.updates_after = {0: 0}  # of each batch that was trained
        self.updates = self.pushed = 0

    # ------------------------------------------------------------------ time

    def after(self, seconds, action):
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    async def run(self, folder, monkeypatch):
        clock = SimpleNamespace(monotonic=lambda: self.now + 1000.0, time=lambda: self.now)
        for module in _MODULES:
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(TrajectoryStore, "write", _write)
        monkeypatch.setattr(service.TrajectoryService, "wait_for_change", _wait_for_change)
        self.settings = service.Settings(folder, durability="none")
        self.service = service.TrajectoryService(self.settings)
        try:
            await self._play()
            self._check()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            self.service.store.close()

    async def _play(self):
        await self._register(0)
        await asyncio.gather(*map(self._join, self.envs))
        self._train(0)
        self.after(1.0, self._tick)
        for seconds, name, *arguments in self.actions:
            self.after(seconds, lambda name=name, arguments=arguments: getattr(self, name)(*arguments))
        deadline = real_time.monotonic() + 60
        while self.trained < self.batches:
            await self._settle()
            if self._training.done():
                self._training.result()
                return
            assert not any(self.failed), self.failed
            assert self.now < 100_000 and real_time.monotonic() < deadline, self._stalled()
            self.now, _, action = heapq.heappop(self._events)
            found = action()
            if asyncio.iscoroutine(found):
                await found
        await self._settle()

    async def _settle(self):
        await asyncio.sleep(0)
        while asyncio.get_running_loop()._ready:  # until all that can go on without time has
            await asyncio.sleep(0)

    def _stalled(self):
        return f"stalled after {self.trained} batches: {self.service.queue.plan().why}; {self.service.queue.order}"

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        self.after(seconds, lambda: woken.done() or woken.set_result(None))
        await woken

    def _tick(self):
        """What the service does each second, and the end of its long polls."""
        for environment in self.service.environments:
            env = self._of[environment.id]
            if environment.id == env.id and not env.is_away:
                self.service.environments.touch(environment.id)
        self.service.environments.apply_shares(self.service.queue)
        self.service.release_dead()
        self.service.release_hung()
        self.service.changed()
        self.after(1.0, self._tick)

    async def _call(self, function, *arguments):
        """Ask the service, and again if it was killed meanwhile."""
        while True:
            task = asyncio.ensure_future(function(self.service, *arguments))
            self._calls.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():
                    raise
            finally:
                self._calls.discard(task)

    # ------------------------------------------------------------------ actions

    def _break_calls(self):
        for task in self._calls:
            task.cancel()

    async def restart(self):
        """Kill the server, and start another on its store."""
        before, last = self._in_queue(), self.service.last
        self._break_calls()
        self.service.store.close()
        self.service = service.TrajectoryService(self.settings)
        assert (self.service.last, self._in_queue()) == (last, before)

    def _in_queue(self):
        queued = {entry.id for entry in self.service.queue if not entry.is_open}
        return queued, {n: (ticket.size, ticket.due) for n, ticket in self.service.queue.tickets.items()}

    async def resume(self, batch_size, back):
        """Start the trainer again, from its checkpoint after the last batch but ``back``."""
        self._training.cancel()
        number = sorted(self.updates_after)[-1 - min(back, len(self.updates_after) - 1)]
        same, self.batch_size = self.batch_size == batch_size, batch_size
        number = await self._register(number)
        self.updates = self.pushed = self.updates_after[number]
        self.updates_after = {n: updates for n, updates in self.updates_after.items() if n <= number}
        if not same:
            self.cut = {n: ids for n, ids in self.cut.items() if n <= number}
        self._train(number)

    async def reset(self):
        """End the trainer, and reset everything once it counts as gone."""
        self._training.cancel()
        await self._settle()
        self._check()
        self.service.trainer.seen -= service.TRAINER_SECONDS
        await self._call(delivery.reset)
        self._break_calls()  # those of before wait until they time out
        self.past = {*self._rows()}
        self._begin_anew()
        await self._register(0)
        self._train(0)

    # ------------------------------------------------------------------ environments

    async def _join(self, env):
        message = EnvRegistration(100, "env", env.weight, env.sizes[0], env.allocation or None)
        answer = await self._call(ingest.register_env, message)
        if "env_id" not in answer:
            self.after(1.0, lambda: self._join(env))
            return
        env.id, env.is_away = answer["env_id"], False
        self._of[env.id] = env
        await asyncio.sleep(0)
        self._start(env, self._stock(env) if env.stock else self._begin(env))
        if not (env.silent and env.workers > 1 and not env.stock):
            self.after(env.away[0] - self.now, lambda: self._leave(env))

    async def _leave(self, env):
        seconds, env.away, env.is_away = env.away[1], (_FOREVER, _FOREVER), True
        for task in env.tasks:
            task.cancel()
        env.running, env.held, env.tasks = 0, set(), []
        self.after(seconds, lambda: self._join(env))
        if not env.silent:
            await self._call(ingest.disconnect_env, env.id)

    def _refused(self, env, refused):
        """It registers anew with a server that does not know it; it ends if its groups do not fit."""
        env.is_away = True
        if refused.status == 404:
            self.after(1.0, lambda: self._join(env))
        else:
            assert refused.status == 422 and not self.service.queue.takes(env.sizes[0]), refused

    async def _begin(self, env):
        """Ask for one ticket after the other, as the adapter does, while there are workers."""
        while True:
            await asyncio.sleep(0)  # others ask at the same time
            if env.running >= env.workers:
                await self.sleep(0.1)
                continue
            more = env.running + 1 < env.workers
            caller = Caller(gone=lambda: env.is_away)
            arguments = (env.id, env.sizes[0], [*env.held], more, None, 30.0, caller)
            try:
                ticket = (await self._call(ingest.begin, *arguments))["ticket"]
            except RequestRefused as refused:
                return self._refused(env, refused)
            if ticket is None:
                continue
            env.held.add(ticket)
            env.running += 1
            self._start(env, self._work(env, ticket, self.pushed))
            if env.silent and more and self.now >= env.away[0]:
                return await self._leave(env)

    def _start(self, env, work):
        env.tasks.append(asyncio.ensure_future(work))
        env.tasks[-1].add_done_callback(lambda task: self.failed.extend([] if task.cancelled() else [task.exception()]))

    async def _work(self, env, ticket, weights):
        hung = self.random.random() < env.hung
        await self.sleep(WORKER_SECONDS if hung else self.random.uniform(*env.seconds))
        if hung or self.random.random() < env.failures:
            await self._call(ingest.release, ticket, "equal_scores")
        else:
            larger = self.random.random() < env.larger
            size = min(self.batch_size, 2 * env.sizes[0]) if larger else self.random.choice(env.sizes)
            await self._post(env, size, ticket, weights)
        env.running -= 1
        env.held.discard(ticket)

    async def _stock(self, env):
        while True:
            try:
                queued = self.service.environments.status(env.id, self.service.queue)["self_queue_size"]
            except RequestRefused as refused:
                return self._refused(env, refused)
            if queued < env.stock:
                await self._post(env, self.random.choice(env.sizes), None, self.pushed)
                await self.sleep(self.random.uniform(*env.seconds) / env.workers)
            else:
                await self.sleep(0.2)

    async def _post(self, env, size, ticket, weights):
        if not self.service.queue.takes(size):  # as ``parse`` does
            if ticket is not None:
                self.service.release("does_not_fit", ticket)
            return
        id = self.service.next_id
        place = ticket if ticket in self.service.queue.tickets else None
        self.groups[id] = Group(env.id, size, place, env.sizes[0], weights)
        await ingest.post(self.service, [stored(id, env.id, size, 10 * size)], ticket, None)

    # ------------------------------------------------------------------ trainer

    async def _register(self, after):
        """Return the number of the last batch that the service counts as trained."""
        fields = {} if self.stock else {"after": after, "max_staleness": self.bound}
        message = Registration("", "", self.batch_size, 100, "", -1, 0, 10**6, **fields)
        await self._call(delivery.register, message)
        self._first = self.service._number  # the first ticket of which all is known
        return self.service.trainer.base

    def _train(self, number):
        self._training = asyncio.ensure_future(self._train_stock() if self.stock else self._train_numbered(number))

    async def _fetch(self, after):
        while (number := await self._call(delivery.numbered_batch, after, 5.0, None, self._is_training)) is None:
            pass
        self._check_batch(number)
        return number

    async def _train_numbered(self, number):
        self._is_training = False
        number = await self._fetch(number)
        while True:
            self._is_training = True
            ahead = asyncio.ensure_future(self._fetch(number))
            try:
                self._check_bound(number)
                if self.random.random() < self.empty:
                    await self._call(delivery.batch_is_empty, number)
                else:
                    await self.sleep(TRAIN_SECONDS)
                    self.updates += 1
                    if self.updates % self.every == 0:
                        self.pushed = self.updates
                        await self._call(delivery.weights_pushed, number)
                self.trained, self.updates_after[number] = self.trained + 1, self.updates
                self._is_training = False
                number = await ahead
            finally:
                ahead.cancel()

    async def _train_stock(self):
        while True:
            number = await self._call(delivery.stock_batch)
            if number is None:
                await self.sleep(1.0)
                continue
            written = self.random.random() < 0.8
            self._check_batch(number)
            if written:
                delivery.stock_delivered(self.service, self.service.epoch, number)
                assert number not in self.updates_after, "each batch is sent once"
                await self.sleep(TRAIN_SECONDS)
                self.updates += 1
                self.trained, self.updates_after[number] = self.trained + 1, self.updates

    # ------------------------------------------------------------------ what must hold

    def _check_batch(self, number):
        """It is full, and has the same groups whenever it is fetched."""
        ids = [int(record) for record in database.read_batch(self.service.store.connection, number)]
        assert self.cut.setdefault(number, ids) == ids
        filled = sum(self.groups[id].size for id in ids)
        if self.stock:
            assert filled == self.batch_size and len({self.groups[id].size for id in ids}) == 1, (number, ids)
        largest = max(size for env in self.envs for size in (*env.sizes, *(2 * s for s in env.sizes if env.larger)))
        assert self.batch_size - min(largest, self.batch_size) + 1 <= filled <= self.batch_size, (number, filled)
        share, queues = self.service.queue.shares(), self.service.queue.environments
        self.shares.append((number, {env: share(own) for env, own in queues.items() if env is not None}))

    def _check_bound(self, number):
        """No group is late but after one larger than its ticket, or of a trainer before."""
        larger = [group.ticket for group in self.groups.values() if group.ticket and group.size > group.asked]
        for id in self.cut[number] if self.bound is not None else ():
            group = self.groups[id]
            if group.ticket and group.ticket >= self._first and not any(ticket <= group.ticket for ticket in larger):
                staleness = self.updates - group.weights
                assert staleness <= self.bound, f"group {id}, ticket {group.ticket}: {staleness} updates old"

    def _check(self):
        """No group is lost or doubled, and none dropped that fits; those from before a reset are in no batch."""
        rows = self._rows()
        assert all(rows.pop(id) == 0 for id in self.past)
        assert rows.keys() == self.groups.keys()
        queued = sorted(entry.id for entry in self.service.queue if not entry.is_open)
        assert queued == sorted(id for id, batch in rows.items() if batch is None)
        for id, batch in rows.items():
            assert batch != 0 or len({self.batch_size, *(args[1] for args in self.actions if len(args) > 2)}) > 1, id
            assert batch not in self.cut or id in self.cut[batch]

    def _rows(self):
        return dict(self.service.store.connection.execute("SELECT id, batch FROM groups"))

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


def _write(store, function, *arguments, **values):
    """``TrajectoryStore.write``, at once."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(function(store.connection, *arguments, **values))
    return future


async def _wait_for_change(service, seconds):
    await service._changed.wait()  # ``_tick`` changes it each second


def drawn(seed):
    """A schedule: 1 to 6 environments of any sizes up to a batch, with failures, deaths, returns, and stock ones; any
    trainer, whose batches may change their size; restarts, and a reset.
    """
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
    stock = rng.random() < 0.15
    for env in envs:
        env.silent = rng.random() < 0.5
        env.hung = rng.choice([0.0, 0.0, 0.0, 0.05])
        if stock:
            env.sizes, env.larger = (rng.choice([n for n in range(1, batch_size + 1) if batch_size % n == 0]),), 0.0
            env.stock = rng.choice([0, 1]) * 3 * (batch_size // env.sizes[0])
    actions = []
    for _ in range(rng.choice([0, 1, 3])):
        sizes = [batch_size, batch_size, batch_size * 2, batch_size + 1, batch_size // 2]
        one = envs[0].sizes[0]  # all others may be refused
        sizes = [size for size in sizes if one <= size and not (stock and size % one)]
        resume = ("resume", rng.choice(sizes), rng.choice([0, 0, 1, 2]))
        actions.append((rng.uniform(1, 60), *rng.choice([("restart",), ("restart",), resume, resume])))
    if rng.random() < 0.15:
        actions.append((rng.uniform(20, 60), "reset"))
    return Schedule(envs, batch_size, bound, 12, seed, empty, every, stock, actions)


def play(schedule, folder, monkeypatch):
    asyncio.run(schedule.run(folder, monkeypatch))
    return schedule
