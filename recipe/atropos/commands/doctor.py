"""Check whether this machine can train: ``verl-atropos doctor [OPTIONS of train] [key=value ...]``

Only Python interpreters are started. Each check reports what it found, or what is wrong and the fix. The checks apply
to the given configuration; without a model in it, those of the model are left out.
"""

import argparse
import importlib.metadata as metadata
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from recipe.atropos.commands.check_results import Check, CheckResult, Note, result_of
from recipe.atropos.commands.run_checks import examine_run
from recipe.atropos.config.compose import given_keys
from recipe.atropos.config.models import KEY as MODEL_KEY
from recipe.atropos.config.options import add_options, compose_overrides
from recipe.atropos.errors import LaunchError, one_line_errors
from recipe.atropos.inference.memory_saver import check_saver
from recipe.atropos.inference.server import sglang_python
from recipe.atropos.launcher.gpu_environment import check_gpu_environment
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.launcher.run_plan import RunPlan, plan_run
from recipe.atropos.utils.gpus import PLATFORM_VARIABLE, visible_gpus
from recipe.atropos.utils.machine import versions_in
from recipe.atropos.verl_ext.attention import set_attention

_PACKAGE = "verl-atropos"
_OLDEST, _TOO_NEW = (3, 11), (3, 13)  # as in pyproject.toml
_TRAINER = ("torch", "verl", "atroposlib", "ray", "transformers")
_SGLANG = ("torch", "sglang", "transformers")


def examine(plan: RunPlan) -> dict[str, CheckResult]:
    """Check what is installed, and the GPUs; return the results by name."""
    config, placed = plan.config, plan.config.copy()
    on_gpu = config.trainer.device == "cuda"
    checks: dict[str, Check] = {
        "python": _python,
        "pins": _pins,
        "trainer": lambda: _installed(sys.executable, _TRAINER),
        "sglang": lambda: _installed(sglang_python(config.inference.python), _SGLANG),
    }
    if on_gpu:
        checks |= {
            "gpus": lambda: _gpus(placed),
            "environments": lambda: "; ".join(check_gpu_environment(placed)) or "driver, CUDA, NCCL and compilers fit",
            "attention": lambda: _attention(config),
        }
    else:
        checks |= {"gpus": lambda: _no_gpus(plan.composed), "compiler": lambda: _compiler(config)}
    results = {name: result_of(check) for name, check in checks.items()}
    if on_gpu and placed.inference.colocated is not False:
        results["memory_saver"] = result_of(lambda: _memory_saver(sglang_python(config.inference.python)))
    return results


def _python() -> str:
    found = sys.version_info[:2]
    if not _OLDEST <= found < _TOO_NEW:
        raise LaunchError(
            f"Python {found[0]}.{found[1]} runs this, and the pinned packages need 3.11 or 3.12: build the "
            "environment with one of them (make env PYTHON=python3.11)"
        )
    return f"{sys.version.split()[0]}, {os.cpu_count()} cores"


def _pins() -> str:
    """Compare the installed packages with what pyproject.toml requires."""
    try:
        required = [Requirement(line) for line in metadata.requires(_PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        required = [Requirement(Path(__file__).parents[1].joinpath("REQUIRED_VERL.txt").read_text().strip())]
    wrong, count = [], 0
    for each in required:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            found = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            found = None
        if found is None or not each.specifier.contains(found, prereleases=True):
            wrong.append(f"{each.name} {found or 'is missing'}, needed is {each.name}{each.specifier}")
    if wrong:
        raise LaunchError(f"{'; '.join(wrong)}: run `make trainer-env`, or docs/gpu.md for GPUs")
    return f"{count} required packages fit"


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


def _no_gpus(config: DictConfig) -> str:
    if config.trainer.device == "auto" and not os.environ.get(PLATFORM_VARIABLE):
        return Note("none is visible, so this would run on the CPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES")
    return "not used (trainer.device)"


def _compiler(config: DictConfig) -> str:
    """Look for the C++ compiler that torch takes on a CPU."""
    key, program = "actor_rollout_ref.actor.use_torch_compile", os.environ.get("CXX") or "g++"
    if not config.actor_rollout_ref.actor.use_torch_compile:
        return f"not used ({key})"
    if (found := shutil.which(program)) is None:
        raise LaunchError(
            f"there is no C++ compiler ($CXX, or g++), with which torch compiles for the CPU: install one, or set "
            f"{key}=false"
        )
    return found


def _attention(config: DictConfig) -> str:
    copied = config.copy()
    return set_attention(copied) or copied.actor_rollout_ref.model.override_config.attn_implementation


def _memory_saver(python: str) -> str:
    check_saver(python)
    return "colocated servers can release their memory"


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit status 0 only if every check passed."""
    parser = argparse.ArgumentParser(prog="verl-atropos doctor", description=__doc__.splitlines()[0].partition(":")[0])
    add_options(parser)
    overrides, console = compose_overrides(parser.parse_intermixed_args(argv)), Console(highlight=False)
    with one_line_errors(OmegaConfBaseException):
        has_model = bool({"preset", "run.resume_from", MODEL_KEY} & given_keys(overrides))
        plan = plan_run(overrides + ([] if has_model else [f"{MODEL_KEY}=model"]))
        results = examine(plan) | examine_run(plan.config, has_model)
    for name, result in results.items():
        color = {"ok": "green", "FAILED": "bold red"}.get(result.state, "yellow")
        console.print(f"[{color}]{result.state:<7}[/] {name:<14}{escape(result.message)}", soft_wrap=True)
    return 0 if all(result.ok for result in results.values()) else 1
