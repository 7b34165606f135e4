"""Replacement for BaseEnv that survives restarts of the Trajectory API, and counts whatever is lost.

It follows the environment in the MRO, so the environment's own overrides still apply.

- The Trajectory API may start late, or die and come back empty: the environment waits for it (``api_timeout``, and
  ``trainer_timeout`` for the trainer, without which the API registers no environment), logs every minute what it waits
  for, and registers again. An API that only answered late needs no new registration; one that refuses connections, or
  no longer knows the environment, was restarted. Its queue is then lost, and counted as ``lost_with_api``.
- A group stays in its worker until the API has taken it, and is posted again after a failure. So at most as many groups
  wait as there are workers, nothing new starts meanwhile, and groups keep the order that ``Paced`` gives them. Nothing
  is posted to an API that has not registered the environment: it would then reject the trainer. A POST without an
  answer is sent again after a minute, although the API may have taken it.
- Groups that the API refuses (4xx, or 5xx repeatedly) are counted as ``not_sent/http_STATUS``, those that it did not
  take in time as ``not_sent/api_unreachable``, and those that it holds back because their size differs from the
  environment's group size as ``buffered``.
- An item whose rollout fails keeps its slot and is retried after each of ``retry_seconds``, then counted as
  ``failed/EXCEPTION``. So is an item that exceeds ``worker_timeout``; that time ends when sending starts.
- SGLang servers get no health-check completions: a call's own retries handle a server that is down.
- The API identifies a registration only by its number, which is needed to remove that of a killed process. The report
  therefore has a line ``{"time", "env", "pid", "registered": NUMBER}``.
"""

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Sequence
from typing import Any

import aiohttp
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from tenacity import RetryError

from recipe.atropos.adapter.api_client import ApiRefused, Deadline, ask, compressed, refuses_connections
from recipe.atropos.adapter.compatibility import check_sizes
from recipe.atropos.adapter.recorded_calls import sglang_servers
from recipe.atropos.adapter.reporting import EnvReport
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.adapter.validate import to_json
from recipe.atropos.data.reasons import Reason
from recipe.atropos.errors import EnvironmentFailure

logger = logging.getLogger(__name__)

_SERVER_ERRORS = 5  # 5xx responses to one POST before giving up
_REFUSALS = 3  # refused status requests, despite new registrations, before the environment ends
_LONGEST_POST = 60.0  # s until an unanswered POST is sent again
_LONGEST_PAUSE = 10.0  # s, at most, between two POSTs of one group


class Durable(BaseEnv):
    """``BaseEnv`` that survives restarts of the Trajectory API; see the module docstring."""

    adapter_settings = AdapterSettings()
    report: EnvReport  # set by AdaptedEnv
    api_timeout = 300.0  # s without an answer from the API, until the environment ends
    trainer_timeout = 3600.0  # s without a trainer
    retry_seconds = (1.0, 3.0, 9.0)  # before the second, third and fourth attempt at an item

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__in_contact = asyncio.Event()  # if cleared, register again before anything else
        self.__in_contact.set()
        self.__logged: set[tuple[str, ...]] = set()  # kinds of failures whose traceback was logged
        for server in sglang_servers(self.server):
            server.config.health_check = False

    # ------------------------------------------------------------------ the Trajectory API

    async def __ask(self, method: str, path: str, payload: Any = None) -> Any:
        """Return the API's response, once there is one; raise ApiRefused if it is an error."""
        url = f"{self.config.rollout_server_url}{path}"
        deadline = Deadline(self.api_timeout)
        while True:
            try:
                return await ask(method, url, payload)
            except aiohttp.InvalidURL as error:
                raise EnvironmentFailure(
                    f"--env.rollout_server_url={url}: no address; give http://HOST:PORT"
                ) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                self.__note_refused_connection(error)
                await deadline.pause(
                    f"the Trajectory API at {url} does not answer ({_describe(error)}); is run-api up?"
                )

    def __note_refused_connection(self, error: Exception) -> None:
        if refuses_connections(error) and hasattr(self, "env_id"):
            self.__lose_contact("refuses connections")

    def __lose_contact(self, how: str) -> None:
        if self.__in_contact.is_set():
            self.__in_contact.clear()
            queued = getattr(self, "status_dict", {}).get("self_queue_size", 0)
            self.report.count("api_lost")
            self.report.count("lost_with_api", queued)
            what = "%s: the Trajectory API %s; about %d groups in its queue are lost; will register again"
            logger.warning(what, self.report.name, how, queued)

    async def _register_env(self) -> dict[str, Any]:
        """Register with the API, waiting until it accepts, and return its response."""
        name = self.config.wandb_name or self.report.name
        deadline = Deadline(self.trainer_timeout)
        while True:
            registration = {
                "max_token_length": self.config.max_token_length,
                "desired_name": name,
                "weight": self.config.inference_weight,
                "min_batch_allocation": self.config.min_batch_allocation,
                "group_size": self.config.group_size,
            }
            what = "a registration at the Trajectory API"
            try:
                answer = await self.__ask("POST", "/register-env", registration)
                if answer["status"] == "success":
                    return answer
                what = f"{what}, which says {answer['status']!r}"
            except ApiRefused as error:
                if error.status < 500:
                    raise EnvironmentFailure(f"{what} of {registration} was refused: {error}") from error
                what = f"{what}, which answered {error}"
            await deadline.pause(f"{self.report.name} waits for {what}")

    async def register_env(self) -> None:
        """Register, or register again, under the same name and without loading a checkpoint: the state is newer."""
        if hasattr(self, "env_id"):
            self.env_id = (await self._register_env())["env_id"]
            self.report.count("registered_again")
            logger.warning("%s: registered again, as number %d", self.report.name, self.env_id)
        else:
            await super().register_env()
        self.__in_contact.set()

    async def setup_wandb(self) -> None:
        if self.config.use_wandb:
            deadline = Deadline(self.trainer_timeout)
            while (await self.__ask("GET", "/wandb_info"))["project"] is None:
                await deadline.pause(f"{self.report.name} waits for a trainer to name the wandb project")
        await super().setup_wandb()

    async def get_server_info(self) -> None:
        """Adopt the trainer's batch size and maximum length.

        Raises:
            EnvironmentFailure: the environment's own sizes do not fit them.
        """
        info = await self.__ask("GET", "/info")
        if info["batch_size"] != -1:
            self.config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self.max_token_len = info["max_token_len"]
        check_sizes(
            self.config.group_size,
            self.config.max_token_length,
            self.config.batch_size,
            self.max_token_len,
            self.config.rollout_server_url,
        )

    async def _fetch_status(self) -> None:
        """Get the API's status, and set how many items may be in flight."""
        status, refusals = None, 0
        while status is None:
            if not self.__in_contact.is_set():
                await self.register_env()
                await self.get_server_info()
            try:
                status = await self.__ask("GET", "/status-env", {"env_id": self.env_id})
            except ApiRefused as error:
                refusals += 1
                if refusals == _REFUSALS:
                    raise EnvironmentFailure(
                        f"{self.report.name}: the Trajectory API answers {error}, again and again, to an environment "
                        f"that has just registered; is --env.inference_weight={self.config.inference_weight} positive?"
                    ) from error
                self.__lose_contact(f"does not know environment {self.env_id} ({error})")
            if not self.__in_contact.is_set():
                status = None  # the answer may be from before the API's restart
        self.status_dict = status
        self.max_num_workers = self.config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = self.config.max_num_workers_per_node * len(self.server.servers)
            if self.config.max_num_workers_per_node == BaseEnvConfig().max_num_workers_per_node:
                self.max_num_workers = self.adapter_settings.groups_in_flight or self.max_num_workers
        await self.server.update_weight(status["env_weight"])

    async def _disconnect(self) -> None:
        if hasattr(self, "env_id") and self.__in_contact.is_set():
            url = f"{self.config.rollout_server_url}/disconnect-env"
            await ask("POST", url, {"env_id": self.env_id})

    # ------------------------------------------------------------------ items

    async def handle_env(self, item_uuid: str) -> Any:
        """Roll out an item, with retries, and send the groups that result."""
        running = self.running_items.get(item_uuid)
        if running is None:
            return None
        item, begun = running["item"], time.time()
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
        self.running_items.pop(item_uuid, None)  # not earlier: if this worker is cancelled, its item starts again
        self.report.count("items")
        try:
            cleanup = self.cleanup()
            if inspect.isawaitable(cleanup):
                await cleanup
        except Exception as error:
            self._count_failure("cleanup", error)
        return groups

    async def __roll_out(self, item: Any) -> Any:
        """Return what is to be sent for an item; None if there is nothing, with the reason counted."""
        for pause in (*self.retry_seconds, None):
            backlog: Sequence[Any] = ()
            stage = "collect_trajectories"
            try:
                groups, backlog = await _not_cancelled(self.collect_trajectories(item))
                backlog = backlog or ()
                stage = "postprocess_histories"
                if groups:
                    groups = await _not_cancelled(self.postprocess_histories(groups))
            except Exception as error:
                if pause is not None:
                    self.__log_once(stage, error)
                    self.report.count(f"retried/{type(_cause(error)).__name__}")
                    await asyncio.sleep(pause)
                    continue
                self._count_failure(stage, error)
                groups = None
            else:
                if not groups and not backlog:
                    self.report.refuse(Reason.NO_GROUP, f"{stage}() gave none for item {str(item)[:200]}")
            self.backlog.extend(backlog)
            return groups or None

    def _count_failure(self, stage: str, error: Exception) -> None:
        self.__log_once(stage, error)
        self.report.count(f"failed/{type(_cause(error)).__name__}")

    def __log_once(self, stage: str, error: Exception) -> None:
        """Log the first failure of a kind with its traceback; a kind is an exception, and the line that raised it."""
        cause = _cause(error)
        frames = traceback.extract_tb(cause.__traceback__)
        kind = (stage, type(cause).__name__, str(frames[-1]) if frames else "")
        if kind not in self.__logged:
            self.__logged.add(kind)
            logger.error("%s: %s failed: %r", self.report.name, stage, cause, exc_info=cause)

    async def env_step_checks(self) -> None:
        before = self.eval_runner
        await super().env_step_checks()
        if self.eval_runner is not before:
            self.eval_runner.add_done_callback(self.__evaluation_ended)

    def __evaluation_ended(self, evaluation: asyncio.Task) -> None:
        if not evaluation.cancelled() and evaluation.exception() is not None:
            self._count_failure("evaluate", evaluation.exception())

    # ------------------------------------------------------------------ groups

    async def _post(self, groups: list[Any], several: bool) -> bool:
        """Post groups, with retries; return whether the API has taken them. ``several``: post a list."""
        path, payload = ("/scored_data_list", groups) if several else ("/scored_data", groups[0])
        tries = server_errors = 0
        waited = 0.0  # s, not counting waits for a registration
        while True:
            try:
                await asyncio.wait_for(self.__in_contact.wait(), self.trainer_timeout)
            except TimeoutError:
                return self.__give_up(groups, "api_unreachable", "not registered again")
            url = f"{self.config.rollout_server_url}{path}"
            for group in groups:
                group["env_id"] = getattr(self, "env_id", None)
            begun = time.monotonic()
            body, headers = compressed(to_json(payload))
            try:
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_LONGEST_POST)) as session,
                    session.post(url, data=body, headers=headers) as reply,
                ):
                    status, text = reply.status, await reply.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.__note_refused_connection(error)
                reason, detail = "api_unreachable", _describe(error)
            else:
                if status < 400:
                    self.report.count("groups_sent", len(groups))
                    if '"buffered"' in text:
                        self.report.count("buffered", len(groups))
                    return True
                reason, detail = f"http_{status}", text[:300]
                server_errors += 1
                if status < 500 or server_errors == _SERVER_ERRORS:
                    return self.__give_up(groups, reason, detail)
            tries += 1
            pause = min(2.0 ** (tries - 1), _LONGEST_PAUSE)
            waited += time.monotonic() - begun + pause
            if waited > self.api_timeout:
                return self.__give_up(groups, reason, detail)
            self.report.count("posted_again", len(groups))
            await asyncio.sleep(pause)

    def __give_up(self, groups: list[Any], reason: str, detail: str) -> bool:
        for _ in groups:
            self.report.refuse(reason, detail)
        return False


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _not_cancelled(work: Awaitable[Any]) -> Any:
    """Await ``work``; if a task that it awaits was cancelled, rather than the current task, raise RuntimeError."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():
            raise
        raise RuntimeError("it waited for a task of its own that was cancelled") from error


def _cause(error: BaseException) -> BaseException:
    """Return the error inside tenacity's and asyncio's wrappers."""
    while True:
        if isinstance(error, RetryError) and error.last_attempt.exception() is not None:
            error = error.last_attempt.exception()
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            return error
