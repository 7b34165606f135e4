"""The trainer's word to the gateway (``inference/gateway.py``): which servers hold which version."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from recipe.atropos.errors import AtroposError

_RETRY_SECONDS = 0.5
_REQUEST_SECONDS = 10.0


class GatewayError(AtroposError, RuntimeError):
    """The gateway does not answer, or refuses what it is told; the message names it."""


@dataclass(frozen=True)
class GatewayClient:
    """``timeout``: seconds to wait for a gateway that is being started again."""

    url: str
    api_key: str | None = None
    timeout: float = 60.0

    def announce(self, version: int, servers: Sequence[str], pushing: bool = False, adapter: str | None = None) -> None:
        """Say that ``servers`` hold ``version``, and no others; or, ``pushing``, that a push of it to them begins.

        ``adapter``: its name on the servers, where the version is an adapter beside their own weights.

        Raises:
            GatewayError: it does not answer within ``timeout`` seconds, or knows one of the servers not.
        """
        word = {"version": version, "servers": list(servers), "pushing": pushing, "adapter": adapter}
        self._call("PUT", "/gateway/weights", word)

    def status(self) -> dict[str, Any]:
        """``version`` (None: nobody has told it any), ``adapter``, ``servers`` (``url``, ``state``, counts), ``held``.

        Raises:
            GatewayError: it does not answer within ``timeout`` seconds.
        """
        return self._call("GET", "/gateway/status")

    def serves(self) -> tuple[int | None, set[str]]:
        """The active version, and the URLs of the servers that get requests."""
        status = self.status()
        return status["version"], _admitted(status)

    def knows(self, version: int, servers: Sequence[str], adapter: str | None) -> bool:
        """Whether this is what it was told last."""
        status = self.status()
        return (status["version"], _admitted(status), status["adapter"]) == (version, set(servers), adapter)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return asyncio.run(self._answer(method, path, body))

    async def _answer(self, method: str, path: str, body: Any) -> Any:
        url, deadline = self.url.rstrip("/") + path, time.monotonic() + self.timeout
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                try:
                    data = None if body is None else orjson.dumps(body)
                    async with session.request(method, url, data=data) as reply:
                        raw = await reply.read()
                        if reply.status == 200:
                            return orjson.loads(raw)
                        raise GatewayError(f"{method} {url} answered HTTP {reply.status}: {raw[:500].decode()}")
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if time.monotonic() > deadline:
                        raise GatewayError(
                            f"no gateway answers at inference.gateway={self.url} within {self.timeout:g} s "
                            f"({error!r}); see its log"
                        ) from error
                await asyncio.sleep(_RETRY_SECONDS)


def _admitted(status: dict[str, Any]) -> set[str]:
    return {server["url"] for server in status["servers"] if server["state"] == "admitted"}
