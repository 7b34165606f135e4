"""How much may begin, and who posts next: the counts behind ``pacing``, without any environment or server."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from recipe.atropos.errors import AtroposError

logger = logging.getLogger(__name__)


_EPSILON = 1e-6  # sequences; shares such as a third of a batch add up to a little less or more


class PacingError(AtroposError, RuntimeError):
    """Generation cannot be paced, or waited too long; the message says for what."""


@dataclass(eq=False)
class Ticket:
    """One item in flight. ``sequences`` are reserved for it; it is posted as long as fewer than ``bound`` are."""

    sequences: int
    bound: float
    begun: float = field(default_factory=time.monotonic)
    first: asyncio.Event = field(default_factory=asyncio.Event)  # all before it are posted or have come to nothing


class Pace:
    """How much may begin, and who posts next. Counts in sequences; the module speaks of groups.

    ``share`` is how many sequences of a batch are this environment's, ``version`` that of the servers; until both are
    known nothing begins. ``waiting`` counts those that are done and wait for their turn.
    """

    def __init__(self, max_staleness: int):
        self.max_staleness = max_staleness
        self.version: int | None = None
        self.share = 0.0
        self.waiting = 0
        self._origin: tuple[float, int] = (0.0, 0)  # so many sequences belong to the steps up to this version
        self._posted = 0
        self._in_flight: dict[Ticket, None] = {}  # in the order of their begin

    @property
    def limit(self) -> float:
        """How many sequences may have begun in all."""
        if self.version is None:
            return 0.0
        done, version = self._origin
        return done + (self.version - version + 1 + self.max_staleness) * self.share

    @property
    def begun(self) -> int:
        """Sequences that are posted or in flight; what came to nothing is not among them."""
        return self._posted + sum(ticket.sequences for ticket in self._in_flight)

    @property
    def room(self) -> bool:
        return self.begun < self.limit - _EPSILON

    @property
    def oldest(self) -> Ticket | None:
        """What all others in flight wait for."""
        return next(iter(self._in_flight), None)

    def set_share(self, share: float) -> None:
        """From the present version on; what belongs to earlier steps stays theirs.

        A share that grows is that of an environment which left, and what it posted is still to be trained on: so
        nothing more may begin at once, only for the versions to come. One that shrinks makes room for a new
        environment, which begins for ``max_staleness`` versions ahead.
        """
        if abs(share - self.share) < _EPSILON:
            return
        if self.version is not None:
            done, version = self._origin
            done += (self.version - version) * self.share
            if 0 < self.share < share:
                done -= (1 + self.max_staleness) * (share - self.share)
            self._origin = (done, self.version)
        self.share = share

    def set_version(self, version: int, queued: int = 0) -> None:
        """``queued``: sequences of this environment that the API still holds; needed where the version goes down.

        Of these only what is no whole batch counts: whole ones are dropped whole, and the trainer asks for the next.
        """
        if self.version is None:
            self._origin = (0.0, version)
        elif version < self.version:
            logger.warning("the servers went from weight version %d back to %d; beginning anew", self.version, version)
            self._origin, self.version = (0.0, version), version
            self._posted = int(queued % self.share) if self.share else 0
            for ticket in self._in_flight:
                ticket.bound = max(self.limit, self.begun)
        self.version = version

    def grant(self, sequences: float | None = None) -> None:
        """Room for so many sequences more, by default for a batch: in place of what the trainer never trained on."""
        done, version = self._origin
        self._origin = (done + (self.share if sequences is None else sequences), version)

    def begin(self, sequences: int) -> Ticket:
        """Take a place; only while there is ``room``. Whoever takes one must ``end`` it, whatever comes of it."""
        assert self.room, "begun without room"
        ticket = Ticket(sequences, self.limit)
        self._in_flight[ticket] = None
        self._call_the_next()
        return ticket

    async def turn(self, ticket: Ticket) -> None:
        """Until all that began before it are posted or have come to nothing."""
        self.waiting += 1
        try:
            await ticket.first.wait()
        finally:
            self.waiting -= 1

    def fitting(self, ticket: Ticket, sizes: Iterable[int]) -> int:
        """How many of these groups, by their sequences, have a place within the bound; in its turn."""
        posted, count = self._posted, 0
        for size in sizes:
            if posted >= ticket.bound - _EPSILON:
                break
            posted, count = posted + size, count + 1
        return count

    def posted(self, ticket: Ticket, sequences: int) -> None:
        """So many sequences are with the API; the next in order may post."""
        self._posted += sequences
        self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        """Gives the place back if nothing was posted; may be called again."""
        if ticket in self._in_flight:
            del self._in_flight[ticket]
            ticket.first.set()
            self._call_the_next()

    def _call_the_next(self) -> None:
        if self.oldest is not None:
            self.oldest.first.set()
