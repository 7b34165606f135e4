"""``BaseEnv`` driven by an outer policy: its rollouts run in the background, and wait at each request for an answer.

- What ``collect_trajectories`` raises is the rollout's outcome: unlike ``BaseEnv.handle_env``, nothing is caught.
- All rollouts of a process run in one asyncio loop in one thread, which ends with the last environment. No canceled
  task stays behind in it.
- Environments of one class and configuration can share one object, as workers do in Atropos: each rollout takes the
  next item.
"""

import asyncio
import functools
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.adapter.shaping import record_groups
from recipe.atropos.gem.outer_policy import Episode, OuterPolicyServer
from recipe.atropos.gem.thread_limits import limit_math_verify_in_threads
from recipe.atropos.utils.tasks import awaited

logger = logging.getLogger(__name__)

GRACE = 10.0  # s for a canceled rollout to end


@functools.cache
def stepped_class(target: str | type[BaseEnv]) -> type[BaseEnv]:
    """Return the adapted environment over `OuterPolicyServer`; the episode records its groups as they are made.

    Many environments score a group and then return None because its scores are equal, as those of one sequence always
    are. Their scores are known only if they are recorded on the way.

    Raises:
        EnvironmentTargetError: ``target`` names no environment.
    """
    environment = load_environment(target) if isinstance(target, str) else target
    record_groups()
    body = {"__doc__": environment.__doc__, "__module__": environment.__module__, "server_cls": OuterPolicyServer}
    return type(environment.__name__, (adapt(environment),), body)


def configured(environment: type[BaseEnv], config: Mapping[str, Any]) -> BaseEnvConfig:
    """Return the environment's own ``config_init``, overridden by ``config``.

    Raises:
        ValueError: a key or a value is invalid for the environment.
    """
    defaults, _ = environment.config_init()
    fields = type(defaults).model_fields
    if unknown := sorted(config.keys() - fields.keys()):
        raise ValueError(f"{environment.__name__} knows no {', '.join(unknown)}; it has {', '.join(sorted(fields))}")
    return type(defaults)(**(defaults.model_dump() | dict(config)))


class SteppedEnvironment:
    """A ``BaseEnv``, and the event loop in which its rollouts run.

    ``environment`` is a `stepped_class`; it is constructed in the caller's thread.
    """

    def __init__(self, environment: type[BaseEnv], config: BaseEnvConfig):
        server = APIServerConfig(
            model_name=config.tokenizer_name,
            tokenizer_name=config.tokenizer_name,
            base_url="http://outer-policy.invalid/v1",  # OuterPolicyServer sends nothing
            api_key="x",
            server_type="sglang",
            health_check=False,
        )
        self.base = environment(config=config, server_configs=[server], slurm=False, testing=False)  # as its cli does
        for server in self.base.server.servers:
            server.tokenizer = self.base.tokenizer
        self._thread = _the_one(_threads, os.getpid(), _LoopThread)
        self._lock = threading.Lock()
        self._is_set_up = False
        limit_math_verify_in_threads()

    def set_up(self, timeout: float) -> None:
        """Run ``BaseEnv.setup``, once.

        Raises:
            TimeoutError: it takes longer than ``timeout`` seconds.
            Exception: what it raises.
        """
        with self._lock:
            if self._is_set_up:
                return
            setup = asyncio.run_coroutine_threadsafe(self.base.setup(), self._thread.loop)
            try:
                setup.result(timeout)
            except TimeoutError as error:
                if setup.done():
                    raise
                setup.cancel()
                name = type(self.base).__name__
                raise TimeoutError(f"{name}.setup() takes longer than {timeout:g} s; give a larger timeout") from error
            self._is_set_up = True

    def begin(self) -> Episode:
        """Start a rollout of the next item."""
        return Episode(functools.partial(_episode, self.base), self._thread.loop)


async def next_item(environment: BaseEnv) -> Any:
    """Return the next item to roll out. Raises RuntimeError if there is none."""
    item = environment.backlog.pop() if environment.backlog else await environment.get_next_item()
    if item is None:
        raise RuntimeError(f"{type(environment).__name__}.get_next_item() has no item")
    return item


async def roll_out(environment: BaseEnv, item: Any) -> Any:
    """Do what ``BaseEnv.handle_env`` does before sending, catching nothing; return a group, several, or None."""
    groups, backlog = await environment.collect_trajectories(item)
    environment.backlog.extend(backlog or [])
    return await environment.postprocess_histories(groups) if groups else groups


async def _episode(environment: BaseEnv) -> Any:
    groups = await roll_out(environment, await next_item(environment))
    await awaited(environment.cleanup())  # some environments define a plain function
    return groups


# Both are by process, since a forked one has none of its parent's threads.
_lock = threading.RLock()
_shared: weakref.WeakValueDictionary[tuple[int, type, str], SteppedEnvironment] = weakref.WeakValueDictionary()
_threads: weakref.WeakValueDictionary[int, "_LoopThread"] = weakref.WeakValueDictionary()


def shared_environment(environment: type[BaseEnv], config: BaseEnvConfig) -> SteppedEnvironment:
    """Return the one environment of this class and configuration, which lives as long as it is referenced."""
    key = (os.getpid(), environment, json.dumps(config.model_dump(mode="json"), sort_keys=True))
    return _the_one(_shared, key, lambda: SteppedEnvironment(environment, config))


def _the_one(kept: MutableMapping[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    with _lock:
        if (found := kept.get(key)) is None:
            found = kept[key] = make()
        return found


# ---------------------------------------------------------------------- the loop


class _LoopThread:
    """An asyncio loop in its own thread; both end when nothing refers to this object any more."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_serve, args=(self.loop,), name="stepped-env", daemon=True)
        self.thread.start()
        weakref.finalize(self, _stop, self.loop, self.thread)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # at the end, cancels what still runs and closes the loop
        while True:
            try:
                return runner.get_loop().run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # raised by a task; whoever awaits it gets it too
                logger.error("an environment ended its process: %r", error)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():  # the garbage collector may run in any thread
            thread.join(GRACE)
