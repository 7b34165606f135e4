"""Weights through memory that the trainer and a server on the same machine share.

The trainer copies a bucket into shared memory (a CPU's, or its GPU's by CUDA IPC) and sends handles to it; the server
loads from there. What travels over HTTP is a pickle of the handles, so both sides must trust each other: one user's
processes on one machine, with an API key.

Shared memory of a CPU is kept from push to push: to take it anew costs more than to fill it. It has a name, and so
outlives a process that is killed, but the name is the run's: what is left goes with the run (``scratch``). After a push
that failed a server may still read from it, so the next push takes new memory; what a server that died had not read,
which torch keeps for it, goes then too. A GPU's memory is given back after each push.

A buffer is filled again only after the server has answered, and only where a server is one rank: of several, those that
are not the first may be late (each bucket then has memory of its own, which torch keeps for its readers). On a GPU a
rank's copies may then still be under way on its stream; torch's own end of an IPC handle waits for that stream before
it lets go, and SGLang drops the handles before it answers. (Read in torch's sources; not yet run on a GPU.)
"""

import base64
import contextlib
import io
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.utils import scratch
from recipe.atropos.utils.files import disk_errors
from recipe.atropos.utils.gpus import without_expandable_segments
from recipe.atropos.utils.hosts import is_this_host
from recipe.atropos.verl_ext.device import get_device_id, get_device_name, set_expandable_segments
from recipe.atropos.weight_sync.servers import WeightPushError, on_all, ranks_of, update_session
from recipe.atropos.weight_sync.transports.bucket import Bucket, Buckets, NamedTensors, filled_ahead, send_in_buckets

_TORCH_HEADER = 64  # bytes, with its count of readers
_DEVICE_INDEX = 6  # the place of the device among the arguments of torch's rebuild_cuda_tensor
_sharing_lock = threading.Lock()


class TensorTransport:
    """Buckets of ``bucket_size`` bytes, handed over by handles."""

    pauses = True

    def __init__(self, bucket_size: int):
        self._segments: list[tuple[StorageWeakRef, Path]] = []  # on a CPU
        self._buckets = Buckets(bucket_size, self._allocate)
        self._filled: Iterator[Bucket] = iter(())
        self._ranks: dict[SGLangClient, int] = {}  # of the present push

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        """Raises WeightPushError: a server is on another machine, or cannot take weights so."""
        self._sweep()
        for client in clients:
            if not is_this_host(client.url):
                raise WeightPushError(
                    f"{client.url} is on another machine than the trainer's rank 0, and shares no memory with it: set "
                    "trainer.atropos.weight_sync.transport=distributed or disk"
                )
        self._ranks = {client: await ranks_of(client, "takes no handles") for client in clients}
        # SGLang answers when its rank 0 has let go of a handle; its other ranks may still copy from it, on a GPU.
        self._buckets.reused = get_device_name() == "cpu" or max(self._ranks.values(), default=1) == 1
        self._filled = await filled_ahead(self._buckets.of(weights))

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        """Raises WeightPushError: a server did not load a bucket."""

        async def load(client: SGLangClient, bucket: Bucket) -> None:
            # A handle is good for one reader: each rank of each server gets its own.
            body: dict[str, Any] = {
                "serialized_named_tensors": [_handles(bucket) for _ in range(self._ranks[client])],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            if bucket.last:  # only now: a server that took half of the weights must not report their version
                body["weight_version"] = str(version)
            await client.post("/update_weights_from_tensor", body)

        async def send(bucket: Bucket) -> None:
            await on_all(clients, "deliver", lambda client: load(client, bucket))

        arrived = False
        try:
            async with update_session(clients):
                await send_in_buckets(self._filled, send)
            arrived = True
        finally:
            self._filled = iter(())
            if not arrived or get_device_name() != "cpu":
                self._buckets.drop()

    def release(self, version: int) -> None:
        """Shared memory stays, for the next version."""

    def _allocate(self, size: int) -> torch.Tensor:
        """uint8, (size,): on a CPU in shared memory, else on the current device, whose memory can be shared."""
        if get_device_name() != "cpu":
            with _shareable_memory():
                return torch.empty(size, dtype=torch.uint8, device=get_device_id())
        path = scratch.current().shared_memory()  # torch's own names do not say whose they are
        with disk_errors(path), open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "rb") as file:
            os.posix_fallocate(file.fileno(), 0, _TORCH_HEADER + size)  # else a full disk kills whoever writes
        with _sharing_by_name():
            storage = torch.UntypedStorage._new_shared_filename_cpu(b"", f"/{path.name}".encode(), size)
        self._segments.append((StorageWeakRef(storage), path))
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def _sweep(self) -> None:
        """Take away what earlier pushes left behind. Not a buffer of ours: torch takes that away itself."""
        for storage, path in self._segments:
            if storage.expired():
                path.unlink(missing_ok=True)
        self._segments = [(storage, path) for storage, path in self._segments if not storage.expired()]


@contextlib.contextmanager
def _shareable_memory() -> Iterator[None]:
    """Where the user has torch allocate expandable segments: none of them meanwhile.

    The handle of one is a file descriptor, which a kernel that restricts ptrace gives to no process but a parent
    (torch's CUDACachingAllocator; not yet run on a GPU).
    """
    if not without_expandable_segments(os.environ):
        yield
        return
    set_expandable_segments(False)
    try:
        yield
    finally:
        set_expandable_segments(True)


def _handles(bucket: Bucket) -> str:
    """One handle for a whole bucket, and where each tensor is in it, as SGLang reads its own "flattened_bucket".

    SGLang unpickles what it knows alone, and of an entry takes these attributes (read in 0.5.23, utils/common.py and
    weight_updater.py). Places are counted in the bucket's own elements: it holds one dtype.
    """
    entries, place = [], 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = shape.numel()
        where = {"start_idx": place, "end_idx": place + size, "numel": size}
        entries.append(SimpleNamespace(name=name, shape=shape, dtype=bucket.flat.dtype, **where))
        place += size
    written = io.BytesIO()
    with _sharing_by_name():
        _HandlePickler(written).dump({"flattened_tensor": bucket.flat, "metadata": entries})
    return base64.b64encode(written.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Of a GPU it tells the UUID, as SGLang itself does: each process counts those that it sees from 0.

    SGLang reads either (read in 0.5.23, srt/utils/patch_torch.py).
    """

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        device = arguments[_DEVICE_INDEX]
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])


@contextlib.contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Handles by name: torch's default passes file descriptors, and a server that gets such a handle dies of it.

    The setting is the process's, and buckets are allocated in one thread while another makes handles.
    """
    with _sharing_lock:
        before = multiprocessing.get_sharing_strategy()
        multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            multiprocessing.set_sharing_strategy(before)
