"""The state of a Trajectory API, shared by ``ingest`` (environments) and ``delivery`` (trainers).

Guarantees:

- What was acknowledged is in the store, which the index in memory is loaded from. A failed write ends the process.
- Numbers, of batches, tickets and groups, are never used again, also not after a kill.
"""

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cachetools import FIFOCache

from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.batching import (
    EXPECTED_SECONDS,
    UNBOUNDED,
    Entry,
    EnvironmentQueue,
    Queue,
)
from recipe.atropos.trajectory_api.endpoints import Registration
from recipe.atropos.trajectory_api.environments import RegisteredEnvironment, RegisteredEnvironments
from recipe.atropos.trajectory_api.store import TrajectoryStore, named_errors

logger = logging.getLogger(__name__)

TRAINER_SECONDS = 600.0  # since a trainer's last request, until others may reset its run
_RESERVED = 1 << 20  # ticket numbers are reserved in blocks, so that none is used again after a kill
_TICK = 1.0  # s
QUIET_SECONDS = 10.0  # s that a trainer waits, until the log says for what; then every minute
_SAY_AGAIN = 60.0  # s
_ASKS_AGAIN = 15.0  # s, in which a trainer that waits asks again
AHEAD = 3  # batches, as many as BaseEnv begins by default, that groups may be in without a staleness bound
# A ticket for which the trainer waits is released after this multiple of the longest that its environment's latest
# groups took, and at least these seconds. An environment that has posted few has no usual time yet: then it is the
# longest of all environments, and at least the seconds of a first one, which may load what it needs.
_HUNG_MULTIPLE, _HUNG_SAMPLES, _HUNG_SECONDS, _HUNG_FIRST_SECONDS = 3.0, 8, 30.0, 120.0
FORGET_SECONDS = 3600.0  # since an environment that is gone was last seen, until it is forgotten


@dataclass(frozen=True)
class Settings:
    """``queue_tokens``: while more are queued and a batch is complete, no tickets are issued, and answers to posts are
    delayed, by at most ``hold_seconds``. ``retention``: "all" keeps every batch, "committed" deletes those that are
    committed.
    """

    data_dir: Path
    durability: str = "normal"
    retention: str = "all"
    queue_tokens: int = 64_000_000
    hold_seconds: float = 60.0  # stock environments wait 300 s for an answer


@dataclass
class RegisteredTrainer:
    """The trainer that registered last. ``weights``: the batches through it are in the weights that servers hold.
    ``empty``: numbers of later batches in which it found nothing to train on.
    """

    registration: Registration
    base: int  # number of the last batch before its first
    weights: int
    seen: float = 0.0  # by its last request, or amid one that waits
    empty: set[int] = field(default_factory=set)
    waiting_since: float | None = None  # since when there is no batch for it, and it has none to train on

    @property
    def numbers(self) -> bool:
        """Whether it asks for batches by number."""
        return self.registration.after is not None

    @property
    def live(self) -> bool:
        return time.monotonic() - self.seen < TRAINER_SECONDS

    @property
    def empty_in_a_row(self) -> int:
        """How many batches in a row, up to the newest of them, had nothing to train on."""
        newest = max(self.empty, default=0)
        return next(n for n in itertools.count() if newest - n not in self.empty)


class TrajectoryService:
    """See the module docstring. ``last`` is the number of the last batch that was cut, ``served`` of the last sent,
    ``cursor`` of the last that a stock trainer acknowledged, ``resized`` of the last of another size than its.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.store = TrajectoryStore(settings.data_dir, settings.durability)
        self._changed = asyncio.Event()
        self.room = asyncio.Event()  # set unless the queue is full, as of the last change or second
        self._expecting = False  # whether ``advance`` is called once an announced request has not come
        self.cutting: asyncio.Future[None] | None = None
        self.registering = asyncio.Lock()  # held by whoever replaces the trainer or the store
        self.next_id = 1  # of a group; also after a reset, since a post may be on its way
        self.begun_at = time.time()
        with named_errors(self.store.path):
            self._take(self.store.load())

    def _take(self, loaded: database.Loaded) -> None:
        run = loaded.run
        self.epoch: int = run.get("epoch", 0)
        self.last: int = run.get("last", 0)
        self.cursor: int = min(run.get("cursor", 0), self.last)  # more was written amid a reset
        self.committed: int = run.get("committed", 0)
        self.resized: int = run.get("resized", 0)
        self.deleted: int = run.get("deleted", 0)
        self.served: int = min(run.get("served", self.cursor), self.last)
        self.posts: FIFOCache[str, int] = FIFOCache(database.KEPT_POSTS)  # digests of groups, by key
        self.posts.update(loaded.posts)
        self.counts: Counter[str] = Counter()  # of events since the start, or a reset
        self.latest: int | None = loaded.last_id or None
        self.next_id = max(self.next_id, loaded.last_id + 1)
        self._number = self._reserved = run.get("numbers", 1)
        self.queue, self.environments, self.trainer = Queue(), RegisteredEnvironments(), None
        for number, values in loaded.environments.items():
            self.environments.by_id[number] = msgspec.convert({"id": number, **values}, RegisteredEnvironment)
        self.environments.apply_shares(self.queue)
        if (values := run.get("registration")) is not None:
            registration = msgspec.convert(values, Registration)
            base, weights, empty = run["base"], run["weights"], set(run.get("empty", ()))
            self.trainer = RegisteredTrainer(registration, base, weights, time.monotonic(), empty)
        for entry in loaded.entries:
            self.queue.add(self.known(entry))
        if self.trainer is not None:
            self.set_batch_size(self.trainer)
        self.changed()

    # ------------------------------------------------------------------ the index

    def known(self, entry: Entry) -> Entry:
        """Return an entry, of environment None if its environment has not registered."""
        entry.env = entry.env if entry.env in self.environments.by_id else None
        return entry

    def set_batch_size(self, trainer: RegisteredTrainer) -> None:
        """Plan batches for a trainer; queued groups that fit into none of its batches are dropped, and counted."""
        unfit = self.queue.set_batch_size(trainer.registration.batch_size, exact=not trainer.numbers)
        if unfit:
            size = trainer.registration.batch_size
            logger.warning("%d queued groups are dropped: they fit into no batch of %d sequences", len(unfit), size)
            for entry in unfit:
                self.count(f"dropped/{'larger_than_batch' if entry.size > size else 'does_not_fill_batch'}")
            self.store.write(database.drop, [entry.id for entry in unfit])

    def take_number(self) -> int:
        """Return the next ticket number. Whatever has it is written after its reservation."""
        if self._number >= self._reserved:
            self._reserved = self._number + _RESERVED
            self.store.write(database.write_run, numbers=self._reserved)
        self._number += 1
        return self._number - 1

    def knows_number(self, number: int) -> bool:
        return 0 < number < self._number

    def step(self) -> int:
        """Return the trainer's step as atroposlib counts it: the batches that it was sent."""
        if self.trainer is None:
            return 0
        return self.trainer.registration.starting_step + max(0, self.served - self.trainer.base)

    # ------------------------------------------------------------------ turns

    def advance(self) -> None:
        """Issue tickets, and give groups without one their places, in turn, as far as the bound and the queue allow."""
        while self.trainer is not None and (env := self.queue.turn()) is not None:
            if not env.asks_now and not self._expecting:
                self._expecting = True
                asyncio.get_running_loop().call_later(EXPECTED_SECONDS, self._stop_expecting)
            if not env.asks_now or self._waits_for(env):
                return
            if env.waiting:
                self.queue.enter(env, self.take_number())
                continue
            ask, entry = self.queue.issue(env, self.take_number(), self._bound() or UNBOUNDED)
            ticket = entry.number, entry.env, entry.size, entry.due
            ask.answer((entry.number, self.store.write(database.begin_ticket, *ticket)))

    def _stop_expecting(self) -> None:
        self._expecting = False
        self.changed()

    def _bound(self) -> int | None:
        """Return the number of the last batch that may contain a group begun now; None without a staleness bound."""
        trainer = self.trainer
        if trainer is None or trainer.registration.max_staleness is None:
            return None
        return trainer.weights + len(trainer.empty) + 1 + trainer.registration.max_staleness

    def _waits_for(self, env: EnvironmentQueue) -> str:
        """Return why an environment may not take its turn now, or ""."""
        if not env.waiting and (full := self.full()):
            return full
        bound, last = self._bound(), self.last + self.queue.place(env.next_size)
        ahead = AHEAD if env.waiting else env.asks[0].ahead
        ahead += 2 * len(self.queue.sizes) * self.queue.exact  # what is left over of each size
        if bound is None and last > self.last + ahead:
            return f"{ahead} batches are queued or begun"
        if bound is not None and last > bound:
            return (
                f"its group would be in batch {last}, and may be in {bound} at most: the servers' weights have the "
                f"batches through {self.trainer.weights}"
            )
        return ""

    def why_no_ticket(self, env: int) -> str:
        """Return why an environment that asks has no ticket."""
        if env not in self.environments.by_id:
            return "the data were reset"
        if self.trainer is None:
            return "no trainer has registered"
        own = self.queue.environments[env]
        turn = self.queue.turn() or own  # which has left
        who = "" if turn is own else f"it is the turn of {turn.name}: "
        return who + (self._waits_for(turn) if turn.asks_now else "its request is expected")

    def why_no_batch(self) -> str:
        """Return what the next batch lacks, and why the environment whose turn it is may not add to it."""
        plan, turn = self.queue.plan(), self.queue.turn()
        held = "" if plan.holding or turn is None or not turn.asks_now else self._waits_for(turn)
        return plan.why + (held and f"; {turn.name} waits: {held}")

    def full(self) -> str:
        """Return why no more should be queued, or "". While a batch lacks groups, all that come are welcome."""
        tokens, limit = self.queue.tokens, self.settings.queue_tokens
        if tokens <= limit or not self.queue.plan().entries:
            return ""
        return f"batch {self.last + 1} is complete, and {tokens} tokens are queued, more than queue-tokens={limit}"

    # ------------------------------------------------------------------ counts and changes

    def count(self, name: str, n: int = 1, environment: RegisteredEnvironment | None = None) -> None:
        self.counts[name] += n
        if environment is not None:
            environment.counts[name] += n

    def changed(self) -> None:
        """Let environments take their turns, and wake all that wait for a batch or for room in the queue."""
        self.advance()
        if self.full():  # found once for all posts that are held
            self.room.clear()
        else:
            self.room.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, seconds: float, event: asyncio.Event | None = None) -> None:
        """Wait for any change, or for an event; at most a second, since some things change with time alone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((event or self._changed).wait(), min(seconds, _TICK))

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Release what dead environments hold, and say why nothing goes on; until canceled, or the store has failed."""
        said = 0.0
        sys.setswitchinterval(0.001)  # s; the thread that writes JSON must not make others wait
        while True:
            await asyncio.sleep(_TICK)
            self.store.check()
            self.environments.apply_shares(self.queue)
            trainer, now = self.trainer, time.monotonic()
            if trainer is not None and now - trainer.seen > _ASKS_AGAIN:
                trainer.waiting_since = None  # it has died
            self.release_dead()
            self.forget_gone()
            self.release_hung()
            self.changed()
            if trainer is None or trainer.waiting_since is None or now - trainer.waiting_since < QUIET_SECONDS:
                said = 0.0
                continue
            if now - said > _SAY_AGAIN:
                said, waited = now, now - trainer.waiting_since
                logger.warning("no batch %d for %.0f s: %s", self.last + 1, waited, self.why_no_batch())

    def release_dead(self) -> None:
        """Release the tickets of environments that are gone."""
        alive = {environment.id for environment in self.environments if environment.alive}
        dead = [entry.number for entry in self.queue.tickets.values() if entry.env not in alive]
        self.release("environment_gone", *dead)

    def release_hung(self) -> None:
        """Release tickets for which the trainer waits much longer than their environments' tickets usually take.

        Only while it has nothing to train on: servers may rest while it trains.
        """
        trainer = self.trainer
        if trainer is None or trainer.waiting_since is None:
            return
        of_all = max((max(env.seconds, default=0.0) for env in self.queue.each()), default=0.0)
        for entry in self.queue.plan().holding:
            if entry.number not in self.queue.tickets:  # its post is being stored
                continue
            env = self.queue.environments[entry.env]
            waited = time.monotonic() - max(trainer.waiting_since, entry.begun)
            known = len(env.seconds) >= _HUNG_SAMPLES
            usual, least = (max(env.seconds), _HUNG_SECONDS) if known else (of_all, _HUNG_FIRST_SECONDS)
            if usual and waited > max(least, _HUNG_MULTIPLE * usual):
                whose = "whose groups" if known else "which has posted few; groups of others"
                why = "batch %d waits %.0f s for ticket %d of %s, %s take %.0f s at most: released"
                logger.warning(why, self.last + 1, waited, entry.number, env.name, whose, usual)
                self.queue.hung[entry.number] = entry
                self.release("hung", entry.number)

    def forget_gone(self) -> None:
        """Forget environments that are long gone and have nothing in the queue; the totals keep what was counted."""
        before = time.monotonic() - FORGET_SECONDS
        long_gone = {one.id for one in self.environments if not one.alive and one.seen < before}
        if long_gone:  # the newest stays: the next number is counted from it
            long_gone -= {max(self.environments.by_id), *(entry.env for entry in self.queue)}
        for number in long_gone:
            del self.environments.by_id[number], self.queue.environments[number]
            self.store.write(database.forget_environment, number)

    def release(self, reason: str, *tickets: int) -> "asyncio.Future[None] | None":
        """Release tickets, and return the future of their durable end; None if none is open."""
        entries = [entry for ticket in tickets if (entry := self.queue.claim(ticket)) is not None]
        for entry in entries:
            self.queue.close(entry)
            self.count(f"released/{reason}", 1, self.environments.by_id.get(entry.env))
        if not entries:
            return None
        self.changed()
        return self.store.write(database.end_tickets, [entry.number for entry in entries])

    async def reset(self) -> None:
        """Take all groups out of the run, forget all registrations, and begin anew."""
        self._take(await self.store.write(database.reset, epoch=self.epoch, numbers=self._reserved))
        self.latest = None
