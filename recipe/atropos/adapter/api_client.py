"""An environment's requests to the Trajectory API: one request each, and waits that say what for."""

import asyncio
import gzip
import logging
import time
from typing import Any

import aiohttp

from recipe.atropos.errors import AtroposError, EnvironmentFailure

logger = logging.getLogger(__name__)

_ANSWER = 60.0  # s; an API that cuts batches answers nobody for many seconds
_SAY_AGAIN = 60.0  # s
_COMPRESSED_FROM = 1024  # bytes


class ApiRefused(AtroposError, RuntimeError):
    """The API answered with an error; ``status`` is HTTP's."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class Deadline:
    """A wait of at most ``limit`` seconds, which says at its begin and each minute what for."""

    def __init__(self, limit: float):
        self.limit = limit
        self._begun = time.monotonic()
        self._said = float("-inf")

    async def pause(self, what: str, seconds: float = 1.0) -> None:
        """Sleep. Raises EnvironmentFailure, with ``what``, after ``limit`` seconds in all."""
        now = time.monotonic()
        if now - self._begun > self.limit:
            raise EnvironmentFailure(f"after {now - self._begun:.0f} s: {what}")
        if now - self._said >= _SAY_AGAIN:
            logger.warning("%s; %.0f s so far, of at most %.0f", what, now - self._begun, self.limit)
            self._said = now
        await asyncio.sleep(seconds)


async def ask(method: str, url: str, payload: Any = None) -> Any:
    """The JSON answer.

    Raises:
        ApiRefused: an answer that is an error.
        aiohttp.ClientError, TimeoutError: no answer.
    """
    timeout = aiohttp.ClientTimeout(total=_ANSWER)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, json=payload) as reply,
    ):
        if reply.status >= 400:
            raise ApiRefused(reply.status, await reply.text())
        return await reply.json()


def refuses_connections(error: Exception) -> bool:
    """Whether nobody listens there: the process that did is gone, with all that it knew."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


def compressed(body: bytes) -> tuple[bytes, dict[str, str]]:
    """A JSON body and its headers; gzip from ``_COMPRESSED_FROM`` bytes on, fast rather than small."""
    headers = {"Content-Type": "application/json"}
    if len(body) < _COMPRESSED_FROM:
        return body, headers
    return gzip.compress(body, compresslevel=1), headers | {"Content-Encoding": "gzip"}
