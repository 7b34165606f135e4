"""Check whether this machine can train: ``verl-atropos doctor [OPTIONS of train] [key=value ...]``

Only Python interpreters are started and nothing is downloaded; a model on the hub is only asked for. Each check reports
what it found, or what is wrong and the fix. The checks apply to the given configuration; without a model in it, those
of the model are left out.
"""

import argparse
import importlib.metadata as metadata
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
from omegaconf import DictConfig
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from recipe.atropos.config.compose import add_options, compose_overrides
from recipe.atropos.config.models import MODEL_KEY, SMALL_POLICIES, check_model, config_file, model_settings
from recipe.atropos.errors import AtroposError, LaunchError
from recipe.atropos.inference.gateway_client import GATEWAY_PORT
from recipe.atropos.inference.server import check_saver, sglang_flags, sglang_python
from recipe.atropos.launcher.gpu_environment import check_gpu_environment
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.launcher.run_plan import RunPlan, names_model, plan_run
from recipe.atropos.launcher.sglang import check_ports, given_ports
from recipe.atropos.launcher.startup import API_PORT
from recipe.atropos.utils.gpus import PLATFORM_VARIABLE, visible_gpus
from recipe.atropos.utils.machine import versions_in
from recipe.atropos.utils.process import port_is_free
from recipe.atropos.utils.wandb_login import wandb_login
from recipe.atropos.verl_ext.attention import set_attention

_OLDEST, _TOO_NEW = (3, 11), (3, 13)  # as in pyproject.toml
_GIB = 1 << 30
_LEAST_MEMORY, _LEAST_SHARED, _LEAST_DISK = 6, 0.5, 2  # GiB; memory: what the demo needs
_LEAST_TOKENS = 32
_STATE_BYTES = 12  # of a parameter in a checkpoint: float32 weights and two moments
_BASE_BYTES = 4  # of an adapter's base, which has no moments


class Note(str):
    """What a check returns that has found nothing wrong, but something that a user may want to change."""


Check = Callable[[], str]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. ``message``: what was found or, if it failed, what is wrong and the fix."""

    state: Literal["ok", "note", "skipped", "FAILED"]
    message: str

    @property
    def ok(self) -> bool:
        return self.state != "FAILED"


def result_of(check: Check) -> CheckResult:
    """Run a check, which raises an AtroposError for what is wrong."""
    try:
        found = check()
    except AtroposError as error:
        return CheckResult("FAILED", str(error))
    return CheckResult("note" if isinstance(found, Note) else "ok", str(found))


def _results(checks: Mapping[str, Check]) -> dict[str, CheckResult]:
    return {name: result_of(check) for name, check in checks.items()}


def examine(plan: RunPlan) -> dict[str, CheckResult]:
    """Check what is installed, and the GPUs; return the results by name."""
    config, placed = plan.config, plan.config.copy()
    on_gpus: dict[str, Check] = {
        "gpus": lambda: _gpus(placed),
        "environments": lambda: "; ".join(check_gpu_environment(placed)) or "driver, CUDA, NCCL and compilers fit",
        "attention": lambda: _attention(config.copy()),
        "memory_saver": lambda: _memory_saver(placed.inference),
    }
    on_a_cpu: dict[str, Check] = {"gpus": lambda: _no_gpus(plan.composed), "compiler": lambda: _compiler(config)}
    return _results(
        {
            "python": _python,
            "pins": _pins,
            "trainer": lambda: _installed(sys.executable, "torch", "verl", "atroposlib", "ray", "transformers"),
            "sglang": lambda: _installed(sglang_python(config.inference.python), "torch", "sglang", "transformers"),
            **(on_gpus if config.trainer.device == "cuda" else on_a_cpu),
        }
    )


def examine_run(config: DictConfig, has_model: bool) -> dict[str, CheckResult]:
    """Check what a run of ``config`` needs of this machine and, if it names one, its model; return results by name."""
    results = _results(
        {
            "ports": lambda: _ports(config),
            "memory": _memory,
            "shared_memory": _shared_memory,
            "disk": lambda: _disk(config),
            "wandb": lambda: _wandb(config),
        }
    )
    return results | (_examine_model(config) if has_model else {})


def _examine_model(config: DictConfig) -> dict[str, CheckResult]:
    path = config.actor_rollout_ref.model.path
    results = {"model": result_of(lambda: _model(path))}
    if path in SMALL_POLICIES:
        return results | dict.fromkeys(_WITH_TOKENIZER, CheckResult("ok", "made with the model"))
    from transformers import AutoTokenizer  # imported here: it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            os.path.expanduser(path),
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
            local_files_only=True,
        )
    except Exception as error:  # whatever a tokenizer's own code raises
        why = (
            f"the tokenizer of {MODEL_KEY}={path} cannot be loaded from this machine "
            f"({' '.join(str(error).split())[:300]}): save it beside the model (tokenizer.save_pretrained), or "
            "download the model first (hf download)"
        )
        skipped = CheckResult("skipped", "not checked, since the tokenizer cannot be loaded")
        return results | dict.fromkeys(_WITH_TOKENIZER, skipped) | {"tokenizer": CheckResult("FAILED", why)}
    return results | _results({name: partial(check, tokenizer, config) for name, check in _WITH_TOKENIZER.items()})


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
        required = [Requirement(line) for line in metadata.requires("verl-atropos") or ()]
    except metadata.PackageNotFoundError:
        required = [Requirement(Path(__file__).parents[1].joinpath("REQUIRED_VERL.txt").read_text().strip())]
    required = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = versions_in(sys.executable, [each.name for each in required])
    wrong = [
        f"{each.name} {found[each.name] or 'is missing'}, needed is {each.name}{each.specifier}"
        for each in required
        if found[each.name] is None or not each.specifier.contains(found[each.name], prereleases=True)
    ]
    if wrong:
        raise LaunchError(f"{'; '.join(wrong)}: run `make trainer-env`, or docs/gpu.md for GPUs")
    return f"{len(required)} required packages fit"


def _installed(python: str, *packages: str) -> str:
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
    return set_attention(config) or config.actor_rollout_ref.model.override_config.attn_implementation


def _memory_saver(inference: DictConfig) -> str:
    if inference.colocated is False:
        return "not used (inference.colocated)"
    check_saver(sglang_python(inference.python))
    return "colocated servers can release their memory"


def _ports(config: DictConfig) -> str:
    check_ports(config)
    usual = {API_PORT: config.api.port, GATEWAY_PORT: config.inference.gateway_port}
    busy = [str(port) for port, configured in usual.items() if configured is None and not port_is_free(port)]
    if busy:
        return Note(f"{' and '.join(busy)} taken, where environments look by default: the run uses free ones")
    return ", ".join(map(str, dict.fromkeys([*given_ports(config).values(), *usual]))) + " free"


def _memory() -> str:
    memory = psutil.virtual_memory()
    if memory.available < _LEAST_MEMORY * _GIB:
        raise LaunchError(
            f"{memory.available / _GIB:.1f} GiB of memory are free, and the demonstration takes {_LEAST_MEMORY}: end "
            "other programs"
        )
    return f"{memory.available / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"


def _shared_memory() -> str:
    try:
        free = shutil.disk_usage("/dev/shm").free / _GIB
    except FileNotFoundError as error:
        raise LaunchError("/dev/shm is missing, which Ray and SGLang use: mount it (docker run --ipc=host)") from error
    if free < _LEAST_SHARED:
        raise LaunchError(
            f"{free:.2f} GiB free in /dev/shm, where Ray keeps its objects: remove what was left there, or start the "
            "container with --ipc=host or --shm-size=8g"
        )
    return f"{free:.0f} GiB free in /dev/shm"


def _disk(config: DictConfig) -> str:
    found = [_room(config.run.dir, 0, "logs and trajectories", "--run-dir")]
    model, only = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.checkpoint.save_lora_only
    parameters = 0 if only else _parameters(model.path)
    if config.trainer.save_freq > 0 and (parameters or only):
        # The next is written before an older one is removed.
        kept = max(config.trainer.max_actor_ckpt_to_keep or 0, 2) + 1
        size = kept * parameters * (_BASE_BYTES if model.lora_rank else _STATE_BYTES)
        found.append(
            _room(
                config.trainer.default_local_dir,
                size,
                f"{kept} checkpoints of " + ("an adapter" if only else f"{parameters / 1e9:.2g} billion parameters"),
                "trainer.default_local_dir, or lower trainer.max_actor_ckpt_to_keep",
            )
        )
    return "; ".join(found)


def _room(path: str, size: int, what: str, change: str) -> str:
    folder, needed = Path(path).resolve(), size + _LEAST_DISK * _GIB
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / _GIB:.0f} GiB free at {existing}, {needed / _GIB:.0f} needed for {what}"
    if free < needed:
        raise LaunchError(f"{found}: make room, or give another {change}")
    return found


def _parameters(path: str) -> int:
    """Return the number of parameters, from the sizes of the model's files; 0 if they are not on this machine."""
    if path in SMALL_POLICIES or (file := config_file(path)) is None:
        return 0
    settings = model_settings(file)
    each = 4 if str(settings.get("dtype") or settings.get("torch_dtype")).endswith("float32") else 2
    return sum(weights.stat().st_size for weights in file.parent.glob("*.safetensors")) // each


def _wandb(config: DictConfig) -> str:
    if "wandb" not in config.trainer.logger:
        return "not used (trainer.logger)"
    mode, host, logged_in = wandb_login()
    if mode != "online":
        return f"WANDB_MODE={mode}"
    if logged_in:
        return f"logged in to {host}"
    raise LaunchError(
        f"trainer.logger has wandb, and nobody is logged in to {host}: run `wandb login`, set WANDB_API_KEY, or "
        "WANDB_MODE=offline to upload later, or drop wandb from trainer.logger"
    )


def _model(path: str) -> str:
    check_model(path)
    if path in SMALL_POLICIES:
        return f"{path} is made at the first start, in a few minutes"
    if (file := config_file(path)) is None:
        return Note(f"{path} is on the hub and not on this machine: the start downloads it")
    return f"{model_settings(file).get('model_type', 'unknown')} in {file.parent}"


def _tokenizer(tokenizer: Any, _: DictConfig) -> str:
    if len(tokenizer) < _LEAST_TOKENS:  # transformers makes an empty one where the files are missing
        raise LaunchError(
            f"the tokenizer has {len(tokenizer)} tokens, as if its files were missing: save it beside the model "
            "(tokenizer.save_pretrained)"
        )
    if tokenizer.eos_token_id is None:
        raise LaunchError("the tokenizer has no eos_token, so no answer would end: set it in tokenizer_config.json")
    return f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens, ends with {tokenizer.eos_token!r}"


def _chat_template(tokenizer: Any, _: DictConfig) -> str:
    if not tokenizer.chat_template:
        return Note(
            "the tokenizer has none, which environments need that send messages: give an instruct model, or set "
            "chat_template in tokenizer_config.json"
        )
    return "the tokenizer has one"


def _sizes(tokenizer: Any, config: DictConfig) -> str:
    """Compare the model's vocabulary with its tokenizer, and its positions with the lengths of a sequence."""
    file = config_file(config.actor_rollout_ref.model.path)
    settings = model_settings(file) if file else {}
    settings |= settings.get("text_config") or {}
    vocabulary, positions = settings.get("vocab_size"), settings.get("max_position_embeddings")
    tokens, longest = len(tokenizer), config.data.max_prompt_length + config.data.max_response_length
    lengths = f"data.max_prompt_length + data.max_response_length = {longest:,}"
    if vocabulary is not None and tokens > vocabulary:
        raise LaunchError(
            f"the tokenizer has {tokens:,} tokens and the model embeddings for {vocabulary:,}: give the tokenizer "
            "that belongs to the model, or resize its embeddings (resize_token_embeddings)"
        )
    if positions is not None and longest > positions:
        raise LaunchError(f"{lengths} tokens, and the model has {positions:,} positions: lower the lengths")
    room = str(sglang_flags(config.inference.args).get("max_total_tokens"))
    if room.isdigit() and int(room) < longest:
        raise LaunchError(f"inference.args.max_total_tokens={room} has no room for {lengths} tokens: raise it")
    return f"vocabulary {vocabulary or 'unknown'} for {tokens} tokens; positions {positions or 'unknown'} for {longest}"


_WITH_TOKENIZER = {"tokenizer": _tokenizer, "chat_template": _chat_template, "sizes": _sizes}


add_arguments = add_options


def main(given: argparse.Namespace) -> int:
    """Return exit status 0 only if every check passed."""
    overrides, console = compose_overrides(given), Console(highlight=False)
    has_model = names_model(overrides)
    plan = plan_run(overrides + ([] if has_model else [f"{MODEL_KEY}=model"]), begins=False)
    results = examine(plan) | examine_run(plan.config, has_model)
    for name, result in results.items():
        color = {"ok": "green", "FAILED": "bold red"}.get(result.state, "yellow")
        console.print(Text.assemble((f"{result.state:<7}", color), f" {name:<14}{result.message}"), soft_wrap=True)
    return 0 if all(result.ok for result in results.values()) else 1
