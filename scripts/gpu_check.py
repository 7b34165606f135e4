"""Does all of it work on this machine's GPU, and how fast: ``python scripts/gpu_check.py [--steps N] [--out FILE]``

Without network. It makes a model with random weights, and then, once for each weight transport, starts what the
launcher starts (Trajectory API, SGLang, gateway, trainer), is the environment itself, and trains a few steps on what
SGLang samples. On one GPU server and trainer share it (``inference.colocated=true``). A transport has passed when

- every step was trained on samples of the weights before it (``max_staleness=0``);
- after every push SGLang sampled with the trainer's logprobs (``weight_sync.verify=probe``);
- the server reports the last version, and no longer gives the answer that it gave before the first step.

A transport that fails does not hide the others; each has a time limit, and nothing that was started stays. Exit status
0 only if every transport that is possible here, and was asked for, has passed. On a machine without a GPU, or with
``--device cpu``, the same runs with a tiny model in float32. See docs/gpu.md.
"""

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from recipe.atropos.device import visible_gpus
from recipe.atropos.environments.sampled_book import versions_of
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.server import LaunchError, default_sglang_python
from recipe.atropos.launch_services import (
    compose_overrides,
    first_version,
    load_config,
    parse_arguments,
    quoted,
    servers_healthy,
    start_api,
    start_trainer,
)
from recipe.atropos.preflight import ConfigurationError
from recipe.atropos.run_record import read_metrics
from recipe.atropos.services.inference import Inference, start_inference
from recipe.atropos.services.process import Service, ServiceFailed
from recipe.atropos.services.run import Run, console
from recipe.atropos.utils.machine import MemoryWatch, this_machine, versions_in
from recipe.atropos.utils.small_policy import make_tokenizer

TRANSPORTS = ("tensor", "disk", "distributed")
_GIB = 1 << 30
_POLL_SECONDS = 0.2
_REQUEST_TIMEOUT = 120.0  # seconds: one push to the server, one request for samples
_ANSWER = [[3, 5, 7, 11, 13, 17, 19, 23]]  # the prompt of the greedy answer, which the updates must change


class CheckFailed(RuntimeError):
    """A transport did not do what it must; says what, and what may mend it."""


@dataclass(frozen=True)
class Size:
    """A random Qwen2 and the work that suits it; ``prompt`` and ``response`` in tokens, ``micro_batch`` too."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    groups: int
    group_size: int
    prompt: int
    response: int
    micro_batch: int
    learning_rate: float


SIZES = {
    "tiny": Size(128, 256, 2, 4, 2, 512, 2, 4, 12, 16, 256, 1e-2),
    "400m": Size(1024, 4096, 24, 16, 4, 32_768, 8, 8, 128, 256, 4096, 1e-3),
    "1.8b": Size(1536, 8960, 28, 12, 2, 151_936, 8, 8, 128, 256, 4096, 1e-3),
}


@dataclass(frozen=True)
class Trial:
    """One transport here: whether server and trainer share a GPU, or why it cannot work at all."""

    transport: str
    colocated: bool = False
    impossible: str | None = None


def plan(gpus: int, transports: Sequence[str] = TRANSPORTS) -> list[Trial]:
    """What can be tried with so many GPUs; with 0, on a CPU, everything."""
    trials = []
    for transport in transports:
        if transport == "distributed" and gpus == 1:
            reason = "NCCL takes no two ranks on one GPU, and the trainer's is the server's; needs a second GPU"
            trials.append(Trial(transport, impossible=reason))
        else:
            trials.append(Trial(transport, colocated=transport != "distributed"))
    return trials


def lacking(trial: Trial, versions: dict[str, Any]) -> str | None:
    """What the environments lack for this on GPUs; ``versions`` by package of the "trainer" and of "sglang"."""
    if trial.colocated and not versions["sglang"]["torch_memory_saver"]:
        return "SGLang's environment has no torch_memory_saver, which colocated servers need: install it there"
    ours, theirs = (versions[where]["nvidia-nccl-cu13"] for where in ("trainer", "sglang"))
    if trial.transport == "distributed" and ours != theirs:
        mend = f"install nvidia-nccl-cu13=={theirs} in the trainer's"
        return f"NCCL {ours} in the trainer's environment, {theirs} in SGLang's, and it joins no two versions: {mend}"
    return None


def make_model(folder: Path, size: Size, dtype: torch.dtype) -> int:
    """Write the model and a tokenizer into ``folder``; returns the number of parameters.

    The logits have a spread of about 2: wide enough that other weights give other logprobs, narrow enough that the
    rounding of bfloat16 does not.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(["one two three"], 300)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=2 / math.sqrt(size.hidden))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


# -- one transport --------------------------------------------------------------------------------------------------


def overrides_of(trial: Trial, arguments: argparse.Namespace, model: Path, on_gpu: bool) -> list[str]:
    """The trial's Hydra overrides; the caller's own come last and win."""
    size, shared = SIZES[arguments.size], trial.colocated
    given = [
        f"trainer.atropos.weight_sync.transport={trial.transport}",
        "trainer.atropos.weight_sync.verify=probe",
        f"trainer.atropos.weight_sync.timeout={_REQUEST_TIMEOUT:g}",
        "trainer.atropos.max_staleness=0",
        f"trainer.atropos.max_wait_time={arguments.limit:g}",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.device={'cuda' if on_gpu else 'cpu'}",
        f"inference.dtype={'bfloat16' if on_gpu else 'float32'}",
        f"inference.colocated={str(shared).lower()}",
        f"inference.mem_fraction_static={arguments.mem_fraction_static if shared or not on_gpu else 'null'}",
        "inference.max_restarts=0",
        f"inference.start_timeout={arguments.limit:g}",
        f"data.train_batch_size={size.groups}",
        f"data.max_prompt_length={size.prompt}",
        f"data.max_response_length={size.response}",
        f"actor_rollout_ref.rollout.n={size.group_size}",
        f"actor_rollout_ref.actor.optim.lr={size.learning_rate}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={size.micro_batch}",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    ]
    if not on_gpu:
        given.append("inference.args.max_total_tokens=4096")
    options = ["--model", str(model), "--steps", str(arguments.steps), "--gpus", "1"]
    return compose_overrides(parse_arguments([*options, *given, *arguments.overrides]))


async def run_trial(trial: Trial, overrides: list[str], size: Size, limit: float, directory: Path) -> dict[str, Any]:
    """Train every step with one transport; at most ``limit`` seconds. Nothing is left running.

    Returns the measurements (see ``measurements``); with ``ok``, and ``error`` where that is false.
    """
    started, memory, accounts = time.monotonic(), MemoryWatch(visible_gpus() > 0), 0.0
    run: Run | None = None
    speeds: list[float] = []
    result: dict[str, Any] = {"ok": False, "colocated": trial.colocated}
    try:
        async with asyncio.timeout(limit) as deadline:
            config = load_config([*overrides, f"run.dir={quoted(directory)}"])
            directory.mkdir(parents=True)
            run = Run(config, overrides, directory)
            api, inference = start_api(run), start_inference(run)
            server = next(service for service in run.services if service.name in inference.servers)
            if any(launch.lends_memory for launch in inference.servers.values()):  # it measures what is free, first
                await servers_healthy(run, api, inference)
            trainer = start_trainer(run, api, inference)
            memory.start({"server": server.pid, "trainer": trainer.pid})
            await servers_healthy(run, api, inference)
            await first_version(run, trainer, inference)
            memory.settled()
            accounts = await server_accounts(inference)
            before = await greedy_answer(inference)
            await train(run, api, inference, trainer, size, speeds)
            await check_result(run, inference, before)
        result["ok"] = True
    except Exception as error:  # whatever it is, the other transports have their turn
        result["error"] = _not_done(run, limit) if deadline.expired() else f"{type(error).__name__}: {error}"
    finally:
        memory.stop()
        try:
            if run is not None:
                run.stop()
        except ServiceFailed as error:
            result |= {"ok": False, "error": str(error)}
    result["seconds"] = time.monotonic() - started
    return result | measurements(read_metrics(directory), speeds, memory, accounts)


def _not_done(run: Run | None, limit: float) -> str:
    tails = "\n".join(f"--- {service.name}:\n{service.tail(8)}" for service in (run.services if run else []))
    return f"not done within {limit:g} s; raise --limit if it was still at work:\n{tails}"


async def train(
    run: Run, api: Service, inference: Inference, trainer: Service, size: Size, speeds: list[float]
) -> None:
    """Be the environment: for each step, sample from the weights before it and post; then wait for the trainer's end.

    Appends the tokens per second of each step's generation to ``speeds``. Raises what ends a trial.
    """
    rng = np.random.default_rng(0)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def registered() -> bool:  # what is posted before wedges atroposlib's API for good
            async with session.get(f"{api.url}/info") as reply:
                return (await reply.json())["batch_size"] != -1

        await _until(run, trainer, registered)
        for step in range(1, run.config.trainer.total_training_steps + 1):

            async def served(version: int = step - 1) -> bool:
                return await inference.version() == version

            await _until(run, trainer, served)
            prompts = [rng.integers(0, size.vocabulary, size.prompt).tolist() for _ in range(size.groups)]
            begin = time.perf_counter()
            groups = await asyncio.gather(*(sample_group(inference, prompt, size) for prompt in prompts))
            speeds.append(size.groups * size.group_size * size.response / (time.perf_counter() - begin))
            for group in groups:
                async with session.post(f"{api.url}/scored_data", json=group) as reply:
                    reply.raise_for_status()
    while trainer.poll() is None:
        run.check()
        await asyncio.sleep(_POLL_SECONDS)
    run.check()


async def _until(run: Run, trainer: Service, condition: Callable[[], Any]) -> None:
    """Raises ServiceFailed: a service ended; the trainer's end, even a good one, would be waited for in vain."""
    while not await condition():
        run.check()
        if trainer.poll() is not None:
            raise trainer.failure("ended before it had a batch for every step")
        await asyncio.sleep(_POLL_SECONDS)


async def sample_group(inference: Inference, prompt: list[int], size: Size) -> dict[str, Any]:
    """A group as environments post it: full-length lists, the engine's own logprobs, 1.0 over the prompt.

    Raises:
        CheckFailed: the server sampled another number of tokens, or with weights that were never pushed.
    """
    parameters = {"temperature": 1.0, "max_new_tokens": size.response, "n": size.group_size, "ignore_eos": True}
    async with SGLangClient(inference.gateway, inference.api_key, timeout=_REQUEST_TIMEOUT) as client:
        replies = await client.generate(input_ids=prompt, sampling_params=parameters)
    sampled = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
    versions = [versions_of(reply["meta_info"]) for reply in replies]
    if {len(answer) for answer in sampled} != {size.response} or None in versions:
        raise CheckFailed(
            f"{inference.gateway} answered with {[len(answer) for answer in sampled]} tokens of versions {versions}; "
            f"asked for {size.group_size} x {size.response} of a pushed version"
        )
    outputs = [[token for _, token, *_ in answer] for answer in sampled]
    return {
        "tokens": [prompt + output for output in outputs],
        "masks": [[-100] * len(prompt) + output for output in outputs],
        "inference_logprobs": [[1.0] * len(prompt) + [value for value, *_ in answer] for answer in sampled],
        "scores": [float(i % 2) for i in range(size.group_size)],
        "group_overrides": {
            "policy_version_min": [oldest for oldest, _ in versions],
            "policy_version_max": [newest for _, newest in versions],
        },
    }


async def greedy_answer(inference: Inference) -> list[int]:
    """Tokens after a prompt that is always the same."""
    parameters = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    async with SGLangClient(inference.gateway, inference.api_key, timeout=_REQUEST_TIMEOUT) as client:
        return (await client.generate(input_ids=_ANSWER, sampling_params=parameters))[0]["output_ids"]


async def server_accounts(inference: Inference) -> float:
    """What SGLang says that its KV cache and graphs take, in GiB. (Of its weights it says nothing after a push.)"""
    async with SGLangClient(inference.urls[0], inference.api_key, timeout=30) as client:
        state = ((await client.capabilities()).arguments.get("internal_states") or [{}])[0]
    usage = state.get("memory_usage") or {}
    graph = usage.get("graph") or 0.0  # by phase on 0.5.23, a number on 0.5.12
    return usage.get("kvcache", 0.0) + (sum(graph.values()) if isinstance(graph, dict) else graph)


async def check_result(run: Run, inference: Inference, before: list[int]) -> None:
    """Raises CheckFailed where steps are missing, or the server does not serve what was trained."""
    steps, lines = run.config.trainer.total_training_steps, read_metrics(run.directory)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        raise CheckFailed(f"metrics.jsonl has the steps {[line['step'] for line in lines]}, not 1 to {steps}")
    if (version := await inference.version()) != steps:
        raise CheckFailed(f"{inference.gateway} serves version {version} after {steps} updates")
    if await greedy_answer(inference) == before:
        raise CheckFailed(f"the server's greedy answer is that of version 0 after {steps} updates: {before}")


# -- measurements ---------------------------------------------------------------------------------------------------


def measurements(
    lines: list[dict[str, Any]], speeds: list[float], memory: MemoryWatch, accounts: float
) -> dict[str, Any]:
    """Medians over the steps (seconds, GB/s of 10^9 bytes, tokens/s), peaks (GiB) and the largest gaps (nats).

    The push of version 0, which makes buffers and process groups, is not among them. ``pause_s`` is the push's own: a
    colocated server stands still from the batch to the end of the push. What was not measured is left out.
    """

    def values(key: str) -> list[float]:
        return [line[key] for line in lines if key in line]

    found: dict[str, Any] = {}
    if pushes := values("weight_sync/total_s"):
        found["push_s"] = statistics.median(pushes)
        found["push_bytes"] = values("weight_sync/bytes")[-1]
        found["push_gb_per_s"] = found["push_bytes"] / 1e9 / found["push_s"]
        found["pause_s"] = statistics.median(values("weight_sync/pause_s"))
        found["push_phase_s"] = statistics.median(values("phase_s/push"))  # with memory given back, and the probe
    if speeds:  # the first has the kernels to warm up
        found["generation_tokens_per_s"] = statistics.median(speeds[1:] or speeds)
    if allocated := values("actor/perf/max_memory_allocated_gb") if memory.on_gpu else []:
        found["trainer_peak_gib"], found["trainer_memory"] = max(allocated), "torch.cuda.max_memory_allocated, one rank"
    elif "trainer" in memory.peaks and not memory.on_gpu:
        found["trainer_peak_gib"], found["trainer_memory"] = memory.peaks["trainer"] / _GIB, "resident, all processes"
    if "server" in memory.peaks:
        found["server_peak_gib"] = memory.peaks["server"] / _GIB
        found["server_memory"] = "nvidia-smi, its processes" if memory.on_gpu else "resident, all processes"
    elif memory.on_gpu and pushes:
        found["server_peak_gib"] = accounts + found["push_bytes"] / _GIB
        found["server_memory"] = "KV cache and graphs by SGLang's own account, and what was pushed"
    for name in sorted({"server", "devices"} & memory.lows.keys()):  # "devices": all GPUs, whoever uses them
        found[f"{name}_low_gib"], found[f"{name}_high_gib"] = memory.lows[name] / _GIB, memory.peaks[name] / _GIB
    for key in ("weight_sync/probe_gap", "atropos/logprob_diff/mean", "atropos/logprob_diff/max"):
        if values(key):
            found[key.partition("/")[2].replace("/", "_")] = max(values(key))
    return found


# -- the command ----------------------------------------------------------------------------------------------------


def print_table(results: dict[str, dict[str, Any]]) -> None:
    columns = (
        ("push s", "push_s", ".3f"),
        ("GB/s", "push_gb_per_s", ".2f"),
        ("pause s", "pause_s", ".3f"),
        ("tokens/s", "generation_tokens_per_s", ".0f"),
        ("trainer GiB", "trainer_peak_gib", ".2f"),
        ("server GiB", "server_peak_gib", ".2f"),
        ("logprob gap", "probe_gap", ".1e"),
    )
    print(f"{'transport':<13}{'':<11}" + "".join(f"{title:>12}" for title, *_ in columns))
    for name, result in results.items():
        state = "impossible" if "impossible" in result else "ok" if result["ok"] else "FAILED"
        cells = (format(result[key], form) if key in result else "" for _, key, form in columns)
        print(f"{name:<13}{state:<11}" + "".join(f"{cell:>12}" for cell in cells))
    for name, result in results.items():
        if reason := result.get("impossible") or result.get("error"):
            print(f"\n{name}: {reason}")


async def check(arguments: argparse.Namespace, gpus: int, work: Path, report: dict[str, Any]) -> None:
    """Every trial in turn; ``report["transports"]`` grows with each."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    size = SIZES[arguments.size]
    for trial in plan(gpus, arguments.transports):
        if trial.impossible:
            report["transports"][trial.transport] = {"impossible": trial.impossible}
            continue
        if gpus and (error := lacking(trial, report["versions"])):
            report["transports"][trial.transport] = {"ok": False, "error": error}
            continue
        where = "a CPU" if not gpus else "the trainer's GPU" if trial.colocated else "a GPU of its own"
        console.print(f"[bold]{trial.transport}[/]: SGLang on {where}, {arguments.steps} steps", soft_wrap=True)
        overrides = overrides_of(trial, arguments, work / "model", gpus > 0)
        result = await run_trial(trial, overrides, size, arguments.limit, work / trial.transport)
        report["transports"][trial.transport] = result


def count_gpus() -> int:
    """0 without a GPU. Raises LaunchError: there is one, and torch cannot use it."""
    if not visible_gpus():
        return 0
    if not torch.cuda.is_available():
        raise LaunchError(
            f"nvidia-smi lists a GPU, but torch {torch.__version__} cannot use it: install torch's CUDA build for this "
            "driver (docs/gpu.md), or give --device cpu"
        )
    return torch.cuda.device_count()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--size", choices=SIZES, help="parameters of the model (default: 400m; on a CPU tiny)")
    parser.add_argument("--steps", type=int, default=3, help="updates for each transport (default: 3)")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=list(TRANSPORTS), metavar="A,B")
    parser.add_argument(
        "--mem-fraction-static", type=float, default=0.3, help="a colocated server's share of the GPU (default: 0.3)"
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one transport (default: 900)")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    parser.add_argument("--work", type=Path, help="folder for model and logs (default: temporary, kept on failure)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for recipe.atropos.launch_services")
    arguments = parser.parse_intermixed_args(argv)
    if unknown := sorted(set(arguments.transports) - set(TRANSPORTS)):
        parser.error(f"--transports {','.join(unknown)}: choose among {','.join(TRANSPORTS)}")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: give 1 or more")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.device == "cpu":  # for every process from here on; verl would find the GPU by nvidia-smi
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}

    both = ("torch", "nvidia-nccl-cu13", "transformers")
    try:
        gpus = count_gpus()
        arguments.size = arguments.size or ("400m" if gpus else "tiny")
        config = load_config(overrides_of(Trial("disk"), arguments, Path("model"), gpus > 0))
        arguments.python = config.inference.python or default_sglang_python()
        versions = {
            "python": sys.version.split()[0],
            "trainer": versions_in(sys.executable, (*both, "verl", "atroposlib", "ray", "flash-attn")),
            "sglang": versions_in(arguments.python, (*both, "sglang", "torch_memory_saver", "sglang-kernel")),
        }
    except (ConfigurationError, LaunchError, RuntimeError) as error:
        console.print(f"error: {error}", soft_wrap=True, markup=False)
        return 1
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="gpu-check-"))).resolve()
    report: dict[str, Any] = {
        "device": "cuda" if gpus else "cpu",
        "machine": this_machine(gpus > 0),
        "versions": versions,
        "size": arguments.size,
        "steps": arguments.steps,
        "transports": {},
        "ok": False,
    }
    try:
        dtype = torch.bfloat16 if gpus else torch.float32
        report["parameters"] = make_model(work / "model", SIZES[arguments.size], dtype)
        asyncio.run(check(arguments, gpus, work, report))
        report["ok"] = all(result.get("ok", "impossible" in result) for result in report["transports"].values())
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; nothing is left running")
        return 130
    finally:
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        print_table(report["transports"])
        if arguments.work is None and report["ok"]:
            shutil.rmtree(work, ignore_errors=True)
        else:
            print(f"\nlogs: {work}/TRANSPORT/logs")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
