"""Command line and client of the gateway (``inference/gateway.py``), for announcements and its status."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, JsonClient

GATEWAY_PORT = 9001  # used if free: the default port in Atropos' environments
_REQUEST_SECONDS = 10.0


class GatewayError(AtroposError, RuntimeError):
    """The gateway does not answer, or refuses a request; the message names it."""


def gateway_command(url: str, host: str, servers: Sequence[str], max_wait: float) -> list[str]:
    """Return the command for a gateway at ``url`` that listens on ``host``; ``max_wait``: seconds to hold a request."""
    options = {"host": host, "port": urlsplit(url).port, "servers": ",".join(servers), "max-wait": max_wait}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "recipe.atropos.inference.gateway", *flags]


@dataclass(frozen=True)
class GatewayClient:
    """Client of the gateway; ``timeout``: seconds to wait for a gateway that is starting or restarting."""

    url: str
    api_key: str | None = None
    timeout: float = 60.0

    def announce(self, version: int, servers: Sequence[str], pushing: bool = False, adapter: str | None = None) -> None:
        """Announce that exactly ``servers`` hold ``version`` or, if ``pushing``, that a push of it to them begins.

        ``adapter``: its name on the servers, if the version is an adapter beside their own weights.

        Raises:
            GatewayError: it does not answer within ``timeout`` seconds, or does not know one of the servers.
        """
        state = {"version": version, "servers": list(servers), "pushing": pushing, "adapter": adapter}
        asyncio.run(self._call("PUT", "/gateway/weights", state))

    async def fetch_status(self) -> dict[str, Any]:
        """Return ``version`` (None: none announced), ``adapter``, ``servers`` (``url``, ``state``, counts), ``held``.

        Raises:
            GatewayError: it does not answer within ``timeout`` seconds.
        """
        return await self._call("GET", "/gateway/status")

    def status(self) -> dict[str, Any]:
        """``fetch_status``, where no event loop runs."""
        return asyncio.run(self.fetch_status())

    def serves(self) -> tuple[int | None, set[str], str | None]:
        """Return the active version, the URLs of the admitted servers, and the adapter's name on them."""
        status = self.status()
        admitted = {server["url"] for server in status["servers"] if server["state"] == "admitted"}
        return status["version"], admitted, status["adapter"]

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            client = JsonClient(self.url, self.api_key, _REQUEST_SECONDS)
            return await client.call_until_answered(self.timeout, method, path, body)
        except InferenceError as error:
            if error.status is not None:
                raise GatewayError(str(error)) from error
            raise GatewayError(
                f"no gateway answers at inference.gateway={self.url} within {self.timeout:g} s ({error.message}); see "
                "its log"
            ) from error
