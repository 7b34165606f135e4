"""The queue's parts: what waits for a batch, in one lane for each environment, and the exact fill of a batch."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Entry:
    """A queued group, or an open ticket for one (``id`` 0), whose ``size`` in sequences is then a prediction.

    ``number`` is the place in its environment's order: the ticket's, or that of its arrival. ``due`` is the number of
    the last batch that may have it within the staleness bound; 0 without one.
    """

    number: int
    env: int | None
    size: int
    tokens: int = 0
    id: int = 0
    due: int = 0
    skipped: int = 0  # batches cut past it, since it did not fit
    gone: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.id

    @property
    def is_open(self) -> bool:
        return self.id == 0


@dataclass(slots=True)
class Lane:
    """An environment's entries in order. ``virtual`` is how much it has been served: sequences / weight."""

    virtual: float
    weight: float = 1.0
    minimum: float = 0.0  # the part of each batch that is allocated to it
    size: int = 0  # sequences in it, open tickets included
    queued: int = 0  # without them
    entries: list[Entry] = field(default_factory=list)
    head: int = 0  # entries before it are gone

    def __iter__(self) -> Iterator[Entry]:
        for at in range(self.head, len(self.entries)):
            if not self.entries[at].gone:
                yield self.entries[at]

    def add(self, entry: Entry) -> None:
        if not self.entries or self.entries[-1].key < entry.key:
            self.entries.append(entry)
        else:
            insort(self.entries, entry, lo=self.head, key=lambda other: other.key)
        self.size += entry.size

    def remove(self, entry: Entry) -> None:
        """Remove an entry; its place in the list is freed later, so that the cost does not depend on the length."""
        entry.gone = True
        self.size -= entry.size
        while self.head < len(self.entries) and self.entries[self.head].gone:
            self.head += 1
        if self.head > 32 and 2 * self.head > len(self.entries):
            del self.entries[: self.head]
            self.head = 0


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
