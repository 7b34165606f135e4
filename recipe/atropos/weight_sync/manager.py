"""The trainer's side of a push: which version is in force."""

from collections.abc import Callable

import ray
from verl.single_controller.ray import RayWorkerGroup


class WeightSyncManager:
    """Stands where verl expects its ``CheckpointEngineManager``.

    ``version`` is the trainer step whose weights every server serves, None before the first push. It advances only
    after a push that succeeded on every server, and that ``verify``, where given, found to be true; ``verify`` returns
    metrics, or raises.
    """

    def __init__(
        self,
        actor_wg: RayWorkerGroup,
        backend: str = "atropos",
        timeout: float = 600.0,
        verify: Callable[[int], dict[str, float]] | None = None,
    ):
        self.actor_wg = actor_wg
        self.backend = backend
        self.timeout = timeout
        self.verify = verify
        self.version: int | None = None

    def update_weights(self, global_steps: int) -> dict[str, float]:
        """Push the actor's weights as version ``global_steps``; returns the push's metrics.

        Raises:
            ray.exceptions.RayTaskError: the push failed (caused by a ``WeightPushError`` or OSError).
            WeightPushError: a server does not compute with the weights that it was given.
            ray.exceptions.GetTimeoutError: the ranks did not finish within ``timeout`` seconds.
        """
        results = ray.get(
            self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend), timeout=self.timeout
        )
        metrics = {key: value for metrics in results for key, value in (metrics or {}).items()}
        if self.verify is not None:
            metrics |= self.verify(global_steps)
        self.version = global_steps
        return metrics
