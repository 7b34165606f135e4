"""The queue's parts: entries in order, what is known of each environment, and the exact fill of a batch."""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace


@dataclass(slots=True, eq=False)
class Entry:
    """A queued group, or an open ticket for one (``id`` 0), whose ``size`` in sequences is then a prediction.

    ``number`` is the place in the order: the ticket's, or that of its arrival. ``due`` is the number of the last batch
    that may have it within the staleness bound; 0 without one, or without a ticket.
    """

    number: int
    env: int | None
    size: int
    tokens: int = 0
    id: int = 0
    due: int = 0
    gone: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.id

    @property
    def is_open(self) -> bool:
        return self.id == 0


class _Run:
    """Entries in order; removing one costs the same however many there are, on average."""

    __slots__ = ("_entries", "_head", "_left")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._head = 0  # entries before it are gone
        self._left = 0

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[Entry]:
        for at in range(self._head, len(self._entries)):
            if not self._entries[at].gone:
                yield self._entries[at]

    def add(self, entry: Entry) -> None:
        if not self._entries or self._entries[-1].key < entry.key:
            self._entries.append(entry)
        else:
            insort(self._entries, entry, lo=self._head, key=lambda other: other.key)
        self._left += 1

    def remove(self, entry: Entry) -> None:
        entry.gone = True
        self._left -= 1
        while self._head < len(self._entries) and self._entries[self._head].gone:
            self._head += 1
        if len(self._entries) > 32 + 2 * self._left:
            self._entries, self._head = list(self), 0


class Line:
    """Entries in the order of their keys, kept by size, so that sizes can be left out at no cost."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}  # by size; open tickets, whose sizes are not known, under 0

    def __iter__(self) -> Iterator[Entry]:
        return self.without(())

    def __bool__(self) -> bool:
        return any(self._runs.values())

    def without(self, sizes: Collection[int]) -> Iterator[Entry]:
        """Yield entries in order, but for groups of ``sizes``, which may grow meanwhile."""
        heads = []
        for size, run in self._runs.items():
            rest = iter(run)
            if size not in sizes and (first := next(rest, None)) is not None:
                heads.append((first.key, size, first, rest))
        heapify(heads)
        while heads:
            _, size, entry, rest = heads[0]
            if size not in sizes:
                yield entry
            if size in sizes or (following := next(rest, None)) is None:
                heappop(heads)
            else:
                heapreplace(heads, (following.key, size, following, rest))

    def add(self, entry: Entry) -> None:
        size = 0 if entry.is_open else entry.size
        if size not in self._runs:
            self._runs[size] = _Run()
        self._runs[size].add(entry)

    def remove(self, entry: Entry) -> None:
        size = 0 if entry.is_open else entry.size
        self._runs[size].remove(entry)
        if not self._runs[size]:
            del self._runs[size]


@dataclass(slots=True)
class Lane:
    """An environment. ``behind`` is how many sequences batches had less of it than its share; negative: more."""

    behind: float = 0.0
    weight: float = 1.0
    minimum: float = 0.0  # the part of each batch that is allocated to it
    paced: bool = False  # it has begun tickets
    begun: int = 0  # sequences of its open tickets, as predicted
    groups: Counter[int] = field(default_factory=Counter)  # its queued groups by size
    ticketed: Counter[int] = field(default_factory=Counter)  # those of them that are in the queue's stream
    line: Line = field(default_factory=Line)  # its entries that are not in the queue's stream

    @property
    def size(self) -> int:
        return self.begun + sequences(self.groups)


def sequences(groups: Counter[int]) -> int:
    return sum(size * n for size, n in groups.items())


def exact_fill(sizes: Sequence[int], target: int) -> list[int] | None:
    """Return indices whose sizes sum to ``target``, or None if there are none.

    Of all such choices, the one with the earliest entries: an entry is left out only if none with it, and with what
    was chosen before it, fits. Sets of sums are bits of integers.
    """
    mask = (1 << (target + 1)) - 1
    sums = [1]  # sums[-1 - i]: what can be reached by entries from i on
    for size in reversed(sizes):
        sums.append(sums[-1] | (sums[-1] << size) & mask)
    sums.reverse()
    if not sums[0] >> target & 1:
        return None
    chosen, rest = [], target
    for i, size in enumerate(sizes):
        if size <= rest and sums[i + 1] >> (rest - size) & 1:
            chosen.append(i)
            rest -= size
    return chosen
