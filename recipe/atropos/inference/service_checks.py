"""Check that the services named in a configuration answer and meet its requirements."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from omegaconf import DictConfig
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_fixed

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.sources.numbered import DataSourceConfig
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError

logger = logging.getLogger(__name__)

_SILENT = (TrajectoryApiError, InferenceError)


def check_services(config: DictConfig, timeout: float = 30.0) -> None:
    """Check that the Trajectory API, every SGLang server and the gateway answer, retrying for ``timeout`` seconds.

    A replay needs none of them and skips the checks.

    Raises:
        ConfigurationError, GatewayError: naming the service and its URL.
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
    api = DataSourceConfig.from_config(config)

    async def trajectory_api() -> None:
        async with TrajectoryApiClient(api.api_url, api.secret, retry_timeout=0, timeout=5) as client:
            await client.status()

    wanted = config.trainer.atropos.weight_sync.pause_mode

    async def server(url: str) -> None:
        async with SGLangClient(url, config.inference.api_key, timeout=5, own=True) as client:
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

    checks = [_wait_for(trajectory_api, "trainer.atropos.api_url", config.trainer.atropos.api_url, timeout)]
    checks += [_wait_for(partial(server, url), "inference.urls", url, timeout) for url in config.inference.urls]
    gateway = GatewayClient(config.inference.gateway, config.inference.api_key, timeout)
    await asyncio.gather(*checks, gateway.fetch_status())


async def _wait_for(check: Callable[[], Awaitable[None]], key: str, url: str, timeout: float) -> None:
    def may_come(error: BaseException) -> bool:
        return isinstance(error, _SILENT) and getattr(error, "status", None) not in (401, 403)

    retry, stop = retry_if_exception(may_come), stop_after_delay(timeout)
    try:
        await AsyncRetrying(retry=retry, stop=stop, wait=wait_fixed(0.5), reraise=True)(check)
    except _SILENT as error:
        raise ConfigurationError(
            f"nothing usable at {key}={url} within {timeout:g} s ({error}); start it or correct {key}"
        ) from error
