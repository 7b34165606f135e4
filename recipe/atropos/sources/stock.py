"""Source of batches from atroposlib's own ``run-api``, which loses data: it hands over each batch at most once.

Guarantees:

- Batches are returned in the order in which their groups were posted, although ``run-api`` cuts its whole queue into
  batches at once and serves the newest first. Such a cut shows in its step counter, so it is fetched as a whole and
  reversed. Where a request for a batch of a cut is lost on its way there, the oldest one comes last.
- ``GET /batch`` is never canceled and has no short timeout: ``run-api`` discards a batch when it starts to send it. A
  batch whose connection breaks is lost, and counted.

Nothing is served again to a trainer that resumes, and no staleness bound holds but by dropping.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import orjson

from recipe.atropos.sources.numbered import (
    Batch,
    DataSource,
    DataSourceConfig,
    DataSourceError,
    Registration,
    registration_of,
)
from recipe.atropos.trajectory_api.client import Answer, NumberedBatch, TrajectoryApiClient, TrajectoryApiError

logger = logging.getLogger(__name__)

_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds between polls while there is no batch


def open_source(
    config: Any, starting_step: int, after: int, meanwhile: Callable[[], bool] = lambda: True
) -> DataSource:
    """Return the source for the server at ``trainer.atropos.api_url``: ours, or atroposlib's own.

    ``config`` is the full configuration; ``starting_step`` and ``after`` are the numbers of updates, and of the last
    batch, in the weights; ``meanwhile`` is that of ``DataSource``.

    Raises:
        DataSourceError: it does not answer.
    """
    own = DataSourceConfig.from_config(config)
    source = StockSource if asyncio.run(_is_stock(own)) else DataSource
    return source(own, registration_of(config, starting_step), after, meanwhile=meanwhile)


async def _is_stock(config: DataSourceConfig) -> bool:
    """Return whether the server is atroposlib's; log what that means.

    Raises:
        DataSourceError: it does not answer.
    """
    async with config.client() as client:
        try:
            await client.diagnose()
            return False
        except TrajectoryApiError as error:
            if error.status != 404:
                fix = "; start it or correct trainer.atropos.api_url" if error.status is None else ""
                raise DataSourceError(f"trainer.atropos.api_url={config.api_url}: {error}{fix}") from error
    logger.warning(
        "%s is atroposlib's run-api: what it holds is lost with it or with the trainer, a batch whose connection "
        "breaks too, and max_staleness only drops; python -m recipe.atropos.trajectory_api loses nothing",
        config.api_url,
    )
    return True


class StockSource(DataSource):
    """``DataSource`` for ``run-api``; ``events`` counts api_unreachable, batch_lost and registered_again."""

    def _call(self, path: str, **message: int) -> None:
        """Do nothing: ``run-api`` issues no tickets and keeps nothing."""

    async def _why(self, api: TrajectoryApiClient) -> str:
        """Say whether environments do not respond, or what mismatches."""
        batch_size = self.registration.batch_size
        queued, latest = (await api.status())["queue_size"], await api.call("GET", "/latest_example")
        size = len(latest.get("tokens") or [])
        try:
            await api.status(0)
        except TrajectoryApiError:  # it answers 500 for an environment that has not registered
            return f"no environment has registered at {api.url}; start one, or look into its log"
        if size == 0:
            return f"an environment has registered at {api.url} but posted nothing; look into its log and the server's"
        waiting = f"{queued} groups wait, the last of {size} sequences"
        if queued and batch_size % size:
            return f"{waiting}, which cannot fill a batch of {batch_size} exactly"
        if queued * size >= batch_size:
            return (
                f"{waiting}, and the API makes no batch of {batch_size} of them: groups of another size are in "
                "between, or an environment with min_batch_allocation has left"
            )
        return (
            f"environments have posted only {queued} groups since the last batch (the last had {size} sequences); "
            "look into their logs: a group of equal scores, or one that is too long, is dropped there"
        )

    def _unusable(self, error: TrajectoryApiError) -> DataSourceError:
        return DataSourceError(f"{error}; start it (run-api --port PORT) or correct trainer.atropos.api_url")

    async def _fetch_forever(self) -> None:
        number, config = self.after, self.config
        async with StockApi(
            config.api_url, None, config.retry_timeout, config.timeout, first_pause=config.retry_delay
        ) as api:
            self._api_step = await api.register_trainer(self.registration)
            self._registered.set()
            while not self._stopping:
                if await asyncio.to_thread(self._wait_for_room):
                    cut = await self._next_cut(api)
                    self._add([NumberedBatch(number + i, batch) for i, batch in enumerate(cut, 1)])
                    number += len(cut)

    async def _next_cut(self, api: "StockApi") -> list[Batch]:
        """Wait for a cut; return all batches that the API cut from its queue together, oldest first."""
        delay = _FIRST_POLL
        self._left_of_cut = 0  # batches that the API has not served yet; one less if a request was lost on its way
        cut: list[Batch] = []  # in the API's order: newest first
        while not self._stopping and not (cut and self._left_of_cut <= 0):
            found, batch = await self._get_batch(api)
            if found:
                # A cut of n batches raises the API's step by n, and only this client triggers cuts.
                step = (await api.status())["current_step"]
                self._left_of_cut += step - self._api_step - 1
                self._api_step = step
                cut += [] if batch is None else [batch]
            elif cut:  # the API no longer has the rest
                break
            else:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_POLL)
        return cut[::-1]

    async def _get_batch(self, api: "StockApi") -> tuple[bool, Batch | None]:
        """Send one ``GET /batch``; return whether there was a batch, and the batch (None if it was lost; counted).

        Register again if the API has lost its state.
        """
        try:
            reply = await api.any_batch()
        except _Broken as error:
            lost = self._left_of_cut > 0 or (await api.status())["current_step"] > self._api_step
            if lost:
                self.events["batch_lost"] += 1
                logger.error("a batch was lost on its way from the Trajectory API, which sends each once: %s", error)
            else:
                api.again += 1
                logger.warning("%s, without a batch; trying again", error)
            return lost, None
        finally:
            self.events["api_unreachable"] = api.again
        if reply.get("status") == "error":
            logger.error("the Trajectory API at %s lost its state (%s); registering again", api.url, reply)
            self.events["registered_again"] += 1
            self._api_step, self._left_of_cut = await api.register_trainer(self.registration), 0
            return False, None
        return reply["batch"] is not None, reply["batch"]


class _Broken(DataSourceError):
    """An answer was lost, or broke off before its end."""


async def _sent_once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Middleware without which aiohttp would send a request again whose answer was lost, and say nothing."""
    try:
        return await handler(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if isinstance(error, aiohttp.ClientConnectorError):
            raise
        raise _Broken(f"{request.method} {request.url}: the answer was lost ({error!r})") from error


class StockApi(TrajectoryApiClient):
    """Client of ``run-api``: what our API has too, and what a trainer does otherwise there."""

    async def any_batch(self) -> dict[str, Any]:
        """Return the answer of ``GET /batch``, however long it takes once the API is reached.

        Raises:
            _Broken: the connection was lost before the end of the answer.
            DataSourceError: the answer is an error; its batch is lost.
            TrajectoryApiError: the API could not be reached within ``retry_timeout``.
        """
        what, timeout = f"GET {self.url}/batch", aiohttp.ClientTimeout(None, sock_connect=self._timeout)

        async def attempt() -> Answer:
            try:
                async with self._session.get(f"{self.url}/batch", timeout=timeout, middlewares=(_sent_once,)) as reply:
                    body = await reply.read()
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise TrajectoryApiError(f"{what} got no answer ({error!r})") from error
            except (aiohttp.ClientError, OSError) as error:
                raise _Broken(f"{what}: the answer broke off ({error!r})") from error
            if reply.status >= 400:
                raise DataSourceError(f"{what} answered HTTP {reply.status}: {body[:500].decode(errors='replace')}")
            return reply.headers, body

        return orjson.loads((await self._until_answered(attempt))[1])

    async def register_trainer(self, registration: Registration) -> int:
        """Register the trainer and verify that it took effect; return the API's step counter.

        The API accepts the first registration in its lifetime and ignores later ones. Scored data posted before any
        registration makes it ignore the first one too; the data is then reset, since nothing could ever fetch it.

        Raises:
            DataSourceError: the API keeps another trainer's batch size or maximum length.
            TrajectoryApiError: it does not answer.
        """
        payload = msgspec.to_builtins(registration)
        await self.call("POST", "/register", payload)
        info = await self.call("GET", "/info")
        if info["batch_size"] == -1:
            logger.warning("the Trajectory API at %s got data before a trainer; its data is reset", self.url)
            await self._request("GET", "/reset_data", {})  # answers in plain text
            await self.call("POST", "/register", payload)
            info = await self.call("GET", "/info")
        for key in ("batch_size", "max_token_len"):
            if info[key] != payload[key]:
                raise DataSourceError(
                    f"the Trajectory API at {self.url} is registered with {key}={info[key]}, this trainer wants "
                    f"{payload[key]}; the API keeps its first registration for life: restart it"
                )
        return (await self.status())["current_step"]
