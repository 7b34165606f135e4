"""The gateway of a trainer that runs without the launcher, in front of existing SGLang servers."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from omegaconf import DictConfig

from recipe.atropos.inference.gateway_client import GATEWAY_PORT, gateway_command
from recipe.atropos.inference.join_commands import for_others, how_to_join
from recipe.atropos.run.folder import RunDir
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.hosts import reachable
from recipe.atropos.utils.process import default_port, start_service
from recipe.atropos.utils.secret import API_KEY_VARIABLE, environments_key
from recipe.atropos.utils.sockets import SOCKET_VARIABLE, listening, reserve


@contextmanager
def gateway_before(config: DictConfig) -> Iterator[None]:
    """Start a gateway for the block if ``inference.gateway`` names none, and print how environments use it.

    The gateway also ends with this process, however that ends.

    Raises:
        ConfigurationError: ``inference.gateway_port`` is taken.
    """
    inference, atropos = config.inference, config.trainer.atropos
    if inference.gateway or atropos.replay or not inference.urls:
        yield
        return
    taken = [urlsplit(url).port for url in (*inference.urls, atropos.api_url)]  # nothing may listen there yet
    port = inference.gateway_port or default_port(GATEWAY_PORT, inference.host, taken)
    inference.gateway = f"http://{reachable(inference.host)}:{port}"
    command = gateway_command(inference.gateway, inference.host, inference.urls, atropos.weight_sync.timeout)
    log, variables = RunDir(config.run.dir).log("gateway"), {API_KEY_VARIABLE: inference.api_key or ""}
    with reserve(inference.host, port, "inference.gateway_port") as reserved, listening(reserved) as given:
        service = start_service(
            "gateway",
            command,
            log_path=log,
            env=variables,
            url=inference.gateway,
            inherited={SOCKET_VARIABLE: given.fileno()},
        )
    try:
        key = "none"
        if inference.api_key:
            key = environments_key(inference.api_key) if sys.stdout.isatty() else None
        address = for_others(inference.gateway, inference.host)
        instructions = how_to_join(config, atropos.api_url, address, key, asyncio.run(_guarded(atropos.api_url)))
        print(
            f"gateway {inference.gateway}, in front of {', '.join(inference.urls)}; see {log}\n{instructions}",
            flush=True,
        )
        yield
    finally:
        service.stop()


async def _guarded(api_url: str) -> bool:
    """Return whether a Trajectory API that answers asks for a key."""
    try:
        async with TrajectoryApiClient(api_url, retry_timeout=0, timeout=5) as api:
            await api.status()
    except TrajectoryApiError as error:
        return error.status == 401
    return False
