"""What can be known to be wrong before anything is started: each error names the value and the mend."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import get_args

import aiohttp
from omegaconf import DictConfig
from verl.trainer.ppo.utils import need_critic

from recipe.atropos.data_proto import RowLimits
from recipe.atropos.data_source import DataSourceConfig
from recipe.atropos.inference.client import InferenceError, PauseMode, SGLangClient
from recipe.atropos.weight_sync.engine import TRANSPORTS


class ConfigurationError(ValueError):
    """A value in the configuration that cannot work; the message says which, and what to give instead."""


SMALL_POLICY = "small-policy"  # as actor_rollout_ref.model.path: the demonstration's model, made here on first use


def resolve_model(path: str, seed: int) -> str:
    """The model's folder or hub name; makes the small policy of ``seed`` where that is asked for and not there yet."""
    if path != SMALL_POLICY:
        return os.path.expanduser(path)
    from recipe.atropos.utils.small_policy import ensure_small_policy

    return str(ensure_small_policy(seed=seed))


def looks_local(path: str) -> bool:
    """Whether a model or dataset name can only be a path: hub names are NAME or ORG/NAME."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or os.path.exists(os.path.expanduser(path))


def check_config(config: DictConfig) -> None:
    """Checks that need no server.

    Raises:
        ConfigurationError: naming the key.
    """
    model = config.actor_rollout_ref.model.path
    if looks_local(model) and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={model}: no model there (no config.json); "
            "give a folder in Hugging Face format, or a hub name"
        )
    if need_critic(config):
        raise ConfigurationError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, which this recipe does not "
            "train; choose grpo or another estimator without one"
        )
    group_size = config.actor_rollout_ref.rollout.n
    batch_size = config.data.train_batch_size * group_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.environment.group_size < 1 or batch_size % config.environment.group_size:
        raise ConfigurationError(
            f"environment.group_size={config.environment.group_size} does not divide the batch of {batch_size} "
            f"sequences (data.train_batch_size={config.data.train_batch_size} groups x "
            f"actor_rollout_ref.rollout.n={group_size}): the Trajectory API would never fill one; change either"
        )
    if config.data.train_batch_size % mini_batch:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch} does not divide "
            f"data.train_batch_size={config.data.train_batch_size}; both count groups"
        )
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if (mini_batch * group_size) % ranks:
        raise ConfigurationError(
            f"a mini-batch of {mini_batch} groups x {group_size} sequences cannot be split over {ranks} ranks "
            "(trainer.nnodes x trainer.n_gpus_per_node); change actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    try:
        DataSourceConfig.from_config(config.trainer.atropos)
        RowLimits(config.data.max_prompt_length, config.data.max_response_length, 0, config.trainer.atropos.overlong)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from error
    weight_sync = config.trainer.atropos.weight_sync
    for key, choices in (("transport", tuple(TRANSPORTS)), ("pause_mode", get_args(PauseMode))):
        if weight_sync[key] not in choices:
            raise ConfigurationError(
                f"trainer.atropos.weight_sync.{key}={weight_sync[key]!r}; choose one of {', '.join(choices)}"
            )
    if not isinstance(weight_sync.every, int) or weight_sync.every < 1:
        raise ConfigurationError(
            f"trainer.atropos.weight_sync.every={weight_sync.every!r} updates between pushes: give 1 or more"
        )


def check_services(config: DictConfig, timeout: float = 30.0) -> None:
    """Whether the Trajectory API and every SGLang server answer, asked for at most ``timeout`` seconds.

    Raises:
        ConfigurationError: naming the service and its URL.
    """
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

    async def server(url: str) -> None:
        async with SGLangClient(url, config.inference.api_key, timeout=5) as client:
            await client.weight_version()

    checks = [_wait_for(trajectory_api, "trainer.atropos.api_url", config.trainer.atropos.api_url, timeout)]
    checks += [_wait_for(partial(server, url), "inference.urls", url, timeout) for url in config.inference.urls]
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
