"""What a step costs the recipe when many servers sample for it: ``python benchmarks/scale.py [--quick]``.

A step is 1,024 sequences of 16,384 tokens, in groups of 8 by 64 environments, half of which sample through the session
server, the others from the gateway as ``BaseEnv`` does; a policy of 7B then takes as long to train as to sample.

Real: Trajectory API, gateway and session server in processes of their own; the environments' requests and posts, all in
one process; the data source, ``fit_step`` of the trainer and the calls around a push of weights, in this one. All
payloads have their real size. Simulated: the trainer's ranks, and the servers, which answer at once, in one process; so
the clock is virtual where a step only waits for tokens: it takes sequences * tokens / (servers * 2,000 tokens a
second).

- CPU seconds of each part for a step, to be set against its length: the three services have a thread each.
- idle: the seconds in which GPUs wait for the recipe. They go by while the last group passes through gateway,
  environment, Trajectory API and data source, all else being there already; in all that the driver does before, between
  and after the ranks' calls, which are the trainer's own steps on ranks that answer at once: conversion, layout and
  checks; what the ranks are sent for logprobs, through Ray, and their reply; comparison with the engine, correction and
  advantages; what they are sent for the update; the last metrics; and during the calls of a push, in which nothing is
  sent. Rollouts' text and rows' metrics are made while the ranks update ("hidden"). Generation that goes on meanwhile
  (``max_staleness``) is not deducted.

Target: 64 servers idle for at most 3% of a step. The step of ``--quick`` is too short to be judged by it.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import ray
import torch
from aiohttp import web
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoTokenizer

from recipe.atropos.config.compose import compose_config
from recipe.atropos.data.rows import IGNORED
from recipe.atropos.demo.small_policy import ensure_small_policy
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient, gateway_command
from recipe.atropos.main import fill_in, ray_options
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.sessions.client import SessionClient, scored_group
from recipe.atropos.sources.numbered import DataSource, DataSourceConfig
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.trajectory_api.endpoints import Registration
from recipe.atropos.utils.gpus import decide_device, platform_variables
from recipe.atropos.utils.local_ray import start_ray
from recipe.atropos.utils.process import Service, free_port, start_service, wait_until_healthy
from recipe.atropos.utils.secret import API_KEY_VARIABLE, environments_key
from recipe.atropos.verl_ext.batch import tensordict_utils as tu
from recipe.atropos.verl_ext.worker import make_nd_compute_dataproto_dispatch_fn
from recipe.atropos.weight_sync.fleet import ServerFleet
from recipe.atropos.weight_sync.push import push
from recipe.atropos.weight_sync.servers import on_all
from recipe.atropos.workers.actor import ActorGroup

KEY = "trainer"
RATE = 2_000  # tokens a second of a server
ENVIRONMENTS, GROUP_SIZE, PROMPT = 64, 8, 64  # the prompt in tokens
RANKS = 8  # of the policy's training
AT_ONCE = 64  # requests of the environments
READY, START_SECONDS = "ready", 120.0  # what the environments print, and when it must be there
VOCABULARY = 300  # of the small policy at least
SHARE = 0.03  # of a step, in which GPUs may be idle
# What they wait for: the last group, conversion and layout, what goes to the ranks and back, all else that the driver
# computes, and the calls of a push.
IDLE = ("last_group", "convert", "ray", "compute", "push")


@dataclass(frozen=True)
class Step:
    """Sizes of a step, and by how many servers it is sampled."""

    sequences: int
    tokens: int
    servers: int

    @property
    def groups(self) -> int:
        return self.sequences // GROUP_SIZE

    @property
    def seconds(self) -> float:
        return self.sequences * self.tokens / (self.servers * RATE)


# ---------------------------------------------------------------- the servers


async def serve(ports: Sequence[int], tokens: int) -> None:
    """Answer as SGLang's servers do, with replies of so many tokens, at once."""
    logprobs = [[-0.125 - 1 / (2 + i), 100 + i % (VOCABULARY - 100), None] for i in range(tokens)]
    versions = dict.fromkeys(ports, "0")

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        info = {"finish_reason": {"type": "length"}, "weight_version": versions[request.app["port"]]}
        reply = {"text": "", "meta_info": info | {"output_token_logprobs": logprobs, "completion_tokens": tokens}}
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": versions[request.app["port"]]})

    async def load(request: web.Request) -> web.Response:
        versions[request.app["port"]] = (await request.json())["version"]
        return web.json_response({"success": True})

    async def done(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"success": True})

    for port in ports:
        app = web.Application(client_max_size=0)
        app["port"] = port
        app.router.add_post("/generate", generate)
        app.router.add_get("/model_info", info)
        app.router.add_post("/load", load)
        app.router.add_route("*", "/{path:.*}", done)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


class Delivered:
    """A transport whose weights need no time: what is measured is the rest of a push."""

    pauses = True

    async def stage(self, clients: Sequence[SGLangClient], weights: Iterator[Any], version: int) -> None:
        list(weights)

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        await on_all(clients, "deliver", lambda client: client.post("/load", {"version": str(version)}))

    def release(self, version: int) -> None:
        pass


# ---------------------------------------------------------------- the environments


@dataclass
class Environments:
    """All environments; the last group of each step is sampled when all others are stored."""

    api: str
    gateway: str
    sessions: str
    step: Step
    key: str
    begun: int = 0
    stored: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        self.slots = asyncio.Semaphore(AT_ONCE)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as self.http:
            self.client = SessionClient(self.sessions, self.key)
            print(READY, flush=True)
            await asyncio.gather(*(self.environment(number) for number in range(ENVIRONMENTS)))

    async def environment(self, number: int) -> None:
        longest = PROMPT + self.step.tokens
        fields = {"max_token_length": longest, "desired_name": f"e{number}", "weight": 1.0, "group_size": GROUP_SIZE}
        async with TrajectoryApiClient(self.api, self.key) as api:
            while (env_id := (await api.register_env(fields)).get("env_id")) is None:
                await asyncio.sleep(0.2)  # until the trainer has registered
            while True:
                ticket = await api.begin(env_id, GROUP_SIZE, wait=10, more=True)
                if ticket is None:
                    continue
                self.begun += 1
                if self.begun % self.step.groups == 0:
                    async with self.changed:
                        await self.changed.wait_for(lambda: (self.stored + 1) % self.step.groups == 0)
                sampled = time.time()
                group = await (self.in_sessions() if number % 2 else self.from_gateway())
                group["group_overrides"] |= {"env_name": f"e{number}", "sampled": sampled}
                await api.post_groups([{**group, "env_id": env_id}], ticket)
                async with self.changed:
                    self.stored += 1
                    self.changed.notify_all()

    async def from_gateway(self) -> dict[str, Any]:
        prompt = [100 + i for i in range(PROMPT)]
        sampling = {"max_new_tokens": self.step.tokens, "temperature": 1.0}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

        async def one() -> list[list[Any]]:
            async with self.slots, self.http.post(f"{self.gateway}/generate", data=orjson.dumps(body)) as answer:
                return orjson.loads(await answer.read())["meta_info"]["output_token_logprobs"]

        replies = await asyncio.gather(*(one() for _ in range(GROUP_SIZE)))
        ids = [[token for _, token, _ in reply] for reply in replies]
        return {
            "tokens": [prompt + reply for reply in ids],
            "masks": [[IGNORED] * PROMPT + reply for reply in ids],
            "inference_logprobs": [[1.0] * PROMPT + [logprob for logprob, _, _ in reply] for reply in replies],
            "scores": [float(number % 2) for number in range(GROUP_SIZE)],
            "group_overrides": {},
        }

    async def in_sessions(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "12 + 7 = 19 " * 5}]
        body = orjson.dumps({"model": "policy", "messages": messages, "max_tokens": self.step.tokens})

        async def one(number: int) -> tuple[str, float, dict[str, Any]]:
            session = await self.client.open(sampling={"temperature": 1.0})
            headers = {"Authorization": f"Bearer {session.api_key}"}
            url = f"{self.sessions}/v1/chat/completions"
            async with self.slots, self.http.post(url, data=body, headers=headers) as answer:
                found = await answer.read()
            assert answer.status == 200, found[:500]
            await self.client.end(session.id, reward=float(number % 2))
            return session.id, float(number % 2), await self.client.rows(session.id)

        return scored_group(await asyncio.gather(*(one(number) for number in range(GROUP_SIZE))), "e")


# ---------------------------------------------------------------- the driver


class Ranks(ActorGroup):
    """In the place of the ranks: what they are sent and reply goes through Ray, but they need no time.

    ``sending``: seconds in which the driver sends and receives; ``away``: those of what stands for the ranks' work, and
    of ``hidden``, what the driver does during the update.
    """

    def __init__(self, config: DictConfig):
        self.settings, self.deadline, self.meanwhile = config.actor_rollout_ref, math.inf, []
        self.computes_reference = self._has_second_model = False
        self._world_size = RANKS
        self._dispatch_info, self._collect_info = {"actor": list(range(RANKS))}, {"actor": [True] * RANKS}
        self._calls = make_nd_compute_dataproto_dispatch_fn("actor")
        self.sending = self.away = self.hidden = 0.0

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        sent = self._send(data)
        begun = time.perf_counter()
        replies = [ray.put(self._reply(ray.get(part))) for part in sent]
        received = time.perf_counter()
        found = self._calls["collect_fn"](self, ray.get(replies))
        self.away += received - begun
        self.sending += time.perf_counter() - received
        return found

    def update_actor(self, data: TensorDict) -> TensorDict:
        self._send(data)
        begun = time.perf_counter()
        while self.meanwhile:
            self.meanwhile.pop(0)()
        self.hidden = time.perf_counter() - begun
        self.away += self.hidden
        return tu.get_tensordict({}, {"metrics": {"grad_norm": [1.0], "mfu": [0.5]}})

    def _send(self, data: TensorDict) -> list[ray.ObjectRef]:
        begun = time.perf_counter()
        (parts,), _ = self._calls["dispatch_fn"](self, data)
        self.sending += time.perf_counter() - begun
        return parts

    @staticmethod
    def _reply(data: TensorDict) -> TensorDict:
        ids = data["input_ids"]
        values = torch.nested.nested_tensor_from_jagged(torch.full(ids.values().shape, -0.3), ids.offsets())
        return tu.get_tensordict({"log_probs": values, "entropy": -values}, {"metrics": {"mfu": 0.5}})


class Pushes:
    """In the place of ``WeightSyncManager``, whose actor pushes: its calls alone."""

    version = 0

    def __init__(self, fleet: ServerFleet):
        self.fleet = fleet

    def ensure_current(self, *_: Any) -> dict[str, float]:
        return {}

    def offload_servers(self) -> None:
        pass

    def update_weights(self, version: int, _: Any) -> None:
        """Make the calls of a push, as ``WeightSyncManager.update_weights`` and the actor do."""

        async def all_servers(urls: list[str]) -> None:
            clients = [SGLangClient(url, KEY) for url in urls]
            await push(clients, Delivered(), iter(()), version, "abort")

        targets = sorted(self.fleet.wait_for(1))
        self.fleet.gateway.announce(version, targets, pushing=True)
        asyncio.run(all_servers(targets))
        self.fleet.admit(version, targets)
        self.version = version


class Unseen:
    """Trackers and a progress bar that nobody sees."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def driver(folder: Path, step: Step) -> Iterator[RayGRPOAtroposTrainer]:
    """Yield the trainer before its first step, with Ray, which ends with it."""
    model = ensure_small_policy(0)
    overrides = [
        f"run.dir={folder / 'run'}",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        "trainer.total_training_steps=10",
        "trainer.atropos.max_staleness=null",
        "ray_kwargs.ray_init.num_cpus=2",
        "+ray_kwargs.ray_init.log_to_driver=false",
        f"+ray_kwargs.ray_init.logging_level={logging.ERROR}",
        "inference.urls=[http://127.0.0.1:1]",
        f"data.train_batch_size={step.groups}",
        f"data.max_prompt_length={2 * PROMPT}",
        f"data.max_response_length={step.tokens}",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
        f"actor_rollout_ref.model.path={model}",
    ]
    logging.getLogger("recipe").setLevel(logging.CRITICAL)  # replies that are made up raise alarms
    config = compose_config(overrides)
    decide_device(config)
    os.environ |= platform_variables(config)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the trainer does
    fill_in(config)
    try:
        start_ray(**ray_options(config))
        trainer = RayGRPOAtroposTrainer(config=config, tokenizer=AutoTokenizer.from_pretrained(model))
        trainer.actor, trainer.global_steps = Ranks(config), 1
        trainer.trackers = trainer.progress_bar = Unseen()
        yield trainer
    finally:
        ray.shutdown()


# ---------------------------------------------------------------- a step


@contextmanager
def services(folder: Path, step: Step) -> Iterator[tuple[dict[str, Service], list[str]]]:
    """Start all but the driver; yield the services by name, and the servers' URLs."""
    ports = [free_port() for _ in range(step.servers)]
    servers = [f"http://127.0.0.1:{port}" for port in ports]
    api, gateway, sessions = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
    module, own = [sys.executable, "-m"], [sys.executable, __file__]
    session = [*module, "recipe.atropos.sessions.server", f"--port={sessions.rpartition(':')[2]}"]
    session += [f"--gateway={gateway}", f"--api={api}", f"--tokenizer={ensure_small_policy(0)}"]
    where = ["--host=127.0.0.1", f"--port={api.rpartition(':')[2]}", f"--data-dir={folder / 'trajectories'}"]
    told = json.dumps({"api": api, "gateway": gateway, "sessions": sessions, "step": vars(step)})
    commands = {
        "servers": ([*own, "--serve", json.dumps([ports, step.tokens])], "", None),
        "api": ([*module, "recipe.atropos.trajectory_api", *where], KEY, api),
        "gateway": (gateway_command(gateway, "127.0.0.1", servers, 600.0), KEY, gateway),
        "sessions": ([*session, f"--data={folder / 'sessions.sqlite'}"], environments_key(KEY), sessions),
        "environments": ([*own, "--sample", told], environments_key(KEY), None),
    }
    started: dict[str, Service] = {}
    try:
        for name, (command, key, url) in commands.items():
            log, env = folder / f"{name}.log", {API_KEY_VARIABLE: key}
            started[name] = start_service(name, command, log_path=log, env=env, url=url)
            if name == "servers":
                healthy(started[name], partial(answer, servers))
            if name == "gateway":
                GatewayClient(gateway, KEY).announce(0, servers)
        healthy(started["api"], partial(answer, [api]))
        healthy(started["sessions"], partial(answer, [sessions]))
        environments = started["environments"]

        async def say_ready() -> bool:
            return READY in environments.log_path.read_text()

        healthy(environments, say_ready)
        yield started, servers
    finally:
        for service in started.values():
            service.stop(grace=1.0)


async def answer(urls: Sequence[str]) -> bool:
    """Whether each of ``urls`` answers, whatever it says. Raises ConnectionError, or another OSError, if not."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10.0)) as http:
        for url in urls:
            async with http.get(url):
                pass
    return True


def healthy(service: Service, check: Callable[[], Awaitable[bool]]) -> None:
    asyncio.run(wait_until_healthy(service, check, START_SECONDS))


def cpu(service: Service) -> float:
    """Return the seconds of CPU that a service has taken."""
    times = psutil.Process(service.pid).cpu_times()
    return times.user + times.system


def measure(step: Step) -> dict[str, float]:
    """Return CPU seconds of each part for one step, and in seconds what GPUs wait for, ``IDLE``, and ``hidden``."""
    with (
        tempfile.TemporaryDirectory() as name,
        services(folder := Path(name), step) as (started, servers),
        driver(folder, step) as trainer,
    ):
        config = DataSourceConfig(started["api"].url, retry_attempts=100, max_staleness=0, secret=KEY)
        registration = Registration(
            batch_size=step.sequences,
            max_token_len=trainer.limits.max_length,
            starting_step=0,
            num_steps=10,
            checkpoint_dir="",
            save_checkpoint_interval=-1,
            wandb_group="",
            wandb_project="",
        )
        trainer.checkpoint_manager = Pushes(ServerFleet(servers, GatewayClient(started["gateway"].url, KEY), KEY))
        names = ("gateway", "sessions", "api", "environments")
        before = {name: cpu(started[name]) for name in names}
        with DataSource(config, registration) as trainer.data_source:
            batch = trainer.data_source.next_batch()
            fetched, taken = time.time(), time.process_time()
            trainer.data_source.next_batch = lambda _: batch
            used = {name: cpu(started[name]) - before[name] for name in names}
            begun = time.perf_counter()
            trainer.fit_step()
            whole = time.perf_counter() - begun
            used["driver"] = time.process_time() - taken
        assert trainer.metrics["atropos/rows"] == step.sequences, trainer.metrics
        overrides = [group.field("group_overrides") for group in batch.groups]
        sampled = max(override["sampled"] for override in overrides)
    ranks, timing = trainer.actor, trainer.timing_raw
    known = {"convert": timing["convert"], "ray": ranks.sending, "push": timing["update_weights"]}
    rest = whole - ranks.away - sum(known.values())
    return used | known | {"last_group": fetched - sampled, "compute": rest, "hidden": ranks.hidden}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 sequences, with 4 and 64 servers")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(*json.loads(options.serve)))
    if options.sample:
        told = json.loads(options.sample)
        step = Step(**told.pop("step"))
        asyncio.run(Environments(**told, step=step, key=os.environ[API_KEY_VARIABLE]).run())
    sequences, tokens, counts = 1024, 16_384, (1, 4, 16, 64)
    if options.quick or options.smoke:
        sequences, tokens, counts = (16, 256, (2,)) if options.smoke else (128, tokens, (4, 64))
    print(f"{sequences:,} sequences of {tokens:,} tokens a step; CPU seconds of each part, seconds that GPUs idle\n")
    parts = ("gateway", "sessions", "api", "environments", "driver", *IDLE, "hidden")
    print(f"{'servers':>7} {'step':>8}", *(f"{name.replace('_', ' '):>12}" for name in parts), f"{'idle':>15}")
    figures: dict[str, float] = {}
    for servers in counts:
        step = Step(sequences, tokens, servers)
        found = measure(step)
        idle = sum(found[name] for name in IDLE)
        share = idle / step.seconds
        columns = (f"{found[name]:>10.2f} s" for name in parts)
        print(f"{servers:>7} {step.seconds:>6.0f} s", *columns, f"{idle:>6.2f} s {share:>6.2%}", flush=True)
        figures |= {f"{name}_{servers}": round(found[name], 3) for name in parts}
        figures |= {f"idle_{servers}": round(idle, 3), f"share_{servers}": round(share, 4)}
    ok = figures[f"share_{counts[-1]}"] <= SHARE or options.smoke or options.quick
    print(f"\ncores {os.cpu_count()}; target: {counts[-1]} servers idle for at most {SHARE:.0%} of a step")
    print(json.dumps({"name": "scale", "figures": figures, "targets": {"share": SHARE}, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
