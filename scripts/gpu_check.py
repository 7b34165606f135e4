"""Check function and speed on this machine's GPUs: ``python scripts/gpu_check.py [--only NAME,...] [--out FILE]``

Needs no network. First the installation is examined (driver, CUDA and NCCL of both environments, compiler, attention,
torch_memory_saver); then each of ``CASES`` trains a random model for a few steps, by the launcher, in processes of its
own. A case has passed if every step was trained on samples of the preceding weights, and after every push SGLang
sampled with the trainer's logprobs.

A case that fails does not stop the others; each has a time limit, and nothing that was started is left running. Exit
status 0 only if every requested case that is possible here has passed. On a machine without a GPU, or with
``--device cpu``, the same cases run with a tiny model in float32. See docs/gpu.md.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine_watch import MemoryWatch, this_machine
from random_models import make_random_model
from recipe.atropos.commands.doctor import examine, usable_gpus
from recipe.atropos.config.compose import load_config
from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.server import sglang_python
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.launcher.short_run import short_run
from recipe.atropos.utils.machine import versions_in

_GIB = 1 << 30
_LONG = 16_384  # tokens of a micro-batch
_ANY_MODEL = "actor_rollout_ref.model.path=model"
_TEMPLATE = 64  # tokens, more than the chat template adds


@dataclass(frozen=True)
class Size:
    """Size of a random model and its work; ``question``, ``answer`` and ``micro_batch`` in tokens."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    groups: int
    group_size: int
    question: int
    answer: int
    micro_batch: int
    learning_rate: float


SIZES = {
    "tiny": Size(128, 256, 2, 4, 2, 512, 2, 4, 12, 16, 256, 1e-2),
    "400m": Size(1024, 4096, 24, 16, 4, 32_768, 8, 8, 128, 256, 4096, 1e-3),
    "1.8b": Size(1536, 8960, 28, 12, 2, 151_936, 8, 8, 128, 256, 4096, 1e-3),
}


@dataclass(frozen=True)
class Case:
    """One run. ``gpus``: how many it needs; ``ranks``: the trainer's; ``long``: micro-batches of 16,384 tokens."""

    about: str
    gpus: int = 1
    ranks: int = 1
    colocated: bool = True
    family: str = "qwen2"
    tied: bool = False
    long: bool = False
    compiled: bool = False
    overrides: tuple[str, ...] = field(default=())

    @property
    def model(self) -> str:
        return f"{self.family}{'-tied' * self.tied}"


def _transport(name: str) -> tuple[str, ...]:
    return (f"trainer.atropos.weight_sync.transport={name}",)


_TENSOR = _transport("tensor")
_ADAPTER = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=false")
CASES = {
    "tensor": Case("weights by CUDA IPC, one GPU for both", overrides=_TENSOR),
    "disk": Case("weights by files", overrides=_transport("disk")),
    "compiled": Case("torch.compile", compiled=True, overrides=_TENSOR),
    "long": Case("micro-batches of 16,384 tokens", long=True, overrides=_TENSOR),
    "tied": Case("tied embeddings", tied=True, overrides=_TENSOR),
    "moe": Case("mixture of experts", family="qwen3_moe", overrides=_TENSOR),
    "lora": Case("an adapter by itself", gpus=2, colocated=False, overrides=_ADAPTER),
    "distributed": Case("weights by NCCL", gpus=2, colocated=False, overrides=_transport("distributed")),
    "tensor_apart": Case("weights by CUDA IPC between two GPUs", gpus=2, colocated=False, overrides=_TENSOR),
    "two_ranks": Case("FSDP on two GPUs, one of them shared", gpus=2, ranks=2, overrides=_TENSOR),
    "tensor_parallel": Case("a server on two GPUs", 2, 2, overrides=(*_TENSOR, "inference.args.tp_size=2")),
    "two_servers": Case("two servers, two ranks", gpus=2, ranks=2, overrides=(*_TENSOR, "inference.servers=2")),
}


def overrides_of(case: Case, size: Size, on_gpu: bool, mem_fraction: float) -> list[str]:
    """Return the case's Hydra overrides for the launcher."""
    micro_batch, answer = size.micro_batch, size.answer
    if case.long:
        micro_batch, answer = (_LONG, _LONG // size.group_size - size.question - _TEMPLATE) if on_gpu else (512, 64)
    shared = case.colocated or not on_gpu
    given = [
        f"environment.args.question_characters={size.question}",
        f"environment.args.answer_tokens={answer}",
        f"inference.colocated={str(case.colocated).lower()}",
        f"inference.mem_fraction_static={mem_fraction if shared else 'null'}",
        f"data.train_batch_size={size.groups}",
        f"data.max_prompt_length={size.question + _TEMPLATE}",
        f"data.max_response_length={answer}",
        f"actor_rollout_ref.rollout.n={size.group_size}",
        f"actor_rollout_ref.actor.optim.lr={size.learning_rate}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={micro_batch}",
        f"actor_rollout_ref.actor.use_torch_compile={str(case.compiled).lower()}",
        f"trainer.device={'cuda' if on_gpu else 'cpu'}",
    ]
    if not on_gpu:
        given.append("inference.args.max_total_tokens=4096")
    return [*given, *case.overrides]


def make_model(folder: Path, case: Case, size: Size, dtype: str) -> Path:
    """Make a model with logits of spread about 1: other weights change its logprobs, bfloat16 rounding does not."""
    return make_random_model(
        folder,
        case.family,
        dtype=dtype,
        tie_word_embeddings=case.tied,
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=_LONG,
        initializer_range=size.hidden**-0.5,
        **({"moe_intermediate_size": size.intermediate // 4} if case.family == "qwen3_moe" else {}),
    )


# -- what is installed ----------------------------------------------------------------------------------------------


def installed(python: str, on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Return results by name, in the form of the cases'; only the interpreters themselves are started."""
    if not on_gpu:
        return {}
    results = examine(plan_run([_ANY_MODEL, "trainer.device=cuda", f"inference.python={python}"]))
    return {
        name: {"ok": result.ok, "message" if result.ok else "error": result.message} for name, result in results.items()
    }


# -- the command ----------------------------------------------------------------------------------------------------


def tried(name: str, arguments: argparse.Namespace, gpus: int, work: Path) -> dict[str, Any]:
    """Run one case: return its figures with ``ok``, and ``error`` if that is false; or why it is ``impossible``."""
    case, size = CASES[name], SIZES[arguments.size]
    if 0 < gpus < case.gpus:
        return {"impossible": f"needs {case.gpus} GPUs"}
    dtype = "bfloat16" if gpus else "float32"
    model = work / f"model-{case.model}"
    if not model.exists():
        make_model(model, case, size, dtype)
    memory = MemoryWatch(gpus > 0)
    overrides = [*overrides_of(case, size, gpus > 0, arguments.mem_fraction_static), *arguments.overrides]
    run = short_run(
        model,
        work / name,
        overrides,
        steps=arguments.steps,
        gpus=case.ranks,
        dtype=dtype,
        limit=arguments.limit,
        watch=memory.of,
    )
    result = {"ok": run.error is None, "seconds": run.seconds, **run.figures}
    if run.error is not None:
        result["error"] = run.error
    for watched in sorted(memory.peaks):  # "devices": all GPUs, whoever uses them
        result[f"{watched}_high_gib"] = memory.peaks[watched] / _GIB
        result[f"{watched}_low_gib"] = memory.lows[watched] / _GIB
    return result


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """Print at most 80 columns, then a line for each reason; ``--out`` has every figure."""
    columns = (
        ("s", "seconds", 5, ".0f"),
        ("push s", "push_s", 8, ".3f"),
        ("pause s", "pause_s", 8, ".3f"),
        ("tokens/s", "generated_tokens_per_s", 9, ".0f"),
        ("GiB", "trainer_gib", 6, ".1f"),
        ("before", "before", 8, ".0e"),
        ("after", "after", 7, ".0e"),
        ("probe", "probe", 7, ".0e"),
    )
    print(f"{'case':<15} {'':<6}" + "".join(f"{title:>{width}}" for title, _, width, _ in columns))
    for name, result in results.items():
        state = "-" if "impossible" in result else "ok" if result["ok"] else "FAILED"
        cells = (f"{format(result[key], form) if key in result else '':>{width}}" for _, key, width, form in columns)
        print(f"{name:<15} {state:<6}{''.join(cells)}".rstrip())
    for name, result in results.items():
        if reason := result.get("impossible") or result.get("error") or result.get("message"):
            print(f"{name}: {reason}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    cases = "\n".join(f"  {name:<16} {case.gpus} GPU{' s'[case.gpus > 1]} {case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"cases:\n{cases}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--size", choices=SIZES, help="parameters of the model (default: 400m; on a CPU tiny)")
    parser.add_argument("--steps", type=int, default=3, help="updates for each case (default: 3)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES), metavar="A,B")
    parser.add_argument(
        "--mem-fraction-static", type=float, default=0.3, help="a colocated server's share of the GPU (default: 0.3)"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one case (default: 600)")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    parser.add_argument("--work", type=Path, help="folder for models and runs (default: temporary, kept on failure)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for recipe.atropos.launch_services")
    arguments = parser.parse_intermixed_args(argv)
    if unknown := sorted(set(arguments.only) - set(CASES)):
        parser.error(f"--only {','.join(unknown)}: choose among {','.join(CASES)}")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: give 1 or more")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.device == "cpu":  # for every process from here on; verl would find the GPU by nvidia-smi
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    both = ("torch", "nvidia-nccl-cu13", "transformers")
    try:
        gpus = usable_gpus()
        python = sglang_python(load_config([_ANY_MODEL, *arguments.overrides]).inference.python)
        versions = {
            "python": sys.version.split()[0],
            "trainer": versions_in(sys.executable, (*both, "verl", "atroposlib", "ray", "flash-attn", "kernels")),
            "sglang": versions_in(python, (*both, "sglang", "torch_memory_saver", "sglang-kernel")),
        }
    except AtroposError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.size = arguments.size or ("400m" if gpus else "tiny")
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="gpu-check-"))).resolve()
    report: dict[str, Any] = {
        "device": "cuda" if gpus else "cpu",
        "machine": this_machine(gpus > 0),
        "versions": versions,
        "size": arguments.size,
        "steps": arguments.steps,
        "cases": {},
        "ok": False,
    }
    try:
        report["cases"] |= installed(python, gpus > 0)
        for name in arguments.only:
            print(f"{name}: {CASES[name].about}, {arguments.steps} steps", flush=True)
            report["cases"][name] = tried(name, arguments, gpus, work)
        report["ok"] = all(result.get("ok", "impossible" in result) for result in report["cases"].values())
    except KeyboardInterrupt:
        print("stopped; nothing is left running")
        return 130
    finally:
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        print_table(report["cases"])
        if arguments.work is None and report["ok"]:
            shutil.rmtree(work, ignore_errors=True)
        else:
            print(f"\nruns and logs: {work}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
