"""The trainer's side of a push: which version is active."""

import logging
from collections.abc import Callable, Sequence

import ray

from recipe.atropos.inference.client import ServerGone
from recipe.atropos.verl_ext.ranks import RayWorkerGroup
from recipe.atropos.weight_sync.colocated import SharedMemory

logger = logging.getLogger(__name__)


class WeightSyncManager:
    """Stands where verl expects its ``CheckpointEngineManager``.

    ``version`` is the trainer step whose weights every server serves, None before the first push. It advances only
    after a push that succeeded on every server, and that ``verify``, where given, found to be true; ``verify`` returns
    metrics, or raises. ``reported`` asks every server for its version, by URL. ``memory``, where given, is what the
    servers leave to the trainer between ``offload_servers`` and the next push.
    """

    def __init__(
        self,
        actor_wg: RayWorkerGroup,
        backend: str = "atropos",
        timeout: float = 600.0,
        verify: Callable[[int], dict[str, float]] | None = None,
        reported: Callable[[], dict[str, str]] | None = None,
        memory: SharedMemory | None = None,
    ):
        self.actor_wg = actor_wg
        self.backend = backend
        self.timeout = timeout
        self.verify = verify
        self.reported = reported
        self.memory = memory
        self.version: int | None = None
        self._gone = False  # a server, when last asked

    def update_weights(self, global_steps: int) -> dict[str, float]:
        """Push the actor's weights as version ``global_steps``; returns the push's metrics.

        Raises:
            ray.exceptions.RayTaskError: the push failed (caused by a ``WeightPushError``).
            WeightPushError: a server does not compute with the weights that it was given.
            ray.exceptions.GetTimeoutError: the ranks did not finish within ``timeout`` seconds.
        """
        self._make_room()
        results = ray.get(
            self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend), timeout=self.timeout
        )
        metrics = {key: value for metrics in results for key, value in (metrics or {}).items()}
        if self.memory is not None:
            self.actor_wg.empty_cache()
            self.memory.resume_caches(global_steps)
            self.memory.resume()
        if self.verify is not None:
            metrics |= self.verify(global_steps)
        self.version = global_steps
        return metrics

    def _make_room(self) -> None:
        """Servers that lent their memory have as much of it again as they need to take weights into."""
        if self.memory is not None:
            self.actor_wg.empty_cache()
            self.memory.resume_weights()

    def onload_servers(self) -> None:
        """However training ends, the next trainer finds servers that can take weights; they stay paused.

        What stands in the way is logged: it must not take the place of the error that ended the training.
        """
        if self.memory is not None:
            try:
                try:
                    self.memory.resume_weights()
                finally:
                    self.memory.resume_caches()
            except Exception:
                logger.exception("start the servers again before the next trainer: they did not take their memory back")

    def offload_servers(self, urls: Sequence[str]) -> None:
        """The servers generate no more, and leave their memory to the trainer until the next push."""
        if self.memory is not None:
            self.memory.release(urls)

    def ensure_current(self, global_steps: int, waiting: bool = False) -> dict[str, float]:
        """Push the actor's weights, those of ``global_steps``, if a server has another version than it was given.

        So has one that was restarted: it serves what it was started with. While the trainer is ``waiting`` for a batch
        one may be gone, since it may be starting. Returns metrics; none if nothing was wrong.

        Raises:
            InferenceError: a server does not answer; names it.
            WeightPushError, ray.exceptions.RayTaskError: as ``update_weights``.
        """
        if self.reported is None or self.version is None:
            return {}
        try:
            reported = self.reported()
        except ServerGone as error:
            if not waiting:
                raise
            if not self._gone:
                logger.error("the next step needs every server: %s", error)
            self._gone = True
            return {}
        self._gone = False
        out_of_sync = {url: version for url, version in reported.items() if version != str(self.version)}
        if not out_of_sync:
            return {}
        logger.error(
            "servers with another weight version than %s are given the weights again: %s", self.version, out_of_sync
        )
        return self.update_weights(global_steps) | {"weight_sync/servers_out_of_sync": float(len(out_of_sync))}
