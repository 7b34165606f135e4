"""Which groups make the next batch, and whose turn it is to add to the order, without any input or output.

An environment asks for a ticket (``ask``), which is issued at its turn (``turn``, ``issue``) and stays open until its
group takes its place, or it ends without one (``claim``, ``close``). ``plan`` says what the next batch is, ``cut``
takes it.

Guarantees:

- A group's size, in sequences, is its number of trajectories (``ScoredGroup.trajectories``), whatever rows each has.
- **One order** (``order``). Tickets are in the order of their numbers, and batches are that order cut by next fit:
  whole groups while they fit into ``batch_size`` sequences; the first that does not fit begins the next batch. An open
  ticket counts with the size that was asked for, a posted group with its own.
- **Places only move forward** (``place``). Next fit is monotone: if a group leaves the order or becomes smaller, no
  later one gets into a later batch. So whoever was given a place in batch N is in batch N or an earlier one, unless a
  group before it became larger than its ticket.
- **A batch is complete** (``plan``) if it is full, or the posted group after it does not fit, and no ticket before is
  open; if nothing follows, also if the environment whose turn it is asks for more than its room. Never because nobody
  asks. So a batch depends on the order alone, not on how long groups take, and has at least ``batch_size`` minus the
  largest group plus 1.
- **Turns** (``turn``) by weighted fair queueing (WF2Q+ of Bennett and Zhang, 1997; in stride scheduling, the
  deficit of one can be a group of every other). The present advances by the sequences added to the order; an
  environment's time advances by what it adds, divided by its share. Of those that are not ahead of the present, the one
  whose next group would end first is next. A ticket that ends without a group, or with a smaller one, is refunded.
  Whoever returns starts at the present. So among environments that always ask, each is ahead of its present share by
  at most one group, and has a deficit of at most one batch. The share is the allocation and the weight's part of what
  is not allocated; so an allocation is a floor over consecutive batches, not in each.
- **Groups without a ticket** wait in the order of their arrival, and enter the order at their environment's turn.
- The cost of a change depends on what is in the order, some batches, and not on what waits.

``exact``: for trainers that cannot take a batch that is not full. A batch is then the first groups of one size, which
divides ``batch_size``.
"""

import bisect
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

UNBOUNDED = 1 << 62  # the last batch that may hold a ticket's group, without a staleness bound
LEAST_WEIGHT = 0.01  # as in atroposlib: no environment starves
_LEAST_SHARE = 1e-9
_RECENT = 64  # tickets
EXPECTED_SECONDS = 0.2  # for a request to follow that was announced


@dataclass(slots=True, eq=False)
class Entry:
    """A queued group, or an open ticket for one (``id`` 0), whose ``size`` in sequences is then what was asked for.

    ``number`` is the place in the order: the ticket's, or that of its arrival. ``due`` is the number of the last batch
    that may hold it, 0 without a ticket. ``charge`` is what it cost its environment in virtual time. ``begun`` is when
    the ticket was issued, in seconds of ``time.monotonic``.
    """

    number: int
    env: int | None
    size: int
    tokens: int = 0
    id: int = 0
    due: int = 0
    charge: float = 0.0
    begun: float = field(default_factory=lambda: time.monotonic())

    def place(self) -> tuple[int, int]:
        """Return what entries of an order are sorted by."""
        return self.number, self.id

    @property
    def is_open(self) -> bool:
        return self.id == 0


@dataclass(slots=True, eq=False)
class BatchRequest:
    """A request for a ticket for ``size`` sequences.

    ``more``: another one follows at once. ``ahead``: how many batches, from the next one on, may hold its group where
    there is no staleness bound. ``gone()`` says whether who asked has left. ``answer`` is given the ticket, and what
    its storing will answer.
    """

    env: int | None
    size: int
    more: bool
    ahead: int
    gone: Callable[[], bool]
    answer: Callable[[tuple[int, Any]], object]


@dataclass(slots=True, eq=False)
class EnvironmentQueue:
    """What an environment has in the queue, and its share of the batches. All its replicas have the same one."""

    name: str = "an unknown environment"
    weight: float = 1.0
    minimum: float = 0.0  # the part of the batches that is allocated to it
    time: float = 0.0  # virtual, in sequences of all environments, as ``Queue._now``
    begun: int = 0  # sequences of its open tickets
    groups: Counter[int] = field(default_factory=Counter)  # posted, by size
    waiting: deque[Entry] = field(default_factory=deque)  # groups without a ticket that are not in the order yet
    asks: list[BatchRequest] = field(default_factory=list)
    latest: int = 0  # sequences of what it added last
    expected: float = 0.0  # the time until which its next request is waited for, since it has announced it
    lost: int = 0  # sequences of its tickets that ended without a group since its last group
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  # that its latest groups took

    @property
    def asks_now(self) -> bool:
        return bool(self.waiting or self.asks)

    @property
    def wants(self) -> bool:
        return bool(self.waiting or self.asks or self.expected)

    @property
    def next_size(self) -> int:
        """Sequences of what it adds to the order next; of a request that was announced, those of the one before."""
        return self.waiting[0].size if self.waiting else self.asks[0].size if self.asks else self.latest

    @property
    def sequences(self) -> int:
        """Sequences of its posted groups."""
        return sum(size * n for size, n in self.groups.items())


@dataclass(frozen=True)
class BatchPlan:
    """The next batch: ``entries`` if it is complete; else ``why`` says what it lacks, and ``holding`` are the open
    tickets that it waits for.
    """

    entries: tuple[Entry, ...] = ()
    why: str = ""
    holding: tuple[Entry, ...] = ()


class Queue:
    """What waits for a batch. ``batch_size`` is None until a trainer registers; ``sizes`` counts the posted groups by
    their sizes, ``tokens`` their tokens. ``environments`` has what each has in the queue, also a new one.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.exact = False
        self.environments: defaultdict[int | None, EnvironmentQueue] = defaultdict(EnvironmentQueue)
        self.order: list[Entry] = []
        self.tickets: dict[int, Entry] = {}  # open, by number
        self.hung: dict[int, Entry] = {}  # released since they took long; a group may come after all
        self.sizes: Counter[int] = Counter()
        self.tokens = 0
        self._now = 0.0  # the present, in virtual time
        # The batch in which the order ends, 1 is the next, and its sequences; None once something has changed.
        self._end: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Entry]:
        return itertools.chain(self.order, *(env.waiting for env in self.each()))

    def each(self) -> Iterable[EnvironmentQueue]:
        """Return what each environment has in the queue, once for all its replicas."""
        return dict.fromkeys(self.environments.values())

    @property
    def sequences(self) -> int:
        """Sequences of all posted groups."""
        return sum(size * n for size, n in self.sizes.items())

    # ------------------------------------------------------------------ what comes and goes

    def set_batch_size(self, batch_size: int, exact: bool = False) -> list[Entry]:
        """Set the size of a batch in sequences, and plan anew; return the groups that fit into none, which are removed.

        Groups without a ticket wait again, in the order of their arrival.
        """
        self.batch_size, self.exact = batch_size, exact
        self._end = None
        groups = sorted((entry for entry in self if not entry.is_open), key=lambda entry: entry.id)
        for entry in groups:
            self._count(entry, -1)
            if not entry.due:
                self.environments[entry.env].time -= entry.charge
                entry.charge = 0.0
        self.order = [entry for entry in self.order if entry.is_open]
        for env in self.each():
            env.waiting.clear()
        for entry in groups:
            if self.takes(entry.size):
                self.add(entry)
        return [entry for entry in groups if not self.takes(entry.size)]

    def takes(self, size: int) -> bool:
        """Whether a group of ``size`` sequences may be in a batch."""
        return self.batch_size is None or (size <= self.batch_size and not (self.exact and self.batch_size % size))

    def set_share(self, env: int | None, name: str, weight: float, minimum: float, of: int | None = None) -> None:
        """Set an environment's name, its weight, and the part of the batches that is allocated to it.

        ``of``: the first of its replicas, whose queue is this one's too; None: it has none.
        """
        own = self.environments.setdefault(env, self.environments[env if of is None else of])
        own.name, own.weight, own.minimum = name, weight, minimum

    def add(self, entry: Entry) -> None:
        """Queue a group, or an open ticket. A group without a ticket waits for its environment's turn."""
        env = self.environments[entry.env]
        if entry.is_open:
            self.tickets[entry.number] = entry
            env.begun += entry.size
        if entry.due:
            bisect.insort(self.order, entry, key=Entry.place)
            self._end = None
        else:
            self._begin_to_want(env)
            if env.waiting and entry.id < env.waiting[-1].id:  # it is queued again
                bisect.insort(env.waiting, entry, key=lambda other: other.id)
            else:
                env.waiting.append(entry)
        if not entry.is_open:
            self._count(entry, 1)

    def claim(self, number: int | None) -> Entry | None:
        """Return an open ticket, which is ended only by ``close`` from now on; None if it is not open."""
        return self.tickets.pop(number, None)

    def close(self, ticket: Entry, groups: Sequence[Entry] = ()) -> None:
        """End a claimed ticket, and put its groups, if any, into its place."""
        at = bisect.bisect_left(self.order, ticket.place(), key=Entry.place)
        if self.order[at : at + 1] != [ticket]:  # of a queue that was reset meanwhile
            for group in groups:
                self.add(group)
            return
        env = self.environments[ticket.env]
        env.begun -= ticket.size
        env.lost = 0 if groups else env.lost + ticket.size
        if groups or env.lost <= (self.batch_size or 0):  # else whoever always fails would always be next
            env.time -= ticket.charge
            self._now -= ticket.size - sum(group.size for group in groups)
        for group in groups:
            group.charge = ticket.charge * group.size / ticket.size
            env.time += group.charge
            self._count(group, 1)
        self.order[at : at + 1] = groups
        if [group.size for group in groups] != [ticket.size]:
            self._end = None

    def _count(self, entry: Entry, sign: int) -> None:
        self.tokens += sign * entry.tokens
        change = Counter({entry.size: sign})
        self.sizes += change  # which keeps no 0
        self.environments[entry.env].groups += change

    # ------------------------------------------------------------------ turns

    def ask(self, ask: BatchRequest) -> None:
        """Let an environment ask for a ticket, until it is issued or ``withdraw`` is called."""
        env = self.environments[ask.env]
        self._begin_to_want(env)
        env.asks.append(ask)
        env.expected = 0.0

    def withdraw(self, ask: BatchRequest) -> None:
        """End a request, if it has no ticket yet."""
        asks = self.environments[ask.env].asks
        if ask in asks:
            asks.remove(ask)

    def turn(self) -> EnvironmentQueue | None:
        """Return the environment whose turn it is to add to the order, None if none wants to. It may have announced a
        request that has not come yet.
        """
        wanting = [env for env in self.each() if env.wants and self._still_wants(env)]
        if not wanting:
            return None
        self._now = max(self._now, min(env.time for env in wanting))
        share = self.shares()
        for env in wanting:  # it was charged by the shares of then, and others have come or left
            least = max(env.time, self._now - (self.batch_size or 0) / share(env))
            env.time = min(least, self._now + env.latest / share(env))
        return min(
            (env for env in wanting if env.time <= self._now), key=lambda env: env.time + env.next_size / share(env)
        )

    def _still_wants(self, env: EnvironmentQueue) -> bool:
        """Forget requests of whoever has left, and an announced one that is overdue; return whether any is left."""
        while env.asks and env.asks[0].gone():
            del env.asks[0]
        if env.expected and time.monotonic() > env.expected:
            env.expected = 0.0
        return env.wants

    def place(self, size: int) -> int:
        """Return the batch that would hold a group of ``size`` sequences at the end of the order; 1 is the next."""
        return self._after_adding(size)[0]

    def _after_adding(self, size: int) -> tuple[int, int]:
        """Return where the order would end with another entry of ``size`` sequences, as ``_end``."""
        if self._end is None:
            self._end = (1, 0)
            for entry in self.order:
                self._end = self._after_adding(entry.size)
        batch, filled = self._end
        return (batch, filled + size) if filled + size <= (self.batch_size or 0) else (batch + 1, size)

    def enter(self, env: EnvironmentQueue, number: int) -> None:
        """Put the environment's first waiting group at the end of the order, as ``number``."""
        entry = env.waiting.popleft()
        entry.number = number
        self._append(env, entry)

    def issue(self, env: EnvironmentQueue, number: int, due: int) -> tuple[BatchRequest, Entry]:
        """Put a ticket for the environment's first request at the end of the order; return both."""
        ask = env.asks[0]
        entry = Entry(number, ask.env, ask.size, due=due)
        env.expected = time.monotonic() + EXPECTED_SECONDS if ask.more else 0.0
        self._append(env, entry)
        del env.asks[0]
        self.tickets[number] = entry
        env.begun += entry.size
        return ask, entry

    def _append(self, env: EnvironmentQueue, entry: Entry) -> None:
        self._end = self._after_adding(entry.size)
        self.order.append(entry)
        self._now += entry.size
        env.latest, entry.charge = entry.size, entry.size / self.shares()(env)
        env.time += entry.charge

    def _begin_to_want(self, env: EnvironmentQueue) -> None:
        """Bring the time of an environment that wanted nothing to the present; one that has something in the queue has
        not been away.
        """
        if not (env.wants or env.begun or env.groups):
            env.time = max(env.time, self._now)

    def shares(self) -> Callable[[EnvironmentQueue], float]:
        """Return a function that gives an environment's part of the batches, beside all that have or want something."""
        present = [env for env in self.each() if env.begun or env.groups or env.wants]
        allocated = sum(env.minimum for env in present)
        rest = max(0.0, 1 - allocated) / (sum(env.weight for env in present) or 1.0)
        return lambda env: max(_LEAST_SHARE, env.minimum / max(1.0, allocated) + rest * env.weight)

    # ------------------------------------------------------------------ the next batch

    def plan(self) -> BatchPlan:
        """Return the next batch, or why there is none."""
        return self._next_exact() if self.exact else self._next()

    def _next(self) -> BatchPlan:
        """Cut the order by next fit."""
        if self.batch_size is None:
            return BatchPlan(why="no trainer has registered")
        room, entries, holding = self.batch_size, [], []
        for entry in self.order:
            fits = entry.size <= room
            if entry.is_open:  # also if it does not fit: its group may be smaller
                holding.append(entry)
            elif fits:
                entries.append(entry)
            room = room - entry.size if fits else 0
            if not room:
                break
        if holding:
            return BatchPlan(why=self._waits_for(holding), holding=tuple(holding))
        turn = self.turn()
        if entries and (not room or (turn is not None and turn.asks_now and turn.next_size > room)):
            return BatchPlan(tuple(entries))
        return BatchPlan(
            why=f"{self.batch_size - room} of {self.batch_size} sequences are queued, and no group is begun"
        )

    def _next_exact(self) -> BatchPlan:
        """Take the first groups of one size that fill a batch."""
        by_size: dict[int, list[Entry]] = {}
        for entry in self.order:
            if not entry.is_open:
                same = by_size.setdefault(entry.size, [])
                same.append(entry)
                if len(same) * entry.size == self.batch_size:
                    return BatchPlan(tuple(same))
        holding = tuple(self.tickets.values())
        why = f"no {self.batch_size} sequences are queued in groups of one size; groups by size: {dict(self.sizes)}"
        return BatchPlan(why=self._waits_for(holding) if holding else why, holding=holding)

    def _waits_for(self, holding: Sequence[Entry]) -> str:
        first, name = holding[0], self.environments[holding[0].env].name
        return f"waiting for groups of {len(holding)} tickets, first {first.number} of {name}"

    def cut(self, plan: BatchPlan) -> None:
        """Take a complete plan's entries."""
        for entry in plan.entries:
            self._count(entry, -1)
        taken = {*plan.entries}
        self.order = [entry for entry in self.order if entry not in taken]
        self._end = None
