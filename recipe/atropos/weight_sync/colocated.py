"""Trainer and servers on the same GPUs: while the policy is trained, the servers release their memory.

    batch -> pause, release -> train -> resume the weights -> push (see ``push``) -> resume the caches, resume

The KV cache is the larger part, and a push does not need it: it is resumed after the trainer's buckets are freed. A
server paused with "retract" keeps its requests, and those that arrive, and answers them after the push: they wait, and
do not fail. With "abort", the only mode that works before SGLang 0.5.21, running requests end.
The memory's contents are lost, so nothing may resume a server between release and push; hence a push after every
update.

Meanwhile nothing may be started in that memory: a marker file says so, and the launcher restarts no server until it is
gone.
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
    """Memory of the servers of ``fleet``, which run on the trainer's GPUs.

    ``mark``, a marker file, exists from before the first release until all live servers were asked to resume.
    """

    def __init__(self, fleet: ServerFleet, pause_mode: PauseMode, mark: Path):
        self.fleet = fleet
        self.pause_mode = pause_mode
        self.mark = mark
        mark.unlink(missing_ok=True)  # left by a trainer that was killed
        self._pushing: int | None = None  # the version of the newest push: servers may report it even if it failed
        self.released: dict[str, str] = {}  # by URL: the server's version when it released its memory
        self.without_cache: dict[str, str] = {}  # the same, for servers that resumed only their weights

    def release(self, urls: Sequence[str]) -> None:
        """Pause the servers and release their memory; a server that cannot be reached has none.

        Raises:
            InferenceError: a server refuses.
        """

        async def release_one(client: SGLangClient) -> None:
            version = await client.weight_version()
            await client.pause(self.pause_mode)
            self.released[client.url] = version  # before the call, which may succeed even if no answer arrives
            await client.release_memory((*_CACHE, *_WEIGHTS))

        self.mark.touch()
        self._on_each(urls, release_one)

    def resume_weights(self, pushing: int | None = None) -> None:
        """Resume the memory that a push of version ``pushing`` needs, without its contents; None: no push follows.

        A server restarted since the release has its own.

        Raises:
            InferenceError: a server refuses, or has no room.
        """

        async def resume_one(client: SGLangClient) -> None:
            version = self.released.pop(client.url)  # before the call: a second one crashes SGLang
            if await client.weight_version() == version:
                self.without_cache[client.url] = version  # likewise: it may succeed even if no answer arrives
                await client.resume_memory(_WEIGHTS)

        self._pushing = self._pushing if pushing is None else pushing
        try:
            self._on_each(list(self.released), resume_one)
        finally:
            self.released.clear()  # servers that could not be reached are gone
            self.forget(())

    def resume_caches(self) -> None:
        """Resume the KV caches. A server restarted since the release has its own.

        Raises:
            InferenceError: a server refuses, or has no room.
        """

        async def resume_one(client: SGLangClient) -> None:
            before = self.without_cache.pop(client.url)
            if await client.weight_version() in (before, str(self._pushing)):
                await client.resume_memory(_CACHE)

        try:
            self._on_each(list(self.without_cache), resume_one)
        finally:
            self.forget(self.without_cache)

    def forget(self, urls: Iterable[str]) -> None:
        """Drop these servers, which died. If no other still lacks its cache, remove the marker: they can restart."""
        for url in list(urls):
            self.without_cache.pop(url, None)
        if not self.without_cache:
            self.mark.unlink(missing_ok=True)

    def resume(self, urls: Sequence[str]) -> None:
        """Resume generation; for colocated servers the push leaves this to the caller, once their caches are back.

        Raises:
            WeightPushError: a server does not resume; names it.
        """

        check_phase("resume", self.fleet.ask(lambda client: client.resume(), urls))

    def _on_each(self, urls: Sequence[str], action: Callable[[SGLangClient], Awaitable[None]]) -> None:
        failures = [answer for answer in self.fleet.ask(action, urls).values() if isinstance(answer, InferenceError)]
        for error in sorted(failures, key=lambda error: error.status is not None):  # a refusal last
            if error.status is not None:
                raise error
            logger.error("%s: its memory was left alone (%s)", error.url, error)
