"""Speed of our Trajectory API beside atroposlib's run-api: ``python benchmarks/trajectory_api.py [--quick]``.

Groups of 8 sequences of 2,048 tokens with logprobs, as a single-turn environment makes them, unless said otherwise.
Both servers run as processes of their own, with the settings that they have by default, and get the same requests.
Medians over several rounds; in each round run-api and ours take turns, in new processes, whose first batches are not
counted. Server CPU is its process's user and system time.

1. ``/batch`` of 512 sequences, as JSON and packed; packed includes making the arrays.
2. Posts, as JSON, as gzip like stock environments, and packed: server CPU for each group.
3. The first ``/batch`` with 20,000 groups of 4 x 8 tokens queued, at batch sizes 16 and 512.
4. Memory for each queued sequence; the 99th percentile of ``/status`` while batches are posted and fetched.
5. Ours alone: a restart with 20,000 groups, until it answers.
6. CPU of an environment's process for each posted group: ``BaseEnv``'s own method, and our client.
7. Ours alone: server CPU for a group begun with a ticket and posted packed, while a trainer fetches batches of 64
   groups and environments wait for tickets at max_staleness=1: with 64 of them, with 2, and for posts without a ticket.
"""

import argparse
import asyncio
import gzip
import http.client
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import psutil
import requests
from atroposlib.envs.base import BaseEnv

from recipe.atropos.data.scored_group import ScoredGroup, unpack_all
from recipe.atropos.trajectory_api import wire
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.utils.process import free_port

SIZE, LENGTH, BATCH = 8, 2048, 512
MANY, SMALL = 20_000, 4
TARGETS = {
    "batch_json_wall_ratio": ">= 25",
    "batch_json_cpu_ratio": ">= 40",
    "batch_packed_ratio": ">= 150",
    "ingest_json_cpu_ratio": ">= 3.5",
    "ingest_gzip_cpu_ratio": ">= 3.5",
    "ingest_packed_cpu_ratio": ">= 12",
    "first_batch_16_ratio": ">= 500",
    "first_batch_512_ratio": ">= 20",
    "memory_ratio": ">= 50",
    "status_p99_ratio": ">= 20",
    "restart_seconds": "<= 2",
    "environment_cpu_ratio": ">= 60",
    "ticket_cpu_64_to_2": "<= 1.2",
    "ticket_cpu_64_to_post": "<= 1.6",
}
_RESOLUTION = 1 << 20  # bytes
_PROBER = """
import http.client, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
while True:
    started = time.perf_counter()
    connection.request("GET", "/status")
    connection.getresponse().read()
    print(time.perf_counter() - started, flush=True)
    time.sleep(0.005)
"""


@dataclass
class Server:
    """A server's process and address."""

    process: subprocess.Popen
    port: int
    session: requests.Session = field(default_factory=requests.Session)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> float:
        """Return the CPU seconds used so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def memory(self) -> int:
        """Return the bytes that only this process has."""
        return psutil.Process(self.process.pid).memory_full_info().uss

    def get(self, path: str, **kwargs: Any) -> Any:
        return orjson.loads(self.session.get(self.url + path, **kwargs).content)

    def raw(self, path: str) -> bytes:
        """Return the content of a GET, read as fast as Python can, and not compressed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path, headers={"Accept-Encoding": "identity"})
        content = connection.getresponse().read()
        connection.close()
        return content

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        headers = {"Content-Type": "application/json", **(headers or {})}
        reply = self.session.post(self.url + path, data=body, headers=headers)
        reply.raise_for_status()

    def register(self, batch_size: int) -> None:
        registration = {
            **{"wandb_group": "", "wandb_project": "", "batch_size": batch_size, "max_token_len": LENGTH},
            **{"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1000},
        }
        self.post("/register", orjson.dumps(registration))


@contextmanager
def serving(ours: bool, folder: Path | None = None) -> Iterator[Server]:
    """Start a server with an empty queue, or ours on a folder; end it."""
    with tempfile.TemporaryDirectory() as empty:
        port = free_port()
        module = "recipe.atropos.trajectory_api" if ours else "atroposlib.cli.run_api"
        where = ["--data-dir", str(folder or empty)] if ours else []
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *where],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "ATROPOS_API_KEY": ""},
        )
        server = Server(process, port)
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    server.get("/info")
                    break
                except requests.ConnectionError:
                    time.sleep(0.01)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def make_group(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 150_000, (SIZE, LENGTH))
    masks = tokens.copy()
    masks[:, : LENGTH // 8] = -100
    logprobs = -rng.exponential(1.0, (SIZE, LENGTH)).astype(np.float32).astype(np.float64)
    return {
        "tokens": tokens.tolist(),
        "masks": masks.tolist(),
        "scores": rng.integers(0, 2, SIZE).astype(float).tolist(),
        "inference_logprobs": logprobs.tolist(),
        "group_overrides": {"env_name": "benchmark", "policy_version_min": [3] * SIZE},
    }


Figures = dict[str, list[float]]


def batches(server: Server, body: bytes, ours: bool, found: Figures) -> None:
    """Post and fetch 512 sequences: as JSON, and packed from ours by its client, which makes the arrays."""
    name = "ours" if ours else "run_api"
    server.register(BATCH)
    for _ in range(BATCH // SIZE):
        server.post("/scored_data", body)
    cpu, started = server.cpu(), time.perf_counter()
    content = server.raw("/batch")
    found[f"batch_json_wall_{name}"].append(time.perf_counter() - started)
    found[f"batch_json_cpu_{name}"].append(server.cpu() - cpu)
    batch = orjson.loads(content)["batch"]
    assert len(batch) == BATCH // SIZE
    found[f"batch_lists_{name}"].append(time.perf_counter() - started)
    if ours:
        for _ in range(BATCH // SIZE):
            server.post("/scored_data", body)
        cpu = server.cpu()
        found["batch_packed_ours"].append(asyncio.run(packed_batch(server)))
        found["batch_packed_cpu_ours"].append(server.cpu() - cpu)


async def packed_batch(server: Server) -> float:
    """Return the seconds in which our client has the next batch as arrays."""
    async with TrajectoryApiClient(server.url) as client:
        last = (await client.diagnose())["batches"]["last"]
        started = time.perf_counter()
        batch = await client.batch(after=last)
        seconds = time.perf_counter() - started
    assert batch is not None and sum(len(group.lengths) for group in batch.groups) == BATCH
    return seconds


def ingest(server: Server, bodies: dict[str, bytes], name: str, groups: int, found: Figures) -> None:
    """Post groups in each form that the server reads."""
    headers = {"json": {}, "gzip": {"Content-Encoding": "gzip"}, "packed": {"Content-Type": wire.PACKED}}
    for form in ("json", "gzip", "packed") if name == "ours" else ("json", "gzip"):
        server.post("/scored_data", bodies[form], headers[form])
        cpu, started = server.cpu(), time.perf_counter()
        for _ in range(groups):
            server.post("/scored_data", bodies[form], headers[form])
        found[f"ingest_{form}_cpu_{name}"].append((server.cpu() - cpu) / groups)
        found[f"ingest_{form}_wall_{name}"].append((time.perf_counter() - started) / groups)


def first_batch(server: Server, batch_size: int, many: int) -> float:
    """Return the seconds of the first ``/batch`` with ``many`` small groups queued."""
    server.register(batch_size)
    group = {"tokens": [[1] * 8] * SMALL, "masks": [[1] * 8] * SMALL, "scores": [0.5] * SMALL}
    body = orjson.dumps([group] * 500)
    for _ in range(many // 500):
        server.post("/scored_data_list", body)
    started = time.perf_counter()
    assert sum(len(group["tokens"]) for group in server.get("/batch")["batch"]) == batch_size
    return time.perf_counter() - started


def memory(server: Server, body: bytes, groups: int) -> float:
    """Return the bytes of memory of a queued sequence; at least what a process's own changes leave uncertain."""
    for _ in range(32):
        server.post("/scored_data", body)
    before = server.memory()
    for _ in range(groups):
        server.post("/scored_data", body)
    return max(_RESOLUTION, server.memory() - before) / groups / SIZE


def status_p99(server: Server, body: bytes, seconds: float) -> float:
    """Return the 99th percentile of ``/status`` in seconds, while batches are posted and fetched."""
    prober = subprocess.Popen([sys.executable, "-c", _PROBER, str(server.port)], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for _ in range(BATCH // SIZE):
                server.post("/scored_data", body)
            server.get("/batch", headers={"Accept-Encoding": "identity"})
    finally:
        prober.terminate()
        output, _ = prober.communicate()
    times = sorted(float(line) for line in output.splitlines()[3:] if line)
    return times[min(len(times) - 1, math.ceil(0.99 * len(times)))]


def restart_seconds(folder: Path, many: int) -> float:
    """Return the seconds from a start to the first answer, with ``many`` groups stored."""
    with serving(True, folder) as server:
        group = make_group()
        small = {key: [row[:256] for row in group[key]] for key in ("tokens", "masks", "inference_logprobs")}
        body = b"".join([ScoredGroup.from_mapping({**small, "scores": group["scores"]}).pack()] * 500)
        for _ in range(many // 500):
            server.post("/scored_data_list", body, {"Content-Type": wire.PACKED})
    with serving(True, Path(tempfile.mkdtemp(dir=folder.parent))) as server:
        empty = time.time() - psutil.Process(server.process.pid).create_time()
    with serving(True, folder) as server:
        seconds = time.time() - psutil.Process(server.process.pid).create_time()
        assert server.get("/status")["queue_size"] == many
    print(f"start with nothing stored {empty:.2f} s, with {many} groups {seconds:.2f} s", flush=True)
    return seconds


class _Poster(BaseEnv):
    """``BaseEnv`` as far as it posts groups."""

    def __init__(self, url: str):
        self.config = SimpleNamespace(rollout_server_url=url)
        self.env_id = None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    async def get_next_item(self) -> None: ...


def environment_cpu(server: Server, group: dict[str, Any], ours: bool, groups: int) -> float:
    """Return the CPU seconds of this process for each group that it posts."""

    async def stock() -> float:
        environment = _Poster(server.url)
        await environment._send_scored_data_to_api(group)
        started = time.process_time()
        for _ in range(groups):
            await environment._send_scored_data_to_api(group)
        return (time.process_time() - started) / groups

    async def packed() -> float:
        async with TrajectoryApiClient(server.url) as client:
            await client.post_groups([group])
            started = time.process_time()
            for _ in range(groups):
                await client.post_groups([group])
            return (time.process_time() - started) / groups

    return asyncio.run(packed() if ours else stock())


async def ticketed_cpu(server: Server, body: bytes, environments: int, batches: int, tickets: bool = True) -> float:
    """Return the server's CPU seconds for each group of ``batches`` batches of 64 groups."""
    registration = {"max_token_length": LENGTH, "desired_name": "e", "weight": 1.0, "group_size": SIZE}
    fields = {"wandb_group": "", "wandb_project": "", "batch_size": 64 * SIZE, "max_token_len": LENGTH}
    fields |= {"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 1000}
    [group] = [json.loads(group.to_json()) for group in unpack_all(body)]

    async def environment() -> None:
        async with TrajectoryApiClient(server.url) as client:
            env_id = (await client.register_env(registration))["env_id"]
            while True:
                ticket = await client.begin(env_id, SIZE, wait=10, more=True) if tickets else None
                if ticket is not None or not tickets:
                    await client.post_groups([{**group, "env_id": env_id}], ticket)

    async with TrajectoryApiClient(server.url) as trainer:
        await trainer.register(fields, 0, 1 if tickets else None)
        working = [asyncio.create_task(environment()) for _ in range(environments)]
        cpu = 0.0
        for number in range(1, batches + 2):
            while await trainer.batch(number - 1, wait=10) is None:
                pass
            await trainer.call("POST", "/weights", {"through": number})
            cpu = cpu or server.cpu()  # from the end of the first batch on
        cpu = (server.cpu() - cpu) / (64 * batches)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    return cpu


def measure(rounds: int, many: int, seconds: float) -> Figures:
    """Run all measurements, with ``many`` groups queued or stored; the servers take turns in each."""
    group = make_group()
    body = json.dumps(group).encode()
    bodies = {
        "json": body,
        "gzip": gzip.compress(body),
        "packed": ScoredGroup.from_mapping(group).pack(),
    }
    found: Any = _Lists()
    for _ in range(rounds):
        for ours, name in ((False, "run_api"), (True, "ours")):
            with serving(ours) as server:
                batches(server, body, ours, _Lists())  # to warm it up
                batches(server, body, ours, found)
                ingest(server, bodies, name, 256 if ours else 24, found)
                cpu = environment_cpu(server, group, ours, 64 if ours else 8)
                found[f"environment_cpu_{name}"].append(cpu)
            with serving(ours) as server:
                found[f"memory_{name}"].append(memory(server, body, 256 if ours else 64))
        print(f"round {len(found['memory_ours'])} of {rounds}", flush=True)
    for batch_size in (16, 512):
        for ours, name in ((False, "run_api"), (True, "ours")):
            for _ in range(1 if batch_size == 16 and not ours else min(3, rounds)):
                with serving(ours) as server:
                    found[f"first_batch_{batch_size}_{name}"].append(first_batch(server, batch_size, many))
        print(f"first batch of {batch_size} with {many} groups", flush=True)
    for ours, name in ((False, "run_api"), (True, "ours")):
        with serving(ours) as server:
            server.register(BATCH)
            found[f"status_p99_{name}"].append(status_p99(server, body, seconds))
    for _ in range(rounds):
        for name, environments, tickets in (("64", 64, True), ("2", 2, True), ("post", 2, False)):
            with serving(ours=True) as server:
                cpu = asyncio.run(
                    ticketed_cpu(server, bodies["packed"], environments, 4 if many < MANY else 16, tickets)
                )
                found[f"ticket_cpu_{name}"].append(cpu)
    with tempfile.TemporaryDirectory() as folder:
        found["restart_seconds"].append(restart_seconds(Path(folder) / "data", many))
    return found


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        self[key] = []
        return self[key]


def report(found: Figures) -> dict[str, float]:
    """Print a table; return the figures that have targets."""
    median: Callable[[str], float] = lambda name: statistics.median(found[name])  # noqa: E731
    rows = {
        "batch_json_wall_ratio": ("/batch of 512, JSON, s", "batch_json_wall_run_api", "batch_json_wall_ours"),
        "batch_json_cpu_ratio": ("  server CPU, s", "batch_json_cpu_run_api", "batch_json_cpu_ours"),
        "batch_packed_ratio": ("/batch of 512, packed, to arrays, s", "batch_lists_run_api", "batch_packed_ours"),
        "ingest_json_cpu_ratio": ("post, JSON, CPU s", "ingest_json_cpu_run_api", "ingest_json_cpu_ours"),
        "ingest_gzip_cpu_ratio": ("post, gzip, CPU s", "ingest_gzip_cpu_run_api", "ingest_gzip_cpu_ours"),
        "ingest_packed_cpu_ratio": ("post, packed, CPU s", "ingest_json_cpu_run_api", "ingest_packed_cpu_ours"),
        "first_batch_16_ratio": ("first batch of 16, s", "first_batch_16_run_api", "first_batch_16_ours"),
        "first_batch_512_ratio": ("first batch of 512, s", "first_batch_512_run_api", "first_batch_512_ours"),
        "memory_ratio": ("memory a sequence, bytes", "memory_run_api", "memory_ours"),
        "status_p99_ratio": ("/status under load, p99, s", "status_p99_run_api", "status_p99_ours"),
        "environment_cpu_ratio": ("environment's CPU a group, s", "environment_cpu_run_api", "environment_cpu_ours"),
    }
    print(f"\n{'':38} {'run-api':>12} {'ours':>12} {'ratio':>8}  target")
    figures = {}
    for name, (label, reference, ours) in rows.items():
        figures[name] = median(reference) / max(1e-9, median(ours))
        target = TARGETS[name]
        print(f"{label:38} {median(reference):12.4g} {median(ours):12.4g} {figures[name]:8.1f}  {target}")
    for form in ("json", "gzip", "packed"):
        walls = [f"ingest_{form}_wall_{name}" for name in ("run_api", "ours")]
        rates = [1 / median(wall) for wall in walls if wall in found]
        print(f"  groups posted a second, {form}: {', '.join(f'{rate:.0f}' for rate in rates)}")
    for other in ("2", "post"):
        name = f"ticket_cpu_64_to_{other}"
        figures[name] = median("ticket_cpu_64") / median(f"ticket_cpu_{other}")
        label = f"ticketed group, 64 waiting, to {other}, CPU s"
        values = f"{median(f'ticket_cpu_{other}'):12.4g} {median('ticket_cpu_64'):12.4g}"
        print(f"{label:38} {values} {figures[name]:8.2f}  {TARGETS[name]}")
    figures["restart_seconds"] = median("restart_seconds")
    label, target = "restart with 20,000 groups, s", TARGETS["restart_seconds"]
    print(f"{label:38} {'':>12} {figures['restart_seconds']:12.2f} {'':>8}  {target}")
    return figures


def meets(value: float, target: str) -> bool:
    sign, bound = target.split()
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    options = parser.parse_args()
    rounds, many, seconds = (1, 1000, 1) if options.smoke else (2, MANY, 5) if options.quick else (5, MANY, 15)
    figures = report(measure(rounds, many, seconds))
    ok = all(meets(figures[name], target) for name, target in TARGETS.items())
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"name": "trajectory_api", "figures": rounded, "targets": TARGETS, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
