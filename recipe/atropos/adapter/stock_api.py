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

import aiohttp
import orjson

from recipe.atropos.adapter.validate import to_json
from recipe.atropos.trajectory_api.trajectory_client import TrajectoryApiError

logger = logging.getLogger(__name__)

_ANSWER = 60.0  # s; while it assembles batches, it answers no request for many seconds
_LONGEST_PAUSE = 10.0  # s, at most, between two attempts
_SERVER_ERRORS = 5  # 5xx responses to one post before giving up


class StockApi:
    """See the module docstring. ``count`` counts events; ``patience`` is the time for a request, in seconds."""

    LOSSES = (
        "what it has is lost with it, a batch whose connection breaks too; no staleness bound holds, and running items "
        "are cancelled when its queue is full"
    )

    def __init__(self, url: str, patience: float, count: Callable[..., None]):
        self.again = 0  # requests that were sent again
        self._url, self._patience, self._count = url.rstrip("/"), patience, count
        self._registered = asyncio.Event()
        self._env_id: int | None = None
        self._queued = 0  # groups of this environment
        headers = {"Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ANSWER), headers=headers)

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def register_env(self, registration: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._request("POST", "/register-env", registration)
        if answer["status"] == "success":
            self._env_id = answer["env_id"]
            self._registered.set()
        return answer

    async def info(self) -> dict[str, Any]:
        return await self._request("GET", "/info")

    async def wandb_info(self) -> dict[str, Any]:
        return await self._request("GET", "/wandb_info")

    async def status(self, env_id: int) -> dict[str, Any]:
        try:
            status = await self._request("GET", "/status-env", {"env_id": env_id})
        except TrajectoryApiError as error:
            if error.status is None:
                raise
            self._lose(f"does not know environment {env_id} ({error})")
        if not self._registered.is_set():
            raise TrajectoryApiError(f"{self._url} has lost environment {env_id}; is its weight positive?", 404)
        self._queued = status["self_queue_size"]
        return status

    async def disconnect_env(self, env_id: int) -> None:
        if self._registered.is_set():
            await self._request("POST", "/disconnect-env", {"env_id": env_id})

    async def post_groups(self, groups: Sequence[dict[str, Any]], ticket: int | None = None) -> None:
        """Post groups.

        Raises:
            TrajectoryApiError: they were refused, or not taken in time; ``reason`` names which.
        """
        answer = await self._request("POST", "/scored_data_list", groups, posts=True)
        if buffered := answer.get("buffered"):
            self._count("buffered", buffered)

    async def _request(self, method: str, path: str, payload: Any = None, posts: bool = False) -> Any:
        server_errors, tries, waited = 0, 0, 0.0  # s, not counting waits for a registration
        while True:
            if posts:
                await self._registered.wait()
                for group in payload:
                    group["env_id"] = self._env_id
            body, begun = to_json(payload), time.monotonic()
            try:
                async with self._session.request(method, self._url + path, data=body) as reply:
                    text = await reply.read()
                if reply.status < 400:
                    return orjson.loads(text)
                problem, status = f"HTTP {reply.status}: {text[:300].decode(errors='replace')}", reply.status
                server_errors += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                problem, status = str(error) or type(error).__name__, None
                if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):
                    self._lose("refuses connections")
            pause = min(2.0**tries, _LONGEST_PAUSE)
            tries, waited = tries + 1, waited + time.monotonic() - begun + pause
            given_up = status is not None and (not posts or status < 500 or server_errors == _SERVER_ERRORS)
            if given_up or waited > self._patience:
                raise TrajectoryApiError(f"{method} {self._url}{path}: {problem}; is run-api up?", status)
            logger.warning("%s %s%s: %s; trying again", method, self._url, path, problem)
            self.again += 1
            await asyncio.sleep(pause)

    def _lose(self, how: str) -> None:
        if self._registered.is_set():
            self._registered.clear()
            self._count("api_lost")
            self._count("lost_with_api", self._queued)
            logger.warning("run-api at %s %s; about %d groups in its queue are lost", self._url, how, self._queued)
