"""Weights in buckets: a few large sends instead of hundreds of small ones, from reused buffers.

The next bucket is filled while one is sent, so however large the model is, a push needs memory only for two buffers and
for the tensors of one layer's attention. These must be in the same bucket: SGLang fuses some of them (``q_a_proj`` and
``kv_a_proj_with_mqa``), and if they arrive in two requests it silently loads neither (read in 0.5.23,
deepseek_weight_loader.py, glm4_moe_lite.py). A buffer grows to hold tensors that must stay together.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle, groupby, islice
from typing import Any, TypeVar

import torch

from recipe.atropos.verl_ext.device import get_device_id, get_torch_device

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Result = TypeVar("Result")
_BUFFERS = 2
_TOGETHER = re.compile(r".*\.layers\.\d+\.self_attn(?=\.)")


@dataclass
class Bucket:
    """Tensors of one dtype, concatenated in ``flat``, (n,); ``last``: whether it is the last bucket of its push."""

    flat: torch.Tensor
    names: list[str] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    last: bool = False

    @property
    def dtype(self) -> str:
        """Name of the dtype in torch, without "torch."."""
        return str(self.flat.dtype).removeprefix("torch.")

    def options(self, version: int) -> dict[str, Any]:
        """Return how a server loads it; only the last names the version, since half of the weights are none."""
        reported = {"weight_version": str(version)} if self.last else {}
        return {"load_format": "flattened_bucket", "flush_cache": False, **reported}

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors, each tensor a view of ``flat``."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [(name, part.view(shape)) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)]


class Buckets:
    """Two buffers of ``size`` bytes, made by ``allocate`` (bytes -> uint8 tensor) when they are first needed.

    After the first push they are no larger than all weights together.
    """

    def __init__(self, size: int, allocate: Callable[[int], torch.Tensor]):
        self.size = size
        self._allocate = allocate
        self.reused = True
        """False: each bucket gets its own memory, for readers that may lag."""
        self._total: int | None = None
        self.drop()

    def of(self, weights: NamedTensors) -> Iterator[Bucket]:
        """Yield the weights in buckets; a bucket stays valid until the second bucket after it is requested."""
        units, total = _units(weights), 0
        following = next(units, None)
        for index in cycle(range(_BUFFERS)):
            if following is None:
                self._total = total
                return
            dtype = following[0][1].dtype
            size = self.size if self._total is None else min(self.size, self._total)
            buffer = self._buffer(index, max(size, _nbytes(following)))
            bucket, used = Bucket(buffer), 0
            while following and following[0][1].dtype == dtype and used + _nbytes(following) <= len(buffer):
                for name, tensor in following:
                    buffer[used : used + tensor.nbytes].view(dtype).copy_(tensor.detach().reshape(-1))
                    used += tensor.nbytes
                    bucket.names.append(name)
                    bucket.shapes.append(tensor.shape)
                following = next(units, None)
            total += used
            bucket.flat, bucket.last = buffer[:used].view(dtype), following is None
            yield bucket

    def drop(self) -> None:
        """Release the buffers; the next bucket gets a new one."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS

    def _buffer(self, index: int, size: int) -> torch.Tensor:
        kept = len(self._buffers[index])
        if not self.reused or kept < size or (self._total is not None and kept > self._total):
            self._buffers[index] = self._allocate(size)
        return self._buffers[index]


def _units(weights: NamedTensors) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors of one dtype that must share a bucket: those of a layer's attention; others stay alone."""

    def place(named: tuple[str, torch.Tensor]) -> tuple[str, torch.dtype] | None:
        match = _TOGETHER.match(named[0])
        return (match[0], named[1].dtype) if match else None

    for together, unit in groupby(weights, place):
        if together:
            yield list(unit)
        else:
            yield from ([named] for named in unit)  # one by one: each is gathered when it is asked for


def _nbytes(unit: list[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in unit)


async def filled_ahead(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Fill as many buckets as there are buffers, while generation continues; return an iterator over all buckets."""
    filled = await in_thread(lambda: list(islice(buckets, _BUFFERS)))
    return chain(filled, buckets)


async def send_in_buckets(buckets: Iterator[Bucket], send: Callable[[Bucket], Awaitable[None]]) -> None:
    """Send every bucket, in order; the next is filled in a thread meanwhile."""
    sending = asyncio.ensure_future(asyncio.sleep(0))
    try:
        while (bucket := await in_thread(lambda: next(buckets, None))) is not None:
            await sending
            sending = asyncio.ensure_future(send(bucket))
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def in_thread(action: Callable[[], Result]) -> Result:
    """Run ``action`` in a thread, on this thread's device and without gradients: torch sets both per thread."""
    device = get_device_id()

    def run() -> Result:
        get_torch_device().set_device(device)
        with torch.no_grad():
            return action()

    return await asyncio.to_thread(run)
