"""A LoRA adapter in a model: its layers, and the merged weights of base and adapter, one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from peft.utils.other import transpose

ADAPTER = "default"  # the name of the adapter that verl makes or loads


def adapted_layers(module: torch.nn.Module) -> dict[str, Linear]:
    """Return the adapted layers by their names in ``state_dict``, even if FSDP wraps them."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): layer
        for name, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
    }


def merged_weights(
    layers: Mapping[str, Linear], state: Mapping[str, Any], full: Callable[[Any], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base model's name and base + scaling * B @ A of every weight in ``state``, in the dtype of the base.

    ``full`` returns the full tensor for a value of ``state``.
    """
    for key, value in state.items():
        if ".lora_" in key:
            continue
        weight, layer = full(value), layers.get(key.removesuffix(".base_layer.weight"))
        if layer is not None:
            a, b = (full(state[key.replace("base_layer", f"lora_{factor}.{ADAPTER}")]).float() for factor in "AB")
            delta = transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[ADAPTER]
            weight = (weight.float() + delta).to(weight.dtype)
        yield key.removeprefix("base_model.model.").replace(".base_layer.", "."), weight
