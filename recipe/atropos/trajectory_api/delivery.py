"""What trainers ask of a Trajectory API: registrations, numbered batches, commits.

Guarantees:

- Batch N is cut and stored before it is sent; asked for again, it has the same groups in the same order, after a
  restart of the server too.
- One trainer at a time: each registration gets an epoch of its own, and requests of an older one are refused. One that
  fails changes nothing.
- The groups of a committed batch are never queued again; those that are, return to their place in the queue.
- A stock trainer's batches are full, also after a trainer that uses numbered batches.
- A stock trainer's next ``GET /batch`` acknowledges the batch before, unless that one's answer was not written whole.
"""

import asyncio
import logging
import time
import uuid
from typing import Any

import msgspec

from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.endpoints import SOMEBODY, Caller, Int, Registration, RequestRefused, endpoint
from recipe.atropos.trajectory_api.service import RegisteredTrainer, TrajectoryService

logger = logging.getLogger(__name__)

_LONGEST_WAIT = 60.0  # s, of a long poll
_STORE_SECONDS = 2.0  # s, for storing a batch, whatever a client waits; longer if the disk is full


@endpoint("POST", "/register", for_trainers=True)
async def register(service: TrajectoryService, message: Registration) -> dict[str, Any]:
    """Register a trainer; the former one is refused from now on.

    Raises:
        RequestRefused: 409, a trainer that uses numbered batches is live, and this one does not; or the batch
            size differs from that of committed batches. 410, batches after ``after`` were deleted.
    """
    if message.batch_size < 1:
        raise RequestRefused(422, f"batch_size={message.batch_size}: give a positive number of sequences")
    if message.max_staleness is not None and message.max_staleness < 0:
        raise RequestRefused(422, f"max_staleness={message.max_staleness}: give 0 or more batches, or null")
    async with service.registering:
        newest = await service.store.write(database.newest_batch)
        former, last = service.trainer, max(service.deleted, newest)
        if message.after is None:
            _refuse_while_live(service, "register with after=N, the number of the last batch in the weights")
            base = max(service.cursor, service.committed, service.served if former and former.numbers else 0)
        else:
            base = message.after
            _check_available(service, base)
        last = _kept_through(service, message, base, last)
        service.trainer = None  # nobody is given a batch meanwhile
        try:
            return await _replace(service, message, base, last)
        finally:
            service.trainer = service.trainer or former


def _kept_through(service: TrajectoryService, message: Registration, base: int, last: int) -> int:
    """Return the number of the last batch that stays one: ``last``, or ``base``, after which all are queued again.

    For another batch size, and for a stock trainer after one that uses numbered batches, whose batches may not be full.
    """
    size, fits = service.queue.batch_size, service.queue.exact or message.after is not None
    if size is None or (size == message.batch_size and fits and base >= service.resized) or base >= last:
        return last
    if base < service.committed:
        raise RequestRefused(
            409,
            f"batch_size={message.batch_size}: batches through {service.committed} are committed in another size; "
            f"register after={service.committed} or later, or with their size",
        )
    return base


async def _replace(service: TrajectoryService, message: Registration, base: int, last: int) -> dict[str, Any]:
    """Write a registration, and then make it that of the service; ``last``: the number of the last batch that stays."""
    if base > last:
        if last:
            logger.warning("the trainer has batches through %d, this store only through %d; counting on", base, last)
        last = base
    epoch, cursor = service.epoch + 1, base if message.after is None else min(service.cursor, last)
    committed = min(service.committed, last)  # a trainer with batches of another store may have committed more
    resized = min(service.resized, last) if service.queue.batch_size in (None, message.batch_size) else last
    groups = await service.store.write(
        database.register,
        registration=msgspec.to_builtins(message),
        **{"epoch": epoch, "base": base, "cursor": cursor, "served": base, "weights": base, "empty": [], "last": last},
        committed=committed,
        resized=resized,
    )
    if groups:
        logger.info("batches %d to %d are requeued: %d groups", last + 1, service.last, len(groups))
        service.count("requeued", len(groups))
    service.epoch, service.last, service.cursor, service.committed = epoch, last, cursor, committed
    service.served, service.resized = base, resized
    service.trainer = RegisteredTrainer(message, base, base, time.monotonic())
    for group in groups:
        service.queue.add(service.known(group))
    service.set_batch_size(service.trainer)
    service.changed()
    return {"uuid": uuid.uuid4().int >> 65, "epoch": epoch, "last": last}


def _refuse_while_live(service: TrajectoryService, instead: str) -> None:
    trainer = service.trainer
    if trainer is not None and trainer.numbers and trainer.live:
        seen = time.monotonic() - trainer.seen
        raise RequestRefused(409, f"a trainer, last seen {seen:.0f} s ago, trains on this server's batches; {instead}")


def _check_available(service: TrajectoryService, after: int) -> None:
    if after < 0:
        raise RequestRefused(422, f"after={after}: give the number of the last batch in the weights, 0 for none")
    if after < service.deleted:
        raise RequestRefused(
            410,
            f"after={after}: batches through {service.deleted} were deleted; the oldest available is "
            f"{service.deleted + 1}",
            oldest=service.deleted + 1,
        )


# ---------------------------------------------------------------------- batches


def _poll_trainer(service: TrajectoryService, epoch: int | None, through: int = 0) -> RegisteredTrainer:
    """Return the registered trainer, and note that it lives; ``through`` is a batch that it has.

    Raises:
        RequestRefused: 409, another trainer has registered since, or none has. 422, there is no such batch.
    """
    trainer = service.trainer
    if trainer is None:
        instead = "another trainer registers now" if service.registering.locked() else "call /register"
        raise RequestRefused(409, f"no trainer has registered; {instead}")
    if epoch is not None and epoch != service.epoch:
        raise RequestRefused(
            409,
            f"epoch={epoch}: a trainer registered later, with epoch {service.epoch}; register again to replace it",
            epoch=service.epoch,
        )
    trainer.seen = time.monotonic()
    if not 0 <= through <= service.last:
        raise RequestRefused(422, f"through={through}: the last batch is {service.last}; give it, or one before")
    return trainer


async def numbered_batch(
    service: TrajectoryService, after: int, wait: float, epoch: int | None, prefetch: bool = False
) -> int | None:
    """Return ``after`` + 1 once that batch is stored, or None if there is none within ``wait`` seconds.

    ``prefetch``: the trainer has a batch to train on meanwhile.

    Raises:
        RequestRefused: 409, of an older epoch. 410, it was deleted. 422, batches before it are missing.
    """
    trainer = _poll_trainer(service, epoch)
    _check_available(service, after)
    if after > service.last:
        raise RequestRefused(422, f"after={after}: the last batch is {service.last}; register with after={after} first")
    deadline = time.monotonic() + min(max(wait, 0.0), _LONGEST_WAIT)
    while service.trainer is trainer:
        cut = after < service.last or (after == service.last and _cut(service))
        remaining = deadline - time.monotonic()
        if cut and await _stored(service, remaining):
            if service.trainer is not trainer:
                break
            trainer.waiting_since = None
            if trainer.numbers:
                service.served = max(service.served, after + 1)
            return after + 1
        trainer.waiting_since = None if prefetch else trainer.waiting_since or time.monotonic()
        if cut or remaining <= 0:
            return None
        await service.wait_for_change(remaining)
        trainer.seen = time.monotonic()
    _poll_trainer(service, epoch)
    return None


def _cut(service: TrajectoryService) -> bool:
    """Cut the next batch if it is complete; return whether it was."""
    if service.registering.locked():
        return False
    plan = service.queue.plan()
    if not plan.entries:
        return False
    service.queue.cut(plan)
    service.last += 1
    service.cutting = service.store.write(database.cut, service.last, [entry.id for entry in plan.entries])
    service.count("cut_groups", len(plan.entries))
    if late := sum(0 < entry.due < service.last for entry in plan.entries):
        service.count("late_groups", late)
    service.changed()
    return True


async def _stored(service: TrajectoryService, seconds: float) -> bool:
    """Return whether what was cut is stored, within ``seconds`` or a little more."""
    if (cutting := service.cutting) is not None and not cutting.done():
        await asyncio.wait([cutting], timeout=max(seconds, _STORE_SECONDS))
    if cutting is not None and cutting.done():
        cutting.result()
    return cutting is None or cutting.done()


async def stock_batch(service: TrajectoryService) -> int | None:
    """Return the number of the batch for a trainer that uses no numbers: the next, or again one that was not written.

    Raises:
        RequestRefused: 409, the trainer that registered last uses numbered batches, be it live or not.
    """
    if service.trainer is not None and service.trainer.numbers:  # else what it was sent would be acknowledged
        raise RequestRefused(409, "this trainer's batches are numbered; call /register first")
    trainer = _poll_trainer(service, None)
    if service.served > service.cursor:
        service.cursor = service.served
        service.store.write(database.write_run, cursor=service.cursor)
        await _delete(service, service.cursor)
    cut = service.cursor < service.last or _cut(service)
    if not (cut and await _stored(service, 0)) or service.trainer is not trainer:
        trainer.waiting_since = trainer.waiting_since or time.monotonic()
        return None
    trainer.waiting_since = None
    return service.cursor + 1


def stock_delivered(service: TrajectoryService, epoch: int, number: int) -> None:
    """Note that the answer to ``stock_batch`` was written whole: it is not sent again, after a restart neither."""
    if (service.epoch, service.cursor + 1) == (epoch, number):
        service.served = number
        service.store.write(database.write_run, served=number)


@endpoint("POST", "/commit", for_trainers=True, with_epoch=True)
async def commit(service: TrajectoryService, through: Int, caller: Caller = SOMEBODY) -> dict[str, Any]:
    """Note that a durable checkpoint contains the batches through a number, so that none before is asked for again."""
    _poll_trainer(service, caller.epoch, through)
    service.committed = max(service.committed, through)
    await service.store.write(database.write_run, committed=service.committed)
    await _delete(service, service.committed)
    return {"status": "committed", "through": service.committed}


async def _delete(service: TrajectoryService, through: int) -> None:
    if service.settings.retention != "committed" or through <= service.deleted:
        return
    service.deleted = through
    await service.store.write(database.write_run, deleted=through)
    while await service.store.write(database.delete_batches, through):
        pass


@endpoint("POST", "/weights", for_trainers=True, with_epoch=True)
async def weights_pushed(service: TrajectoryService, through: Int, caller: Caller = SOMEBODY) -> dict[str, Any]:
    """Note that the servers hold weights that contain the batches through a number; tickets follow it."""
    trainer = _poll_trainer(service, caller.epoch, through)
    trainer.weights = through
    trainer.empty = {number for number in trainer.empty if number > through}
    await _save_progress(service, trainer)
    return {"status": "noted", "through": through}


@endpoint("POST", "/empty", for_trainers=True, with_epoch=True)
async def batch_is_empty(service: TrajectoryService, number: Int, caller: Caller = SOMEBODY) -> dict[str, Any]:
    """Note that the trainer found nothing to train on in a batch: it makes no update, so tickets may go one further."""
    trainer = _poll_trainer(service, caller.epoch, number)
    if number > trainer.weights and number not in trainer.empty:
        trainer.empty.add(number)
        service.count("empty_batches")
        await _save_progress(service, trainer)
    return {"status": "noted", "number": number}


async def _save_progress(service: TrajectoryService, trainer: RegisteredTrainer) -> None:
    await service.store.write(database.write_run, weights=trainer.weights, empty=sorted(trainer.empty))
    service.changed()


@endpoint("GET", "/reset_data", for_trainers=True)
async def reset(service: TrajectoryService) -> str:
    """Take all groups out of the run; their records stay in the store.

    Raises:
        RequestRefused: 409, a trainer that uses numbered batches is live.
    """
    async with service.registering:
        _refuse_while_live(service, "stop it first")
        await service.reset()
    return "Reset successful"
