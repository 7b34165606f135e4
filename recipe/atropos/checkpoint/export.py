"""Export the trained model as a folder in Hugging Face format; ``commands.export_model`` has the command line.

Guarantees:

- tensors are bit for bit as trained, in the trained dtype unless another is requested; names and shapes are those that
  transformers' ``save_pretrained`` writes;
- a LoRA adapter is merged as for the servers, or exported alone in PEFT's format;
- no GPU or process group is needed, and at most one tensor (for packed experts, the packed one) is in memory;
- the folder appears complete or not at all.

verl's ``model_merger`` is not used: it holds the whole model in memory, rounds it to bfloat16, and leaves an adapter
beside the untrained base.
"""

import argparse
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from recipe.atropos.checkpoint.model_card import EXPORTED, write_card
from recipe.atropos.checkpoint.safetensors_writer import write_safetensors
from recipe.atropos.checkpoint.shards import Shards
from recipe.atropos.checkpoint.store import (
    ADAPTER_CONFIG,
    COMPLETE,
    checkpoints_of,
    choose_checkpoint,
    step_of,
    verify,
)
from recipe.atropos.config.models import needs_no_trust
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.tensors.format import TENSOR_NAMES, CheckpointFormat, model_file
from recipe.atropos.utils.files import read_json, replace_folder, write_json
from recipe.atropos.utils.secret import read_config_yaml

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt)(\.index\.json)?")  # of save_contents=[hf_model], in bfloat16


# ---------------------------------------------------------------- checkpoint


class _Checkpoint:
    """The trained model of a checkpoint: its class on the meta device, its shards, and the names of its tensors."""

    def __init__(self, folder: Path, config: DictConfig, trust_remote_code: bool):
        actor = folder / "actor"
        verify(folder, "actor/model_*", "actor/*.json", "actor/huggingface/*")
        self.huggingface = actor / "huggingface"
        self.shards = Shards(actor)
        names = read_json(actor / TENSOR_NAMES, kind=list)
        if names is None:
            raise AtroposError(
                f"{actor} has no {TENSOR_NAMES}: an older version of the recipe saved it; resume the run with this one "
                "until it saves a checkpoint"
            )
        self.base = config.actor_rollout_ref.model.path
        self.model = _on_meta(self.huggingface, trust_remote_code)
        self.format = CheckpointFormat.of_unloaded(self.model, names)
        self._adapter_config = actor / ADAPTER_CONFIG
        self.adapted = self._adapter_config.exists()
        self.adapter_only = self.adapted and all(".lora_" in name for name in self.shards)
        """``save_lora_only``: the base weights are not in the checkpoint."""
        self._names = set(names)

    def merged(self, dtype: torch.dtype | None) -> tuple[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]:
        """Return the whole model under its checkpoint's names: meta tensors, and the real tensors in the same order.

        Raises:
            AtroposError: the shards and the model's class have different tensors.
        """
        model, weights = self.model, Mapping.items
        if self.adapted:
            from peft import LoraConfig, get_peft_model  # takes seconds to import

            from recipe.atropos.tensors.lora_layers import adapted_layers, merged_weights

            settings = LoraConfig.from_pretrained(str(self._adapter_config.parent))
            settings.base_model_name_or_path = model.name_or_path  # PEFT warns if it differs
            layers = adapted_layers(get_peft_model(model, settings))
            weights = partial(merged_weights, layers, full=lambda tensor: tensor)

        def stream(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.format.stream(weights(state)):
                yield name, _cast(name, tensor, self._dtype_of(name, dtype))

        like = dict(stream(self.shards.like))
        tied, unsaved = self.format.tied, set(model._keys_to_ignore_on_save or ())
        if like.keys() != self._names:
            differing = sorted(like.keys() ^ self._names)
            raise AtroposError(f"{self.shards.folder}: {len(differing)} tensors too many or too few: {differing[:5]}")
        like = {name: t for name, t in like.items() if tied.get(name) not in like and name not in unsaved}
        return like, _without_tied(stream(self.shards), like, tied)

    def adapter(self, dtype: torch.dtype | None) -> tuple[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]:
        """Like ``merged``, but for A and B of every adapted layer under PEFT's names."""
        names = {key.replace(".default.", "."): key for key in self.shards if ".lora_" in key}
        like = {name: _cast(name, self.shards.like[key], dtype) for name, key in names.items()}
        return like, ((name, _cast(name, self.shards[key], dtype)) for name, key in names.items())

    def _dtype_of(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return ``dtype``, or None (unchanged) for tensors that the model keeps in float32, such as router biases."""
        kept = self.model._keep_in_fp32_modules_strict or ()
        return None if any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in kept) else dtype

    def write_adapter_config(self, folder: Path) -> None:
        settings = json.loads(self._adapter_config.read_text())
        settings |= {"base_model_name_or_path": self.base, "inference_mode": True}
        write_json(folder / ADAPTER_CONFIG, settings)

    def write_configuration(self, folder: Path, dtype: str) -> None:
        """Write the configuration and, if it is not there yet, the generation configuration."""
        settings = _without_attention(json.loads((self.huggingface / CONFIG_NAME).read_text()))
        settings.pop("torch_dtype", None)  # the former name of dtype
        settings |= {"architectures": [type(self.model).__name__], "dtype": dtype}
        write_json(folder / CONFIG_NAME, settings)
        generation = folder / GENERATION_CONFIG_NAME
        if not generation.exists():  # verl skips one that transformers would not save, and saves none by default
            if (given := model_file(self.base, generation.name)) is not None:
                shutil.copyfile(given, generation)
            elif self.model.can_generate():
                self.model.generation_config.save_pretrained(folder)


def _without_attention(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the attention of the training, which is not installed wherever a model is used."""
    return {
        key: _without_attention(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.strip("_") != "attn_implementation"
    }


def _on_meta(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model on the meta device; raise ConfigurationError if it has custom code that is not trusted."""
    with needs_no_trust(folder, trust_remote_code), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # The same class as in verl's training.
        several = type(config) in AutoModelForImageTextToText._model_mapping.keys()
        auto_class = AutoModelForImageTextToText if several else AutoModelForCausalLM
        return auto_class.from_config(config, trust_remote_code=trust_remote_code, attn_implementation="eager")


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast a floating-point tensor; raise ConfigurationError if a finite value is too large for ``dtype``."""
    if dtype in (None, tensor.dtype) or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    if not tensor.is_meta and (cast.isinf() & tensor.isfinite()).any():
        raise ConfigurationError(
            f"--dtype={str(dtype).removeprefix('torch.')}: {name} holds values up to {tensor.abs().max():.4g}, which "
            f"would become infinite (the largest is {torch.finfo(dtype).max:.4g}); give bfloat16, or leave it out"
        )
    return cast


def _without_tied(
    tensors: Iterator[tuple[str, torch.Tensor]], like: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are in ``like``.

    Raises:
        AtroposError: at the end, if a tensor left out of ``like`` as tied to another has different values.
    """
    compared, sums = {*tied, *tied.values()}, {}
    for name, tensor in tensors:
        if name in compared:
            sums[name] = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        if name in like:
            yield name, tensor
    for name, other in tied.items():
        if name not in like and name in sums and sums[name] != sums[other]:
            raise AtroposError(f"{name} and {other} are one tensor by the model's configuration, and have other values")


# ---------------------------------------------------------------- export


def export_checkpoint(
    run: RunDir,
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    adapter: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Write the model of ``checkpoint`` to ``out``, replacing it, and return a line that says what was written.

    ``dtype`` None keeps the trained dtype.

    ``adapter``: export only the LoRA adapter, which is all that a checkpoint of ``save_lora_only`` has.
    ``trust_remote_code``: the model's custom code may run, whatever the run's configuration says.

    Raises:
        AtroposError: it cannot be exported.
        ConfigurationError: ``adapter`` does not fit the checkpoint, or it was removed meanwhile, the model has custom
            code that is not trusted, ``dtype`` cannot hold a value, or ``out`` is a mount point or holds something
            other than an export.
        DiskFull: ``out`` is unchanged.
    """
    out = out.resolve()
    _check_out(out)
    config, wanted = read_config_yaml(run.config), dtype and getattr(torch, dtype)
    try:
        source = _Checkpoint(checkpoint, config, trust_remote_code)
    except (AtroposError, OSError) as error:
        if (checkpoint / COMPLETE).exists():
            raise
        raise ConfigurationError(f"{checkpoint} was removed meanwhile, by the run's trainer: choose another") from error
    if adapter and not source.adapted:
        raise ConfigurationError(f"--adapter: {run.path} was trained without LoRA; leave it out")
    if source.adapter_only and not adapter:
        raise ConfigurationError(f"{checkpoint} holds the adapter alone (save_lora_only): give --adapter")
    like, tensors = source.adapter(wanted) if adapter else source.merged(wanted)
    written = _most_common_dtype(like)
    exported = {"run": run.path.name, "step": step_of(checkpoint), "dtype": written, "adapter": adapter}
    with replace_folder(out) as folder:
        of_models = (CONFIG_NAME, GENERATION_CONFIG_NAME) if adapter else ()
        for path in source.huggingface.rglob("*"):  # chat templates may be in a subfolder
            if path.is_file() and path.name not in of_models and not _WEIGHTS.fullmatch(path.name):
                copy = folder / path.relative_to(source.huggingface)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        if adapter:
            source.write_adapter_config(folder)
        else:
            source.write_configuration(folder, written)
        exported["size"] = write_safetensors(folder, "adapter_model" if adapter else "model", like, tensors)
        write_json(folder / EXPORTED, exported)
        write_card(folder, run)
    return f"{out}: step {exported['step']}, {written}, {exported['size'] / 1e9:.3g} GB"


def _check_out(out: Path) -> None:
    """Raise ConfigurationError if ``out`` cannot or must not be replaced."""
    if os.path.ismount(out):
        raise ConfigurationError(f"{out}: a mount point cannot be replaced by an export; give a folder in it (--out)")
    if out.exists() and not (out / EXPORTED).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(
            f"{out}: holds other files, and would be replaced; move them, or give another folder (--out)"
        )


def _most_common_dtype(like: Mapping[str, torch.Tensor]) -> str:
    sizes: dict[torch.dtype, int] = {}
    for tensor in like.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.")


def export_last(run: RunDir) -> str | None:
    """Export the newest checkpoint, if any, to ``RUN/model``, or to ``RUN/adapter`` if it is of ``save_lora_only``;
    return what ``export_checkpoint`` does. With ``save_freq=-1`` it is of an earlier step, and is not exported.

    Raises:
        AtroposError: as in ``export_checkpoint``.
    """
    config = read_config_yaml(run.config)
    if config.trainer.save_freq <= 0 or not checkpoints_of(run).whole():
        return None
    model, only = config.actor_rollout_ref.model, "actor_rollout_ref.actor.checkpoint.save_lora_only"
    adapter = bool(model.lora_rank and OmegaConf.select(config, only))
    out, trusted = run.adapter if adapter else run.model, model.trust_remote_code
    return export_checkpoint(run, choose_checkpoint(run), out, adapter=adapter, trust_remote_code=trusted)


def export(arguments: argparse.Namespace) -> str:
    """Run ``verl-atropos export``; return and raise as ``export_checkpoint``."""
    run = RunDir(arguments.run)
    if not run.config.is_file():
        raise ConfigurationError(f"{arguments.run}: no {run.config.name} there; give the folder of a run")
    checkpoint = choose_checkpoint(run, arguments.step, arguments.best)
    newest = checkpoint == checkpoints_of(run).whole()[-1]
    name = f"{'adapter' if arguments.adapter else 'model'}{'' if newest else f'-{step_of(checkpoint)}'}"
    return export_checkpoint(
        run,
        checkpoint,
        arguments.out or run.path / name,
        arguments.dtype,
        arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
    )
