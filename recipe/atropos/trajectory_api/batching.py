"""Which groups make the next batch: order, fairness and exact fill, without any input or output.

Guarantees:

- Each group is in the queue until it is in a batch, and in one batch only.
- **Order.** All entries, groups and open tickets, are in one order. A batch is the choice of exactly ``batch_size``
  sequences in the shortest beginning of that order that has such a choice; of several, the one with the earliest
  entries. It is cut only when no ticket in that beginning is open. So it depends on the groups alone, never on the
  sequence in which tickets end.
- **Nothing blocks.** If no ticket is open, no allocation and no part of tickets is waited for, and any choice
  of the groups queued has ``batch_size`` sequences, there is a batch. Groups that fit into none stay in the order and
  are taken as soon as they fit.
- **With a staleness bound**, the tickets of all environments are one stream in the order of their numbers; ``pacing``
  shares them. Groups without a ticket are beside it, by weight. A batch begins with what of the stream must be in it
  for the rest to be in time. So a ticket's group is in a batch within its bound, if groups have the sizes that their
  tickets were begun with and nothing is left out for its size.
- **Without a bound**, each environment's entries are in their own order. First come, while they live, environments with
  an allocation, up to it, less what batches before had beyond their share; then always the environment that was served
  least for its share, its allocation and its weight's part of the rest. So where sizes fit, each batch has its
  allocations, in whole groups, and none is more than one group ahead of another with queued groups; and among
  environments that always have groups, of sizes that divide the batch, each is within as many batches of its share as
  there are environments.
- **Sizes set aside** are those of more than a batch, those that ``SKIPS`` batches in a row passed over, and those that
  ``make_room`` finds. Their groups do not count as queued or begun, so no environment stops for them, until ``SKIPS``
  more batches had some of them than passed them over, or the batch size changes. Their tokens count.
- The cost of a batch depends on its own size, on the number of environments and of sizes, and on the staleness bound,
  not on the length of the queue: at most ``batch_size`` / s groups of each size s are looked at.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from recipe.atropos.trajectory_api.lanes import Entry, Lane, Line, exact_fill, sequences

SKIPS = 16  # batches
LEAST_WEIGHT = 0.01  # as in atroposlib: no environment starves
EPSILON = 1e-6  # sequences

Envs = Collection[int | None]


@dataclass(frozen=True)
class Plan:
    """The next batch: ``entries`` if it is ``complete``; else ``why`` says what it lacks.

    ``stuck``: more than a batch is queued and no ticket is open, but the sizes do not fit.
    """

    entries: tuple[Entry, ...] = ()
    sizes: frozenset[int] = frozenset()  # of the groups that were looked at
    complete: bool = False
    why: str = ""
    stuck: bool = False


@dataclass
class _Source:
    """Entries from which a batch takes: the stream, or those of one environment. None is a ticket yet to begin."""

    rest: Iterator[Entry | None]
    position: float  # what it was served, relative to its share: the least is next
    share: float
    first: int  # sequences that come before anything of other sources
    taken: int = 0
    head: Entry | None = None

    @property
    def key(self) -> tuple[float, int]:
        return (math.inf, 0) if self.head is None else self.head.key

    def advance(self) -> bool:
        try:
            self.head = next(self.rest)
        except StopIteration:
            return False
        return True

    def take(self, size: int) -> None:
        self.position += size / self.share
        self.taken += size


class Queue:
    """What waits for a batch. ``batch_size`` is None until a trainer registers.

    ``groups``, ``sequences`` and ``sizes`` count what is queued, without open tickets or what is set aside; ``tokens``
    counts all groups.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.bounded = False
        self.lanes: dict[int | None, Lane] = {}
        self.stream = Line()  # what was begun with a ticket, if there is a staleness bound
        self.tickets: dict[int, Entry] = {}  # open, by number
        self.tokens = 0
        self._groups: Counter[int] = Counter()  # by size
        self._passed: Counter[int] = Counter()  # by size: batches that had none, though one came before others
        self._unfit: set[int] = set()  # sizes that are set aside though no larger than a batch
        self._planned: tuple[object, Plan] | None = None

    def __iter__(self) -> Iterator[Entry]:
        return chain(self.stream, *(lane.line for lane in self.lanes.values()))

    # ------------------------------------------------------------------ what comes and goes

    def set_environment(self, env: int | None, weight: float, minimum: float) -> None:
        """Set an environment's weight, relative to others', and the part of each batch that is allocated to it."""
        lane = self.lane(env)
        lane.weight, lane.minimum = max(weight, LEAST_WEIGHT), minimum
        self._planned = None

    def set_batch_size(self, batch_size: int | None, bounded: bool = False) -> None:
        """Set the size of a batch in sequences; what was set aside counts as queued again.

        ``bounded``: whether there is a staleness bound.
        """
        entries = sorted(self, key=lambda entry: entry.key)
        for entry in entries:
            self._remove(entry)
            entry.gone = False
        for lane in self.lanes.values():
            lane.behind *= (batch_size or 0) / (self.batch_size or batch_size or 1)
        self.batch_size, self.bounded = batch_size, bounded
        self._passed.clear()
        self._unfit.clear()
        for entry in entries:
            self.add(entry)
        self._planned = None

    def add(self, entry: Entry) -> None:
        """Queue a group, or an open ticket."""
        self._line(entry).add(entry)
        lane = self.lanes[entry.env]
        if entry.is_open:
            self.tickets[entry.number] = entry
            lane.begun += entry.size
            lane.paced = True
        else:
            self._count(entry, 1)
        self._planned = None

    def release(self, number: int) -> Entry | None:
        """Remove an open ticket; return it, or None if it is not open."""
        entry = self.tickets.get(number)
        if entry is not None:
            self._remove(entry)
        return entry

    def _remove(self, entry: Entry) -> None:
        self._line(entry).remove(entry)
        if entry.is_open:
            del self.tickets[entry.number]
            self.lanes[entry.env].begun -= entry.size
        else:
            self._count(entry, -1)
        self._planned = None

    def _count(self, entry: Entry, sign: int) -> None:
        self.tokens += sign * entry.tokens
        lane = self.lanes[entry.env]
        for groups in (self._groups, lane.groups, *((lane.ticketed,) if self._is_in_stream(entry) else ())):
            groups[entry.size] += sign
            if not groups[entry.size]:
                del groups[entry.size]

    def _is_in_stream(self, entry: Entry) -> bool:
        return self.bounded and entry.due > 0

    def _line(self, entry: Entry) -> Line:
        lane = self.lane(entry.env)
        return self.stream if self._is_in_stream(entry) else lane.line

    def lane(self, env: int | None) -> Lane:
        """Return what is known of an environment, from now on if it is new."""
        if env not in self.lanes:
            self.lanes[env] = Lane()
        return self.lanes[env]

    # ------------------------------------------------------------------ what is queued

    @property
    def sizes(self) -> Counter[int]:
        """Queued groups by size in sequences."""
        return self.fitting(self._groups)

    @property
    def aside(self) -> dict[int, int]:
        """Groups that are set aside, by size."""
        return {size: n for size, n in sorted(self._groups.items()) if self.is_aside(size)}

    @property
    def groups(self) -> int:
        return self.sizes.total()

    @property
    def sequences(self) -> int:
        return sequences(self.sizes)

    def queued(self, env: int | None) -> int:
        """Return the sequences of an environment's queued groups."""
        return sequences(self.fitting(self.lanes[env].groups))

    def is_aside(self, size: int) -> bool:
        return size in self._unfit or (self.batch_size is not None and size > self.batch_size)

    def fitting(self, groups: Counter[int]) -> Counter[int]:
        """Return numbers of groups by size, without the sizes that are set aside."""
        return Counter({size: n for size, n in groups.items() if not self.is_aside(size)})

    def _set_aside(self, sizes: Iterable[int]) -> dict[int, int]:
        found = {size: self._groups[size] for size in sizes if not self.is_aside(size)}
        self._unfit.update(found)
        self._passed |= dict.fromkeys(found, SKIPS)
        self._planned = None
        return found

    # ------------------------------------------------------------------ the next batch

    def plan(self, alive: Envs, number: int, asking: Envs = ()) -> Plan:
        """Return the next batch, of this number, or why there is none.

        ``alive``: the environments whose allocation is waited for; ``asking``: those that want to begin tickets, whose
        part is waited for if there is a staleness bound.
        """
        asked = (number, frozenset(alive), frozenset(asking))
        if self._planned is None or self._planned[0] != asked:
            self._planned = asked, self._plan(alive, number, asking)
        return self._planned[1]

    def _plan(self, alive: Envs, number: int, asking: Envs) -> Plan:
        target = self.batch_size
        if target is None:
            return Plan(why="no trainer has registered")
        if not self.bounded and (lacking := self._lacking(alive)):  # if bounded, tickets begin by shares
            return Plan(why=lacking)
        closed = sum(size * n for size, n in self._groups.items() if size <= target)
        begun = closed + sum(lane.begun for lane in self.lanes.values())
        if begun < target:
            return Plan(why=f"{begun} of {target} sequences are queued or begun, {len(self.tickets)} groups not posted")
        full = {size for size in self._groups if size > target}  # sizes of which more would be of no use
        walked: list[Entry] = []
        counts: Counter[int] = Counter()
        sums, mask = 1, (1 << (target + 1)) - 1  # bits: the numbers of sequences that choices of ``walked`` have
        for entry in self._in_order(alive, number, asking, full):
            if entry is None:
                return Plan(why="environments that ask for tickets have begun less than their part")
            if entry.is_open:
                first = f"first {entry.number} of environment {entry.env}"
                return Plan(why=f"waiting for groups of {len(self.tickets)} tickets, {first}")
            walked.append(entry)
            counts[entry.size] += 1
            if (counts[entry.size] + 1) * entry.size > target:
                full.add(entry.size)
            sums |= (sums << entry.size) & mask
            if sums >> target:
                chosen = exact_fill([entry.size for entry in walked], target)
                return Plan(tuple(walked[i] for i in chosen or ()), frozenset(counts), complete=True)
        why = f"no choice of the queued groups, of sizes {sorted(counts)}, has {target} sequences"
        return Plan(why=why, stuck=True)

    def _in_order(self, alive: Envs, number: int, asking: Envs, full: Collection[int]) -> Iterator[Entry | None]:
        """Yield entries in the order in which a batch takes them, without groups of the sizes in ``full``; None where
        a ticket would be next that has not begun.
        """
        minima = self._minima(alive)
        members = {
            env for env, lane in self.lanes.items() if self.bounded and (lane.begun or lane.ticketed or env in asking)
        }
        shares = self.shares({env for env, lane in self.lanes.items() if lane.line or env in members}, alive)
        sources = []
        for env, lane in self.lanes.items():
            if lane.line:
                part = minima.get(env, 0.0)
                first = math.ceil(part + min(0.0, lane.behind) - EPSILON)  # less what batches had beyond its share
                sources.append(_Source(lane.line.without(full), -lane.behind / shares[env], shares[env], first))
        if members:
            part = sum(minima.get(env, 0.0) for env in members)
            share, behind = sum(shares[env] for env in members), sum(self.lanes[env].behind for env in members)
            first = math.ceil(part + min(0.0, behind) - EPSILON)
            first = max(first, self._needed(number) if sources else 0)
            rest = chain(self.stream.without(full), [None] if asking else [])
            sources.insert(0, _Source(rest, -behind / share, share, first))
        sources = [source for source in sources if source.advance()]
        while sources:
            source = next((source for source in sources if source.taken < source.first), None)
            source = source or min(sources, key=lambda source: (source.position, source.key))
            if source.head is None and len(sources) > 1:
                yield None
            elif source.head is not None and (source.head.is_open or source.head.size not in full):
                yield source.head
                source.take(source.head.size)
            if not source.advance():
                sources.remove(source)

    def _needed(self, number: int) -> int:
        """Return how many sequences of the stream batch ``number`` must have, so that the rest can be in time."""
        total = needed = 0
        batch_size = self.batch_size or 0
        for entry in self.stream.without({size for size in self._groups if self.is_aside(size)}):
            total += entry.size
            needed = max(needed, total - (entry.due - number) * batch_size)
            if needed >= batch_size:
                break
        return needed

    def cut(self, plan: Plan, alive: Envs) -> dict[int, int]:
        """Take a complete plan's entries; return the groups that are set aside from now on, by size."""
        target = self.batch_size or 0
        present = {env for env, lane in self.lanes.items() if lane.begun or self.queued(env) or env in alive}
        shares = self.shares(present | {entry.env for entry in plan.entries}, alive)
        behind = {env: arrears + shares[env] * target for env, arrears in self.arrears(shares).items()}
        for entry in plan.entries:
            behind[entry.env] -= entry.size
            self._remove(entry)
        most = {  # what is kept, if its groups did not fit, or if it had nothing to give, which the others then gave
            env: target * (len(shares) if self.lanes[env].line else share * (1 - share))
            for env, share in shares.items()
        }
        given_up = sum(max(0.0, behind[env] - most[env]) for env in shares)
        others = sum(share for env, share in shares.items() if behind[env] < most[env])
        for env, share in shares.items():
            more = given_up * share / others if behind[env] < most[env] else 0.0
            self.lanes[env].behind = min(behind[env], most[env]) + more
        chosen = {entry.size for entry in plan.entries}
        for size in chosen:
            self._passed[size] -= 1 if size in self._unfit else self._passed[size]
            if not self._passed[size]:
                self._unfit.discard(size)
        for size in plan.sizes - chosen:
            self._passed[size] = min(SKIPS, self._passed[size] + 1)
        return self._set_aside(size for size in plan.sizes - chosen if self._passed[size] == SKIPS)

    def make_room(self, alive: Envs, number: int) -> dict[int, int]:
        """If sizes that do not fit are all that is queued, set aside those with the most sequences, until less than a
        batch counts as queued: environments that stopped because of it go on. Return the groups by size.
        """
        found: dict[int, int] = {}
        if self.plan(alive, number).stuck:
            while self.sequences >= (self.batch_size or 0):
                found |= self._set_aside([max(self.sizes, key=lambda size: (size * self._groups[size], size))])
        return found

    # ------------------------------------------------------------------ shares

    def _minima(self, alive: Envs) -> dict[int | None, float]:
        """Return the allocated sequences of each living environment, scaled down if they exceed a batch."""
        minima = {env: lane.minimum for env, lane in self.lanes.items() if lane.minimum > 0 and env in alive}
        scale = (self.batch_size or 0) / max(1.0, sum(minima.values()))
        return {env: minimum * scale for env, minimum in minima.items()}

    def _lacking(self, alive: Envs) -> str:
        """Return which environment has too little for its allocation, or ""."""
        for env, minimum in self._minima(alive).items():
            if (size := self.lanes[env].size) < int(minimum):
                return (
                    f"environment {env} lives and has {size} of the {int(minimum)} sequences that are allocated to it"
                )
        return ""

    def arrears(self, shares: Mapping[int | None, float]) -> dict[int | None, float]:
        """Return how many sequences environments with these shares are behind, relative to each other."""
        total = sum(self.lanes[env].behind for env in shares)
        return {env: self.lanes[env].behind - total * share for env, share in shares.items()}

    def shares(self, envs: Envs, alive: Envs) -> dict[int | None, float]:
        """Return the part of a batch that each environment gets; allocations are of those that live."""
        whole = max(1, self.batch_size or 1)
        allocated = {env: minimum / whole for env, minimum in self._minima({*envs} & {*alive}).items()}
        rest = max(0.0, 1 - sum(allocated.values())) / sum(self.lanes[env].weight for env in envs)
        return {env: max(EPSILON, allocated.get(env, 0.0) + rest * self.lanes[env].weight) for env in envs}
