"""What environments ask of a Trajectory API: registrations, tickets, and groups. Guarantees:

- A group is answered 200 once it is stored; a refused one is counted by its reason and changes nothing else.
- A post with an idempotency key is stored once, however often it is sent. Without a key, a post is taken for a
  repetition only if an equal one's connection broke before its answer was written.
- A queue beyond its limit, from which a complete batch can be taken, delays the answers to posts, after storing them;
  it refuses none.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from isal import isal_zlib

from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.trajectory_api import database, pacing
from recipe.atropos.trajectory_api.environments import Environment
from recipe.atropos.trajectory_api.lanes import Entry
from recipe.atropos.trajectory_api.messages import Begin, EnvIdentifier, EnvRegistration, Release, RequestRefused
from recipe.atropos.trajectory_api.parsing import Parsed, parse_json, parse_packed
from recipe.atropos.trajectory_api.service import Service

_LONGEST_WAIT = 60.0  # s, of a long poll
_RETRY_AFTER = 0.2  # s


# ---------------------------------------------------------------------- registrations


async def register_env(service: Service, message: EnvRegistration) -> dict[str, Any]:
    """Register an environment, once there is a trainer."""
    trainer = service.trainer
    if trainer is None:
        return {"status": "wait for trainer to start"}
    environment = service.environments.add(message)
    service.apply_share(environment)
    await _save(service, environment)
    return {
        "status": "success",
        "env_id": environment.id,
        "wandb_name": environment.name,
        "checkpoint_dir": trainer.registration.checkpoint_dir,
        "starting_step": service.step(),
        "checkpoint_interval": trainer.registration.save_checkpoint_interval,
        "num_steps": trainer.registration.num_steps,
    }


async def disconnect_env(service: Service, message: EnvIdentifier) -> dict[str, Any]:
    """Note that an environment has left; its tickets are released."""
    environment = service.environments.by_id.get(message.env_id)
    if environment is None:
        return {"status": "failure", "error": f"env_id={message.env_id}: no environment has registered under it"}
    environment.connected = False
    service.release_dead()
    await _save(service, environment)
    service.changed()
    return {"status": "success"}


async def _save(service: Service, environment: Environment) -> None:
    values = {
        "registration": msgspec.to_builtins(environment.registration),
        "name": environment.name,
        "connected": environment.connected,
    }
    await service.store.write(database.write_environment, environment.id, values)


# ---------------------------------------------------------------------- tickets


async def begin(service: Service, message: Begin, gone: Any) -> dict[str, Any]:
    """Issue a ticket as soon as the staleness bound and the queue allow it, within ``message.wait`` seconds.

    ``gone()`` says whether who asked is no longer there; a ticket for nobody would be waited for.
    """
    environment = service.environments.get(message.env_id)
    environment.connected = True
    size = environment.registration.group_size if message.sequences is None else message.sequences
    if size < 1 or (service.queue.batch_size and size > service.queue.batch_size):
        raise RequestRefused(422, f"sequences={size}: give 1 to {service.queue.batch_size}, the batch size")
    if message.held is not None:
        held = {*message.held}
        lost = [entry for entry in service.queue.tickets.values() if entry.env == environment.id]
        for entry in lost:
            if entry.number not in held:
                service.release(entry.number, "ticket_lost")
    deadline = time.monotonic() + min(message.wait, _LONGEST_WAIT)
    while True:
        service.environments.see(environment.id)
        environment.asked = time.monotonic()
        why = _refuses(service, environment.id, size)
        if not why and not gone():
            number, due = service.take_number(), service.due()
            service.queue.add(Entry(number, environment.id, size, due=due))
            await service.store.write(database.begin_ticket, number, environment.id, size, due)
            return {"ticket": number}
        if (remaining := deadline - time.monotonic()) <= 0 or gone():
            return {"ticket": None, "retry_after": _RETRY_AFTER, "reason": why}
        await service.wait_for_change(remaining)


def _refuses(service: Service, env: int, size: int) -> str:
    if service.trainer is None:
        return "no trainer has registered"
    if full := service.full():
        return full
    if not (due := service.due()):
        return ""
    alive, asking = service.environments.alive(), service.environments.asking()
    return pacing.refuses(service.queue, env, size, range(service.last + 1, due + 1), alive, asking)


async def release(service: Service, message: Release) -> dict[str, Any]:
    """End a ticket without a group, for a reason that is counted."""
    entry = service.queue.tickets.get(message.ticket)
    if entry is not None:
        service.environments.see(entry.env)
    ended = service.release(message.ticket, _name(message.reason))
    if ended is None:
        return {"status": "not open"}
    await ended
    return {"status": "released"}


def _name(reason: str) -> str:
    """Return a reason as a name of metrics."""
    return "".join(letter if letter.isalnum() else "_" for letter in reason[:64]) or "unknown"


# ---------------------------------------------------------------------- groups


def parse(service: Service, body: bytes, packed: bool, several: bool, ticket: int | None) -> list[Parsed]:
    """Return a post's groups.

    Raises:
        RequestRefused: 422, with the reason; the groups are counted, and the ticket is released.
    """
    try:
        groups = parse_packed(body) if packed else parse_json(body, several)
        if ticket is not None and not service.knows_number(ticket):
            raise RequestRefused(422, f"ticket={ticket}: /begin never issued it")
        if not several and len(groups) != 1:
            raise RequestRefused(422, f"{len(groups)} packed groups: post one here, or any number to /scored_data_list")
        return groups
    except RefusedGroup as error:
        entry = service.queue.tickets.get(ticket) if ticket is not None else None
        environment = service.environments.see(entry.env) if entry is not None else None
        service.count(f"refused/{error.reason}", 1, environment)
        service.save()
        if ticket is not None:
            service.release(ticket, error.reason)
        raise RequestRefused(422, str(error), reason=error.reason) from error


def digest_of(body: bytes) -> str:
    """Return what tells a post's content from another's; it need not withstand an adversary."""
    return f"{len(body)}.{isal_zlib.crc32(body)}.{isal_zlib.adler32(body)}"


@dataclass
class Unanswered:
    """A post without a key, until its answer is written; ``gone()`` says whether its client has left."""

    groups: int
    storing: asyncio.Future[None]
    gone: Callable[[], bool]
    answered: bool = False


def repetition(service: Service, digest: str | None, gone: Callable[[], bool]) -> Unanswered | None:
    """Return what was stored of an equal post whose connection broke, once; None if there is none."""
    if digest is None:
        return None
    earlier = service.unanswered.get(digest)
    if earlier is not None and earlier.gone():
        groups, storing = earlier.groups, earlier.storing
    elif digest in service.broken:
        groups, storing = service.broken.pop(digest), asyncio.get_running_loop().create_future()
        storing.set_result(None)
    else:
        return None
    service.count("repeated", groups)
    return Unanswered(groups, storing, gone)


@contextlib.contextmanager
def unanswered(service: Service, digest: str | None, own: Unanswered) -> Iterator[None]:
    """Let equal posts know of this one; if it is not answered in the end, the next one is its repetition."""
    if digest is None or not own.groups:
        yield
        return
    service.unanswered[digest] = own
    stored = False
    try:
        yield
        stored = True
    finally:
        if service.unanswered.get(digest) is own:  # no repetition has taken its place
            del service.unanswered[digest]
            if own.answered:
                service.answered(digest)
            elif stored:
                service.broken[digest] = own.groups


async def post(
    service: Service, groups: Sequence[Parsed], ticket: int | None, key: str | None, digest: str | None
) -> None:
    """Store groups, in the ticket's place, or in the order of arrival if it has none or has ended.

    Raises:
        RequestRefused: 409, another post with the key is of other groups.
    """
    if not groups:
        return
    if key is not None and (earlier := service.posts.get(key)) is not None:
        if earlier != len(groups):
            raise RequestRefused(409, f"key={key}: a post of {earlier} groups had this key; give each post its own")
        if key in service.posting:
            await asyncio.shield(service.posting[key])
        return
    begun = None if ticket is None else service.queue.tickets.get(ticket)
    number, due = (service.take_number(), 0) if begun is None else (begun.number, begun.due)
    now = time.time()
    rows = []
    for group in groups:
        rows.append(
            (
                database.Group(service.next_id, number, group.env_id, group.sequences, group.tokens, due, now),
                group.record,
            )
        )
        service.next_id += 1
    stored = service.store.write(database.append, rows, key, digest, ticket)
    if key is not None:
        service.posts[key], service.posting[key] = len(groups), stored
    # A task of its own: the index must follow the store even if the client leaves now.
    await asyncio.shield(asyncio.ensure_future(_index(service, groups, [row for row, _ in rows], ticket, key, stored)))


async def _index(
    service: Service,
    groups: Sequence[Parsed],
    rows: Sequence[database.Group],
    ticket: int | None,
    key: str | None,
    stored: "asyncio.Future[None]",
) -> None:
    try:
        await stored
    except BaseException:
        if key is not None:
            service.posts.pop(key, None)
        raise
    finally:
        if key is not None:
            service.posting.pop(key, None)
    if ticket is not None:
        service.queue.release(ticket)
    for group, row in zip(groups, rows, strict=True):
        service.queue.add(service.entry(row))
        if service.queue.is_aside(group.sequences):
            service.note_aside({group.sequences: 1})
        service.latest = row.id
        environment = service.environments.see(group.env_id)
        service.count("received", 1, environment)
        for name in group.odd:
            service.count(f"odd/{name}", 1, environment)
    service.changed()


async def hold(service: Service, gone: Any) -> None:
    """Wait while the queue is full, at most ``hold_seconds``, or until the client is gone."""
    deadline = time.monotonic() + service.settings.hold_seconds
    while service.full() and not gone():
        if (remaining := deadline - time.monotonic()) <= 0:
            return
        await service.wait_for_change(remaining)
