"""Weight transport through memory that the trainer shares with servers on the same machine.

The trainer copies a bucket into shared memory (of the CPU, or of its GPU by CUDA IPC) and sends handles to it; the
server loads from there. The handles are sent over HTTP as a pickle, so both sides must trust each other: one user's
processes on one machine, with an API key.

CPU shared memory is kept from push to push: allocating it costs more than filling it. It has a name, and so outlives a
killed process, but the name belongs to the run, and leftovers are removed with the run (``scratch``). After a failed
push a server may still read from it, so the next push allocates new memory; memory that torch kept for a server that
died before reading it is then removed too. GPU memory is freed after each push.

A buffer is refilled only after the server has answered and, on a GPU, only if every server has a single rank: with
several, ranks other than the first may lag (each bucket then gets its own memory, which torch keeps for its readers).
A rank's copies may still be running on its stream then, but SGLang drops the handles before it answers, and torch
waits for that stream before it releases an IPC handle. (Read in torch's sources; it has run on one H200.)
"""

import base64
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

from recipe.atropos.config.transports import WeightTransport
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.utils import scratch
from recipe.atropos.utils.files import disk_errors
from recipe.atropos.utils.gpus import without_expandable_segments
from recipe.atropos.utils.hosts import is_this_host
from recipe.atropos.verl_ext.device import get_device_id, get_device_name, set_expandable_segments
from recipe.atropos.weight_sync.servers import WeightPushError, on_all, ranks_of, update_session
from recipe.atropos.weight_sync.transports.bucket import Bucket, Buckets, NamedTensors, filled_ahead, send_in_buckets

_TORCH_HEADER = 64  # bytes; holds torch's count of readers
_DEVICE_INDEX = 6  # index of the device in the arguments of torch's rebuild_cuda_tensor


class TensorTransport(WeightTransport, name="tensor"):
    """Sends handles to shared buckets of ``bucket_size`` bytes."""

    shares_memory = in_requests = by_rank = True

    def __init__(self, *, bucket_size: int, **_: object):
        # Of this process: torch's default handles are file descriptors, and a server that gets such a handle crashes.
        multiprocessing.set_sharing_strategy("file_system")
        self._segments: list[tuple[StorageWeakRef, Path]] = []  # on a CPU
        self._buckets = Buckets(bucket_size, self._allocate)
        self._filled: Iterator[Bucket] = iter(())
        self._ranks: dict[SGLangClient, int] = {}  # by server of the current push

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        """Fill the first buckets. Raises WeightPushError if a server is on another machine or takes no handles."""
        self._sweep()
        for client in clients:
            if not is_this_host(client.url):
                raise WeightPushError(
                    f"{client.url} is on another machine than the trainer's rank 0, and shares no memory with it: set "
                    "trainer.atropos.weight_sync.transport=distributed or disk"
                )
        self._ranks = {client: await ranks_of(client, "takes no handles") for client in clients}
        # SGLang answers once its rank 0 has released a handle; on a GPU, other ranks may still be copying from it.
        self._buckets.reused = get_device_name() == "cpu" or max(self._ranks.values(), default=1) == 1
        self._filled = await filled_ahead(self._buckets.of(weights))

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        """Send every bucket. Raises WeightPushError if a server did not load one."""

        async def load(client: SGLangClient, bucket: Bucket) -> None:
            # A handle is good for one reader: each rank of each server gets its own.
            handles = [_handles(bucket) for _ in range(self._ranks[client])]
            body = {"serialized_named_tensors": handles, **bucket.options(version)}
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

    def _allocate(self, size: int) -> torch.Tensor:
        """Return a uint8 buffer, (size,): on a CPU in shared memory, else in shareable memory of the current device."""
        if get_device_name() != "cpu":
            with contextlib.ExitStack() as stack:
                # The handle of an expandable segment is a file descriptor, which a kernel that restricts ptrace gives
                # only to a parent process (torch's CUDACachingAllocator).
                if without_expandable_segments():
                    set_expandable_segments(False)
                    stack.callback(set_expandable_segments, True)
                return torch.empty(size, dtype=torch.uint8, device=get_device_id())
        path = scratch.current().shared_memory()  # torch's own names do not identify the run
        with disk_errors(path), open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "rb") as file:
            os.posix_fallocate(file.fileno(), 0, _TORCH_HEADER + size)  # else a full disk kills the writer
        storage = torch.UntypedStorage._new_shared_filename_cpu(b"", f"/{path.name}".encode(), size)
        self._segments.append((StorageWeakRef(storage), path))
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def _sweep(self) -> None:
        """Remove segments that earlier pushes left behind, but not buffers in use: torch removes those itself."""
        for storage, path in self._segments:
            if storage.expired():
                path.unlink(missing_ok=True)
        self._segments = [(storage, path) for storage, path in self._segments if not storage.expired()]


def _handles(bucket: Bucket) -> str:
    """Return a handle to a whole bucket, and each tensor's place in it, in SGLang's "flattened_bucket" format.

    SGLang unpickles only types that it knows, and reads these attributes of an entry (read in 0.5.23, utils/common.py
    and weight_updater.py). Offsets count elements of the bucket, which holds a single dtype.
    """
    entries, place = [], 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = shape.numel()
        where = {"start_idx": place, "end_idx": place + size, "numel": size}
        entries.append(SimpleNamespace(name=name, shape=shape, dtype=bucket.flat.dtype, **where))
        place += size
    written = io.BytesIO()
    _HandlePickler(written).dump({"flattened_tensor": bucket.flat, "metadata": entries})
    return base64.b64encode(written.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Identifies a GPU by its UUID, as SGLang itself does: each process numbers its visible GPUs from 0.

    SGLang accepts both (read in 0.5.23, srt/utils/patch_torch.py).
    """

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_INDEX]).uuid)
        return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])
