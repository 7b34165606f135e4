"""Flags that an SGLang server needs for adapter-only LoRA sync."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.inference.lora_routing import ADAPTERS_KEPT


def lora_arguments(model: DictConfig) -> dict[str, Any]:
    """Return flags of ``sglang.launch_server`` for ``actor_rollout_ref.model``; empty without adapter-only LoRA sync.

    PEFT itself resolves which layers ``target_modules`` selects, on a model without weights.
    """
    if not model.lora_rank or model.lora.merge:
        return {}
    # Imported here: they take seconds, which a launcher without an adapter does not need.
    import torch
    from peft import LoraConfig, PeftConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.get("lora_adapter_path"):
        adapter = PeftConfig.from_pretrained(model.lora_adapter_path)
    else:
        keys = ("target_modules", "exclude_modules")
        named = OmegaConf.to_container(OmegaConf.create({key: model.get(key) for key in keys}))
        adapter = LoraConfig(r=model.lora_rank, **named)
    trusted = model.get("trust_remote_code", False)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model.path, trust_remote_code=trusted), trust_remote_code=trusted
        )
        layers = [name for name, layer in get_peft_model(net, adapter).named_modules() if isinstance(layer, LoraLayer)]
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.r,
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "max_loras_per_batch": ADAPTERS_KEPT,
        "max_loaded_loras": ADAPTERS_KEPT,
    }
