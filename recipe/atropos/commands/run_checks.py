"""What the doctor checks of a run: ports, memory, disk, trackers, and its model and tokenizer.

Nothing is started or downloaded; a model on the hub is only asked for.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig

from recipe.atropos.commands.check_results import Check, CheckResult, NotChecked, Note, result_of
from recipe.atropos.config.models import KEY as MODEL_KEY
from recipe.atropos.config.models import SMALL_POLICIES, check_model, config_file, model_settings
from recipe.atropos.errors import LaunchError
from recipe.atropos.inference.gateway_client import GATEWAY_PORT
from recipe.atropos.launcher.sglang import given_ports
from recipe.atropos.launcher.startup import API_PORT
from recipe.atropos.utils.process import port_is_free
from recipe.atropos.utils.wandb_login import wandb_login

_GIB = 1 << 30
_LEAST_MEMORY, _LEAST_SHARED, _LEAST_DISK = 6, 0.5, 2  # GiB; memory: what the demo needs
_LEAST_TOKENS = 32
_STATE_BYTES = 12  # of a parameter in a checkpoint: float32 weights and two moments


def examine_run(config: DictConfig, has_model: bool) -> dict[str, CheckResult]:
    """Check what a run of ``config`` needs of this machine and, if it names one, its model; return results by name."""
    checks: dict[str, Check] = {
        "ports": lambda: _ports(config),
        "memory": _memory,
        "shared_memory": _shared_memory,
        "disk": lambda: _disk(config),
        "wandb": lambda: _wandb(config),
    }
    if has_model:
        model = _Model(config)
        checks |= {
            "model": model.check,
            "tokenizer": model.check_tokenizer,
            "chat_template": model.check_chat_template,
            "sizes": model.check_sizes,
        }
    return {name: result_of(check) for name, check in checks.items()}


def _ports(config: DictConfig) -> str:
    hosts = {"api.port": config.api.host}
    given = given_ports(config)
    taken = [key for key, port in given.items() if not port_is_free(port, hosts.get(key, config.inference.host))]
    if taken:
        ports = ", ".join(f"{key}={given[key]}" for key in taken)
        raise LaunchError(f"{ports} taken: end what listens there, give another, or null for a free one")
    usual = {API_PORT: config.api.port, GATEWAY_PORT: config.inference.gateway_port}
    busy = [str(port) for port, configured in usual.items() if configured is None and not port_is_free(port)]
    if busy:
        return Note(f"{' and '.join(busy)} taken, where environments look by default: the run uses free ones")
    return ", ".join(map(str, {**given, **{str(port): port for port in usual}}.values())) + " free"


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
    folder = Path(config.run.dir).resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, needed, what = shutil.disk_usage(existing).free, _LEAST_DISK * _GIB, "logs and trajectories"
    if config.trainer.save_freq > 0 and (parameters := _parameters(config.actor_rollout_ref.model.path)):
        kept = (config.trainer.max_actor_ckpt_to_keep or 1) + 2  # the best, and the one that is being written
        needed += kept * _STATE_BYTES * parameters
        what = f"{kept} checkpoints of {parameters / 1e9:.2g} billion parameters"
    if free < needed:
        raise LaunchError(
            f"{free / _GIB:.0f} GiB free at {existing}, and {needed / _GIB:.0f} are needed for {what}: make room, give "
            "another --run-dir, or lower trainer.max_actor_ckpt_to_keep"
        )
    return f"{free / _GIB:.0f} GiB free at {existing}, {needed / _GIB:.0f} needed for {what}"


def _parameters(path: str) -> int:
    """Return the number of parameters, from the sizes of the model's files; 0 if they are not on this machine."""
    file = config_file(path) if path not in SMALL_POLICIES else None
    if file is None:
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


class _Model:
    """The checks of a model, which share its configuration and tokenizer."""

    def __init__(self, config: DictConfig):
        self._config, self._settings = config, config.actor_rollout_ref.model
        self._loaded: Any = None
        self._is_told = False  # that it cannot be loaded

    @property
    def _is_made(self) -> bool:
        return self._settings.path in SMALL_POLICIES

    def check(self) -> str:
        check_model(self._settings.path)
        if self._is_made:
            return f"{self._settings.path} is made at the first start, in a minute"
        if (file := config_file(self._settings.path)) is None:
            return Note(f"{self._settings.path} is on the hub and not on this machine: the start downloads it")
        return f"{model_settings(file).get('model_type', 'unknown')} in {file.parent}"

    def _tokenizer(self) -> Any:
        if self._is_told:
            raise NotChecked("not checked, since the tokenizer cannot be loaded")
        if self._loaded is None:
            from transformers import AutoTokenizer  # imported here: it takes seconds

            path = self._settings.path
            try:
                trusted = self._settings.trust_remote_code
                self._loaded = AutoTokenizer.from_pretrained(
                    os.path.expanduser(path), trust_remote_code=trusted, local_files_only=True
                )
            except Exception as error:  # whatever a tokenizer's own code raises
                self._is_told, what = True, " ".join(str(error).split())[:300]
                raise LaunchError(
                    f"the tokenizer of {MODEL_KEY}={path} cannot be loaded from this machine ({what}): save it beside "
                    "the model (tokenizer.save_pretrained), or download the model first (hf download)"
                ) from error
        return self._loaded

    def check_tokenizer(self) -> str:
        if self._is_made:
            return "made with the model"
        tokenizer = self._tokenizer()
        if len(tokenizer) < _LEAST_TOKENS:  # transformers makes an empty one where the files are missing
            raise LaunchError(
                f"the tokenizer has {len(tokenizer)} tokens, as if its files were missing: save it beside the model "
                "(tokenizer.save_pretrained)"
            )
        if tokenizer.eos_token_id is None:
            raise LaunchError("the tokenizer has no eos_token, so no answer would end: set it in tokenizer_config.json")
        return f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens, ends with {tokenizer.eos_token!r}"

    def check_chat_template(self) -> str:
        if self._is_made:
            return "made with the model"
        if not self._tokenizer().chat_template:
            return Note(
                "the tokenizer has none, which environments need that send messages: give an instruct model, or set "
                "chat_template in tokenizer_config.json"
            )
        return "the tokenizer has one"

    def check_sizes(self) -> str:
        """Compare the model's vocabulary with its tokenizer, and its positions with the lengths of a sequence."""
        if self._is_made:
            return "made to fit"
        data, file = self._config.data, config_file(self._settings.path)
        settings = model_settings(file) if file else {}
        settings |= settings.get("text_config") or {}
        vocabulary, positions = settings.get("vocab_size"), settings.get("max_position_embeddings")
        tokens, longest = len(self._tokenizer()), data.max_prompt_length + data.max_response_length
        lengths = f"data.max_prompt_length + data.max_response_length = {longest:,}"
        if vocabulary is not None and tokens > vocabulary:
            raise LaunchError(
                f"the tokenizer has {tokens:,} tokens and the model embeddings for {vocabulary:,}: give the tokenizer "
                "that belongs to the model, or resize its embeddings (resize_token_embeddings)"
            )
        if positions is not None and longest > positions:
            raise LaunchError(f"{lengths} tokens, and the model has {positions:,} positions: lower the lengths")
        room = self._config.inference.args.get("max_total_tokens")
        if room is not None and room < longest:
            raise LaunchError(f"inference.args.max_total_tokens={room:,} has no room for {lengths} tokens: raise it")
        return f"vocabulary {vocabulary or 0:,} >= {tokens:,} tokens; positions {positions or 0:,} >= {longest:,}"
