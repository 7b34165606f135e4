"""The state behind ``pacing``, without environments or servers: how many sequences may start, and who posts next."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from recipe.atropos.errors import AtroposError

logger = logging.getLogger(__name__)


_EPSILON = 1e-6  # sequences; tolerance for rounding, as with shares of a third of a batch


class PacingError(AtroposError, RuntimeError):
    """Generation cannot be paced, or waited too long; the message says for what."""


@dataclass(eq=False)
class Ticket:
    """One item in flight: ``sequences`` are reserved for it, and it may post while fewer than ``bound`` are posted."""

    sequences: int
    bound: float
    begun: float = field(default_factory=time.monotonic)
    first: asyncio.Event = field(default_factory=asyncio.Event)  # all earlier items are posted or have produced nothing


class Pace:
    """Limit on the sequences that may start, and order of posting. Counts sequences, where ``pacing`` speaks of groups.

    ``share`` is this environment's number of sequences per batch, ``version`` the servers' weight version; nothing
    starts until both are known. ``waiting`` counts the items that are done and wait for their turn.
    """

    def __init__(self, max_staleness: int):
        self.max_staleness = max_staleness
        self.version: int | None = None
        self.share = 0.0
        self.waiting = 0
        self._origin: tuple[float, int] = (0.0, 0)  # (number of sequences for the steps up to this version, version)
        self._posted = 0
        self._in_flight: dict[Ticket, None] = {}  # in starting order

    @property
    def limit(self) -> float:
        """Total number of sequences that may have started."""
        if self.version is None:
            return 0.0
        done, version = self._origin
        return done + (self.version - version + 1 + self.max_staleness) * self.share

    @property
    def begun(self) -> int:
        """Number of sequences posted or in flight; items that produced nothing are not counted."""
        return self._posted + sum(ticket.sequences for ticket in self._in_flight)

    @property
    def room(self) -> bool:
        return self.begun < self.limit - _EPSILON

    @property
    def oldest(self) -> Ticket | None:
        """The oldest item in flight, which all others wait for; None if there is none."""
        return next(iter(self._in_flight), None)

    def set_share(self, share: float) -> None:
        """Set the share from the current version on; sequences that belong to earlier steps are unaffected.

        A share grows when another environment leaves. What that one posted will still be trained on, so nothing more
        may start at once, only with later versions. A share shrinks to make room for a new environment, which starts
        sequences for ``max_staleness`` versions ahead.
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
        """Set the weight version. ``queued``: this environment's sequences in the API; needed if the version drops.

        Only those beyond whole batches count: a whole batch is dropped entirely, and the trainer asks for the next.
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
        """Let ``sequences`` more start, by default a batch's share, in place of what the trainer never trained on."""
        done, version = self._origin
        self._origin = (done + (self.share if sequences is None else sequences), version)

    def begin(self, sequences: int) -> Ticket:
        """Reserve a place; only while there is ``room``. The caller must ``end`` the ticket, whatever comes of it."""
        assert self.room, "begun without room"
        ticket = Ticket(sequences, self.limit)
        self._in_flight[ticket] = None
        self._call_the_next()
        return ticket

    async def turn(self, ticket: Ticket) -> None:
        """Wait until every item that started earlier is posted or has produced nothing."""
        self.waiting += 1
        try:
            await ticket.first.wait()
        finally:
            self.waiting -= 1

    def fitting(self, ticket: Ticket, sizes: Iterable[int]) -> int:
        """Return how many groups of these sizes (in sequences) fit within the bound; call in the ticket's turn."""
        posted, count = self._posted, 0
        for size in sizes:
            if posted >= ticket.bound - _EPSILON:
                break
            posted, count = posted + size, count + 1
        return count

    def posted(self, ticket: Ticket, sequences: int) -> None:
        """Record that the API has taken ``sequences``, and let the next item in order post."""
        self._posted += sequences
        self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        """Release the place if nothing was posted; may be called again."""
        if ticket in self._in_flight:
            del self._in_flight[ticket]
            ticket.first.set()
            self._call_the_next()

    def _call_the_next(self) -> None:
        if self.oldest is not None:
            self.oldest.first.set()
