"""Which groups make the next batch: order, fairness, exact fill and pacing, without any input or output. Guarantees:

- Each entry leaves the queue once: in a batch, released, or set aside and then named.
- A batch has exactly ``batch_size`` sequences. If the groups in order do not add up to it, the choice among the first
  ones, and ``WINDOW`` more, that leaves out the fewest early ones does: one is found wherever one exists there.
- Within an environment, entries are taken in order, except for those that do not fit. An open ticket in a batch's
  place is waited for, so that its groups do not depend on how long they take.
- What is due first comes first. Of what is due alike, or not at all, environments with an allocation come first, as
  long as they live. Sharing the rest, an environment with queued groups is never more than one group away from the
  part that its weight gives it (earliest eligible virtual deadline first).
- A group that is larger than a batch, or was skipped ``SKIPS`` times, is set aside, and never waited for.
- ``refuses`` lets a ticket begin only if all that is queued or begun fits into the batches up to its bound. As what is
  due first is taken first, no ticket that is begun later can break its bound.
- The cost of a batch depends on its own size and on the number of environments, not on the length of the queue.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from recipe.atropos.trajectory_api.lanes import Entry, Lane, exact_fill

WINDOW = 64  # entries beyond those that would fill a batch
SKIPS = 16  # batches
LEAST_WEIGHT = 0.01  # as in atroposlib: no environment starves
_EPSILON = 1e-6  # sequences


@dataclass(frozen=True)
class Plan:
    """The next batch: ``entries`` if it is ``complete``; else ``why`` says what it lacks."""

    entries: tuple[Entry, ...] = ()
    passed: tuple[Entry, ...] = ()  # came before the last of ``entries``, but did not fit
    complete: bool = False
    why: str = ""


class Queue:
    """What waits for a batch. ``batch_size`` is None until a trainer registers.

    ``sequences``, ``tokens`` and ``groups`` count what is queued, without open tickets or what is set aside.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.bounded = False
        self.lanes: dict[int | None, Lane] = {}
        self.aside: dict[int, Entry] = {}  # by id
        self.tickets: dict[int, Entry] = {}  # open, by number
        self.sequences = self.tokens = self.groups = 0
        self.sizes: Counter[int] = Counter()  # of queued groups, in sequences
        self._virtual = 0.0

    # ------------------------------------------------------------------ what comes and goes

    def set_environment(self, env: int | None, weight: float, minimum: float) -> None:
        """Set an environment's weight, relative to others', and the part of each batch that is allocated to it."""
        lane = self._lane(env)
        lane.weight, lane.minimum = max(weight, LEAST_WEIGHT), minimum

    def set_batch_size(self, batch_size: int | None, bounded: bool = False) -> None:
        """Set the size of a batch in sequences; what was set aside for the former is queued again.

        ``bounded``: whether there is a staleness bound; if not, nothing is due.
        """
        self.batch_size, self.bounded = batch_size, bounded
        for entry in [entry for lane in self.lanes.values() for entry in lane if not bounded]:
            entry.due = 0
        aside, self.aside = self.aside, {}
        for entry in aside.values():
            self.add(Entry(entry.number, entry.env, entry.size, entry.tokens, entry.id, entry.due))
        for lane in self.lanes.values():
            for entry in [entry for entry in lane if self._never_fits(entry)]:
                self._set_aside(entry)

    def add(self, entry: Entry) -> None:
        """Queue a group, or an open ticket."""
        if self._never_fits(entry):
            self.aside[entry.id] = entry
            return
        lane = self._lane(entry.env)
        if not lane.size:  # an idle environment keeps at most a batch's worth of arrears
            lane.virtual = max(lane.virtual, self.virtual() - (self.batch_size or 0) / self._weights())
        lane.add(entry)
        if entry.is_open:
            self.tickets[entry.number] = entry
        else:
            self._count(entry, 1)

    def release(self, number: int) -> Entry | None:
        """Remove an open ticket; return it, or None if it is not open."""
        entry = self.tickets.pop(number, None)
        if entry is not None:
            self.lanes[entry.env].remove(entry)
        return entry

    def _take(self, entry: Entry) -> None:
        self.lanes[entry.env].remove(entry)
        self._count(entry, -1)

    def _set_aside(self, entry: Entry) -> None:
        self._take(entry)
        self.aside[entry.id] = entry

    def _count(self, entry: Entry, sign: int) -> None:
        self.groups += sign
        self.sequences += sign * entry.size
        self.tokens += sign * entry.tokens
        self.sizes[entry.size] += sign
        self.lanes[entry.env].queued += sign * entry.size

    def _never_fits(self, entry: Entry) -> bool:
        return not entry.is_open and self.batch_size is not None and entry.size > self.batch_size

    def _lane(self, env: int | None) -> Lane:
        if env not in self.lanes:
            self.lanes[env] = Lane(self.virtual())
        return self.lanes[env]

    # ------------------------------------------------------------------ shares

    def virtual(self) -> float:
        """Return the weighted mean of what the environments with queued groups have been served."""
        lanes = [lane for lane in self.lanes.values() if lane.size]
        if lanes:
            self._virtual = sum(lane.virtual * lane.weight for lane in lanes) / sum(lane.weight for lane in lanes)
        return self._virtual

    def _weights(self) -> float:
        return sum(lane.weight for lane in self.lanes.values()) or 1.0

    def _minima(self, alive: Collection[int | None]) -> dict[int | None, float]:
        """Return the allocated sequences of each living environment, scaled down if they exceed a batch."""
        minima = {env: lane.minimum for env, lane in self.lanes.items() if lane.minimum > 0 and env in alive}
        scale = (self.batch_size or 0) / max(1.0, sum(minima.values()))
        return {env: minimum * scale for env, minimum in minima.items()}

    # ------------------------------------------------------------------ the next batch

    def plan(self, alive: Collection[int | None]) -> Plan:
        """Return the next batch, or why there is none. ``alive``: the environments whose allocation is waited for."""
        if self.batch_size is None:
            return Plan(why="no trainer has registered")
        window, total, beyond = [], 0, 0
        minima = self._minima(alive)
        for entry in self._in_order(minima):
            window.append(entry)
            beyond += total >= self.batch_size
            total += entry.size
            if total == self.batch_size and not beyond or beyond == WINDOW:
                break
        if not self.bounded and (lacking := self._lacking(minima)):  # if bounded, tickets begin by shares
            return Plan(why=lacking)
        if total < self.batch_size:
            waiting = sum(entry.is_open for entry in window)
            return Plan(why=f"{total} of {self.batch_size} sequences are queued or begun, {waiting} groups not posted")
        chosen = exact_fill([entry.size for entry in window], self.batch_size)
        if chosen is None:
            sizes = sorted({entry.size for entry in window})
            return Plan(
                why=f"no choice of the first {len(window)} groups, of sizes {sizes}, has {self.batch_size} sequences"
            )
        entries = tuple(window[i] for i in chosen)
        if begun := [entry for entry in entries if entry.is_open]:
            return Plan(why=f"waiting for {len(begun)} tickets, first {begun[0].number} of environment {begun[0].env}")
        passed = tuple(entry for entry in window[: chosen[-1]] if entry not in entries)
        return Plan(entries, passed, True)

    def cut(self, plan: Plan, alive: Collection[int | None]) -> list[Entry]:
        """Take a complete plan's entries; return what was set aside for having been skipped too often."""
        minima, taken = self._minima(alive), dict.fromkeys(self.lanes, 0)
        for entry in plan.entries:
            taken[entry.env] += entry.size
        for env, size in taken.items():
            self.lanes[env].virtual += max(0.0, size - minima.get(env, 0.0)) / self.lanes[env].weight
        self.virtual()
        for entry in plan.entries:
            self._take(entry)
        aside = []
        for entry in plan.passed:
            entry.skipped += 1
            if entry.skipped >= SKIPS and not entry.is_open:
                self._set_aside(entry)
                aside.append(entry)
        return aside

    def _lacking(self, minima: dict[int | None, float]) -> str:
        """Return which environment has too little for its allocation, or ""."""
        for env, minimum in minima.items():
            if self.lanes[env].size < int(minimum):
                return (
                    f"environment {env} lives and has {self.lanes[env].size} of the {int(minimum)} sequences that are "
                    "allocated to it"
                )
        return ""

    def _in_order(self, minima: dict[int | None, float]) -> Iterator[Entry]:
        """Yield entries in the order in which a batch takes them: by what is due, allocations, and virtual time."""
        rests = {env: iter(lane) for env, lane in self.lanes.items() if lane.size}
        heads = {env: entry for env, rest in rests.items() if (entry := next(rest, None)) is not None}
        virtual, taken = {env: self.lanes[env].virtual for env in heads}, dict.fromkeys(heads, 0)
        while heads:
            due = min(entry.due for entry in heads.values())
            weights = {env: self.lanes[env].weight for env, entry in heads.items() if entry.due == due}
            mean = sum(virtual[env] * weight for env, weight in weights.items()) / sum(weights.values())
            mean = max(mean + _EPSILON, min(virtual[env] for env in weights))  # floats of long runs are coarse
            env = next((env for env in minima if env in weights and taken[env] < int(minima[env])), None)
            if env is None:
                env = min(
                    (env for env in weights if virtual[env] <= mean),
                    key=lambda env: (virtual[env] + heads[env].size / weights[env], heads[env].key),
                )
            entry, minimum = heads[env], minima.get(env, 0.0)
            yield entry
            beyond = max(0.0, taken[env] + entry.size - minimum) - max(0.0, taken[env] - minimum)
            virtual[env] += beyond / self.lanes[env].weight
            taken[env] += entry.size
            if (following := next(rests[env], None)) is None:
                del heads[env]
            else:
                heads[env] = following

    # ------------------------------------------------------------------ pacing

    def refuses(
        self,
        env: int | None,
        size: int,
        batches: int | None,
        alive: Collection[int | None],
        asking: Collection[int | None],
    ) -> str:
        """Return why a ticket for ``size`` sequences may not begin now, or "".

        ``batches``: how many batches may still be cut before the bound, None for any number; ``asking``: the
        environments that want to begin groups too.
        """
        if self.batch_size is None:
            return "no trainer has registered"
        if batches is None:
            return ""
        places = batches * self.batch_size
        begun = sum(lane.size for lane in self.lanes.values())
        if begun + size > places:
            stuck = places > 0 and not self.tickets and not self.plan(alive).complete  # by sizes that do not fit
            return "" if stuck else f"{begun} of {places} sequences that may begin have"
        self._lane(env)
        others = {*asking, env, *(other for other in alive if other in self.lanes and self.lanes[other].minimum > 0)}
        shares = self._shares(others & self.lanes.keys() | {other for other, lane in self.lanes.items() if lane.size})
        mean = self.virtual()

        def position(other: int | None) -> float:
            lane = self.lanes[other]
            return ((lane.virtual - mean) * lane.weight + lane.size) / shares[other]

        own = position(env)
        if own + size / 2 / shares[env] < places or own <= min(map(position, shares)) + _EPSILON:
            return ""
        return f"its share of the {places} sequences that may begin is {shares[env]:.0%}"

    def _shares(self, envs: Collection[int | None]) -> dict[int | None, float]:
        """Return the part of a batch that each environment gets."""
        whole = max(1, self.batch_size or 1)
        allocated = {env: minimum / whole for env, minimum in self._minima(envs).items()}
        rest = max(0.0, 1 - sum(allocated.values())) / sum(self.lanes[env].weight for env in envs)
        return {env: max(_EPSILON, allocated.get(env, 0.0) + rest * self.lanes[env].weight) for env in envs}
