"""Mixins that change verl's FSDP engines for this recipe, and the engines for NVIDIA GPUs built with them.

``ConfiguredOffload``: the reference policy stays on its device unless ``ref.fsdp_config`` sets ``param_offload`` (or
``offload_policy``). verl 0.9.1 offloads every forward-only model regardless of its configuration, which makes its
forward pass 40 to 70 times slower.

``PushedWeights``: the weights that are pushed. verl gives packed experts of any MoE model the names of Qwen's
checkpoints; here every tensor has the name and the shape that it has in the model's own checkpoint.

With a LoRA adapter and ``model.lora.merge``, servers get merged weights, base + scaling * B @ A, under the base model's
names; without it, A and scaling * B of each adapted layer, under PEFT's names.
verl merges the adapter into the model, reads the model, rounds the result to bf16, and restores the base weights from
copies (``merged_lora_context``). Here the model is not modified: sums are computed outside it, a tensor at a time. So:

- what is pushed is what the trainer computes with, in the trainer's precision;
- a push only reads: base weights, adapter and optimizer stay bit for bit the same, even where FSDP holds gathered
  copies of them (``reshard_after_forward=false``), and a push that fails midway leaves nothing to restore;
- every rank builds every tensor, because gathering is a collective.

``RowTemperature``: a separate temperature per row. verl's engine supports this, but verl's trainer overwrites the
temperatures with one value for the whole batch.

A new adapter depends only on the engine's ``seed``, not on the strategy or the number of ranks.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import (
    fsdp_version,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.atropos.tensors.format import FUSED, TENSOR_NAMES, CheckpointFormat
from recipe.atropos.tensors.lora_layers import ADAPTER, adapted_layers, merged_weights
from recipe.atropos.utils.files import write_json


class ConfiguredOffload:
    """Mixin; must precede one of verl's FSDP engines in the MRO."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap the module; verl reads ``forward_only`` here only to decide whether to offload."""
        config = self.engine_config
        stays = config.forward_only and not (config.param_offload or config.offload_policy)
        if not stays:
            return super()._build_fsdp_module(module)
        config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            config.forward_only = True


class RowTemperature:
    """Mixin; must precede one of verl's FSDP engines in the MRO.

    If a batch has ``row_temperature``, (B,) float32, it replaces the batch's ``temperature`` in logprobs, entropies
    and the logits that losses see.
    """

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        if "row_temperature" in micro_batch:
            micro_batch["temperature"] = micro_batch["row_temperature"]
        return super().prepare_model_inputs(micro_batch=micro_batch)


class PushedWeights:
    """Mixin; must precede one of verl's FSDP engines in the MRO.

    ``checkpoint_format`` is the model's, and is set when the model is built.
    """

    checkpoint_format: CheckpointFormat

    @property
    def adapter_only(self) -> bool:
        """Whether an adapter is pushed without the base weights."""
        return self.model_config.lora_rank > 0 and not self.model_config.lora.get("merge", False)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        self.checkpoint_format = CheckpointFormat(module)
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Add the adapter to ``module``.

        Raises:
            ValueError: the adapter cannot be pushed: it has more than A and B of linear layers or, if it is not
                merged, layers outside the decoder or several ranks.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.engine_config.seed)
            module = super()._build_lora_module(module)
        _check_mergeable(module)
        if self.adapter_only:
            _check_servable(module)
        return module

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save verl's checkpoint, the weights' names in the model's checkpoint, and an adapter's PEFT configuration."""
        # ``export`` needs the latter two, which are known only while the model is loaded.
        super().save_checkpoint(local_path, *args, **kwargs)
        if torch.distributed.get_rank() == 0:
            write_json(Path(local_path) / TENSOR_NAMES, list(self.checkpoint_format.shapes))
            adapter = getattr(self.module, "peft_config", {}).get(ADAPTER)  # FSDP forwards to the module that it wraps
            if adapter is not None:
                adapter.save_pretrained(local_path)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Return (name, full tensor) pairs to push, in the trained dtype; every rank must iterate to the end."""
        # FSDP2 gathers shards from any device; only the arithmetic of an adapter needs them on the accelerator.
        adapted = self.model_config.lora_rank > 0
        staged = (adapted or fsdp_version(self.module) == 1) and not self._uses_fsdp2_cpu_offload_policy
        if staged:
            load_fsdp_model_to_gpu(self.module)
        if self.adapter_only:
            return self._adapter_per_tensor_param(), None
        if adapted:
            return self._merged_lora_per_tensor_param(), None
        state = self.module.state_dict()
        if staged and self._is_offload_param:
            offload_fsdp_model_to_cpu(self.module)
        return self.checkpoint_format.stream((name, _full(tensor)) for name, tensor in state.items()), None

    def _adapter_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield PEFT's name and the full tensor of A, (r, in), and of scaling * B, (out, r), of every adapted layer.

        Yields zeros for a layer without an adapter that SGLang fuses with an adapted layer.
        """
        try:
            layers, state = adapted_layers(self.module), self.module.state_dict()
            for name, layer in layers.items():
                a, b = (_full(state[f"{name}.lora_{factor}.{ADAPTER}.weight"]) for factor in "AB")
                yield f"{name}.lora_A.weight", a
                yield f"{name}.lora_B.weight", b * layer.scaling[ADAPTER]
                for part in _missing_parts(name, layers):
                    weight = state.get(f"{part}.weight")
                    if weight is not None:  # else the model has no such layer
                        yield f"{part}.lora_A.weight", torch.zeros_like(a)
                        yield f"{part}.lora_B.weight", b.new_zeros(weight.shape[0], len(a))
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            weights = merged_weights(adapted_layers(self.module), self.module.state_dict(), _full)
            yield from self.checkpoint_format.stream(weights)
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)


def _missing_parts(name: str, layers: Iterable[str]) -> list[str]:
    """Return the layers without an adapter that SGLang fuses with ``name``, if it is the first adapted one among them.

    SGLang rejects an adapter for only part of ``qkv_proj``, and crashes on one for only part of ``gate_up_proj``.
    """
    parent, _, own = name.rpartition(".")
    group = next((group for group in FUSED.values() if own in group), (own,))
    parts = [f"{parent}.{part}" for part in group]
    first = next(part for part in parts if part in layers)
    return [part for part in parts if part not in layers] if name == first else []


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; if it is sharded, gather it on the current device, which is a collective."""
    return tensor.to(get_device_id()).full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_mergeable(module: torch.nn.Module) -> None:
    """Raise ValueError unless only A and B of linear layers are trained, none of them tied to the embedding."""
    factors = tuple(f".lora_{factor}.{ADAPTER}.weight" for factor in "AB")
    others = [name for name, p in module.named_parameters() if p.requires_grad and not name.endswith(factors)]
    embedding = module.get_input_embeddings().weight
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            plain = isinstance(layer, Linear) and not layer.lora_variant
            if not plain or layer.get_base_layer().weight is embedding:
                others.append(name)
    if others:
        raise ValueError(
            f"this adapter cannot be merged into what the servers load: {', '.join(others[:5])} "
            f"({len(others)} in all); give actor_rollout_ref.model.target_modules linear layers, and not the output "
            "layer of a model with tied embeddings"
        )


def _check_servable(module: torch.nn.Module) -> None:
    """Raise ValueError unless all adapted layers are in the decoder and have the same rank, as SGLang requires."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    outside = [name for name in layers if ".layers." not in name]
    ranks = {layer.r[ADAPTER] for layer in layers.values()}
    if outside or len(ranks) != 1:
        raise ValueError(
            "actor_rollout_ref.model.lora.merge=false with an adapter that SGLang cannot take alone: layers outside "
            f"the decoder {outside[:5]}, ranks {sorted(ranks)}; set lora.merge=true, or give other target_modules"
        )


# verl looks for an engine of the vendor before its own, which is registered by device only.
@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class AtroposFSDPEngine(ConfiguredOffload, RowTemperature, PushedWeights, FSDPEngineWithLMHead):
    """FSDP1 ("fsdp") and FSDP2 ("fsdp2") on NVIDIA GPUs."""
