"""Client of atroposlib's own ``run-api``, with the interface of ``TrajectoryApiClient`` that environments use.

There are no tickets: BaseEnv's own backpressure applies, which cancels running items, and no staleness bound holds.
``run-api`` keeps all in memory and hands over each batch at most once. So:

- If it refuses connections or no longer knows the environment, its queue is lost. That is counted as ``api_lost`` and
  ``lost_with_api`` (groups, as of the last status), and ``status`` then raises an error of status 404 until the
  environment has registered again. Nothing is posted before: groups that come first make it reject the trainer.
- A post is sent again until it is answered, at most ``_SERVER_ERRORS`` times on 5xx; one without an answer too, after a
  minute, although the API may have taken it.
- Groups that it holds back because their size differs from the environment's group size are counted as ``buffered``.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from tenacity import RetryCallState, wait_exponential

from recipe.atropos.adapter.validate import to_json
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError

logger = logging.getLogger(__name__)

_ANSWER = 60.0  # s; while it assembles batches, it answers no request for many seconds
_LONGEST_PAUSE = 10.0  # s, at most, between two attempts
_POST = "/scored_data_list"
_SERVER_ERRORS = 5  # 5xx responses to one post before giving up


class StockApi(TrajectoryApiClient):
    """See the module docstring. ``count`` counts events; ``retry_timeout`` is the time for a request, in seconds."""

    LOSSES = (
        "what it has is lost with it, a batch whose connection breaks too; no staleness bound holds, and running items "
        "are canceled when its queue is full"
    )

    def __init__(self, url: str, retry_timeout: float, count: Callable[..., None]):
        super().__init__(url, retry_timeout=retry_timeout, timeout=_ANSWER)
        self._count = count
        self._registered = asyncio.Event()
        self._env_id: int | None = None
        self._queued = 0  # groups of this environment

    async def register_env(self, registration: Mapping[str, Any]) -> dict[str, Any]:
        answer = await super().register_env(registration)
        if answer["status"] == "success":
            self._env_id = answer["env_id"]
            self._registered.set()
        return answer

    async def status(self, env_id: int | None = None) -> dict[str, Any]:
        try:
            status = await super().status(env_id)
        except TrajectoryApiError as error:
            if error.status is None:
                raise
            self._lose(f"does not know environment {env_id} ({error})")
        if not self._registered.is_set():
            raise TrajectoryApiError(f"{self.url} has lost environment {env_id}; is its weight positive?", 404)
        self._queued = status["self_queue_size"]
        return status

    async def disconnect_env(self, env_id: int, reason: str = "") -> None:
        if self._registered.is_set():
            await super().disconnect_env(env_id)

    async def post_groups(
        self, groups: Sequence[Mapping[str, Any]], ticket: int | None = None, key: str | None = None
    ) -> None:
        """Post groups.

        Raises:
            TrajectoryApiError: they were refused, or not taken in time; ``reason`` names which.
        """
        answer = await self._json("POST", _POST, groups)
        if buffered := answer.get("buffered"):
            self._count("buffered", buffered)

    async def _json(
        self, method: str, path: str, message: Any = None, limit: float | None = None, key: str | None = None
    ) -> Any:
        posts, headers = path == _POST, {"Content-Type": "application/json"}
        server_errors, held_back = 0, 0.0  # s spent waiting for a registration

        async def attempt() -> Any:
            nonlocal server_errors, held_back
            if posts:
                begun = time.monotonic()
                await self._registered.wait()
                held_back += time.monotonic() - begun
                for group in message:
                    group["env_id"] = self._env_id
            try:
                _, answer = await self._attempt(method, path, headers, to_json(message))
            except TrajectoryApiError as error:
                server_errors += error.status is not None
                if isinstance(getattr(error.__cause__, "os_error", None), ConnectionRefusedError):
                    self._lose("refuses connections")
                raise
            return orjson.loads(answer)

        def stop(state: RetryCallState) -> bool:
            return server_errors == _SERVER_ERRORS or state.seconds_since_start - held_back >= self.retry_timeout

        def again(error: TrajectoryApiError) -> bool:
            return error.status is None or (posts and error.may_change)

        try:
            return await self._retrying(attempt, wait_exponential(1, max=_LONGEST_PAUSE), stop, again)
        except TrajectoryApiError as error:
            if not error.may_change:
                raise
            raise TrajectoryApiError(f"{error}; is run-api up?", error.status) from error.__cause__

    def _lose(self, how: str) -> None:
        if self._registered.is_set():
            self._registered.clear()
            self._count("api_lost")
            self._count("lost_with_api", self._queued)
            logger.warning("run-api at %s %s; about %d groups in its queue are lost", self.url, how, self._queued)
