"""Replacement for ``BaseEnv`` as an environment's base class: how it speaks to the Trajectory API, and starts items.

It follows the environment in the MRO, so the environment's own overrides still apply.

- An item whose rollout fails keeps its worker and is retried after each of ``retry_seconds``, then counted as
  ``failed/EXCEPTION``. So is an item that exceeds ``worker_timeout``; that time ends when sending starts. The first
  failure of each kind is logged with its traceback.
- If a worker is canceled, its item stays in ``running_items``, so that whoever cancels it can start it again.
- SGLang servers get no health completions: a call's own retries handle a server that is down.
- An item starts only with a ticket. Its post closes the ticket; otherwise the ticket is released with the reason that
  ``report`` counts, "cancelled" where the item starts again, or "nothing_posted". The API cuts batches in the order of
  the tickets and issues none beyond the staleness bound: see ``trajectory_api.batching`` for what it guarantees.
- While it sends nothing, items start more and more slowly: ``EnvReport.pause``.
- Nothing that runs is canceled because a queue is full. ``max_num_workers`` limits what runs at once. Without a
  staleness bound, nothing starts beyond the ``max_batches_offpolicy`` batches that are queued or begun.
- Waiting for a ticket holds up neither evaluation nor reports. What the API says it waits for is logged every minute;
  after ``longest_wait`` (and ``worker_timeout``) the environment ends with that message.
- Every request is sent again for ``api_timeout``, and for ``longest_wait`` while the API says that its disk is full;
  then the environment ends. It waits ``trainer_timeout`` for a
  trainer, without which the API registers no environment. An API that does not know the environment (its store
  was replaced) gets a new registration; what runs then starts again.
- Groups that the API refuses are counted as ``not_sent/REASON``, those that it did not take in time as
  ``not_sent/api_unreachable``.
- It needs our API: atroposlib's own issues no tickets, and loses what it holds.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
import traceback
import uuid
from collections import deque
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import wandb
from atroposlib.envs.base import BaseEnv, BaseEnvConfig, EvalHandlingEnum
from tenacity import AsyncRetrying, RetryCallState, stop_after_attempt, wait_chain, wait_fixed

from recipe.atropos.adapter.recorded_calls import cause_of, sglang_servers
from recipe.atropos.adapter.replicas import checkpoint_name
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.adapter.validate import as_groups, size_of
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.run.reporting import PLACE, EnvReport, Place
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.tasks import awaited, guarded

logger = logging.getLogger(__name__)

_LONG_POLL, _SAY_AGAIN = 10.0, 60.0  # s
_ITEMS = 16


class Deadline:
    """A wait of at most ``limit`` seconds, which logs every minute, from ``quiet`` seconds on, what it waits for."""

    def __init__(self, limit: float, quiet: float = 0.0):
        self.limit, self._begun = limit, time.monotonic()
        self._next_log = self._begun + quiet

    async def pause(self, what: str, seconds: float = 1.0) -> None:
        """Sleep; raise EnvironmentFailure, with ``what``, once ``limit`` seconds have passed in total."""
        now = time.monotonic()
        waited = now - self._begun
        if waited > self.limit:
            raise EnvironmentFailure(f"after {waited:.0f} s: {what}")
        if now >= self._next_log:
            logger.warning("%s; %.0f s so far, of at most %.0f", what, waited, self.limit)
            self._next_log = now + _SAY_AGAIN
        await asyncio.sleep(seconds)


def check_sizes(config: BaseEnvConfig, max_token_len: int, api_url: str) -> None:
    """Check an environment's group size and length (tokens) against what the trainer told the Trajectory API, its
    ``config.batch_size`` and ``max_token_len``; -1 means unknown, and passes.

    Raises:
        EnvironmentFailure: a group is larger than a batch, or sequences may be longer than the trainer accepts.
    """
    group_size, batch_size = config.group_size, config.batch_size
    if 0 < batch_size < group_size:
        raise EnvironmentFailure(
            f"--env.group_size={group_size}: the trainer's batch has {batch_size} sequences (from {api_url}); give at "
            "most as many, or change the trainer's batch"
        )
    if 0 < max_token_len < config.max_token_length:
        raise EnvironmentFailure(
            f"--env.max_token_length={config.max_token_length} is more than the {max_token_len} tokens that the "
            f"trainer takes (from {api_url}): longer sequences would be dropped; give --env.max_token_length="
            f"{max_token_len}, or raise the trainer's prompt and response lengths"
        )


class PostingEnv(BaseEnv):
    """``BaseEnv`` on a Trajectory API with tickets; see the module docstring."""

    adapter_settings = AdapterSettings()
    report: EnvReport  # set by AdaptedEnv
    retry_seconds = (1.0, 3.0, 9.0)  # before the second, third and fourth attempt at an item
    api_timeout = 300.0  # s without an answer from the API, until the environment ends
    trainer_timeout = 3600.0  # s without a trainer
    longest_wait = 3600.0  # s without a ticket
    _most_items = math.inf  # in flight, where an environment knows that more would only wait

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for server in sglang_servers(self.server):
            server.config.health_check = False
        self.__logged: set[tuple[str, ...]] = set()  # kinds of failures whose traceback was logged
        self.__client: TrajectoryApiClient | None = None
        self.__starting: asyncio.Task | None = None  # starts items while there is room for workers
        self.__releases: set[asyncio.Task] = set()
        # Of the latest items; a ticket is for the most of them, since a larger group would make others late.
        self.__sequences = deque([self.config.group_size], maxlen=_ITEMS)

    # ------------------------------------------------------------------ registration

    async def _api(self) -> TrajectoryApiClient:
        """Return the client, which is connected at the first call."""
        if self.__client is not None:
            return self.__client
        url = self.config.rollout_server_url
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise EnvironmentFailure(f"--env.rollout_server_url={url}: no address; give http://HOST:PORT")
        keys = [os.environ.get(API_KEY_VARIABLE), *(server.config.api_key for server in sglang_servers(self.server))]
        secret = next((key for key in keys if key), None)
        secret = None if secret in ("x", "none") else secret
        client = TrajectoryApiClient(url, secret, self.api_timeout, held=self.longest_wait)
        try:
            await (await client.__aenter__()).diagnose()
        except TrajectoryApiError as error:
            await client.__aexit__()
            if error.status == 401:
                raise EnvironmentFailure(f"{error}; set ${API_KEY_VARIABLE} to its secret") from error
            if error.status not in (404, 405):
                raise
            raise EnvironmentFailure(
                f"--env.rollout_server_url={url}: it is atroposlib's run-api, which issues no tickets and loses what "
                "it holds; start python -m recipe.atropos.trajectory_api there, which speaks the same protocol"
            ) from error
        self.__client = client
        return client

    async def _register_env(self) -> dict[str, Any]:
        """Register with the API, waiting until it accepts, and return its response."""
        settings, name = self.adapter_settings, self.config.wandb_name or self.report.name
        registration = {
            "max_token_length": self.config.max_token_length,
            "desired_name": name,
            "weight": self.config.inference_weight,
            "min_batch_allocation": self.config.min_batch_allocation,
            "group_size": self.config.group_size,
            "replica": settings.replica if settings.replicas > 1 else None,
        }
        deadline = Deadline(self.trainer_timeout)
        while True:
            try:
                answer = await (await self._api()).register_env(registration)
            except TrajectoryApiError as error:
                if error.status is None:
                    raise
                raise EnvironmentFailure(f"{self.report.name} registers as {registration}: {error}") from error
            if answer["status"] == "success":  # the API's name counts registrations, so a restart would have another
                return answer | ({} if settings.replica is None else {"wandb_name": checkpoint_name(name, settings)})
            await deadline.pause(
                f"{self.report.name} waits for a registration at the Trajectory API, which says {answer['status']!r}"
            )

    async def __register_again(self) -> None:
        """Register under a new number, without loading a checkpoint: the state is newer. What runs starts again."""
        self.env_id = (await self._register_env())["env_id"]
        self.report.count("registered_again")
        logger.warning("%s: registered again, as number %d", self.report.name, self.env_id)
        await self.get_server_info()
        self.backlog.extend(running["item"] for running in self.running_items.values())  # their tickets are unknown
        for worker in self.workers:
            worker.cancel()
        self.running_items, self.workers = {}, set()

    async def setup_wandb(self) -> None:
        """Join the trainer's wandb group; BaseEnv's would ask the API without a secret."""
        if not self.config.use_wandb:
            return
        deadline = Deadline(self.trainer_timeout)
        while (info := await (await self._api()).call("GET", "/wandb_info"))["project"] is None:
            await deadline.pause(f"{self.report.name} waits for a trainer to name the wandb project")
        self.wandb_group, self.wandb_project = info["group"], info["project"]
        name = self.config.wandb_name and f"{self.config.wandb_name}-{time.strftime('%Y-%m-%d')}-{uuid.uuid4().hex[:6]}"
        wandb.init(name=name, project=info["project"], group=info["group"], config=self.config.model_dump())

    async def get_server_info(self) -> None:
        """Adopt the trainer's batch size and maximum length.

        Raises:
            EnvironmentFailure: the environment's own sizes do not fit them.
        """
        api = await self._api()
        info = await api.call("GET", "/info")
        if info["batch_size"] != -1:
            self.config.batch_size = info["batch_size"]
        if info["max_token_len"] > 0:
            self.max_token_len = info["max_token_len"] + 1  # BaseEnv drops groups with a sequence of as many tokens
        check_sizes(self.config, info["max_token_len"], api.url)

    async def get_status(self) -> None:
        """Get the API's status, and set how many items may be in flight."""
        api = await self._api()
        try:
            status = await api.status(self.env_id)
        except TrajectoryApiError as error:
            if error.status != 404:
                raise
            await self.__register_again()
            status = await api.status(self.env_id)
        if api.again:
            self.report.counts["sent_again"] = api.again
        self._set_max_num_workers()
        await self.server.update_weight(status["env_weight"])
        self.status_dict = status | {"queue_size": 0}  # or BaseEnv's backpressure would cancel workers

    def _set_max_num_workers(self) -> None:
        self.max_num_workers = self.config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = self.config.max_num_workers_per_node * len(self.server.servers)
            if self.config.max_num_workers_per_node == BaseEnvConfig().max_num_workers_per_node:
                self.max_num_workers = self.adapter_settings.groups_in_flight or self.max_num_workers
        self.max_num_workers = min(self.max_num_workers, self._most_items)

    async def _disconnect(self, reason: str = "") -> None:
        """Leave the API, which then releases all tickets that are open; ``reason``: "" if nothing is wrong."""
        client, self.__client = self.__client, None
        if client is not None:
            try:
                if hasattr(self, "env_id"):
                    await client.disconnect_env(self.env_id, reason)
            finally:
                await client.__aexit__()

    # ------------------------------------------------------------------ items and their tickets

    def _stop_items(self) -> None:
        """Cancel running items; start no more."""
        for task in filter(None, (self.__starting, *self.workers, *self.eval_workers)):
            task.cancel()

    async def add_train_workers(self) -> None:
        """Let items start in a task of their own, since waiting for a ticket must not hold up the manager."""
        if self.__starting is None or self.__starting.done():
            if self.__starting is not None:
                self.__starting.result()
            self.__starting = asyncio.create_task(self.__start_items(await self._api()))

    def __has_room(self, more: int = 0) -> bool:
        """Whether an item may start, and after it ``more`` others."""
        limit, config = self.max_num_workers, self.config
        if self.eval_runner is not None and not self.eval_runner.done():
            if config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
                return False
            if config.eval_handling == EvalHandlingEnum.LIMIT_TRAIN:
                limit = int(limit * config.eval_limit_ratio)
        return len(self.workers) + more < limit

    async def __start_items(self, api: TrajectoryApiClient) -> None:
        while self.__has_room():
            begun = time.monotonic()
            while time.monotonic() - begun < self.report.pause:  # which the first group ends
                await asyncio.sleep(min(1.0, self.report.pause))
            if not self.backlog:
                if (item := await self.get_next_item()) is None:
                    return
                self.backlog.append(item)  # while it waits, for checkpoints
            ticket = await self.__ticket(api)
            if ticket is None:
                return
            item = self.backlog.pop()
            item_uuid, place = str(uuid.uuid4()), Place(self.env_id, ticket)
            token = PLACE.set(place)  # of the context that the task copies
            worker = asyncio.create_task(self.handle_env(item_uuid))
            PLACE.reset(token)
            self.running_items[item_uuid] = {"item": item, "worker": worker, "start_time": time.time()}
            self.workers.add(worker)
            # A callback, since a worker that is canceled before its first step never runs.
            worker.add_done_callback(partial(self.__worker_ended, item, place))

    async def __ticket(self, api: TrajectoryApiClient) -> int | None:
        """Return a ticket; None if there is no longer room, or the API no longer knows the environment.

        Raises:
            EnvironmentFailure: there was none for too long.
        """
        limit = max(self.longest_wait, self.config.worker_timeout)
        deadline = Deadline(limit, quiet=_SAY_AGAIN)
        sequences, ahead = min(max(self.__sequences), self.config.batch_size), max(1, self.config.max_batches_offpolicy)
        while self.__has_room():
            try:
                more = self.__has_room(1) and not self.report.pause
                ticket = await api.begin(self.env_id, sequences, min(_LONG_POLL, limit), more, ahead)
            except TrajectoryApiError as error:
                if error.status != 404:
                    raise
                return None
            if ticket is not None:
                if self.__has_room():
                    return ticket
                return await api.release(ticket, "cancelled")  # an evaluation has started meanwhile
            waiting = f"{self.report.name} waits for a ticket: {api.lacking}; {len(self.workers)} items run here"
            await deadline.pause(f"{waiting}; if no environment's do, look into the trainer's log", 0)
        return None

    def __worker_ended(self, item: Any, place: Place, worker: asyncio.Task) -> None:
        self.workers.discard(worker)
        if not worker.cancelled():
            if error := worker.exception():
                logger.error("a worker failed: %r", error)
            elif worker.result():
                self.last_completed_item = item
        if not place.taken and place.env_id == self.env_id:  # not of an earlier registration
            reason = place.reason or ("cancelled" if worker.cancelled() else "nothing_posted")
            release = asyncio.create_task(self.__release(place.ticket, reason, place.detail))
            self.__releases.add(release)
            release.add_done_callback(self.__releases.discard)

    async def __release(self, ticket: int, reason: str, detail: str) -> None:
        if self.__client is not None:  # else it has left, which releases all
            with contextlib.suppress(TrajectoryApiError):  # the manager's own requests end the environment
                await self.__client.release(ticket, reason, detail)

    # ------------------------------------------------------------------ rollouts

    async def handle_env(self, item_uuid: str) -> Any:
        """Roll out an item, with retries, and send the groups that result."""
        running, begun = self.running_items[item_uuid], time.time()
        item = running["item"]
        try:
            groups = await self.__roll_out(item)
        except asyncio.CancelledError:
            if 0 < self.config.worker_timeout < time.time() - running.get("start_time", begun):
                self.report.count("items")
                self._count_failure("worker", TimeoutError(f"--env.worker_timeout={self.config.worker_timeout:g} s"))
            raise
        duration = max(0.0, time.time() - begun)
        self.task_duration.append(duration)
        self.task_successful.append(int(bool(groups)))
        (self.succeeded_task_duration if groups else self.failed_task_duration).append(duration)
        if groups:
            running["start_time"] = math.inf  # sending has timeouts of its own
            try:
                await self.handle_send_to_api(groups, item)
            except Exception as error:
                self._count_failure("handle_send_to_api", error)
        self.running_items.pop(item_uuid, None)  # not earlier: if this worker is canceled, its item starts again
        self.report.count("items")
        try:
            await awaited(self.cleanup())
        except Exception as error:
            self._count_failure("cleanup", error)
        return groups

    async def __roll_out(self, item: Any) -> Any:
        """Return what is to be sent for an item; None if there is nothing, with the reason counted."""
        stage, groups, backlog, place = "", None, (), PLACE.get()

        def count(state: RetryCallState) -> None:
            error = state.outcome.exception()
            self.__log_once(stage, error)
            self.report.count(f"retried/{type(cause_of(error)).__name__}")

        pauses = [wait_fixed(seconds) for seconds in (*self.retry_seconds, 0)]  # nothing is waited for after the last
        retrying = AsyncRetrying(
            stop=stop_after_attempt(len(pauses)), wait=wait_chain(*pauses), before_sleep=count, reraise=True
        )
        try:
            async for attempt in retrying:
                with attempt:
                    stage, backlog = "collect_trajectories", ()
                    groups, backlog = await guarded(self.collect_trajectories(item))
                    if groups:
                        stage = "postprocess_histories"
                        groups = await guarded(self.postprocess_histories(groups))
        except Exception as error:
            groups = None
            self._count_failure(stage, error)
        else:
            # Else its groups are sent, or refused, within collect_trajectories.
            if not groups and not backlog and not (place and (place.taken or place.reason)):
                self.report.refuse(Reason.NO_GROUP, f"{stage}() gave none for item {str(item)[:200]}")
        self.backlog.extend(backlog or ())
        return groups or None

    def _count_failure(self, stage: str, error: Exception) -> None:
        self.__log_once(stage, error)
        self.report.fail(cause_of(error))

    def __log_once(self, stage: str, error: Exception) -> None:
        """Log the first failure of a kind with its traceback; a kind is an exception, and the line that raised it."""
        cause = cause_of(error)
        frames = traceback.extract_tb(cause.__traceback__)
        kind = (stage, type(cause).__name__, str(frames[-1]) if frames else "")
        if kind not in self.__logged:
            self.__logged.add(kind)
            logger.error("%s: %s failed: %r", self.report.name, stage, cause, exc_info=cause)

    async def env_step_checks(self) -> None:
        before, step, interval = self.eval_runner, self.status_dict["current_step"], self.checkpoint_interval
        if interval > 0 and self.curr_step // interval < step // interval:  # BaseEnv's misses some
            self.save_checkpoint(step // interval * interval)
        await super().env_step_checks()
        if self.eval_runner is not before:
            self.eval_runner.add_done_callback(self.__evaluation_ended)

    def __evaluation_ended(self, evaluation: asyncio.Task) -> None:
        if not evaluation.cancelled() and evaluation.exception() is not None:
            self._count_failure("evaluate", evaluation.exception())

    # ------------------------------------------------------------------ groups

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Post an item's groups, under its ticket if it has one."""
        groups, place = as_groups(scored_data), PLACE.get()
        try:
            await self._post(groups, None if place is None else place.ticket)
        except (RefusedGroup, TrajectoryApiError) as error:
            for _ in groups:
                self.report.refuse(error.reason, str(error))
        except Exception as error:  # BaseEnv would only log it
            self._count_failure("handle_send_to_api", error)
        else:
            self.report.count("groups_sent", len(groups))
            self.__sequences.append(sum(map(size_of, groups)))
            if place is not None:
                place.taken = True

    async def _post(self, groups: list[Any], ticket: int | None) -> None:
        """Post groups; raise RefusedGroup or TrajectoryApiError if the API does not take them."""
        api = await self._api()
        for group in groups:
            group["env_id"] = self.env_id
        await api.post_groups(groups, ticket)
