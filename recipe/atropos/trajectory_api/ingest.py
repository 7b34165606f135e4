"""What environments ask of a Trajectory API: registrations, tickets, and groups.

Guarantees:

- A group is answered 200 once it is stored; a refused one is counted by its reason and changes nothing else.
- A post with an idempotency key is stored once, however often it is sent, and so is a registration.
- A queue beyond its limit, from which a complete batch can be taken, delays the answers to posts, after storing them;
  it refuses none.
- A ticket is closed by one post; a second one's groups are without a ticket.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.scored_group import ScoredGroup
from recipe.atropos.trajectory_api import database, wire
from recipe.atropos.trajectory_api.batching import BatchRequest, Entry
from recipe.atropos.trajectory_api.endpoints import (
    SOMEBODY,
    Caller,
    EnvRegistration,
    Int,
    RequestRefused,
    Seconds,
    endpoint,
)
from recipe.atropos.trajectory_api.environments import RegisteredEnvironment, one_line
from recipe.atropos.trajectory_api.parsing import environments_of, parse_json, parse_packed
from recipe.atropos.trajectory_api.service import AHEAD, TrajectoryService

_LONGEST_WAIT = 30.0  # s, of a long poll; an environment that is not seen for longer counts as gone
_RETRY_AFTER = 0.2  # s


# ---------------------------------------------------------------------- registrations


@endpoint("POST", "/register-env")
async def register_env(
    service: TrajectoryService, message: EnvRegistration, caller: Caller = SOMEBODY
) -> dict[str, Any]:
    """Register an environment, once there is a trainer; with one key, once however often it is sent."""
    trainer = service.trainer
    if trainer is None:
        return {"status": "wait for trainer to start"}
    environment = next((one for one in service.environments if caller.key is not None and one.key == caller.key), None)
    if environment is None:
        environment = service.environments.add(message, caller.key)
        service.environments.apply_shares(service.queue)
    service.environments.touch(environment.id)
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


@endpoint("POST", "/disconnect-env")
async def disconnect_env(service: TrajectoryService, env_id: Int, reason: str = "") -> dict[str, Any]:
    """Note that an environment has left, with the ``reason`` if something is wrong; its tickets are released."""
    environment = service.environments.by_id.get(env_id)
    if environment is None:
        return {"status": "failure", "error": f"env_id={env_id}: no environment has registered under it"}
    environment.connected = False
    environment.left_because = one_line(reason) or environment.left_because
    service.release_dead()
    await _save(service, environment)
    service.changed()
    return {"status": "success"}


async def _save(service: TrajectoryService, environment: RegisteredEnvironment) -> None:
    values = {
        "registration": msgspec.to_builtins(environment.registration),
        "name": environment.name,
        "connected": environment.connected,
        "key": environment.key,
    }
    await service.store.write(database.write_environment, environment.id, values)


# ---------------------------------------------------------------------- tickets


@endpoint("POST", "/begin")
async def begin(
    service: TrajectoryService,
    env_id: Int,
    sequences: Int | None = None,
    held: list[Int] | None = None,
    more: bool = False,
    ahead: Int | None = None,
    wait: Seconds = 0.0,
    caller: Caller = SOMEBODY,
) -> dict[str, Any]:
    """Issue a ticket as soon as the staleness bound and the queue allow it, within ``wait`` seconds.

    ``held``: all tickets that the environment knows of; others of it are released. ``more``: another request follows at
    once, so that nobody else takes its turn meanwhile. ``ahead``: how many batches, from the next one on, may hold its
    group where there is no staleness bound.
    """
    environment = service.environments.get(env_id)
    environment.connected = True
    size = environment.registration.group_size if sequences is None else sequences
    if size < 1 or (service.queue.batch_size and size > service.queue.batch_size):
        raise RequestRefused(422, f"sequences={size}: give 1 to {service.queue.batch_size}, the batch size")
    known = {entry.number for entry in service.queue.tickets.values() if entry.env == env_id}
    service.release("ticket_lost", *(() if held is None else known.difference(held)))
    issued: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()
    queue = service.queue  # a reset makes another
    ask = BatchRequest(env_id, size, more, max(1, ahead or AHEAD), caller.gone, issued.set_result)
    service.environments.touch(env_id)
    queue.ask(ask)
    service.advance()
    try:
        if not issued.done():
            if service.queue.plan().entries:  # this asks for more than the room of a batch
                service.changed()
            await asyncio.wait([issued], timeout=min(max(wait, 0.0), _LONGEST_WAIT))
        if not issued.done():
            return {"ticket": None, "retry_after": _RETRY_AFTER, "reason": service.why_no_ticket(env_id)}
    finally:
        service.environments.touch(env_id)
        queue.withdraw(ask)
    ticket, stored = issued.result()
    await stored
    return {"ticket": ticket}


@endpoint("POST", "/release")
async def release(service: TrajectoryService, ticket: Int, reason: str = "unknown", detail: str = "") -> dict[str, Any]:
    """End a ticket without a group, for a reason that is counted; ``detail``: why its item failed, or was not sent."""
    entry = service.queue.tickets.get(ticket)
    if entry is not None:
        environment = service.environments.touch(entry.env)
        if environment is not None and detail:
            environment.failed, environment.failure = environment.failed + 1, one_line(detail)
    name = "".join(letter if letter.isalnum() else "_" for letter in reason[:64]) or "unknown"  # of a metric
    ended = service.release(name, ticket)
    # Also of one that is not open: its end may not be stored yet, if this is a repetition.
    await (ended or service.store.write(database.end_tickets, [ticket]))
    return {"status": "not open" if ended is None else "released"}


# ---------------------------------------------------------------------- groups


@endpoint("POST", "/scored_data")
@endpoint("POST", "/scored_data_list")
async def scored_data(service: TrajectoryService, body: bytes, caller: Caller) -> dict[str, Any]:
    """Store groups; the answer is delayed while the queue is full."""
    several, packed = caller.path == "/scored_data_list", caller.request.content_type == wire.PACKED
    groups = parse(service, body, packed, several, caller.ticket)
    await post(service, groups, caller.ticket, caller.key)
    answer = {"status": "received", **({"groups_processed": len(groups)} if several else {})}
    del body, groups  # which are stored, so that a post that is held keeps neither in memory
    if caller.ticket is None:
        await hold(service, caller.gone)
    return answer


def parse(
    service: TrajectoryService, body: bytes, packed: bool, several: bool, ticket: int | None
) -> list[ScoredGroup]:
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
        for group in groups:
            _check_size(service, group)
        return groups
    except RefusedGroup as error:
        entry = service.queue.tickets.get(ticket)
        for env, n in Counter(environments_of(body, packed)).items():
            environment = service.environments.touch(env) or service.environments.touch(entry.env if entry else None)
            service.count(f"refused/{error.reason}", n, environment)
        if ticket is not None:
            service.release(error.reason, ticket)
        raise RequestRefused(422, str(error), reason=error.reason) from error


def _check_size(service: TrajectoryService, group: ScoredGroup) -> None:
    batch_size, sequences = service.queue.batch_size, group.trajectories
    if service.queue.exact and len(group.lengths) > sequences:
        raise RefusedGroup(
            Reason.DOES_NOT_FILL_BATCH,
            f"{len(group.lengths)} sequences are rows of {sequences} trajectories: a trainer that does not ask for "
            "batches by number takes every sequence for a trajectory; post one row of each",
        )
    if service.queue.takes(sequences):
        return
    if sequences > batch_size:
        raise RefusedGroup(
            Reason.LARGER_THAN_BATCH, f"a group of {sequences} sequences: the trainer's batch has {batch_size}"
        )
    raise RefusedGroup(
        Reason.DOES_NOT_FILL_BATCH,
        f"a group of {sequences} sequences: a trainer that does not ask for batches by number takes exactly "
        f"{batch_size} sequences, which groups of this size never fill; let the group size divide it",
    )


async def post(service: TrajectoryService, groups: Sequence[ScoredGroup], ticket: int | None, key: str | None) -> None:
    """Store groups, in the ticket's place, or in the order of arrival if it has none or has ended.

    Raises:
        RequestRefused: 409, another post with the key is of other groups.
    """
    if not groups:
        return
    digests = {} if key is None else {key: _digest(groups)}
    if key is not None and (earlier := service.posts.get(key)) is not None:
        if earlier not in (digests[key], len(groups)):  # a store of an earlier version has their number
            raise RequestRefused(409, f"key={key}: a post of other groups had this key; give each post its own")
        await service.store.write(database.end_tickets, [])  # after the earlier one, which may not be stored yet
        return
    begun = service.queue.claim(ticket)
    if (timed := begun or service.queue.hung.pop(ticket, None)) is not None:
        service.queue.environments[timed.env].seconds.append(time.monotonic() - timed.begun)
    number, due = (service.take_number(), 0) if begun is None else (begun.number, begun.due)
    entries = [
        Entry(number, group.env_id, group.trajectories, len(group.tokens), id, due)
        for id, group in enumerate(groups, service.next_id)
    ]
    service.next_id += len(groups)
    stored = service.store.write(database.append, entries, [group.record for group in groups], digests, ticket)
    service.posts.update(digests)
    indexed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def index(stored: "asyncio.Future[None]") -> None:
        """Called as soon as they are stored, also if the client has left, in the order of the writes."""
        try:
            stored.result()
            _index(service, groups, entries, begun, digests)
        except Exception as error:  # is the poster's
            indexed.set_exception(error)
        else:
            indexed.set_result(None)

    stored.add_done_callback(index)
    await asyncio.shield(indexed)


def _digest(groups: Sequence[ScoredGroup]) -> int:
    """Return a digest of what a post trains on; advantages may be others, where credit is given anew."""
    digest = xxhash.xxh3_64()
    for group in groups:
        for values in (group.lengths, group.tokens, group.masks, group.scores):
            digest.update(np.ascontiguousarray(values))
    return digest.intdigest() >> 1  # SQLite has signed integers


def _index(
    service: TrajectoryService,
    groups: Sequence[ScoredGroup],
    entries: Sequence[Entry],
    begun: Entry | None,
    digests: Mapping[str, int],
) -> None:
    """Let the index follow the store, in the order of the writes: a reset is one."""
    for entry in entries:
        service.known(entry)
        if begun is None:
            service.queue.add(entry)
    if begun is not None:
        service.queue.close(begun, entries)
        if sum(entry.size for entry in entries) > begun.size:
            service.count("larger_than_ticket")
    service.posts.update(digests)  # also after a reset meanwhile
    if service.trainer is not None and not all(service.queue.takes(entry.size) for entry in entries):
        service.set_batch_size(service.trainer)  # a trainer with smaller batches registered meanwhile
    service.latest = entries[-1].id
    for group in groups:
        environment = service.environments.touch(group.env_id)
        service.count("received", 1, environment)
        if environment is not None:
            environment.failed = 0
        for name in group.irregular:
            service.count(f"irregular_fields/{name}", 1, environment)
    service.changed()


async def hold(service: TrajectoryService, gone: Any) -> None:
    """Wait while the queue is full, at most ``hold_seconds``, or until the client is gone."""
    deadline = time.monotonic() + service.settings.hold_seconds
    while not service.room.is_set() and not gone() and (remaining := deadline - time.monotonic()) > 0:
        await service.wait_for_change(remaining, service.room)
