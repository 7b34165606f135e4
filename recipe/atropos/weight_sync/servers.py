"""One action on all servers of a push at once, with every failure named."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from recipe.atropos.inference.client import SGLangClient


class WeightPushError(RuntimeError):
    """A push that did not reach a server; names the server and the phase."""


async def on_all(
    clients: Sequence[SGLangClient], phase: str, action: Callable[[SGLangClient], Awaitable[object]]
) -> None:
    """Run ``action`` on all servers; wait for all, then raise WeightPushError with every failure named."""
    results = await asyncio.gather(*(action(client) for client in clients), return_exceptions=True)
    failures = {c.url: r for c, r in zip(clients, results, strict=True) if isinstance(r, BaseException)}
    if failures:
        details = "; ".join(f"{url}: {error}" for url, error in failures.items())
        raise WeightPushError(f"weight push failed in phase {phase!r} on {details}") from next(iter(failures.values()))


@asynccontextmanager
async def update_session(clients: Sequence[SGLangClient]) -> AsyncIterator[None]:
    """What tensor and distributed updates must stand in on SGLang from 0.5.21 on; nothing where servers know none.

    It is closed after a failure too: else the next push could not open one.
    """
    await on_all(clients, "begin", lambda client: client.begin_weight_update())
    try:
        yield
    except BaseException:
        await asyncio.gather(*(client.end_weight_update() for client in clients), return_exceptions=True)
        raise
    await on_all(clients, "end", lambda client: client.end_weight_update())


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
