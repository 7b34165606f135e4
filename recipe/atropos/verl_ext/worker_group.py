"""verl's worker group with a timeout for each call; verl itself waits forever for a rank that hangs."""

import math
import time
from collections.abc import Callable
from typing import Any

import ray

from recipe.atropos.errors import AtroposError
from recipe.atropos.verl_ext.ranks import RayWorkerGroup


class RankTimeout(AtroposError, RuntimeError):
    """Ranks did not respond within the timeout."""

    recoverable = True


_DEATH_SECONDS = 5.0  # until Ray knows that a process died whose peers report a broken connection


class LimitedWorkerGroup(RayWorkerGroup):
    """verl's worker group, with each call limited to ``limit`` seconds and to ``deadline``.

    ``deadline`` is a ``time.monotonic`` value. All of ``meanwhile`` is called, once, while the ranks work on the next
    call.
    """

    def __init__(self, *args: Any, limit: float, **kwargs: Any):
        self.limit, self.deadline = limit, math.inf
        self.meanwhile: list[Callable[[], object]] = []
        super().__init__(*args, **kwargs)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Callable[..., Any]) -> list[str]:
        def limited(
            group: "LimitedWorkerGroup",
            method_name: str,
            dispatch_fn: Callable[..., Any],
            collect_fn: Callable[..., Any],
            execute_fn: Callable[..., Any],
            blocking: bool,
        ) -> Any:
            def collect(group: "LimitedWorkerGroup", output: Any) -> Any:
                while blocking and group.meanwhile:
                    group.meanwhile.pop(0)()
                return collect_fn(group, group.wait(method_name, output) if blocking else output)

            return func_generator(group, method_name, dispatch_fn, collect, execute_fn, blocking=False)

        return super()._bind_worker_method(user_defined_cls, limited)

    def wait(self, method: str, references: Any, limit: float | None = None) -> Any:
        """Return the results of ``method``'s calls, within ``limit`` seconds instead of the group's limits, if given.

        Raises:
            RankTimeout: names the ranks that did not answer in time.
            ray.exceptions.RayError: a call failed; the loss of a rank, if there is one, rather than what its peers
                report.
        """
        key = "step_timeout" if limit is None else "weight_sync.timeout"
        # A second at least, for ranks that have answered while ``meanwhile`` took all of the time.
        limit = max(1.0, min(self.limit, self.deadline - time.monotonic())) if limit is None else limit
        calls = references if isinstance(references, list) else [references]
        try:
            return ray.get(references, timeout=limit)
        except ray.exceptions.RayTaskError as error:
            if (lost := _lost_rank(calls)) is not None:
                raise lost from error
            raise
        except ray.exceptions.GetTimeoutError:
            _, missing = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
            ranks = [rank for rank, call in enumerate(calls) if call in missing]
            raise RankTimeout(
                f"{method}: no answer of rank {', '.join(map(str, ranks))} of {len(calls)} within "
                f"{limit:.0f} s; logs/ray (of a cluster, Ray's logs on their nodes) has their output; raise "
                f"trainer.atropos.{key} if they were at work"
            ) from None


def _lost_rank(calls: list[Any]) -> ray.exceptions.RayActorError | None:
    """Return the error of a rank whose process died, if that is why a call failed."""
    ray.wait(calls, num_returns=len(calls), timeout=_DEATH_SECONDS, fetch_local=False)
    for call in calls:
        try:
            ray.get(call, timeout=0)
        except ray.exceptions.RayActorError as error:
            return error
        except Exception:  # noqa: S112  (of a peer, or no answer yet)
            continue
    return None
