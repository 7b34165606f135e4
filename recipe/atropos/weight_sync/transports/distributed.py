"""Weight broadcasts in a process group of the trainer's rank 0 and all server ranks: NCCL on GPUs, gloo on CPUs.

HTTP requests tell the servers what to expect, and they join a broadcast of each bucket. The group is formed at the
first push and reused; a new one, with a new name, is formed after a failed push and when servers change or restart.
"""

import asyncio
import itertools
import socket
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from recipe.atropos.config.transports import WeightTransport, gpu_transport
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.utils.gpus import NCCL_FLAGS, nccl_variables
from recipe.atropos.utils.hosts import address_towards
from recipe.atropos.verl_ext.device import get_device_id, get_device_name
from recipe.atropos.weight_sync.servers import WeightPushError, clean_up, on_all, ranks_of, update_session
from recipe.atropos.weight_sync.transports.bucket import (
    Bucket,
    Buckets,
    NamedTensors,
    filled_ahead,
    in_thread,
    send_in_buckets,
)

JOIN_SECONDS = 30.0  # for all servers to reach the rendezvous, where they wait for each other
_ABANDON_SECONDS = 5.0  # for a broadcast or rendezvous to notice that it was aborted


class DistributedTransport(WeightTransport, name="distributed"):
    """Broadcasts buckets of ``bucket_size`` bytes; ``timeout``: seconds that a server may take for one of them."""

    uses_nccl = keeps_buckets = by_rank = True

    def __init__(self, *, bucket_size: int, timeout: float, **_: object):
        device = "cpu" if get_device_name() == "cpu" else get_device_id()
        self._buckets = Buckets(bucket_size, lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        self.timeout = timeout
        self._filled: Iterator[Bucket] = iter(())
        self._group: _Group | None = None
        self._left: list[tuple[str, str]] = []  # (URL, group): servers that may still hold an abandoned group

    @classmethod
    def problems(cls, config: DictConfig) -> Iterator[str]:
        """Yield why NCCL cannot join the ranks: on one GPU, or with flags of SGLang that change it there alone."""
        if config.inference.colocated and config.trainer.device == "cuda":
            yield (
                "inference.colocated=true with trainer.atropos.weight_sync.transport=distributed: NCCL takes no two "
                "ranks on one GPU; set it to auto, tensor or disk"
            )
        variables = nccl_variables()
        flags = {flag.replace("-", "_") for flag, value in config.inference.args.items() if value}
        for flag in flags & NCCL_FLAGS.keys() if gpu_transport(config) is cls else ():
            if unset := [f"{name}=1" for name in NCCL_FLAGS[flag] if variables[name] != "1"]:
                yield (
                    f"inference.args.{flag} changes NCCL in the servers alone, and weights go over it: export "
                    f"{' '.join(unset)} before the start, for both sides, or leave it out"
                )

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        """Form the group and fill the first buckets. Raises WeightPushError if a server did not join."""
        self._group = await self._joined(clients)
        self._filled = await filled_ahead(self._buckets.of(weights))

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        """Broadcast every bucket. Raises WeightPushError if a server did not load one."""
        group, self._group = self._group, None  # until the push succeeds

        async def send(bucket: Bucket) -> None:
            body = {
                "names": bucket.names,
                "dtypes": [bucket.dtype] * len(bucket.names),
                "shapes": [list(shape) for shape in bucket.shapes],
                "group_name": group.name,
                **bucket.options(version),
            }
            await _both(
                on_all(clients, "deliver", lambda client: client.post("/update_weights_from_distributed", body)),
                in_thread(lambda: group.broadcast(bucket.flat)),
                group,
            )

        try:
            async with update_session(clients):
                await send_in_buckets(self._filled, send)
        except BaseException:
            await self._leave(group, clients)
            raise
        group.version = str(version)
        self._group = group

    async def _joined(self, clients: Sequence[SGLangClient]) -> "_Group":
        """Return a group of exactly these servers, none restarted since its last push; form one if needed."""
        if self._group is not None:
            versions = await asyncio.gather(*(client.weight_version() for client in clients))
            if self._group.urls == [client.url for client in clients] and set(versions) == {self._group.version}:
                return self._group
            group, self._group = self._group, None
            await self._leave(group, clients)
        return await _Group.form(clients, self.timeout)

    async def _leave(self, group: "_Group", clients: Sequence[SGLangClient]) -> None:
        """Destroy the group, here and on its servers; on those not in ``clients``, at a later call that has them."""
        self._left += [(url, group.name) for url in group.urls]
        by_url = {client.url: client for client in clients}
        reachable = [(url, name) for url, name in self._left if url in by_url]
        self._left = [left for left in self._left if left not in reachable]
        await clean_up(
            by_url[url].post("/destroy_weights_update_group", {"group_name": name}) for url, name in reachable
        )
        await in_thread(group.destroy)


class _Group:
    """Process group with rank 0 in this process; ``version`` is the last one pushed through it."""

    def __init__(self, name: str, urls: list[str], process_group: dist.ProcessGroup, store: dist.TCPStore):
        self.name, self.urls, self.version = name, urls, ""
        self._process_group: dist.ProcessGroup | None = process_group
        self._store: dist.TCPStore | None = store

    @classmethod
    async def form(cls, clients: Sequence[SGLangClient], timeout: float) -> "_Group":
        """Form a group with all servers; ``timeout``: seconds that a server may take for a request.

        Servers that joined wait for the others and generate nothing, so all are released as soon as one fails.

        Raises:
            WeightPushError: a server did not join; names it.
        """
        sizes = [await ranks_of(client, "joins no group") for client in clients]
        world_size = 1 + sum(sizes)
        # NCCL's timeout kills the process, so the request's, naming the server, must come first; gloo's delays closing.
        backend, limit = ("gloo", timeout) if get_device_name() == "cpu" else ("nccl", 2 * timeout)
        name = f"atropos_{uuid.uuid4().hex}"
        try:
            # A server on another machine cannot reach this one's loopback address.
            address = max((address_towards(client.url) for client in clients), key=lambda a: not a.startswith("127."))
        except OSError as error:
            raise WeightPushError(f"no route to {[client.url for client in clients]}: {error}") from error
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        # The rendezvous server. Nothing here uses this object as a store, so deleting it releases all who wait there.
        meeting = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

        # As in SGLang's own init_custom_process_group: the processes share no default group.
        def join() -> dist.ProcessGroup:
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
            process_group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                Backend(backend),
                PrefixStore(name, store),
                group_name=name,
                timeout=timedelta(seconds=limit),
            )
            _world.pg_group_ranks[process_group] = {rank: rank for rank in range(world_size)}
            return process_group

        group = {
            "master_address": address,
            "master_port": port,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        joining = asyncio.ensure_future(in_thread(join))
        invited = {
            asyncio.ensure_future(client.post("/init_weights_update_group", group | {"rank_offset": offset})): client
            for client, offset in zip(clients, itertools.accumulate([1, *sizes[:-1]]), strict=True)
        }
        join_timeout = min(timeout / 2, JOIN_SECONDS)  # shorter than the requests', which would all expire together
        done, late = await asyncio.wait([joining, *invited], timeout=join_timeout, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in (joining, *invited) if task in done and task.exception()]
        if not failed and not late:
            return cls(name, [client.url for client in clients], joining.result(), meeting)
        del meeting
        if late:  # servers that waited for the others get an answer now
            _, late = await asyncio.wait(late, timeout=_ABANDON_SECONDS)
        await _abandon(joining, invited, name)
        names = {joining: "the trainer's rank 0"} | {task: client.url for task, client in invited.items()}
        blamed = failed or [task for task in invited if task in late] or list(invited)
        silence = f"did not come within {join_timeout:g} s"
        details = "; ".join(f"{names[task]}: {task.exception() if task in failed else silence}" for task in blamed)
        raise WeightPushError(f"weight push failed in phase 'join' on {details}")

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast from this rank to all; blocks."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([flat.view(torch.uint8)], options).wait()

    def abort(self) -> None:
        """Abort a broadcast that a server does not take part in."""
        self._process_group.abort()

    def destroy(self) -> None:
        """Destroy the group; gloo closes the connections once nothing refers to it."""
        dist.destroy_process_group(self._process_group)
        self._process_group = self._store = None


async def _abandon(
    joining: asyncio.Task[dist.ProcessGroup], invited: dict[asyncio.Task[object], SGLangClient], name: str
) -> None:
    """Clean up a group that did not form, here and on the servers."""
    for task in invited:
        task.cancel()
        task.add_done_callback(_retrieve_exception)
    await clean_up(client.post("/destroy_weights_update_group", {"group_name": name}) for client in invited.values())
    joining.add_done_callback(lambda task: _retrieve_exception(task) or dist.destroy_process_group(task.result()))


def _retrieve_exception(task: asyncio.Task[object]) -> object:
    """Retrieve the task's exception, if any, so that asyncio does not warn that it was never retrieved."""
    return task.cancelled() or task.exception()


async def _both(posts: Awaitable[None], broadcast: Awaitable[None], group: _Group) -> None:
    """Wait for the servers and the broadcast. If a server refuses, do not wait for the broadcast to end: gloo cannot
    abort it, and it blocks until its own timeout."""
    tasks = [asyncio.ensure_future(posts), asyncio.ensure_future(broadcast)]
    try:
        await asyncio.gather(*tasks)
    except BaseException as error:
        group.abort()
        await asyncio.wait(tasks, timeout=_ABANDON_SECONDS)
        tasks[0].cancel()
        tasks[1].add_done_callback(_retrieve_exception)
        if tasks[0].done() and not tasks[0].cancelled() and (named := tasks[0].exception()):
            raise named from None  # gloo's error names no server
        if isinstance(error, RuntimeError) and not isinstance(error, WeightPushError):
            raise WeightPushError(f"the broadcast to {', '.join(group.urls)} broke off: {error}") from error
        raise
