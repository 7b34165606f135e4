"""Speed of weight synchronization: ``python benchmarks/weight_sync.py [--quick]``.

A random bfloat16 model with the shape of Qwen2.5-0.5B is pushed to a real SGLang server on this machine by each
transport, and each is compared with a lower bound, its floor, measured in the same run on the same tensors:

- tensor: a plain copy of every tensor into allocated memory, as the buckets are from the second push on;
- distributed: a bare gloo broadcast of as many bytes between two processes, in buckets of the same size;
- disk: a bare safetensors write, and a read.

Pushes and floors alternate, so that both see the same load on shared cores. ``memory`` is the pushing process's peak
above its memory before, in buckets; ``paused`` is the share of a push in which generation was paused, and how many
times the floors of what must happen in it that took.
"""

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import multiprocessing

from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.server import SGLangLaunch, start_sglang
from recipe.atropos.utils.process import Service, free_port, wait_until_healthy
from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine

TARGETS = {"tensor": 6.0, "distributed": 2.0, "disk": 1.5}  # times the floor
# Seconds in which generation is paused, over what must happen then: a copy by the server, and with ``distributed`` the
# broadcast before it, since SGLang receives and loads a bucket in one call. Requests and waiting for both come on top.
PAUSED = {"tensor": ("tensor",), "distributed": ("distributed", "tensor")}
PAUSED_TARGETS = {"tensor": 3.0, "distributed": 1.25}
MEMORY_TARGET = 2.0  # buckets
WARM_UP = 3  # pushes: a virtual machine's memory is slow until it has been touched, the server's too
Weights = dict[str, torch.Tensor]


def make_model(folder: Path, layers: int) -> Weights:
    """Write the model with random weights and a tiny tokenizer; return its tensors, bfloat16."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(before)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b", pad_token="b").save_pretrained(folder)
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def copy_into(weights: Weights, target: Weights) -> float:
    return timed(lambda: [target[name].copy_(tensor) for name, tensor in weights.items()])


def write_and_read(weights: Weights, folder: Path) -> float:
    """Time a write and a read; the read comes from the page cache, as the server's does."""
    file = folder / "floor.safetensors"

    def both() -> None:
        save_file(weights, file)
        for tensor in load_file(file).values():
            tensor.clone()  # load_file only maps; a server has to read the bytes

    seconds = timed(both)
    file.unlink()
    return seconds


class Broadcast:
    """A second process that receives buckets by gloo broadcast."""

    def __init__(self, n_bytes: int, bucket: int):
        self.sizes = [min(bucket, n_bytes - start) for start in range(0, n_bytes, bucket)]
        self.buffer = torch.zeros(bucket, dtype=torch.uint8)
        port = free_port()
        context = multiprocessing.get_context("spawn")
        self.go = context.Queue()
        self.process = context.Process(target=_receive, args=(port, self.sizes, bucket, self.go), daemon=True)
        self.process.start()
        _join(port, 0)

    def run(self) -> float:
        self.go.put(True)
        dist.barrier()
        return timed(lambda: [dist.broadcast(self.buffer[:size], src=0) for size in self.sizes] and dist.barrier())

    def close(self) -> None:
        self.go.put(False)
        self.process.join(30)
        dist.destroy_process_group()


def _join(port: int, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def _receive(port: int, sizes: list[int], bucket: int, go: multiprocessing.Queue) -> None:
    _join(port, 1)
    buffer = torch.empty(bucket, dtype=torch.uint8)
    while go.get():
        dist.barrier()
        for size in sizes:
            dist.broadcast(buffer[:size], src=0)
        dist.barrier()
    dist.destroy_process_group()


class Peak:
    """Peak memory of this process above its memory on entry, in bytes; shared memory counts."""

    def __enter__(self) -> "Peak":
        gc.collect()
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.bytes, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the layers, fewer rounds")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    layers, rounds = (1, 1) if arguments.smoke else (4, 2) if arguments.quick else (24, 9)
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), layers, rounds, bucket=512 << 20)
    ok = all(figures[f"{transport}_over_floor"] <= target for transport, target in TARGETS.items())
    ok = ok and all(figures[f"{transport}_memory_buckets"] <= MEMORY_TARGET for transport in TARGETS)
    ok = ok and all(
        figures[f"{transport}_paused_over_floors"] <= target for transport, target in PAUSED_TARGETS.items()
    )
    targets = {f"{transport}_over_floor": f"<= {target}" for transport, target in TARGETS.items()}
    targets |= {f"{transport}_paused_over_floors": f"<= {target}" for transport, target in PAUSED_TARGETS.items()}
    targets["memory_buckets"] = f"<= {MEMORY_TARGET}"
    print(json.dumps({"name": "weight_sync", "figures": figures, "targets": targets, "ok": ok}))
    return 0 if ok else 1


async def serving(server: Service) -> None:
    await wait_until_healthy(server, SGLangClient(server.url).health, 300)


def measure(folder: Path, layers: int, rounds: int, bucket: int) -> dict[str, float]:
    torch.set_num_threads(1)  # as in the trainer's rank that copies; the other core is the server's
    weights = make_model(folder / "model", layers)
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    bucket_used = max(bucket, *(tensor.nbytes for tensor in weights.values()))  # a buffer holds the largest tensor
    options = {"dtype": "bfloat16", "device": "cpu", "extra_args": {"max_total_tokens": 2048}}
    launch = SGLangLaunch(str(folder / "model"), port=free_port(), **options)
    server = start_sglang(launch, log_path=folder / "sglang.log")
    broadcast = Broadcast(n_bytes, bucket)
    copies = {key: tensor.clone() for key, tensor in weights.items()}
    floors = {
        "tensor": lambda: copy_into(weights, copies),
        "distributed": broadcast.run,
        "disk": lambda: write_and_read(weights, folder),
    }
    seconds: dict[str, list[float]] = {transport: [] for transport in TARGETS}
    floor_seconds: dict[str, list[float]] = {transport: [] for transport in TARGETS}
    paused: dict[str, list[float]] = {transport: [] for transport in TARGETS}
    peaks: dict[str, float] = {}
    version = 0
    try:
        asyncio.run(serving(server))
        for transport in TARGETS:
            pusher = AtroposCheckpointEngine(
                bucket, True, urls=[server.url], transport=transport, directory=folder / "weights", dtype="bfloat16"
            )
            for number in range(-WARM_UP, rounds):
                version += 1
                with Peak() as peak:
                    metrics = asyncio.run(pusher.send_weights(iter(weights.items()), version, [server.url]))
                assert metrics["weight_sync/bytes"] == n_bytes
                floor = floors[transport]()
                if number == -WARM_UP:  # the first push allocates
                    peaks[transport] = peak.bytes / bucket_used
                if number < 0:
                    continue
                seconds[transport].append(metrics["weight_sync/total_s"])
                paused[transport].append(metrics["weight_sync/pause_s"])
                floor_seconds[transport].append(floor)
            shutil.rmtree(folder / "weights", ignore_errors=True)
    finally:
        server.stop()
        broadcast.close()

    size = f"{n_bytes / 1e9:.2f} GB of bfloat16 in buckets of {bucket >> 20} MiB"
    print(f"{size}, {os.cpu_count()} cores, medians of {rounds}")
    print("transport      push s   GB/s  floor s  ratio  target  memory  paused")
    figures: dict[str, float] = {"gigabytes": n_bytes / 1e9}
    for transport, target in TARGETS.items():
        push, floor = statistics.median(seconds[transport]), statistics.median(floor_seconds[transport])
        still = statistics.median(paused[transport])
        needed = sum(statistics.median(floor_seconds[name]) for name in PAUSED.get(transport, ()))
        over = f"{still / needed:.2f} floors (target {PAUSED_TARGETS[transport]})" if needed else ""
        print(
            f"{transport:<12} {push:8.3f} {n_bytes / 1e9 / push:6.2f} {floor:8.3f} {push / floor:6.2f} {target:7.1f} "
            f"{peaks[transport]:7.2f} {still / push:6.0%} {over}"
        )
        figures |= {
            f"{transport}_s": push,
            f"{transport}_floor_s": floor,
            f"{transport}_over_floor": push / floor,
            f"{transport}_paused_s": still,
            f"{transport}_memory_buckets": peaks[transport],
        } | ({f"{transport}_paused_over_floors": still / needed} if needed else {})
    return figures


if __name__ == "__main__":
    sys.exit(main())
