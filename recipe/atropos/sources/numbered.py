"""Source of the trainer's batches: registers at the Trajectory API, prefetches numbered batches, acknowledges them.

Guarantees:

- ``next_batch`` returns batches in the order of their numbers, each once; what is fetched ahead, or lost with this
  process, is served again to the next that registers with the number of its last batch.
- At most ``prefetch`` batches are held here.
- Every wait has a limit: ``retry_attempts`` for an API that has not answered yet, ``max_wait_time`` for one that has
  and is silent, ``longest_wait`` for a batch, and for an API that says that it cannot store. The error names the
  component that does not respond, and what the API lacks for a batch.
- While this process lives, the API knows it, however long a step takes.
- No wait of the trainer's thread is silent: ``meanwhile`` is called every few seconds, and the client logs every
  attempt that got no answer, with the reason. Whatever ends the fetching thread, or what it does beside fetching, is
  raised there.

This module does not handle tensors; ``data_proto`` does. ``stock_source`` reads from atroposlib's own server.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from recipe.atropos.data.scored_group import Group
from recipe.atropos.errors import AtroposError
from recipe.atropos.trajectory_api.client import LONGEST_PAUSE, NumberedBatch, TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.trajectory_api.endpoints import Registration

Batch = Sequence[Group]

_POLL_SECONDS = 5.0  # of one long poll: closing waits for it
_END_SECONDS = 5.0  # for a request in flight when the source is closed
_HEARTBEAT_SECONDS = 60.0  # between two; the API treats a trainer as gone after 600
_MEANWHILE_SECONDS = 2.0  # of waiting before the trainer checks its servers, or shows that it waits


class DataSourceError(AtroposError, RuntimeError):
    """The Trajectory API cannot be used, or no batch arrived in time; the message says what was waited for."""


@dataclass(frozen=True)
class DataSourceConfig:
    """Where the Trajectory API is and how long to wait for it. Times are in seconds.

    ``timeout``: for one request, beyond the time that the API may take for it. ``retry_attempts`` and ``retry_delay``:
    an API that has not answered yet is retried after ``retry_delay``, doubling up to 5 s. ``max_wait_time``: the
    longest wait for an API that has, and for a batch; for a batch, it is replaced by ``join_timeout`` if the run starts
    no environments and others join (``joined``). ``secret``: that of the API. ``max_staleness``: the API lets no group
    begin that would be older when it is trained on.
    """

    api_url: str
    timeout: float = 30.0
    retry_attempts: int = 10
    retry_delay: float = 0.5
    max_wait_time: float = 600.0
    join_timeout: float = 86400.0
    joined: bool = False
    prefetch: int = 1
    max_staleness: int | None = None
    secret: str | None = field(default=None, repr=False)

    @classmethod
    def from_config(cls, config: Any) -> "DataSourceConfig":
        """Build from the full configuration."""
        values = config.trainer.atropos
        own = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        starts = (config.environment[key] for key in ("target", "command", "agent"))
        joined = not (any(starts) or config.environments)
        return cls(**own, joined=joined, secret=config.inference.api_key)

    @property
    def longest_wait(self) -> tuple[str, float]:
        """Name and value, in seconds, of the option that limits the wait for a batch."""
        name = "join_timeout" if self.joined else "max_wait_time"
        return name, getattr(self, name)

    @property
    def retry_timeout(self) -> float:
        """Seconds in which an API that refuses connections is tried ``retry_attempts`` times."""
        return sum(min(self.retry_delay * 2**i, LONGEST_PAUSE) for i in range(self.retry_attempts - 1))

    def client(self) -> TrajectoryApiClient:
        held = self.longest_wait[1]
        return TrajectoryApiClient(
            self.api_url, self.secret, self.retry_timeout, self.timeout, held, first_pause=self.retry_delay
        )


def registration_of(config: Any, starting_step: int) -> Registration:
    """Return the trainer's registration; ``config`` is the full one, ``starting_step`` the number of updates so far."""
    data, trainer = config.data, config.trainer
    return Registration(
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
    """Source of batches that fetches in its own thread; the trainer's thread calls the public methods.

    Use as a context manager: entering registers and starts fetching, leaving stops the thread. The API admits
    environments at the first fetch, so enter only once the servers hold the weights of ``starting_step``.

    ``after`` is the number of the last batch in the weights. ``events`` counts recovered failures: api_unreachable.
    ``meanwhile`` is called every few seconds while the API is slow to take a message, and returns whether to wait on.
    """

    config: DataSourceConfig
    registration: Registration
    after: int = 0
    events: Counter[str] = field(default_factory=Counter)
    meanwhile: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._ready: deque[NumberedBatch] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopping = False
        self._training = False  # whether the trainer has a batch; for the API
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atropos-data-source", daemon=True)

    def __enter__(self) -> "DataSource":
        self._thread.start()
        while not self._registered.wait(_MEANWHILE_SECONDS):
            self.meanwhile()
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

    def next_batch(self, meanwhile: Callable[[], object] | None = None) -> NumberedBatch:
        """Return the next batch as soon as there is one.

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
            f"{asyncio.run(self.diagnosis())}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the number of batches fetched ahead, and the recovered failures."""
        events = {f"atropos/api/{event}": n for event, n in self.events.items() if n}
        return {"atropos/batches_ahead": len(self), **events}

    def weights_pushed(self, through: int) -> None:
        """Tell the API that the servers hold weights that contain the batches through ``through``."""
        self._call("/weights", through=through)

    def batch_is_empty(self, number: int) -> None:
        """Tell the API that nothing of a batch can be trained on, so that environments may go on without an update."""
        self._call("/empty", number=number)

    def commit(self, through: int) -> None:
        """Tell the API that no batch through ``through`` will be asked for again: checkpoints contain them."""
        self._call("/commit", through=through)

    def _call(self, path: str, **message: int) -> None:
        """Post a message by the client, in its thread; raise DataSourceError if the API refuses or is silent."""
        try:
            if self._error is None:
                future = asyncio.run_coroutine_threadsafe(self._client.call("POST", path, message), self._loop)
                while not wait([future], _MEANWHILE_SECONDS).done and self._thread.is_alive():
                    if not self.meanwhile():
                        return
                future.result(0)
                return
        except TrajectoryApiError as error:
            raise self._unusable(error) from error
        except (TimeoutError, CancelledError, RuntimeError) as error:  # the last two: fetching has ended meanwhile
            if self._error is None:
                raise DataSourceError(f"the Trajectory API at {self.config.api_url} is silent: {error!r}") from error
        raise self._error

    def _unusable(self, error: TrajectoryApiError) -> DataSourceError:
        if error.status is None and self._registered.is_set():
            return DataSourceError(f"{error} (trainer.atropos.max_wait_time={self.config.max_wait_time:g} s)")
        return DataSourceError(str(error))

    async def diagnosis(self) -> str:
        """Return a sentence on why no batch arrives."""
        try:
            config = self.config
            async with TrajectoryApiClient(config.api_url, config.secret, retry_timeout=0.0, timeout=10.0) as api:
                return await self._why(api)
        except TrajectoryApiError as error:
            return f"the Trajectory API is silent ({error})"

    async def _why(self, api: TrajectoryApiClient) -> str:
        return (await api.diagnose())["why"]

    def _take(self, seconds: float) -> NumberedBatch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None, timeout=seconds)
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            self._training = False
            return None

    def _run(self) -> None:
        """Fetch in a thread of its own; what ends it is raised in the trainer's."""
        try:
            asyncio.run(self._fetch_forever())
        except BaseException as error:
            with self._changed:
                self._error = self._unusable(error) if isinstance(error, TrajectoryApiError) else error
                self._changed.notify_all()
        finally:
            self._registered.set()

    async def _fetch_forever(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self.config.client() as self._client:
            await self._client.register(msgspec.to_builtins(self.registration), self.after, self.config.max_staleness)
            self._registered.set()
            self._client.retry_timeout = max(self.config.retry_timeout, self.config.max_wait_time)
            after = self.after
            while not self._stopping:
                if await asyncio.to_thread(self._wait_for_room):
                    batch = await self._client.batch(after, wait=_POLL_SECONDS, prefetch=self._training)
                    self.events["api_unreachable"] = self._client.again
                    if batch is not None:
                        after = batch.number
                        self._add([batch])
                elif not self._stopping:
                    with contextlib.suppress(TrajectoryApiError):  # the next request that matters says so
                        await self._client.status()  # a heartbeat: nothing is fetched while a step takes long

    def _add(self, batches: list[NumberedBatch]) -> None:
        with self._changed:
            self._ready.extend(batches)
            self._training = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait while ``prefetch`` batches are ready, for ``_HEARTBEAT_SECONDS``; return whether another is wanted."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or len(self._ready) < self.config.prefetch, _HEARTBEAT_SECONDS
            )
            return not self._stopping and len(self._ready) < self.config.prefetch
