"""Client of the session server, for environments: open a session, end it, read its rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.sockets import OwnServers

SESSIONS_VARIABLE = "ATROPOS_SESSIONS_URL"  # the session server's address, which the launcher sets for environments
_RETRY_SECONDS = 0.5


class SessionError(AtroposError, RuntimeError):
    """The session server refuses a request, or does not answer; the message names it."""


class Opened(NamedTuple):
    """A session. A program needs ``base_url`` (for OpenAI's clients with /v1) and ``api_key``, which opens it alone."""

    id: str
    base_url: str
    api_key: str


def scored_group(outcomes: Sequence[tuple[str, float, dict[str, Any]]], env: str) -> dict[str, Any]:
    """Return the scored group of sessions, given as (id, reward, rows); their rows are of one trajectory each.

    It has ``turn_values`` if all of them have some, but those of a single turn, which need none.
    """
    group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    overrides: dict[str, Any] = {"trajectory": [], "sessions": []}
    for number, (session, reward, rows) in enumerate(outcomes):
        size = len(rows["tokens"])
        for name, values in rows.items():
            (group if name in group else overrides).setdefault(name, []).extend(values)
        group["scores"] += [reward] * size
        overrides["trajectory"] += [number] * size
        overrides["sessions"] += [session] * size
    silent = any(rows["turn_values"][0] is None and sum(map(len, rows["turn_numbers"])) > 1 for *_, rows in outcomes)
    given = overrides.pop("turn_values")
    if any(given) and not silent:
        overrides["turn_values"] = [values or [None] for values in given]
    group["group_overrides"] = overrides | {"group_size": len(outcomes), "env_name": env}
    return group


class SessionClient:
    """Used as ``async with SessionClient(url, key) as client``; ``key`` is the environments'. A server may be away for
    ``timeout`` seconds, as while it is started again.
    """

    def __init__(self, url: str, key: str | None, timeout: float = 120.0):
        self.url, self._key, self._timeout = url.rstrip("/"), key, timeout

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(connector=OwnServers(force_close=True, limit=0), headers=headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def open(self, **fields: Any) -> Opened:
        """Open a session; ``fields``: see ``SessionRequest``. If the answer is lost, one stays unused."""
        return Opened(**await self._call("POST", "/sessions", fields))

    async def end(self, session: str, **result: Any) -> dict[str, Any]:
        """End a session, by its reward or by ``end``, the reason why it failed; return its state and what happened."""
        return await self._call("POST", f"/sessions/{session}/reward", result)

    async def rows(self, session: str) -> dict[str, Any]:
        """Return its rows to train on; see ``Session.rows``."""
        return await self._call("GET", f"/sessions/{session}/rows")

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        retrying = AsyncRetrying(
            stop=stop_after_delay(self._timeout),
            wait=wait_fixed(_RETRY_SECONDS),
            retry=retry_if_exception_type((aiohttp.ClientError, OSError)),
            reraise=True,
        )
        data = None if body is None else orjson.dumps(body)
        try:
            async for attempt in retrying:
                with attempt:
                    async with self._session.request(method, self.url + path, data=data) as reply:
                        status, answer = reply.status, await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise SessionError(f"{self.url}{path}: no answer for {self._timeout:g} s: {error!r}") from error
        if status != 200:
            raise SessionError(f"{self.url}{path}: HTTP {status}: {answer[:500].decode(errors='replace')}")
        return orjson.loads(answer)
