"""What this recipe has otherwise than verl's FSDP engines; with it, the engines for NVIDIA GPUs.

``ConfiguredOffload``: the reference policy stays on its device unless ``ref.fsdp_config.param_offload`` says otherwise.
verl 0.9.1 offloads every forward-only model, whatever its configuration says, which makes its forward pass 40 to 70
times slower.

``MergedLoRA``: the servers get whole weights, base + scaling * B @ A, under the base model's names. verl merges the
adapter into the model, reads the model, rounds what it reads to bf16, and puts copies of the base weights back
(``merged_lora_context``). Here nothing is put into the model: the sum is made beside it, one tensor at a time. So

- what is pushed is what the trainer computes with, in the trainer's precision;
- a push only reads: base weights, adapter and optimizer are bit for bit what they were, also where FSDP holds gathered
  copies of them (``reshard_after_forward=false``), and a push that fails half-way leaves nothing to restore;
- every rank makes every tensor: gathering is a collective.

A new adapter depends on the engine's ``seed`` alone, not on the strategy or the number of ranks.
"""

from collections.abc import Iterator

import torch
from peft.tuners.lora import Linear, LoraLayer
from peft.utils.other import transpose
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import normalize_peft_param_name, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params

_ADAPTER = "default"  # the one that verl makes or loads


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


class MergedLoRA:
    """Goes before one of verl's FSDP engines: ``class Engine(MergedLoRA, FSDPEngineWithLMHead)``."""

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """``module`` with its adapter.

        Raises:
            ValueError: the adapter cannot be merged: it is not to be, or is more than A and B of linear layers.
        """
        if not self.model_config.lora.get("merge", False):
            raise ValueError(
                f"actor_rollout_ref.model.lora_rank={self.model_config.lora_rank} with model.lora.merge=false: the "
                "servers would get the base weights alone; set actor_rollout_ref.model.lora.merge=true"
            )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.engine_config.seed)
            module = super()._build_lora_module(module)
        _check_mergeable(module)
        return module

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name in the base checkpoint and the full tensor of every weight, in the dtype that is trained."""
        try:
            yield from unfuse_moe_params(self._merged_weights(), self.model_config.hf_config.model_type)
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)

    def _merged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = getattr(self.module, "_fsdp_wrapped_module", self.module)  # FSDP1 wraps, FSDP2 does not
        layers = {
            name.replace("_fsdp_wrapped_module.", ""): layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, LoraLayer)
        }
        state = self.module.state_dict()
        for key, tensor in state.items():
            # At most one name: verl's functions take dicts, and drop the adapter's own tensors.
            for name in convert_weight_keys(normalize_peft_param_name({key: tensor}), model):
                weight = _full(tensor)
                layer = layers.get(key.removesuffix(".base_layer.weight"))
                if layer is not None:
                    weight = (weight.float() + _delta(key.removesuffix("base_layer.weight"), layer, state)).to(
                        weight.dtype
                    )
                yield name, weight


def _delta(prefix: str, layer: Linear, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """scaling * B @ A of the layer whose keys start with ``prefix``, (out, in), float32."""
    a, b = (_full(state[f"{prefix}lora_{factor}.{_ADAPTER}.weight"]).float() for factor in "AB")
    return transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[_ADAPTER]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on the current device; a collective where it is sharded."""
    return tensor.to(get_device_id()).full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_mergeable(module: torch.nn.Module) -> None:
    """Only A and B of linear layers are trained, and no such layer shares its weight with the embedding."""
    factors = tuple(f".lora_{factor}.{_ADAPTER}.weight" for factor in "AB")
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


# verl looks for the vendor's engine before its own, which is registered for the device alone.
@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class AtroposFSDPEngine(ConfiguredOffload, MergedLoRA, FSDPEngineWithLMHead):
    """FSDP1 ("fsdp") and FSDP2 ("fsdp2") on NVIDIA GPUs."""
