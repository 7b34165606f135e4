"""Generation paced by training: no sample is more than ``max_staleness`` updates old when it is trained on.

An adapted environment keeps the bound k of ``--adapter.max_staleness`` (the launcher sets it from
``trainer.atropos.max_staleness``; without it, pacing is off). G is the number of this environment's groups per batch, v
the servers' weight version, v0 the version at the environment's start. Guarantees:

- A group starts only while fewer than (v - v0 + 1 + k) * G others have, not counting those that produced nothing.
- Groups are posted in the order in which they started: a finished group waits until each earlier one is posted or has
  produced nothing. While waiting, it takes up no worker slot.

So step s trains on the groups that started as numbers (s - 1) * G to s * G, each at version s - 1 - k or later, however
long they took: the bound holds by construction, nothing is discarded, and with k = 0 generation and training alternate.
Which groups are trained on is settled when they start. If stale groups were discarded instead, or running ones
cancelled or aborted when the queue is full or the weights change, long responses would be lost more often, and the
policy would learn from the short ones. BaseEnv's own backpressure cancels in that way, so it is disabled
(``max_batches_offpolicy`` has no effect): groups that have started are cancelled only by ``worker_timeout``, and by an
evaluation that stops training, after which they start again.

- A group that failed, was cancelled or was refused releases its place. An item that yields several groups counts as
  that many; those without a place within the bound are dropped, with a warning.
- A version that goes down means that the trainer resumed: v0 is then this version, and only groups in flight, or in the
  API's queue beyond whole batches, count as started.
- An environment's share of a batch is its allocation (``min_batch_allocation``) plus, of what is not allocated, the
  share of its weight. With several environments, the groups of others can overtake slow ones, so some rows may still be
  too old; the trainer drops and counts them.
- When an environment leaves, the others take over its share of later steps, and also of a batch that waits for groups
  that it no longer posts.
- Every wait has a timeout. A batch can be lost: to a trainer that died and resumed from the same version, in transit,
  or because all of it was refused. Trainer and environment would then wait for each other. So if all that may start is
  posted, and no new version arrives for ``stall_timeout`` and for twice the longest step so far, another batch may
  start. If the trainer was only slow, that batch arrives too late, and the trainer drops and counts it. (If the trainer
  waits for evaluations, the launcher sets a longer timeout.) What is awaited is logged every minute, and after
  ``longest_wait`` the environment ends with that message.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from atroposlib.envs.base import EvalHandlingEnum

from recipe.atropos.adapter.durable import Durable
from recipe.atropos.adapter.pace import Pace, PacingError, Ticket
from recipe.atropos.adapter.recorded_calls import sglang_servers
from recipe.atropos.inference.client import InferenceError, SGLangClient

logger = logging.getLogger(__name__)

_SELDOM, _ANSWER, _SAY_AGAIN = 1.0, 10.0, 60.0  # s: between checks with room left; server timeout; between logs


async def served_version(servers: Sequence[tuple[str, str | None]]) -> tuple[int | None, str]:
    """Return the lowest weight version of servers, each (URL, API key); None and the reason if one is unknown."""

    async def ask(url: str, api_key: str | None) -> str:
        async with SGLangClient(url, api_key, timeout=_ANSWER) as client:
            return await client.weight_version()

    try:
        versions = await asyncio.gather(*(ask(*server) for server in servers))
    except InferenceError as error:
        return None, str(error)
    for (url, _), version in zip(servers, versions, strict=True):
        if not version.isdecimal():
            return None, f"{url} reports weight version {version!r}: the trainer has pushed nothing to it"
    return min(map(int, versions)), ""


_TICKET: ContextVar[Ticket | None] = ContextVar("ticket", default=None)  # of the current worker


class Paced(Durable):
    """An environment with paced generation; see the module docstring. Only servers of type "sglang" report versions."""

    left_timeout = 5.0  # s that a batch may lack groups of an environment that left, until they are started here
    longest_wait = 3600.0  # s without progress, until the environment ends

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        max_staleness = self.adapter_settings.max_staleness
        self._pace = None if max_staleness is None else Pace(max_staleness)
        self._sequences_an_item = self.config.group_size
        self._looked = self._warned = -float("inf")
        self._idle_since: float | None = None  # since when nothing is in flight and there is no room
        self._version_since: float | None = None
        self._longest_step = 0.0  # s between two versions
        self._granted = 0  # extra batches, since the current version
        self._left = False  # whether another environment left, and its part was not yet started here
        self._unknown = ""  # why the version is not known

    async def get_status(self) -> None:
        """Get the API's status and the servers' version, and derive how much may start.

        Raises:
            PacingError: nothing could start or post for ``longest_wait``, or no server reports versions.
        """
        await self._fetch_status()
        if self._pace is None:
            return
        status = self.status_dict
        share = self.config.batch_size * self.part_of_a_batch(self.config.min_batch_allocation, status)
        self._left |= 0 < self._pace.share < share
        self._pace.set_share(share)
        await self._look(status["self_queue_size"] * self.config.group_size)
        self.max_num_workers += self._pace.waiting
        queued, status["queue_size"] = status["queue_size"], 0  # or BaseEnv's backpressure would cancel workers
        self._watch(queued * self.config.group_size)

    @staticmethod
    def part_of_a_batch(allocation: float | None, status: Mapping[str, Any]) -> float:
        """Return the part allocated, plus the weight's part of the rest; it sums to 1 over all environments."""
        return max(0.0, (allocation or 0.0) + status["unallocated_fraction"] * status["env_weight"])

    async def _look(self, queued: int) -> None:
        """Get the servers' version: in every round of the manager if there is no room, else once per second.

        A drop in version must be noticed before the version has passed the old one again.
        """
        if self._pace.room and time.monotonic() - self._looked < _SELDOM:
            return
        servers = [
            (server.config.base_url.removesuffix("/").removesuffix("/v1"), server.config.api_key or None)
            for server in sglang_servers(self.server)
        ]
        if not servers:
            raise PacingError(
                f"max_staleness={self._pace.max_staleness} needs servers of type sglang, which tell versions"
            )
        version, self._unknown = await served_version(servers)
        self._looked = now = time.monotonic()
        if version is not None and version != self._pace.version:
            if self._version_since is not None:
                self._longest_step = max(self._longest_step, now - self._version_since)
            self._version_since, self._granted = now, 0
            self._pace.set_version(version, queued)

    def _watch(self, queued: int) -> None:
        """Log each minute what is awaited, and resolve stalls. ``queued``: all environments' sequences in the API."""
        pace, now = self._pace, time.monotonic()
        oldest = pace.oldest
        if oldest is not None:
            self._idle_since = now
            what = f"{pace.waiting} groups are done and wait for one that began {now - oldest.begun:.0f} s ago"
            since = oldest.begun if pace.waiting else now
            if now - since > max(self.longest_wait, self.config.worker_timeout):
                raise PacingError(what)
        elif pace.room or self._idle_since is None:
            self._idle_since = since = now
            what = ""
        else:
            what, since = self._what_is_lacking(), self._idle_since
            if now - since > self.longest_wait:
                raise PacingError(f"{now - since:.0f} s: {what}")
            if self._fill_in(now - since, queued):
                return
            limit = max(self.adapter_settings.stall_timeout, 2 * self._longest_step)
            if pace.version is not None and not self._unknown and now - since > limit * 2**self._granted:
                logger.error("%.0f s: %s. Taking a batch for lost, and beginning another", now - since, what)
                self._granted += 1
                pace.grant()
                return
        if now - max(since, self._warned) > _SAY_AGAIN:
            logger.warning(what)
            self._warned = now

    def _fill_in(self, idle: float, queued: int) -> bool:
        """Make room for this environment's part of a batch that another one left incomplete; return whether it did.

        Only if the trainer waits for that batch: the API has then cut as many batches as there were updates.
        """
        batch, missing = self.config.batch_size, self.config.batch_size - queued
        waits = self._pace.version is not None and self.status_dict["current_step"] <= self._pace.version
        if not (self._left and waits and 0 < missing <= batch and idle > self.left_timeout):
            return False
        logger.warning("another environment left; beginning our part of the %d sequences that a batch lacks", missing)
        self._left = False
        self._pace.grant(missing * self._pace.share / batch)
        return True

    def _what_is_lacking(self) -> str:
        pace = self._pace
        if pace.version is None or self._unknown:
            return f"waiting for the weight version of the servers ({self._unknown}); inference.urls must name them all"
        if not pace.share:
            return "waiting for the batch size, which a trainer tells the Trajectory API"
        return (
            f"waiting for a weight version above {pace.version}: all {pace.begun} sequences that "
            f"max_staleness={pace.max_staleness} lets begin before it are posted; look into the trainer's log"
        )

    async def add_train_workers(self) -> None:
        """Start as many workers as there are places within the bound; never cancel any."""
        if self._pace is None:
            return await super().add_train_workers()
        limit = self.max_num_workers
        if self.eval_runner is not None and not self.eval_runner.done():
            if self.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
                return
            if self.config.eval_handling == EvalHandlingEnum.LIMIT_TRAIN:
                limit = int(limit * self.config.eval_limit_ratio)
        while len(self.workers) < limit and self._pace.room:
            item = self.backlog.pop() if self.backlog else await self.get_next_item()
            if item is None:
                return
            ticket = self._pace.begin(self._sequences_an_item)
            item_uuid = str(uuid.uuid4())
            worker = asyncio.create_task(self._work(item_uuid, ticket))
            self.running_items[item_uuid] = {"item": item, "worker": worker, "start_time": time.time()}
            self.workers.add(worker)
            # A callback, since a worker that is cancelled before its first step never runs.
            worker.add_done_callback(partial(self._worker_ended, item, ticket))

    async def _work(self, item_uuid: str, ticket: Ticket) -> Any:
        _TICKET.set(ticket)
        return await self.handle_env(item_uuid)

    def _worker_ended(self, item: Any, ticket: Ticket, worker: asyncio.Task) -> None:
        self.workers.discard(worker)
        self._pace.end(ticket)
        if worker.cancelled():
            return
        if error := worker.exception():
            logger.error("a worker failed: %r", error)
        elif worker.result():
            self.last_completed_item = item

    async def _wait_for_turn(self, groups: list[Any]) -> list[Any]:
        """Wait for an item's turn to post, and return those of its groups that have a place in a batch."""
        ticket = _TICKET.get()
        if self._pace is None or ticket is None:
            return groups
        await self._pace.turn(ticket)
        sizes = [len(group["tokens"]) for group in groups]
        count = self._pace.fitting(ticket, sizes)
        if count < len(groups):
            logger.warning("%d of %d groups of one item have no place in a batch", len(groups) - count, len(groups))
        self._sequences_an_item = sum(sizes)  # what the next item is expected to need
        return groups[:count]

    def _take_places(self, groups: list[Any]) -> None:
        """Record that the API has the groups: the next item may post. A second post of one item does not wait."""
        if self._pace is not None and (ticket := _TICKET.get()) is not None:
            self._pace.posted(ticket, sum(len(group["tokens"]) for group in groups))
