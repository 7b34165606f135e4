"""Groups of sessions of programs that nobody here starts: a ticket of the Trajectory API, its sessions, one post.

- ``POST /groups`` takes the ticket, so it waits while the queue is ahead of the trainer, and opens the sessions.
- A session that ends without a reward is repeated once: the answer to its end has the new one as ``again``. If that
  fails too, it is left out of the group.
- With a rule of credit its tokens have advantages, as those of an environment that the launcher starts.
- The group is posted when its last session has ended, under a key that is stored with it: once, whatever is killed.
  One without rewards, or with equal ones, releases its ticket.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import sqlite3
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from recipe.atropos.credit.group import Credit, give_credit
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.sampling import SamplingParams, default_temperature
from recipe.atropos.errors import secondary_errors
from recipe.atropos.sessions.client import scored_group
from recipe.atropos.sessions.counts import Reports
from recipe.atropos.sessions.messages import Count, RequestError
from recipe.atropos.sessions.session import Session, SessionOptions
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError

logger = logging.getLogger(__name__)

_TICKET_SECONDS = 60.0  # that a request waits for a ticket
_SESSION_SECONDS = 3600.0  # of a session, if no limit is given: else one that was forgotten would hold its group
_TRIES = 2


class GroupRequest(SessionOptions, kw_only=True):  # type: ignore[call-arg]
    """The body of ``POST /groups``; ``size`` sessions on an item. While a group of this ``key`` is open it is answered
    again, so a program whose answer was lost asks with the same one.
    """

    env: str
    size: Count
    key: str | None = None


class SessionGroup(msgspec.Struct):
    """What is stored of a group: its sessions by place, and how often each was tried. ``id`` is the key of its post."""

    id: str
    request: GroupRequest
    env_id: int
    ticket: int
    sessions: list[str]
    tries: list[int]


class Groups:
    """The open groups. ``open_session`` opens one with fields of a ``State``, ``load`` returns one by its id,
    ``forget`` frees its memory. ``credit``, if it is given, needs ``tokenizer``.
    """

    def __init__(
        self,
        store: SessionStore,
        api: TrajectoryApiClient,
        reports: Reports,
        open_session: Callable[..., Session],
        load: Callable[[str], Session],
        forget: Callable[[Session], None],
        credit: Credit | None = None,
        tokenizer: Any = None,
    ):
        self._credit = None if credit is None else partial(give_credit, credit=credit, tokenizer=tokenizer)
        self._store, self._api, self._reports = store, api, reports
        self._open_session, self._load, self._forget = open_session, load, forget
        self._groups = {group.id: group for group in map(_decode, store.groups())}
        for group in self._groups.values():
            api.hold(group.env_id, group.ticket)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by environment

    async def open(self, request: GroupRequest) -> list[Session]:
        """Take a ticket and open the sessions of a group.

        Raises:
            RequestError: an open group of another request has the key, or there is no ticket in time.
            TrajectoryApiError: the API refuses the environment.
        """
        until = time.monotonic() + _TICKET_SECONDS
        async with self._locks[request.env]:  # where others may wait for as long
            for group in self._groups.values():
                if request.key is not None and (group.request.env, group.request.key) == (request.env, request.key):
                    if group.request != request:
                        raise RequestError(f"key={request.key}: an open group of another request has it", 409)
                    return [self._load(identifier) for identifier in group.sessions]
            env_id = await self._registered(request)
            ticket = await self._api.begin(env_id, request.size, max(0.0, until - time.monotonic()))
        if ticket is None:
            status = await self._api.diagnose()
            raise RequestError(f"no ticket within {_TICKET_SECONDS:g} s: {status['why']}; ask again", 503)
        group = SessionGroup(secrets.token_hex(12), request, env_id, ticket, [], [])
        try:
            sessions = [self._begin(group, seq) for seq in range(request.size)]
            group.sessions, group.tries = [session.state.id for session in sessions], [1] * request.size
            self._save(group)
        except Exception as error:  # as on a full disk
            with secondary_errors():
                await self._api.release(ticket, Reason.NO_GROUP, str(error))
            raise
        self._groups[group.id] = group
        return sessions

    def _begin(self, group: SessionGroup, seq: int) -> Session:
        request, limits = group.request, group.request.limits
        return self._open_session(
            env=request.env,
            item=request.item,
            group=group.id,
            seq=seq,
            sampling=SamplingParams(temperature=default_temperature()).request() | request.sampling,
            limits=msgspec.structs.replace(limits, seconds=limits.seconds or _SESSION_SECONDS),
        )

    async def _registered(self, request: GroupRequest) -> int:
        """Return the number of a group's environment, which the API registers once for this store."""
        about = {"desired_name": request.env, "weight": 1.0, "group_size": request.size, "max_token_length": 0}
        place = f"{socket.gethostname()}:{self._store.path.resolve()}:{request.env}"
        answer = await self._api.register_env(about, key=uuid.uuid5(uuid.NAMESPACE_URL, place).hex)
        if answer["status"] != "success":
            raise RequestError(f"the Trajectory API says {answer['status']!r}; ask again", 503)
        return answer["env_id"]

    def ended(self, session: Session) -> Session | None:
        """Return the session that repeats one without a reward, None if none does.

        One that was repeated before, unknown to its program, has the same one again; its reward ends the repetition,
        if that is not used.
        """
        group = self._groups.get(session.state.group or "")
        if group is None:
            return None
        seq = session.state.seq
        if group.sessions[seq] != session.state.id:
            again = self._load(group.sessions[seq])
            if again.state.end is not None or any(again.exchanges.values()):
                return None
            if session.state.reward is None:
                return again
            group.sessions[seq] = session.state.id
            self._save(group)
            again.save(end="unused", finished=True, counted=True)
            self._forget(again)
            return None
        if session.state.reward is not None or group.tries[seq] >= _TRIES:
            return None
        again = self._begin(group, seq)
        group.sessions[seq], group.tries[seq] = again.state.id, group.tries[seq] + 1
        self._save(group)
        self._forget(session)
        return again

    def holds(self, session: Session) -> bool:
        """Whether a group that is not posted yet has this session."""
        group = self._groups.get(session.state.group or "")
        return group is not None and session.state.id in group.sessions

    async def poll(self) -> None:
        """Post the groups whose last session has ended.

        Raises:
            TrajectoryApiError, sqlite3.Error, OSError: they wait for the API, or for room on the disk.
        """
        trouble = None
        for group in list(self._groups.values()):
            try:
                await self._poll(group)
            except (TrajectoryApiError, sqlite3.Error, OSError) as error:
                trouble = error
            except Exception as error:  # this group alone cannot be read, or be given credit
                logger.error("group %s is given up: %s", group.id, error, exc_info=error)
                await self._close(group, Reason.NO_GROUP)
        if trouble is not None:
            raise trouble

    async def keep_tickets(self) -> None:
        """Tell the Trajectory API that the environments of open groups are alive, so they keep their tickets."""
        for env_id in {group.env_id for group in self._groups.values()}:
            try:
                await self._api.status(env_id)
            except TrajectoryApiError as error:  # the others keep theirs
                logger.error("environment %d may lose its tickets: %s", env_id, error)

    async def _poll(self, group: SessionGroup) -> None:
        sessions = [self._load(identifier) for identifier in group.sessions]
        for session in sessions:
            session.settle(self._reports)
        if all((one.state.finished or one.is_late) and self.ended(one) is None for one in sessions):
            await self._post(group, sessions)

    async def _post(self, group: SessionGroup, sessions: list[Session]) -> None:
        kept = [session for session in sessions if session.state.reward is not None and session.tree.turns]
        reason: str | None = Reason.EQUAL_SCORES if kept else Reason.NO_GROUP
        made: dict[str, Any] = {}
        if kept:
            outcomes = [(session.state.id, session.state.reward, session.rows()) for session in kept]
            made = scored_group(outcomes, group.request.env) | {"env_id": group.env_id}
        try:
            if kept and self._credit is not None:
                await self._credit(made, item=group.request.item)
            if len({session.state.reward for session in kept}) > 1 or any(map(any, made.get("advantages", ()))):
                await self._api.post_groups([made], group.ticket, group.id)
                reason = None
        except (RefusedGroup, TrajectoryApiError) as error:
            if isinstance(error, TrajectoryApiError) and error.may_change:
                raise
            logger.error("group %s was refused: %s", group.id, error)
            reason = error.reason
        await self._close(group, reason)
        self._reports.of(group.request.env).count("sessions/left_out", len(sessions) - len(kept))
        for session in sessions:
            self._forget(session)

    async def _close(self, group: SessionGroup, reason: str | None) -> None:
        """Remove a group; ``reason``: why its ticket is given back, None if it was posted."""
        if reason is not None:
            with contextlib.suppress(TrajectoryApiError):
                await self._api.release(group.ticket, reason)
        self._store.remove_group(group.id)
        del self._groups[group.id]

    def _save(self, group: SessionGroup) -> None:
        self._store.put_group(group.id, msgspec.json.encode(group))


_decode = msgspec.json.Decoder(SessionGroup).decode
