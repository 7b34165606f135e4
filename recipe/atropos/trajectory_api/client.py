"""Client of our Trajectory API, for the trainer's data source and the environments' adapter.

Guarantees:

- A request that got no answer is sent again, until ``retry_timeout`` seconds have passed; while the API says that it
  cannot store (its disk is full), until ``held`` seconds have, and the error says so.
- Posts and registrations of environments carry an idempotency key, so that they take effect once. A trainer that
  registers again gets another epoch, which replaces its own. A ticket whose answer was lost is released by the next
  ``begin``. All other requests say what is so, and may be repeated.
- Groups travel packed; the arrays of a batch's groups share its bytes.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential

from recipe.atropos.data.scored_group import Group, ScoredGroup, unpack_all
from recipe.atropos.errors import AtroposError
from recipe.atropos.trajectory_api import wire
from recipe.atropos.utils.sockets import OwnServers

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 5.0  # s, between attempts
_READ_BUFFER = 4 << 20  # bytes; a batch has several MB
_ANSWER = 90.0  # s for one attempt; the server delays answers by at most 60
_ASK = 5.0  # s for the question why there was no answer

Answer = tuple[Mapping[str, str], bytes]  # headers and body


class TrajectoryApiError(AtroposError, RuntimeError):
    """The API refused a request, or could not be reached; ``status`` is the HTTP status, None without an answer.

    ``reason`` is that of a refused group, else ``http_STATUS`` or ``api_unreachable``; ``answer`` is what the API said.
    ``trouble`` is why it cannot store, if it gave no answer and says so.
    """

    trouble = ""

    def __init__(self, message: str, status: int | None = None, answer: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.status = status
        self.answer = dict(answer or {})
        self.reason: str = self.answer.get("reason") or ("api_unreachable" if status is None else f"http_{status}")

    @property
    def may_change(self) -> bool:
        """Whether the same request may still be answered."""
        return self.status is None or self.status >= 500


class NumberedBatch(NamedTuple):
    """A batch, numbered from 1."""

    number: int
    groups: Sequence[Group]


class TrajectoryApiClient:
    """Use as an asynchronous context manager. ``secret`` is sent as a bearer token. Times are in seconds.

    ``timeout`` is for one attempt, beyond the wait that the request asks for. Attempts are ``first_pause`` apart, which
    doubles up to ``LONGEST_PAUSE``. ``held`` is at least ``retry_timeout``.
    """

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        retry_timeout: float = 300.0,
        timeout: float = _ANSWER,
        held: float = 0.0,
        first_pause: float = 0.1,
    ):
        self.url = url.rstrip("/")
        self.keyed_url = f"{self.url}/{secret}" if secret else self.url  # for requests without the header
        self.retry_timeout = retry_timeout
        self.epoch: int | None = None
        self.again = 0  # requests that were sent again
        self.lacking = ""  # why the latest ``begin`` got no ticket
        self._timeout, self._held_timeout, self._first_pause = timeout, held, first_pause
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._begins: dict[int, asyncio.Lock] = {}  # by environment
        self._held: dict[int, set[int]] = {}  # open tickets, by environment

    async def __aenter__(self) -> "TrajectoryApiClient":
        # No compression: it costs more time than it saves on the loopback or a cluster's network.
        headers = {"Accept-Encoding": "identity", **self._headers}
        connector = OwnServers() if self._headers else None
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=_READ_BUFFER)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    # ------------------------------------------------------------------ trainers

    async def register(
        self, registration: Mapping[str, Any], after: int, max_staleness: int | None = None
    ) -> dict[str, Any]:
        """Register a trainer whose weights contain the batches through ``after``; return ``uuid``, ``epoch``, ``last``.

        ``registration`` has the fields of ``POST /register``. The former trainer is refused from now on. A trainer that
        registers with another batch size gets the later batches in that size.

        Raises:
            TrajectoryApiError: with status 410, batches after ``after`` were deleted; ``answer["oldest"]`` is the
                oldest available.
        """
        self.epoch = None
        answer = await self.call("POST", "/register", {**registration, "after": after, "max_staleness": max_staleness})
        self.epoch = answer["epoch"]
        return answer

    async def batch(self, after: int, wait: float = 30.0, prefetch: bool = False) -> NumberedBatch | None:
        """Return batch ``after`` + 1, or None if there is none within ``wait`` seconds.

        ``prefetch``: the trainer has a batch to train on meanwhile, so it does not wait for this one.

        Raises:
            TrajectoryApiError: with status 409, another trainer has registered; 410, the batch was deleted.
        """
        query = {"after": str(after), "wait": f"{wait:g}", "prefetch": str(int(prefetch))}
        headers, body = await self._request(
            "GET", "/batch", {"Accept": wire.PACKED}, query=query, limit=wait + self._timeout
        )
        if headers.get("Content-Type") != wire.PACKED:
            return None
        return NumberedBatch(int(headers[wire.BATCH_HEADER]), unpack_all(body))

    # ------------------------------------------------------------------ environments

    async def register_env(self, registration: Mapping[str, Any], key: str | None = None) -> dict[str, Any]:
        """Register an environment by the fields of ``POST /register-env``; ``status`` of the answer may say to wait.
        With the same ``key`` it is the same environment; without one it is another at each call.
        """
        return await self.call("POST", "/register-env", registration, key=key or uuid.uuid4().hex)

    async def disconnect_env(self, env_id: int, reason: str = "") -> None:
        """Leave; ``reason``: why, if something is wrong, for ``/diagnose``."""
        await self.call("POST", "/disconnect-env", {"env_id": env_id, "reason": reason})

    async def begin(
        self,
        env_id: int,
        sequences: int | None = None,
        wait: float = 0.0,
        more: bool = False,
        ahead: int | None = None,
    ) -> int | None:
        """Return a ticket for a group of ``sequences``, None if none may begin within ``wait`` seconds.

        ``more``: another call follows at once. ``ahead``: how many batches may be queued or begun where there is no
        staleness bound; None: 3.

        Close it by ``post_groups`` or ``release``. Tickets of an environment come from one client, one at a time.
        """
        async with self._begins.setdefault(env_id, asyncio.Lock()):
            held = self._held.setdefault(env_id, set())
            message = {
                "env_id": env_id,
                "sequences": sequences,
                "held": sorted(held),
                "wait": wait,
                "more": more,
                "ahead": ahead,
            }
            answer = await self.call("POST", "/begin", message, limit=wait + self._timeout)
            self.lacking = answer.get("reason", "")
            if answer["ticket"] is not None:
                held.add(answer["ticket"])
            return answer["ticket"]

    async def post_groups(
        self, groups: Sequence[Mapping[str, Any]], ticket: int | None = None, key: str | None = None
    ) -> None:
        """Post groups, which close ``ticket``; they are stored once, however often this is tried with one ``key``.

        Raises:
            RefusedGroup: a group is not what ``ScoredGroup.from_mapping`` takes. The ticket is still open.
            TrajectoryApiError: with status 422 and ``reason``, the API refused a group, and released the ticket.
        """
        body = b"".join(ScoredGroup.from_mapping(group).pack() for group in groups)
        headers = {"Content-Type": wire.PACKED, wire.KEY_HEADER: key or uuid.uuid4().hex}
        if ticket is not None:
            headers[wire.TICKET_HEADER] = str(ticket)
        try:
            await self._request("POST", "/scored_data_list", headers, body)
        except TrajectoryApiError as error:
            if error.status == 422:
                self._forget(ticket)
            raise
        self._forget(ticket)

    def hold(self, env_id: int, ticket: int) -> None:
        """Know a ticket that an earlier client of the environment took: ``begin`` releases all others of it."""
        self._held.setdefault(env_id, set()).add(ticket)

    async def release(self, ticket: int, reason: str, detail: str = "") -> None:
        """End a ticket without a group; the reason is counted, and ``/diagnose`` shows the last ``detail``."""
        await self.call("POST", "/release", {"ticket": ticket, "reason": reason, "detail": detail})
        self._forget(ticket)

    def _forget(self, ticket: int | None) -> None:
        for held in self._held.values():
            held.discard(ticket)

    # ------------------------------------------------------------------ both

    async def status(self, env_id: int | None = None) -> dict[str, Any]:
        """Return ``/status``, or an environment's ``/status-env``."""
        if env_id is None:
            return await self.call("GET", "/status")
        return await self.call("GET", "/status-env", {"env_id": env_id})

    async def diagnose(self) -> dict[str, Any]:
        """Return ``/diagnose``; its ``why`` says in a sentence what a batch lacks."""
        return await self.call("GET", "/diagnose")

    async def call(
        self, method: str, path: str, message: Any = None, limit: float | None = None, key: str | None = None
    ) -> Any:
        """Send a message as JSON to any endpoint (see ``endpoints``), and return the answer; ``limit`` as ``timeout``.

        ``POST /commit`` tells that a durable checkpoint has the batches through ``through``: no earlier one is asked
        for again. ``POST /weights``: that the servers' weights contain them, which tickets follow. ``POST /empty``:
        nothing of the batch ``number`` can be trained on: there is no update, so tickets may go one batch further.

        Raises:
            TrajectoryApiError: the answer is an error, or there is none in time.
        """
        body = None if message is None else orjson.dumps(message)
        headers = {"Content-Type": "application/json"} | ({} if key is None else {wire.KEY_HEADER: key})
        _, answer = await self._request(method, path, headers, body, limit=limit)
        return orjson.loads(answer)

    async def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        limit: float | None = None,
    ) -> Answer:
        """Send a request until it is answered; return headers and body.

        Raises:
            TrajectoryApiError: the answer is an error, or there is none within ``retry_timeout``, or ``held``.
        """
        if self.epoch is not None:
            headers = {**headers, wire.EPOCH_HEADER: str(self.epoch)}
        what, timeout = f"{method} {self.url}{path}", aiohttp.ClientTimeout(limit or self._timeout)

        async def attempt() -> Answer:
            try:
                async with self._session.request(
                    method, self.url + path, data=body, params=query, headers=headers, timeout=timeout
                ) as reply:
                    content = await reply.read()
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
                failure = TrajectoryApiError(f"{what} got no answer ({error!r})")
                failure.trouble = await self._trouble() if isinstance(error, TimeoutError) else ""
                raise failure from error
            if reply.status < 400:
                return reply.headers, content
            answer = _mapping(content)
            detail = answer.get("detail") or content[:300].decode(errors="replace")
            raise TrajectoryApiError(f"{what} answered HTTP {reply.status}: {detail}", reply.status, answer)

        return await self._until_answered(attempt)

    async def _until_answered(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Try again for ``retry_timeout`` s without an answer, or ``held`` s, if that is longer, while the API cannot
        store.
        """
        lived = 0.0  # s after the start, when it last said that it cannot

        def limit(error: TrajectoryApiError) -> float:
            return max(self.retry_timeout, self._held_timeout) if error.trouble else self.retry_timeout

        def is_over(state: RetryCallState) -> bool:
            nonlocal lived
            error, elapsed = state.outcome.exception(), state.seconds_since_start
            if error.trouble:
                lived = elapsed
            return elapsed - (0.0 if error.trouble else lived) >= limit(error)

        def say(state: RetryCallState) -> None:
            error = state.outcome.exception()
            logger.warning("%s; trying again", error.trouble or error)
            self.again += 1

        attempts = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, TrajectoryApiError) and error.may_change),
            wait=wait_exponential(self._first_pause, max=LONGEST_PAUSE),
            stop=is_over,
            before_sleep=say,
            reraise=True,
        )
        try:
            return await attempts(attempt)
        except TrajectoryApiError as error:
            if not error.may_change:
                raise
            silent = "is the Trajectory API up?" if error.status is None else "see its log"
            why = f"it cannot store: {error.trouble}" if error.trouble else silent
            raise TrajectoryApiError(f"{error}, for {limit(error):g} s; {why}") from error.__cause__

    async def _trouble(self) -> str:
        """Return why the API holds its answers, "" if it does not or is silent."""
        try:
            timeout = aiohttp.ClientTimeout(min(_ASK, self._timeout))
            async with self._session.get(f"{self.url}/diagnose", timeout=timeout) as reply:
                return str(_mapping(await reply.read()).get("warnings", {}).get("store", ""))
        except (aiohttp.ClientError, OSError):
            return ""


def _mapping(content: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
