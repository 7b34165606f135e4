"""One push: a weight version reaches every server, or an error says which one it did not reach.

    stage -> pause -> deliver -> flush -> verify -> resume

- While the weights are staged (gathered, written), generation goes on with the old version.
- Nothing is generated between the first and the last changed tensor of a server: it is paused.
- The KV cache is flushed after the last tensor and before anything is generated, so no new token attends to keys of old
  weights; a flush that fails fails the push.
- Generation continues only after *every* server has reported the version.
- On an error the servers are left paused: one that may have taken half of the weights never goes on. A retry is a whole
  push; the caller's version stays what it was.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import torch

from recipe.atropos.inference.client import SGLangClient

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class WeightPushError(RuntimeError):
    """A push that did not reach a server; names the server and the phase."""


class Transport(Protocol):
    """How the bytes of a version come to a server."""

    def stage(self, weights: NamedTensors, version: int) -> int:
        """Take all weights, before generation is paused; returns the number of bytes."""

    async def deliver(self, client: SGLangClient, version: int) -> None:
        """Let one paused server load the staged version and carry its number."""

    def release(self, version: int) -> None:
        """The version is in force everywhere: what was staged before it may go."""


async def push(
    clients: Sequence[SGLangClient], transport: Transport, weights: NamedTensors, version: int, pause_mode: str
) -> dict[str, float]:
    """Bring ``weights`` (name, full tensor) to all servers as ``version``.

    ``pause_mode`` says what running requests meet: "abort" ends them, "retract" computes their prefix anew with the new
    weights and goes on. "in_place" keeps their old keys, so that the flush, and with it the push, fails while one runs.

    Returns seconds by phase and the size, as metrics under ``weight_sync/``.

    Raises:
        WeightPushError: a phase failed on a server; all servers are left paused.
    """
    started = time.perf_counter()
    size = transport.stage(weights, version)
    staged = time.perf_counter()

    await _on_all(clients, "pause", lambda client: client.pause(pause_mode))
    await _on_all(clients, "deliver", lambda client: transport.deliver(client, version))
    delivered = time.perf_counter()
    await _on_all(clients, "flush", lambda client: client.flush_cache())
    await _on_all(clients, "verify", lambda client: _verify(client, version))
    await _on_all(clients, "resume", lambda client: client.resume())
    resumed = time.perf_counter()

    transport.release(version)
    return {
        "weight_sync/version": float(version),
        "weight_sync/bytes": float(size),
        "weight_sync/stage_s": staged - started,
        "weight_sync/deliver_s": delivered - staged,
        "weight_sync/pause_s": resumed - staged,
        "weight_sync/total_s": resumed - started,
    }


async def _verify(client: SGLangClient, version: int) -> None:
    reported = await client.weight_version()
    if reported != str(version):
        raise WeightPushError(f"{client.url} reports weight version {reported!r} after a push of {version}")


async def _on_all(
    clients: Sequence[SGLangClient], phase: str, action: Callable[[SGLangClient], Awaitable[None]]
) -> None:
    """Run one phase on all servers at once; wait for all, then raise with every failure named."""
    results = await asyncio.gather(*(action(client) for client in clients), return_exceptions=True)
    failures = {c.url: r for c, r in zip(clients, results, strict=True) if isinstance(r, BaseException)}
    if failures:
        details = "; ".join(f"{url}: {error}" for url, error in failures.items())
        raise WeightPushError(f"weight push failed in phase {phase!r} on {details}") from next(iter(failures.values()))


def pause_all(urls: Sequence[str], api_key: str | None, timeout: float) -> None:
    """Pause servers that must not go on; one that does not answer is not generating either."""

    async def pause(url: str) -> None:
        async with SGLangClient(url, api_key, timeout=timeout) as client:
            await client.pause("retract")

    async def pause_each() -> None:
        await asyncio.gather(*(pause(url) for url in urls), return_exceptions=True)

    asyncio.run(pause_each())


def reported_versions(urls: Sequence[str], api_key: str | None, timeout: float) -> dict[str, str]:
    """The weight version that each server reports, by its URL.

    Raises:
        InferenceError: a server does not answer; names it.
    """

    async def ask(url: str) -> str:
        async with SGLangClient(url, api_key, timeout=timeout) as client:
            return await client.weight_version()

    async def ask_each() -> list[str]:
        return list(await asyncio.gather(*(ask(url) for url in urls)))

    return dict(zip(urls, asyncio.run(ask_each()), strict=True))
