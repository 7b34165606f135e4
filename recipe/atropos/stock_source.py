"""Client of the Atropos Trajectory API: register, prefetch batches, return the oldest first, and diagnose stalls.

Guarantees:

- ``next_batch`` returns batches in the order in which their groups were posted, although the API cuts its whole queue
  into batches at once and serves the newest first. Such a cut shows in the API's step counter, so it is fetched as a
  whole and reversed.
- At most ``prefetch`` batches (or one whole cut) are fetched ahead of training. The environments' backpressure counts
  only the API's queue, so prefetching lets them generate further ahead.
- ``GET /batch`` is never cancelled and has no short timeout: the API discards a batch when it starts to send it.
- Every wait has a limit: ``retry_attempts`` for registration, ``longest_wait`` for a batch. The error names the
  component that does not respond.

This module does not handle tensors; ``data_proto`` does.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tenacity import AsyncRetrying, before_sleep_log, retry_if_exception_type, stop_after_attempt, wait_exponential

from recipe.atropos.errors import AtroposError

logger = logging.getLogger(__name__)

Batch = list[dict[str, Any]]  # groups: ScoredData of the API

_FIRST_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds between polls while there is no batch
_LONGEST_DELAY = 5.0  # seconds between attempts to reach the API
_UNREACHABLE = (aiohttp.ClientError, OSError)
_END_SECONDS = 5.0  # for a request in flight when the source is closed
_MEANWHILE_SECONDS = 2.0  # of waiting for a batch before the trainer checks its servers


class DataSourceError(AtroposError, RuntimeError):
    """The Trajectory API cannot be used, or no batch arrived in time; the message says what was waited for."""


@dataclass(frozen=True)
class DataSourceConfig:
    """Where the Trajectory API is and how long to wait for it. Times are in seconds.

    ``timeout``: for one request (not ``/batch``, see the module). ``retry_attempts`` and ``retry_delay``: an
    unreachable API is retried after ``retry_delay``, doubling up to 5 s. ``max_wait_time``: the longest wait for a
    batch, replaced by ``join_timeout`` if the run starts no environments and others join (``joined``).
    """

    api_url: str
    timeout: float = 30.0
    retry_attempts: int = 10
    retry_delay: float = 0.5
    max_wait_time: float = 600.0
    join_timeout: float = 86400.0
    joined: bool = False
    prefetch: int = 1

    @classmethod
    def from_config(cls, config: Any) -> "DataSourceConfig":
        """Build from the full configuration."""
        values = config.trainer.atropos
        own = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**own, joined=config.environment.target is None and not config.environments)

    @property
    def longest_wait(self) -> tuple[str, float]:
        """Name and value, in seconds, of the option that limits the wait for a batch."""
        name = "join_timeout" if self.joined else "max_wait_time"
        return name, getattr(self, name)


@dataclass(frozen=True)
class Registration:
    """What a trainer sends to ``POST /register``. ``batch_size`` is in sequences, ``max_token_len`` in tokens."""

    batch_size: int
    max_token_len: int
    starting_step: int
    num_steps: int
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    wandb_group: str = ""
    wandb_project: str = ""

    @classmethod
    def from_config(cls, config: Any, starting_step: int) -> "Registration":
        """Build from the full configuration; ``starting_step`` is the number of updates so far."""
        data, trainer = config.data, config.trainer
        return cls(
            batch_size=data.train_batch_size * config.actor_rollout_ref.rollout.n,
            max_token_len=data.max_prompt_length + data.max_response_length,
            starting_step=starting_step,
            num_steps=trainer.total_training_steps,
            checkpoint_dir=str(Path(trainer.default_local_dir).resolve()),
            save_checkpoint_interval=trainer.save_freq,
            wandb_group=trainer.experiment_name,
            wandb_project=trainer.project_name,
        )


@dataclass
class DataSource:
    """Source of batches that fetches in its own thread; the trainer's thread calls ``next_batch``.

    Use as a context manager: entering registers and starts fetching, leaving stops the thread. The API admits
    environments at the first fetch, so enter only once the servers hold the weights of ``starting_step``.

    ``events`` counts recovered failures: api_unreachable, batch_lost, registered_again. ``fetch_seconds`` is the time
    spent receiving batches, in parallel to training; ``groups_fetched`` is the number of groups received.
    """

    config: DataSourceConfig
    registration: Registration
    events: Counter[str] = field(default_factory=Counter)
    fetch_seconds: float = 0.0
    groups_fetched: int = 0

    def __post_init__(self) -> None:
        self._ready: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopping = False
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atropos-data-source", daemon=True)
        self._api_step = self.registration.starting_step
        self._left_of_cut = 0  # batches of a cut that the API has not served yet

    def __enter__(self) -> "DataSource":
        self._thread.start()
        self._registered.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=_END_SECONDS)

    def __len__(self) -> int:
        """Return the number of batches fetched but not yet returned."""
        return len(self._ready)

    def next_batch(self, meanwhile: Callable[[], object] | None = None) -> Batch:
        """Return the oldest batch as soon as there is one.

        ``meanwhile`` is called every few seconds of the wait; its own duration does not count as waiting.

        Raises:
            DataSourceError: none arrived within ``longest_wait``, or the API failed; names what does not respond.
        """
        option, limit = self.config.longest_wait
        deadline = time.monotonic() + limit
        while (remaining := deadline - time.monotonic()) > 0:
            if (batch := self._take(min(remaining, _MEANWHILE_SECONDS))) is not None:
                return batch
            if meanwhile is not None:
                begun = time.monotonic()
                meanwhile()
                deadline += time.monotonic() - begun
        raise DataSourceError(
            f"no batch of {self.registration.batch_size} sequences within trainer.atropos.{option}={limit:g} s: "
            f"{asyncio.run(diagnose(self.config.api_url, self.registration.batch_size))}"
        )

    def _take(self, seconds: float) -> Batch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None, timeout=seconds)
            if not self._ready:
                if self._error is not None:
                    raise self._error
                return None
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def _run(self) -> None:
        try:
            asyncio.run(self._fetch_forever())
        except BaseException as error:  # passed to the trainer's thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._registered.set()

    async def _fetch_forever(self) -> None:
        async with TrajectoryApi(self.config, self.events) as api:
            self._api_step = await register(api, self.registration)
            self._registered.set()
            while await asyncio.to_thread(self._wait_for_room):
                if cut := await self._next_cut(api):
                    with self._changed:
                        self._ready.extend(cut)
                        self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Block while ``prefetch`` batches are ready; return False if the source is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or len(self._ready) < self.config.prefetch)
            return not self._stopping

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
        self.groups_fetched += len(reply["batch"])
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

    @classmethod
    def once(cls, url: str, timeout: float = 10.0) -> "TrajectoryApi":
        """Return a client that makes a single attempt of ``timeout`` seconds."""
        return cls(DataSourceConfig(url, timeout=timeout, retry_attempts=1))

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
            wait=wait_exponential(config.retry_delay, max=_LONGEST_DELAY),
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
        async with TrajectoryApi.once(api_url) as api:
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
