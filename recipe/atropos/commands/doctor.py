"""Check whether this machine can train: ``verl-atropos doctor [--preset NAME] [key=value ...]``

Only Python interpreters are started. Each check reports what it found, or what is wrong and the fix. The checks apply
to the given configuration; without a model, to any model.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from recipe.atropos.config.compose import given_keys, load_config
from recipe.atropos.errors import AtroposError, LaunchError, one_line_errors
from recipe.atropos.inference.memory_saver import check_saver
from recipe.atropos.inference.server import sglang_python
from recipe.atropos.launcher.gpu_environment import check_gpu_environment
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.utils.gpus import device_of, visible_gpus
from recipe.atropos.utils.machine import versions_in
from recipe.atropos.verl_ext.attention import set_attention

_MODEL = "actor_rollout_ref.model.path"
_TRAINER = ("torch", "verl", "atroposlib", "ray", "transformers")
_SGLANG = ("torch", "sglang", "transformers")
_GIB = 1 << 30
_LEAST_MEMORY = 6  # GiB that the demonstration needs


@dataclass(frozen=True)
class Finding:
    """Result of one check. ``message``: what was found or, if not ``ok``, what is wrong and the fix."""

    ok: bool
    message: str


def examine(config: DictConfig) -> dict[str, Finding]:
    """Run every check, and return the findings by name."""
    on_gpu, placed = device_of(config) == "cuda", config.copy()
    checks: dict[str, Callable[[], str]] = {
        "machine": _machine,
        "trainer": lambda: _installed(sys.executable, _TRAINER),
        "sglang": lambda: _installed(sglang_python(config.inference.python), _SGLANG),
    }
    if on_gpu:
        checks |= {
            "gpus": lambda: _gpus(placed),
            "environments": lambda: "; ".join(check_gpu_environment(placed)) or "driver, CUDA, NCCL and compilers fit",
            "attention": lambda: _attention(config),
        }
    findings = {name: _finding(check) for name, check in checks.items()}
    if on_gpu and placed.inference.colocated is not False:
        findings["memory_saver"] = _finding(lambda: _memory_saver(sglang_python(config.inference.python)))
    return findings


def _finding(check: Callable[[], str]) -> Finding:
    try:
        return Finding(True, check())
    except AtroposError as error:
        return Finding(False, str(error))


def _machine() -> str:
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    if memory.available < _LEAST_MEMORY * _GIB:
        raise LaunchError(
            f"{memory.available / _GIB:.1f} GiB of memory are free, and the demonstration takes {_LEAST_MEMORY}: end "
            "other programs"
        )
    disk = shutil.disk_usage(Path.cwd())
    return (
        f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, {memory.available / _GIB:.0f} GiB of memory, "
        f"{shared.free / _GIB:.0f} of shared memory and {disk.free / _GIB:.0f} of disk free"
    )


def _installed(python: str, packages: Sequence[str]) -> str:
    versions = versions_in(python, packages)
    if missing := [name for name in packages if versions[name] is None]:
        raise LaunchError(f"{python} has no {', '.join(missing)}: run `make env`, or docs/gpu.md for GPUs")
    cuda = f"CUDA {versions['cuda']}" if versions["cuda"] else "for a CPU"
    return ", ".join(f"{name} {versions[name]}" for name in packages) + f" ({cuda}), {python}"


def usable_gpus() -> int:
    """Return the number of usable GPUs. Raises LaunchError if there is a GPU that torch cannot use."""
    import torch

    if not visible_gpus():
        return 0
    if not torch.cuda.is_available():
        raise LaunchError(
            f"nvidia-smi lists a GPU, but torch {torch.__version__} cannot use it: install torch's CUDA build for this "
            "driver (docs/gpu.md), or set trainer.device=cpu (of gpu_check.py: --device cpu)"
        )
    return torch.cuda.device_count()


def _gpus(config: DictConfig) -> str:
    """Decide in ``config`` whether servers share the trainer's GPUs, as the launcher does."""
    if not (usable := usable_gpus()):
        raise LaunchError("trainer.device=cuda, and no GPU is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi -L")
    return "; ".join([f"{usable} usable", *filter(None, [place_servers(config)])])


def _attention(config: DictConfig) -> str:
    copied = config.copy()
    return set_attention(copied) or copied.actor_rollout_ref.model.override_config.attn_implementation


def _memory_saver(python: str) -> str:
    check_saver(python)
    return "colocated servers can release their memory"


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit status 0 only if every check passed."""
    parser = argparse.ArgumentParser(prog="verl-atropos doctor", description=__doc__.splitlines()[0].partition(":")[0])
    parser.add_argument("--preset", help="a file of config/preset, without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    given = parser.parse_args(argv)
    overrides = [*([f"preset={given.preset}"] if given.preset else []), *given.overrides]
    if not given.preset and _MODEL not in given_keys(overrides):
        overrides.append(f"{_MODEL}=model")
    console = Console(highlight=False)
    with one_line_errors(OmegaConfBaseException):
        findings = examine(load_config(overrides))
    for name, finding in findings.items():
        state = "[green]ok[/]    " if finding.ok else "[bold red]FAILED[/]"
        console.print(f"{state} {name:<13}{escape(finding.message)}", soft_wrap=True)
    return 0 if all(finding.ok for finding in findings.values()) else 1
