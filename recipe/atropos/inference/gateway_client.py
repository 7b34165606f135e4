"""How the gateway (``inference/gateway.py``) is started, told which servers hold which version, and asked."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from recipe.atropos.errors import AtroposError

GATEWAY_PORT = 9001  # where it is free: the address that Atropos' environments have by default
_RETRY_SECONDS = 0.5
_REQUEST_SECONDS = 10.0
_FAILURES = (aiohttp.ClientError, OSError)


class GatewayError(AtroposError, RuntimeError):
    """The gateway does not answer, or refuses what it is told; the message names it."""


def gateway_command(url: str, host: str, servers: Sequence[str], max_wait: float) -> list[str]:
    """Of the gateway at ``url``, listening on ``host``; ``max_wait``: seconds that a request may wait for a server."""
    options = {"host": host, "port": urlsplit(url).port, "servers": ",".join(servers), "max-wait": max_wait}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "recipe.atropos.inference.gateway", *flags]


@dataclass(frozen=True)
class GatewayClient:
    """``timeout``: seconds to wait for a gateway that is being started, or started again."""

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
        asyncio.run(self._call("PUT", "/gateway/weights", orjson.dumps(word)))

    async def fetch_status(self) -> dict[str, Any]:
        """``version`` (None: nobody has told it any), ``adapter``, ``servers`` (``url``, ``state``, counts), ``held``.

        Raises:
            GatewayError: it does not answer within ``timeout`` seconds.
        """
        return await self._call("GET", "/gateway/status")

    def status(self) -> dict[str, Any]:
        """``fetch_status``, where no event loop runs."""
        return asyncio.run(self.fetch_status())

    def serves(self) -> tuple[int | None, set[str]]:
        """The active version, and the URLs of the servers that get requests."""
        status = self.status()
        return status["version"], _admitted(status)

    def knows(self, version: int, servers: Sequence[str], adapter: str | None) -> bool:
        """Whether this is what it was told last."""
        status = self.status()
        return (status["version"], _admitted(status), status["adapter"]) == (version, set(servers), adapter)

    async def _call(self, method: str, path: str, body: bytes | None = None) -> Any:
        url = self.url.rstrip("/") + path
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)

        async def call() -> Any:
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                async with session.request(method, url, data=body) as reply:
                    raw = await reply.read()
                    if reply.status != 200:
                        raise GatewayError(f"{method} {url} answered HTTP {reply.status}: {raw[:500].decode()}")
                    return orjson.loads(raw)

        stop, lost = stop_after_delay(self.timeout), retry_if_exception_type(_FAILURES)
        try:
            return await AsyncRetrying(stop=stop, wait=wait_fixed(_RETRY_SECONDS), retry=lost, reraise=True)(call)
        except _FAILURES as error:
            raise GatewayError(
                f"no gateway answers at inference.gateway={self.url} within {self.timeout:g} s ({error!r}); see its log"
            ) from error


def _admitted(status: dict[str, Any]) -> set[str]:
    return {server["url"] for server in status["servers"] if server["state"] == "admitted"}
