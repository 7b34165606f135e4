"""One action on all servers of a push at once, with every failure named."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, SGLangClient

logger = logging.getLogger(__name__)

_TIDY_SECONDS = 5.0  # that a server may take after a failure; a hanging one must not hold up what names it


class WeightPushError(AtroposError, RuntimeError):
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


async def tidied(calls: Iterable[Awaitable[object]]) -> None:
    """What is put in order after a failure, as far as the servers answer; the failure is what is told."""
    limited = (asyncio.wait_for(call, _TIDY_SECONDS) for call in calls)
    for result in await asyncio.gather(*limited, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, InferenceError | TimeoutError):
            raise result


@asynccontextmanager
async def update_session(clients: Sequence[SGLangClient]) -> AsyncIterator[None]:
    """What tensor and distributed updates must stand in on SGLang from 0.5.21 on; nothing where servers know none.

    It is closed after a failure too: else the next push could not open one.
    """
    await on_all(clients, "begin", lambda client: client.begin_weight_update())
    try:
        yield
    except BaseException:
        await tidied(client.end_weight_update() for client in clients)
        raise
    await on_all(clients, "end", lambda client: client.end_weight_update())


def pause_all(urls: Sequence[str], api_key: str | None, timeout: float) -> None:
    """Pause servers that must not go on; one that cannot be is named in the log."""

    async def pause(url: str) -> None:
        async with SGLangClient(url, api_key, timeout=timeout) as client:
            await client.pause("auto")

    async def pause_each() -> None:
        for error in await asyncio.gather(*(pause(url) for url in urls), return_exceptions=True):
            if error is not None:
                logger.error("not paused: %s", error)

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
