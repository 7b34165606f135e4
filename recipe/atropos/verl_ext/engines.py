"""What this recipe has otherwise than verl's FSDP engines; with it, the engines for NVIDIA GPUs.

``ConfiguredOffload``: the reference policy stays on its device unless ``ref.fsdp_config.param_offload`` says otherwise.
verl 0.9.1 offloads every forward-only model, whatever its configuration says, which makes its forward pass 40 to 70
times slower.

``PushedWeights``: what leaves a model. verl renames packed experts of MoE models as Qwen's checkpoints name them,
whatever the model; here every tensor has the name and the shape that it has in the model's own checkpoint.

With a LoRA adapter and ``model.lora.merge`` the servers get whole weights, base + scaling * B @ A, under the base
model's names; without it A and scaling * B of each adapted layer, under PEFT's names.
verl merges the adapter into the model, reads the model, rounds what it reads to bf16, and puts copies of the base
weights back (``merged_lora_context``). Here nothing is put into the model: the sum is made beside it, one tensor at a
time. So

- what is pushed is what the trainer computes with, in the trainer's precision;
- a push only reads: base weights, adapter and optimizer are bit for bit what they were, also where FSDP holds gathered
  copies of them (``reshard_after_forward=false``), and a push that fails half-way leaves nothing to restore;
- every rank makes every tensor: gathering is a collective.

``RowTemperature``: each row at a temperature of its own. verl's engine takes a temperature for each row, but its
trainer writes one for the whole batch over it.

A new adapter depends on the engine's ``seed`` alone, not on the strategy or the number of ranks.
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

from recipe.atropos.checkpoint.format import FUSED, TENSOR_NAMES, CheckpointFormat
from recipe.atropos.checkpoint.lora_layers import ADAPTER, adapted_layers, merged_weights
from recipe.atropos.utils.files import write_json


class ConfiguredOffload:
    """Goes before one of verl's FSDP engines: ``class Engine(ConfiguredOffload, FSDPEngineWithLMHead)``."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """verl asks ``forward_only`` here for one thing alone, whether to offload."""
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

    ``row_temperature``, (B,) float32, where a batch has it, takes the place of the batch's ``temperature`` in logprobs,
    entropies and the logits that losses see.
    """

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        if "row_temperature" in micro_batch:
            micro_batch["temperature"] = micro_batch["row_temperature"]
        return super().prepare_model_inputs(micro_batch=micro_batch)


class PushedWeights:
    """Mixin for one of verl's FSDP engines: ``class Engine(PushedWeights, FSDPEngineWithLMHead)``.

    ``checkpoint_format`` is that of the model, from the moment on when it is built.
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
        """``module`` with its adapter.

        Raises:
            ValueError: the adapter cannot be pushed: it is more than A and B of linear layers, or, where it is not to
                be merged, of layers outside the decoder or of several ranks.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.engine_config.seed)
            module = super()._build_lora_module(module)
        _check_mergeable(module)
        if self.adapter_only:
            _check_servable(module)
        return module

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """As verl, and beside it the names that the weights have in the model's checkpoint, and PEFT's configuration of
        an adapter: what ``export`` needs, and what is known only where the model is loaded.
        """
        super().save_checkpoint(local_path, *args, **kwargs)
        if torch.distributed.get_rank() == 0:
            write_json(Path(local_path) / TENSOR_NAMES, list(self.checkpoint_format.shapes))
            adapter = getattr(self.module, "peft_config", {}).get(ADAPTER)  # FSDP forwards to the module that it wraps
            if adapter is not None:
                adapter.save_pretrained(local_path)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Name and full tensor of all that is pushed, in the dtype that is trained; every rank iterates to the end."""
        # FSDP2 gathers from where the shards are; only an adapter is computed with.
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
        """PEFT's name and the full tensor of A, (r, in), and of scaling * B, (out, r), of every adapted layer.

        A layer that is not adapted, but that SGLang computes as one with an adapted one, has zeros.
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
    """The layers without an adapter that are computed as one with ``name``; none if another of them has named them.

    SGLang refuses an adapter with a part of ``qkv_proj``, and dies of a part of ``gate_up_proj``.
    """
    parent, _, own = name.rpartition(".")
    group = next((group for group in FUSED.values() if own in group), (own,))
    parts = [f"{parent}.{part}" for part in group]
    first = next(part for part in parts if part in layers)
    return [part for part in parts if part not in layers] if name == first else []


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on the current device; a collective where it is sharded."""
    return tensor.to(get_device_id()).full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_mergeable(module: torch.nn.Module) -> None:
    """Only A and B of linear layers are trained, and no such layer shares its weight with the embedding."""
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
    """Every adapted layer is one of a decoder layer, and all have the same rank: SGLang has room for no other."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    outside = [name for name in layers if ".layers." not in name]
    ranks = {layer.r[ADAPTER] for layer in layers.values()}
    if outside or len(ranks) != 1:
        raise ValueError(
            "actor_rollout_ref.model.lora.merge=false with an adapter that SGLang cannot take alone: layers outside "
            f"the decoder {outside[:5]}, ranks {sorted(ranks)}; set lora.merge=true, or give other target_modules"
        )


# verl looks for the vendor's engine before its own, which is registered for the device alone.
@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class AtroposFSDPEngine(ConfiguredOffload, RowTemperature, PushedWeights, FSDPEngineWithLMHead):
    """FSDP1 ("fsdp") and FSDP2 ("fsdp2") on NVIDIA GPUs."""
