"""Actions on several servers at once, with every failure reported."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, SGLangClient

_CLEANUP_SECONDS = 5.0  # for a server's cleanup after a failure; a hung one must not delay the error that names it


class WeightPushError(AtroposError, RuntimeError):
    """A weight push failed on a server; names the server and the phase."""


async def on_all(
    clients: Sequence[SGLangClient], phase: str, action: Callable[[SGLangClient], Awaitable[object]]
) -> None:
    """Run ``action`` on all servers of a push; wait for all, then raise WeightPushError with every failure named."""
    results = await asyncio.gather(*(action(client) for client in clients), return_exceptions=True)
    check_phase(phase, {client.url: result for client, result in zip(clients, results, strict=True)})


def check_phase(phase: str, results: Mapping[str, Any]) -> None:
    """Raise WeightPushError if any of ``results``, by URL, is an exception; name them all."""
    failures = {url: error for url, error in results.items() if isinstance(error, BaseException)}
    if failures:
        details = "; ".join(f"{url}: {error}" for url, error in failures.items())
        raise WeightPushError(f"weight push failed in phase {phase!r} on {details}") from next(iter(failures.values()))


async def ranks_of(client: SGLangClient, why: str) -> int:
    """Return the tensor-parallel size. Raises WeightPushError under data parallelism; ``why`` completes its message:
    "such a server ...".
    """
    arguments = (await client.capabilities()).arguments
    if arguments.get("dp_size", 1) != 1:
        raise WeightPushError(
            f"{client.url} runs with dp_size={arguments['dp_size']}, and such a server {why}: start several servers "
            "instead, or set trainer.atropos.weight_sync.transport=disk"
        )
    return arguments.get("tp_size", 1)


async def clean_up(calls: Iterable[Awaitable[object]]) -> None:
    """Await cleanup calls after a failure; ignore InferenceErrors and timeouts: the failure itself is reported."""
    limited = (asyncio.wait_for(call, _CLEANUP_SECONDS) for call in calls)
    for result in await asyncio.gather(*limited, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, InferenceError | TimeoutError):
            raise result


@asynccontextmanager
async def update_session(clients: Sequence[SGLangClient]) -> AsyncIterator[None]:
    """Open the session that tensor and distributed updates need since SGLang 0.5.21; no-op on servers without sessions.

    It is closed after a failure too, as far as the servers answer.
    """
    await on_all(clients, "begin", lambda client: client.begin_weight_update())
    try:
        yield
    except BaseException:
        await clean_up(client.end_weight_update() for client in clients)
        raise
    await on_all(clients, "end", lambda client: client.end_weight_update())
