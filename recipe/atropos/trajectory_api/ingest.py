"""What environments ask of a Trajectory API: registrations, tickets, and groups.

Guarantees:

- A group is answered 200 once it is stored; a refused one is counted by its reason and changes nothing else.
- A post with an idempotency key is stored once, however often it is sent, and so is a registration.
- A queue beyond its limit, from which a complete batch can be taken, delays the answers to posts, after storing them;
  it refuses none.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.trajectory_api import database, pacing
from recipe.atropos.trajectory_api.environments import Environment
from recipe.atropos.trajectory_api.lanes import Entry
from recipe.atropos.trajectory_api.messages import Begin, EnvIdentifier, EnvRegistration, Release, RequestRefused
from recipe.atropos.trajectory_api.parsing import Parsed, environments_of, parse_json, parse_packed
from recipe.atropos.trajectory_api.service import Service

_LONGEST_WAIT = 60.0  # s, of a long poll
_RETRY_AFTER = 0.2  # s


# ---------------------------------------------------------------------- registrations


async def register_env(service: Service, message: EnvRegistration, key: str | None = None) -> dict[str, Any]:
    """Register an environment, once there is a trainer; with one ``key``, once however often it is sent."""
    trainer = service.trainer
    if trainer is None:
        return {"status": "wait for trainer to start"}
    environment = service.environments.of_key(key)
    if environment is None:
        environment = service.environments.add(message, key)
        service.apply_share(environment)
    service.environments.see(environment.id)
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
        "key": environment.key,
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
    # Also of one that is not open: its end may not be stored yet, if this is a repetition.
    await (ended or service.store.write(database.end_tickets, [message.ticket]))
    return {"status": "not open" if ended is None else "released"}


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
        for env, n in Counter(environments_of(body, packed)).items():
            environment = service.environments.see(env) or service.environments.see(entry.env if entry else None)
            service.count(f"refused/{error.reason}", n, environment)
        service.save()
        if ticket is not None:
            service.release(ticket, error.reason)
        raise RequestRefused(422, str(error), reason=error.reason) from error


async def post(
    service: Service, groups: Sequence[Parsed], ticket: int | None, key: str | None, digest: str | None
) -> int | None:
    """Store groups, in the ticket's place, or in the order of arrival if it has none or has ended.

    Returns what ``database.append`` does.

    Raises:
        RequestRefused: 409, another post with the key is of other groups.
    """
    if not groups:
        return None
    if key is not None and (earlier := service.posts.get(key)) is not None:
        if earlier != len(groups):
            raise RequestRefused(409, f"key={key}: a post of {earlier} groups had this key; give each post its own")
        if key in service.posting:
            await asyncio.shield(service.posting[key])
        return None
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
    indexing = _index(service, groups, [row for row, _ in rows], ticket, key, stored)
    return await asyncio.shield(asyncio.ensure_future(indexing))


async def _index(
    service: Service,
    groups: Sequence[Parsed],
    rows: Sequence[database.Group],
    ticket: int | None,
    key: str | None,
    stored: "asyncio.Future[int | None]",
) -> int | None:
    try:
        row = await stored
    except BaseException:
        if key is not None:
            service.posts.pop(key, None)
        raise
    finally:
        if key is not None:
            service.posting.pop(key, None)
    if ticket is not None:
        service.queue.release(ticket)
    for group, indexed in zip(groups, rows, strict=True):
        service.queue.add(service.entry(indexed))
        if service.queue.is_aside(group.sequences):
            service.note_aside({group.sequences: 1})
        service.latest = indexed.id
        environment = service.environments.see(group.env_id)
        service.count("received", 1, environment)
        for name in group.odd:
            service.count(f"odd/{name}", 1, environment)
    service.changed()
    return row


async def hold(service: Service, gone: Any) -> None:
    """Wait while the queue is full, at most ``hold_seconds``, or until the client is gone."""
    deadline = time.monotonic() + service.settings.hold_seconds
    while service.full() and not gone():
        if (remaining := deadline - time.monotonic()) <= 0:
            return
        await service.wait_for_change(remaining)
