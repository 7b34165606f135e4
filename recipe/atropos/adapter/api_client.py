"""An environment's client for the Trajectory API: single requests, and bounded waits that log what they wait for."""

import asyncio
import gzip
import logging
import time
from typing import Any

import aiohttp

from recipe.atropos.errors import AtroposError, EnvironmentFailure

logger = logging.getLogger(__name__)

_ANSWER = 60.0  # s; while the API assembles batches, it answers no request for many seconds
_SAY_AGAIN = 60.0  # s
_COMPRESSED_FROM = 1024  # bytes


class ApiRefused(AtroposError, RuntimeError):
    """The API answered with an error; ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class Deadline:
    """A wait of at most ``limit`` seconds, which logs when it starts and then every minute what it waits for."""

    def __init__(self, limit: float):
        self.limit = limit
        self._begun = time.monotonic()
        self._logged = float("-inf")

    async def pause(self, what: str, seconds: float = 1.0) -> None:
        """Sleep. Raise EnvironmentFailure, with ``what``, once ``limit`` seconds have passed in total."""
        now = time.monotonic()
        if now - self._begun > self.limit:
            raise EnvironmentFailure(f"after {now - self._begun:.0f} s: {what}")
        if now - self._logged >= _SAY_AGAIN:
            logger.warning("%s; %.0f s so far, of at most %.0f", what, now - self._begun, self.limit)
            self._logged = now
        await asyncio.sleep(seconds)


async def ask(method: str, url: str, payload: Any = None) -> Any:
    """Send one request and return the JSON response.

    Raises:
        ApiRefused: the API answered with an error status.
        aiohttp.ClientError, TimeoutError: there was no answer.
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
    """Return whether nothing listens at the address: the API's process is gone, and its state with it."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


def compressed(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a JSON body and its headers; from ``_COMPRESSED_FROM`` bytes on gzipped, for speed rather than size."""
    headers = {"Content-Type": "application/json"}
    if len(body) < _COMPRESSED_FROM:
        return body, headers
    return gzip.compress(body, compresslevel=1), headers | {"Content-Encoding": "gzip"}
