"""A real SGLang server over a model small enough for two CPU cores; for every test that needs an inference engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from random_models import make_random_model
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.server import SGLangLaunch, start_sglang
from recipe.atropos.utils.process import Service, free_port, wait_until_healthy

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 2048}


def make_tiny_model(path: Path | str, seed: int, model_type: str = "qwen2", **config: Any) -> Path:
    """``make_random_model``, 128 wide and with room for 2,048 tokens."""
    return make_random_model(path, model_type, seed, **SIZES | config)


@contextlib.contextmanager
def running_sglang(model_path: Path | str, *, timeout: float = 240.0, **launch: Any) -> Iterator[tuple[Service, str]]:
    """A healthy CPU server of `model_path` in float32, with its url; ended afterwards, with all its processes.

    Keyword arguments are those of SGLangLaunch, `max_total_tokens`, and `log_path` (a file beside the model by
    default).
    """
    log_path = launch.pop("log_path", Path(model_path).parent / "sglang.log")
    flags = {"max_total_tokens": launch.pop("max_total_tokens", 16384), **launch.pop("extra_args", {})}
    defaults = {"port": free_port(), "device": "cpu", "dtype": "float32", "extra_args": flags}
    service = start_sglang(SGLangLaunch(str(model_path), **(defaults | launch)), log_path=log_path)
    try:
        call(service.url, lambda client: wait_until_healthy(service, client.health, timeout))
        yield service, service.url
    finally:
        service.stop(grace=1)  # it would take its time, and nobody waits for anything of it


def call(url: str, action: Callable[[SGLangClient], Awaitable[Any]], timeout: float = 30) -> Any:
    """What ``action`` returns of a client of its own; ``timeout`` in seconds."""

    async def inner() -> Any:
        return await action(SGLangClient(url, timeout=timeout))

    return asyncio.run(inner())


def version_of(url: str) -> str:
    """The weight version that a server reports."""
    return call(url, SGLangClient.weight_version)


def greedy(url: str, timeout: float = 30) -> list[list[int]]:
    """A server's own answers to ``PROMPTS``, without chance."""
    parameters = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    replies = call(url, lambda client: client.generate(input_ids=PROMPTS, sampling_params=parameters), timeout)
    return [reply["output_ids"] for reply in replies]


def sampled_groups(url: str, n: int = 4) -> list[dict[str, Any]]:
    """Fresh samples as an environment posts them: full length, the engine's own logprobs, 1.0 over the prompt."""
    groups, parameters = [], {"temperature": 1.0, "max_new_tokens": 16, "n": n}
    for prompt in PROMPTS:
        replies = call(url, lambda client: client.generate(input_ids=prompt, sampling_params=parameters))  # noqa: B023
        outputs = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
        tokens = [[token for _, token, _ in output] for output in outputs]
        groups.append(
            {
                "tokens": [prompt + output for output in tokens],
                "masks": [[-100] * len(prompt) + output for output in tokens],
                "inference_logprobs": [[1.0] * len(prompt) + [lp for lp, *_ in output] for output in outputs],
                "scores": [float(i % 2) for i in range(n)],
            }
        )
    return groups


async def wait_healthy(client: SGLangClient, seconds: float = 240) -> None:
    """Until the server generates; one of a test's own, which may be starting."""
    async with asyncio.timeout(seconds):
        while not await client.health():
            await asyncio.sleep(0.2)
