"""Which models are refused, by their ``config.json``: what would be sampled or trained otherwise than as they are."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.config.models import config_file, model_settings

QUANTIZATION_FLAGS = ("quantization", "torchao_config")  # of sglang.launch_server
# Models to which verl does not tell where a row ends: their attention is given no positions.
_WITHOUT_POSITIONS = (
    *("afmoe", "biogpt", "bloom", "doge", "falcon", "gpt_bigcode", "gpt_oss", "llama4_text", "mpt", "opt"),
    *("persimmon", "xglm"),
)
_RECURRENT = (  # with layers of ``_RECURRENT_LAYERS``, which a configuration may not name
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
)
_RECURRENT_LAYERS = {"conv", "hybrid", "linear_attention", "mamba", "recurrent"}
# Of a configuration: what is done to logits after the head.
_AFTER_HEAD = (
    *("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_bias", "lm_head_multiplier"),
    *("logits_soft_cap", "output_logit_soft_cap"),
)
_FULL_ATTENTION = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # in SGLang, whatever their use_sliding_window


def model_rules(config: DictConfig) -> Iterator[tuple[Any, str]]:
    """Yield the rules of the model's own configuration, if it is on this machine, as ``preflight`` has others."""
    path = config.actor_rollout_ref.model.path
    file = config_file(path)
    settings, model = model_settings(file) if file else {}, config.actor_rollout_ref.model
    yield (
        settings.get("use_sliding_window") and settings.get("model_type") in _FULL_ATTENTION,
        f"actor_rollout_ref.model.path={path}: {file} has use_sliding_window=true, and SGLang serves "
        f"{settings.get('model_type')} with full attention, so it would sample from another policy; set "
        "use_sliding_window to false there, for both sides, or choose another model",
    )
    kind, layers = settings.get("model_type"), settings.get("layer_types")
    yield (
        "vision_config" in settings or "audio_config" in settings,
        f"actor_rollout_ref.model.path={path}: {kind} reads images or sound too, which is not supported; give its text "
        "model as a checkpoint of its own",
    )
    yield (
        model.use_remove_padding
        and (kind in _WITHOUT_POSITIONS or (_RECURRENT_LAYERS & {*layers} if layers else kind in _RECURRENT)),
        f"actor_rollout_ref.model.use_remove_padding=true with {path}: the layers of {kind} would read all rows of a "
        "micro-batch as one; set it to false",
    )
    changed = [key for key in _AFTER_HEAD if settings.get(key) is True or settings.get(key) not in (None, False, 1)]
    yield (
        model.use_fused_kernels and (changed or kind == "phi"),
        f"actor_rollout_ref.model.use_fused_kernels=true with {path}: verl's fused kernels leave out what {kind} does "
        f"to logits ({', '.join(changed) or 'a bias'}), so logprobs and gradients would be wrong; set it to false",
    )
    yield (
        model.use_fused_kernels
        and config.actor_rollout_ref.actor.strategy == "fsdp2"
        and settings.get("tie_word_embeddings") is False,
        f"actor_rollout_ref.model.use_fused_kernels=true with actor.strategy=fsdp2 and {path}, whose head is not tied: "
        "verl's fused kernels cannot read a head that FSDP2 shards; set actor.strategy=fsdp, or false",
    )
    quantization = settings.get("quantization_config") or {}
    yield (
        quantization,
        f"actor_rollout_ref.model.path={path} is quantized ({quantization.get('quant_method')}), and unquantized "
        "weights are pushed to the servers; give a bfloat16 checkpoint",
    )
    for flag, value in config.inference.args.items():
        yield (
            flag.replace("-", "_") in QUANTIZATION_FLAGS and value,
            f"inference.args.{flag}={value}: a quantized server cannot take the weights that are pushed; leave it out, "
            "and serve bfloat16",
        )
