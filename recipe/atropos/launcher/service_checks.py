"""Whether the services that a configuration names answer, and are what it needs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.client import InferenceError, SGLangClient

logger = logging.getLogger(__name__)


def check_services(config: DictConfig, timeout: float = 30.0) -> None:
    """Whether the Trajectory API, every SGLang server and a gateway answer, asked for at most ``timeout`` seconds.

    A replay needs neither.

    Raises:
        ConfigurationError: naming the service and its URL.
    """
    if config.trainer.atropos.replay:
        return
    if not config.inference.urls:
        raise ConfigurationError(
            "inference.urls is empty: give the URLs of the SGLang servers, inference.urls=[http://HOST:PORT], "
            "or start everything with python -m recipe.atropos.launch_services"
        )
    asyncio.run(_check_services(config, timeout))


async def _check_services(config: DictConfig, timeout: float) -> None:
    async def trajectory_api() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            async with session.get(config.trainer.atropos.api_url.rstrip("/") + "/status") as reply:
                reply.raise_for_status()

    wanted = config.trainer.atropos.weight_sync.pause_mode

    async def server(url: str) -> None:
        async with SGLangClient(url, config.inference.api_key, timeout=5) as client:
            await client.weight_version()
            capabilities = await client.capabilities()
        try:
            mode = capabilities.safe_pause_mode(wanted)
        except ValueError as error:
            raise ConfigurationError(
                f"trainer.atropos.weight_sync.pause_mode={wanted} does not work with inference.urls={url}: {error}"
            ) from error
        if wanted == "auto" and mode == "abort":
            logger.warning(
                "%s runs SGLang %s, which cannot flush its cache with retracted requests: each push ends the requests "
                "that run (finish_reason abort), and environments lose these groups",
                url,
                capabilities.version,
            )

    async def gateway() -> None:
        headers = {"Authorization": f"Bearer {config.inference.api_key}"} if config.inference.api_key else None
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session:
            async with session.get(config.inference.gateway.rstrip("/") + "/gateway/status") as reply:
                reply.raise_for_status()

    checks = [_wait_for(trajectory_api, "trainer.atropos.api_url", config.trainer.atropos.api_url, timeout)]
    checks += [_wait_for(partial(server, url), "inference.urls", url, timeout) for url in config.inference.urls]
    if config.inference.gateway:
        checks.append(_wait_for(gateway, "inference.gateway", config.inference.gateway, timeout))
    await asyncio.gather(*checks)


async def _wait_for(check: Callable[[], Awaitable[None]], key: str, url: str, timeout: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            return await check()
        except (aiohttp.ClientError, InferenceError, OSError, TimeoutError) as error:
            refused = isinstance(error, InferenceError) and error.status in (401, 403)
            if refused or asyncio.get_running_loop().time() > deadline:
                raise ConfigurationError(
                    f"nothing usable at {key}={url} within {timeout:g} s ({error}); start it or correct {key}"
                ) from error
        await asyncio.sleep(0.5)
