"""Source of batches from atroposlib's own ``run-api``, which loses data: it hands over each batch at most once.

Guarantees:

- Batches are returned in the order in which their groups were posted, although ``run-api`` cuts its whole queue into
  batches at once and serves the newest first. Such a cut shows in its step counter, so it is fetched as a whole and
  reversed.
- ``GET /batch`` is never canceled and has no short timeout: ``run-api`` discards a batch when it starts to send it. A
  batch whose connection breaks is lost, and counted.

Nothing is served again to a trainer that resumes, and no staleness bound holds but by dropping.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import orjson
from tenacity import AsyncRetrying, before_sleep_log, retry_if_exception_type, stop_after_attempt, wait_exponential

from recipe.atropos.sources.numbered import (
    Batch,
    DataSource,
    DataSourceConfig,
    DataSourceError,
    Registration,
)
from recipe.atropos.trajectory_api.client import LONGEST_PAUSE, NumberedBatch, TrajectoryApiError

logger = logging.getLogger(__name__)

_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds between polls while there is no batch
_UNREACHABLE = (aiohttp.ClientError, OSError)


def open_source(
    config: Any, starting_step: int, after: int, meanwhile: Callable[[], object] = lambda: None
) -> DataSource:
    """Return the source for the server at ``trainer.atropos.api_url``: ours, or atroposlib's own.

    ``config`` is the full configuration; ``starting_step`` and ``after`` are the numbers of updates, and of the last
    batch, in the weights; ``meanwhile`` is that of ``DataSource``.

    Raises:
        DataSourceError: it does not answer.
    """
    own = DataSourceConfig.from_config(config)
    source = StockSource if _is_stock(own) else DataSource
    return source(own, Registration.from_config(config, starting_step), after, meanwhile=meanwhile)


def _is_stock(config: DataSourceConfig) -> bool:
    """Return whether the server is atroposlib's; log what that means.

    Raises:
        DataSourceError: it does not answer.
    """

    async def ask() -> bool:
        async with config.client() as client:
            try:
                await client.diagnose()
            except TrajectoryApiError as error:
                if error.status == 404:
                    return True
                raise DataSourceError(str(error)) from error
            return False

    if stock := asyncio.run(ask()):
        logger.warning(
            "%s is atroposlib's run-api: what it holds is lost with it or with the trainer, a batch whose connection "
            "breaks too, and max_staleness only drops; python -m recipe.atropos.trajectory_api loses nothing",
            config.api_url,
        )
    return stock


class StockSource(DataSource):
    """``DataSource`` for ``run-api``; ``events`` counts api_unreachable, batch_lost and registered_again."""

    def weights_pushed(self, through: int) -> None:
        """Do nothing: ``run-api`` issues no tickets."""

    def batch_is_empty(self, number: int) -> None:
        """Do nothing: ``run-api`` issues no tickets."""

    def commit(self, through: int) -> None:
        """Do nothing: ``run-api`` keeps nothing."""

    async def diagnosis(self) -> str:
        return await diagnose(self.config.api_url, self.registration.batch_size)

    async def _fetch_forever(self) -> None:
        number = self.after
        self._left_of_cut = 0  # batches of a cut that the API has not served yet
        async with TrajectoryApi(self.config, self.events) as api:
            self._api_step = await register(api, self.registration)
            self._registered.set()
            while await asyncio.to_thread(self._wait_for_room):
                cut = await self._next_cut(api)
                self._add([NumberedBatch(number + i, batch) for i, batch in enumerate(cut, 1)])
                number += len(cut)

    async def _next_cut(self, api: "TrajectoryApi") -> list[Batch]:
        """Wait for a cut; return all batches that the API cut from its queue together, oldest first."""
        delay = _FIRST_POLL
        cut: list[Batch] = []  # in the API's order: newest first
        while not self._stopping and not (cut and self._left_of_cut <= 0):
            found, batch = await self._get_batch(api)
            if found:
                # A cut of n batches raises the API's step by n, and only this client triggers cuts.
                step = (await api.get("/status"))["current_step"]
                self._left_of_cut += step - self._api_step - 1
                self._api_step = step
                cut += [] if batch is None else [batch]
            elif cut:  # the API no longer has the rest
                self._left_of_cut = 0
            else:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_POLL)
        return cut[::-1]

    async def _get_batch(self, api: "TrajectoryApi") -> tuple[bool, Batch | None]:
        """Send one ``GET /batch``; return whether there was a batch, and the batch (None if it broke off; counted).

        Register again if the API has lost its state.
        """
        started = time.perf_counter()
        try:
            reply = await api.get("/batch", limited=False)
        except _Broken as error:
            self.events["batch_lost"] += 1
            logger.error("a batch was lost on its way from the Trajectory API, which sends each only once: %s", error)
            return True, None
        if reply.get("status") == "error":
            logger.error("the Trajectory API at %s lost its state (%s); registering again", api.url, reply)
            self.events["registered_again"] += 1
            self._api_step, self._left_of_cut = await register(api, self.registration), 0
            return False, None
        if reply["batch"] is None:
            return False, None
        self.fetch_seconds += time.perf_counter() - started
        return True, reply["batch"]


class _Broken(DataSourceError):
    """A reply broke off before its end."""


class TrajectoryApi:
    """Client of the Trajectory API: JSON over HTTP, with exponential back-off while it cannot be reached.

    ``events`` counts failed attempts, as api_unreachable.
    """

    def __init__(self, config: DataSourceConfig, events: Counter[str] | None = None):
        self.url = config.api_url.rstrip("/")
        self._config = config
        self._events = Counter() if events is None else events

    async def __aenter__(self) -> "TrajectoryApi":
        # No compression: it costs the API more time than it saves on the loopback or a cluster's network.
        self._session = aiohttp.ClientSession(headers={"Accept-Encoding": "identity"})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, *, limited: bool = True, **kwargs: Any) -> Any:
        return await self._request("GET", path, limited, **kwargs)

    async def post(self, path: str, payload: Mapping[str, Any]) -> Any:
        return await self._request("POST", path, json=payload)

    async def knows_environment(self, number: int) -> bool:
        """Return whether environment ``number``, counted from 0, has registered; if not, the API answers 500."""
        try:
            await self.get("/status-env", json={"env_id": number})
        except DataSourceError:
            return False
        return True

    async def _request(self, method: str, path: str, limited: bool = True, **kwargs: Any) -> Any:
        """Send a request, with retries; ``limited`` applies the timeout to all of it, not only to connecting.

        Raises:
            _Broken: the connection was lost in the middle of the reply.
            DataSourceError: the API could not be reached in all attempts, or answered with an HTTP error.
        """
        config, what = self._config, f"{method} {self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=config.timeout if limited else None, sock_connect=config.timeout)

        async def request() -> Any:
            async with self._session.request(method, self.url + path, timeout=timeout, **kwargs) as reply:
                try:
                    body = await reply.read()
                except _UNREACHABLE as error:
                    raise _Broken(f"{what}: the reply broke off ({error!r})") from error
                if reply.status >= 400:
                    raise DataSourceError(f"{what} answered HTTP {reply.status}: {body[:500].decode(errors='replace')}")
                return orjson.loads(body)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_UNREACHABLE),
            stop=stop_after_attempt(config.retry_attempts),
            wait=wait_exponential(config.retry_delay, max=LONGEST_PAUSE),
            before_sleep=before_sleep_log(logger, logging.WARNING),
            after=lambda _: self._events.update(api_unreachable=1),
            reraise=True,
        )
        try:
            return await retrying(request)
        except _UNREACHABLE as error:
            raise DataSourceError(
                f"the Trajectory API at {self.url} did not answer {method} {path} in {config.retry_attempts} attempts "
                f"({error!r}); start it (run-api --port PORT) or correct trainer.atropos.api_url"
            ) from error


async def register(api: TrajectoryApi, registration: Registration) -> int:
    """Register the trainer and verify that it took effect; return the API's step counter.

    The API accepts the first registration in its lifetime and ignores later ones. Scored data that was posted before
    any registration makes it ignore the first one too; the data is then reset, since nothing could ever fetch it.

    Raises:
        DataSourceError: the API keeps another trainer's batch size or maximum length.
    """
    payload = vars(registration)
    await api.post("/register", payload)
    info = await api.get("/info")
    if info["batch_size"] == -1:
        logger.warning(
            "the Trajectory API at %s got data before a trainer; resetting what it could never serve", api.url
        )
        await _reset(api)
        await api.post("/register", payload)
        info = await api.get("/info")
    for key in ("batch_size", "max_token_len"):
        if info[key] != payload[key]:
            raise DataSourceError(
                f"the Trajectory API at {api.url} is registered with {key}={info[key]}, this trainer wants "
                f"{payload[key]}; the API keeps its first registration for life: restart it"
            )
    return (await api.get("/status"))["current_step"]


async def _reset(api: TrajectoryApi) -> None:
    async with api._session.get(f"{api.url}/reset_data") as reply:  # answers in plain text
        reply.raise_for_status()


async def diagnose(api_url: str, batch_size: int) -> str:
    """Return one sentence on why no batch arrives: whether API or environments do not respond, or what mismatches."""
    try:
        async with TrajectoryApi(DataSourceConfig(api_url, timeout=10.0, retry_attempts=1)) as api:
            status = await api.get("/status")
            latest = await api.get("/latest_example")
            environments = await api.knows_environment(0)
    except DataSourceError as error:
        return f"the Trajectory API is silent ({error})"
    size = len(latest.get("tokens") or [])
    if not environments:
        return f"no environment has registered at {api.url}; start one, or look into its log"
    if size == 0:
        return f"an environment has registered at {api.url} but posted nothing; look into its log and the server's"
    queued = status["queue_size"]
    if queued and batch_size % size:
        return f"{queued} groups wait, the last of {size} sequences, which cannot fill a batch of {batch_size} exactly"
    if queued * size >= batch_size:
        return (
            f"{queued} groups wait, the last of {size} sequences, and the API makes no batch of {batch_size} of them: "
            "groups of another size are in between, or an environment with min_batch_allocation has left"
        )
    return (
        f"environments have posted only {queued} groups since the last batch (the last had {size} sequences); "
        "look into their logs: a group of equal scores, or one that is too long, is dropped there"
    )
