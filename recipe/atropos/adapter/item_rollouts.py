"""Replacement for BaseEnv's ``handle_env``: an item is rolled out with retries, and each failure is counted.

- An item whose rollout fails keeps its worker and is retried after each of ``retry_seconds``, then counted as
  ``failed/EXCEPTION``. So is an item that exceeds ``worker_timeout``; that time ends when sending starts.
- If a worker is canceled, its item stays in ``running_items``, so that whoever cancels it can start it again.
- The first failure of each kind is logged with its traceback.
"""

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable
from typing import Any

from atroposlib.envs.base import BaseEnv
from tenacity import AsyncRetrying, RetryCallState, stop_after_attempt, wait_chain, wait_fixed

from recipe.atropos.adapter.recorded_calls import cause_of, sglang_servers
from recipe.atropos.adapter.reporting import EnvReport
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.data.reasons import Reason

logger = logging.getLogger(__name__)


class ItemRollouts(BaseEnv):
    """``BaseEnv`` whose items fail with a count; see the module docstring. SGLang servers get no health completions:
    a call's own retries handle a server that is down.
    """

    adapter_settings = AdapterSettings()
    report: EnvReport  # set by AdaptedEnv
    retry_seconds = (1.0, 3.0, 9.0)  # before the second, third and fourth attempt at an item

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__logged: set[tuple[str, ...]] = set()  # kinds of failures whose traceback was logged
        for server in sglang_servers(self.server):
            server.config.health_check = False

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
        self.running_items.pop(item_uuid, None)  # not earlier: if this worker is canceled, its item starts again
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
        stage, backlog = "", ()

        async def attempt() -> Any:
            nonlocal stage, backlog
            stage, backlog = "collect_trajectories", ()
            groups, backlog = await _not_cancelled(self.collect_trajectories(item))
            if not groups:
                return None
            stage = "postprocess_histories"
            return await _not_cancelled(self.postprocess_histories(groups))

        def count(state: RetryCallState) -> None:
            error = state.outcome.exception()
            self.__log_once(stage, error)
            self.report.count(f"retried/{type(cause_of(error)).__name__}")

        pauses = [wait_fixed(seconds) for seconds in (*self.retry_seconds, 0)]  # nothing is waited for after the last
        retrying = AsyncRetrying(
            stop=stop_after_attempt(len(pauses)), wait=wait_chain(*pauses), before_sleep=count, reraise=True
        )
        groups = None
        try:
            groups = await retrying(attempt)
        except Exception as error:
            self._count_failure(stage, error)
        else:
            if not groups and not backlog:
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
        before = self.eval_runner
        await super().env_step_checks()
        if self.eval_runner is not before:
            self.eval_runner.add_done_callback(self.__evaluation_ended)

    def __evaluation_ended(self, evaluation: asyncio.Task) -> None:
        if not evaluation.cancelled() and evaluation.exception() is not None:
            self._count_failure("evaluate", evaluation.exception())


async def _not_cancelled(work: Awaitable[Any]) -> Any:
    """Await ``work``; if a task that it awaits was canceled, rather than the current task, raise RuntimeError."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():
            raise
        raise RuntimeError("it waited for a task of its own that was canceled") from error
