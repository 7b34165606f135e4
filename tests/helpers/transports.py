"""The engine of rank 0 alone, which pushes by any transport."""

import asyncio
import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from helpers.checksums import can_checksum, differing_tensors
from recipe.atropos.utils import scratch
from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine

LIMIT = 15  # s, one request


def engine(urls, transport, tmp_path, bucket_size=200_000, dtype="float32", **options):
    """With the servers' ``urls``, which ``send`` pushes to."""
    pusher = AtroposCheckpointEngine(
        bucket_size,
        True,
        urls=urls,
        transport=transport,
        directory=tmp_path / "weights",
        dtype=dtype,
        **{"timeout": LIMIT} | options,
    )
    pusher.urls = urls
    return pusher


def send(engine, model, version):
    """Push a model's weights, and compare every tensor of every server that can."""
    metrics = asyncio.run(engine.send_weights(weights_of(model), version, engine.urls))
    for url in filter(can_checksum, engine.urls):
        sent = ((name, tensor.to(engine.dtype)) for name, tensor in weights_of(model))
        different = differing_tensors(url, sent)
        assert not different, f"{url} has other values in {different}"
    return metrics


def weights_of(model):
    """As a rank streams them; a tied output layer comes too, as from verl's engines."""
    yield from _state_of(model).items()


@functools.cache
def _state_of(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()


class Allocations(list):
    """Sizes of the buffers that ``Buckets`` have asked it for, in order."""

    def __call__(self, n_bytes):
        self.append(n_bytes)
        return torch.empty(n_bytes, dtype=torch.uint8)


def shared_memory():
    """Paths of this run."""
    return set(Path("/dev/shm").glob(f"{scratch.current().folder.name}-*"))
