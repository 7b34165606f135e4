"""One GPU for both: while the policy is trained, the servers give their memory back.

    batch -> pause, release -> train -> resume the weights -> push (see ``push``) -> resume the caches, resume

The KV cache is the larger part, and a push needs none: it comes back when the trainer's buckets are gone. A server that
is paused by "retract" keeps its requests, and those that arrive, and answers them after the push: they wait, and do not
fail. By "abort", which is all that SGLang before 0.5.21 can do, those that run end.
What a server held is lost with the memory, so between release and push nothing may resume it; hence a push after every
update.

Meanwhile nothing may be started in that memory: a mark, a file, says so to whoever starts servers again. The launcher
waits until it is gone.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from recipe.atropos.inference.client import InferenceError, PauseMode, SGLangClient
from recipe.atropos.weight_sync.fleet import ServerFleet
from recipe.atropos.weight_sync.servers import check_phase

logger = logging.getLogger(__name__)

_WEIGHTS, _CACHE = ("weights",), ("kv_cache",)


class SharedMemory:
    """The memory of the servers of ``fleet``, which stand on the trainer's GPUs.

    ``mark`` is there from before the first server gives its memory until all that live were asked to take it back.
    """

    def __init__(self, fleet: ServerFleet, pause_mode: PauseMode, mark: Path):
        self.fleet = fleet
        self.pause_mode = pause_mode
        self.mark = mark
        mark.unlink(missing_ok=True)  # a trainer that was killed leaves it
        self.released: dict[str, str] = {}  # URL: the version that the server had when it gave its memory
        self.without_cache: dict[str, str] = {}  # the same, of those that have taken back what their weights need

    def release(self, urls: Sequence[str]) -> None:
        """Pause the servers and take their memory; one that cannot be reached has none.

        Raises:
            InferenceError: a server refuses.
        """

        async def release_one(client: SGLangClient) -> None:
            version = await client.weight_version()
            await client.pause(self.pause_mode)
            self.released[client.url] = version  # before: a release without an answer may have happened
            await client.release_memory((*_CACHE, *_WEIGHTS))

        self.mark.parent.mkdir(parents=True, exist_ok=True)
        self.mark.touch()
        self._on_each(urls, release_one)

    def resume_weights(self) -> None:
        """Give back what a push needs, without what was in it. A server that was started again since has its own.

        Raises:
            InferenceError: a server refuses, or finds no room.
        """

        async def resume_one(client: SGLangClient) -> None:
            version = self.released.pop(client.url)  # before: SGLang dies of a second one
            if await client.weight_version() == version:
                self.without_cache[client.url] = version  # before, too: an answer that is lost may have happened
                await client.resume_memory(_WEIGHTS)

        try:
            self._on_each(list(self.released), resume_one)
        finally:
            self.released.clear()  # who could not be reached is gone
            self.forget(())

    def resume_caches(self, version: int | None = None) -> None:
        """Give back the rest; ``version``: what was pushed since, where something was.

        Raises:
            InferenceError: a server refuses, or finds no room.
        """

        async def resume_one(client: SGLangClient) -> None:
            before = self.without_cache.pop(client.url)
            if await client.weight_version() in (before, str(version)):  # else it was started again
                await client.resume_memory(_CACHE)

        try:
            self._on_each(list(self.without_cache), resume_one)
        finally:
            self.forget(self.without_cache)

    def forget(self, urls: Iterable[str]) -> None:
        """These servers have died, and hold nothing any more. Without any left, who died may be started again."""
        for url in list(urls):
            self.without_cache.pop(url, None)
        if not self.without_cache:
            self.mark.unlink(missing_ok=True)

    def resume(self) -> None:
        """The servers generate again: what a push leaves to be done where their caches come after it.

        Raises:
            WeightPushError: one does not; names it.
        """

        check_phase("resume", self.fleet.ask(lambda client: client.resume(), self.fleet.targets))

    def _on_each(self, urls: Sequence[str], action: Callable[[SGLangClient], Awaitable[None]]) -> None:
        failures = [answer for answer in self.fleet.ask(action, urls).values() if isinstance(answer, InferenceError)]
        for error in failures:
            if error.status is None:
                logger.error("%s: its memory was left alone (%s)", error.url, error)
        for error in failures:
            if error.status is not None:
                raise error
