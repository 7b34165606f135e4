"""Check, before anything is sent, that a server serves the trained model.

A tensor of another shape crashes SGLang's scheduler, and a tensor of an unknown name is silently skipped.
"""

import logging
from typing import Any

from transformers import PretrainedConfig

from recipe.atropos.config.model_rules import QUANTIZATION_FLAGS
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.servers import WeightPushError

logger = logging.getLogger(__name__)

# Configuration fields that determine the tensors' names and shapes.
_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)


async def check_model(client: SGLangClient, trained: PretrainedConfig, dtype: str) -> None:
    """Check that a server serves ``trained``; ``dtype``: what weights are cast to before sending, e.g. "bfloat16".

    Raises:
        WeightPushError: the server has another architecture, size or dtype, or is quantized; names it and the values.
        InferenceError: the server does not answer.
    """
    model, arguments = await client.model_info(), (await client.capabilities()).arguments
    path = served_path(model)
    served = _configuration(client.url, path, trained)
    # SGLang reports only the flag; without it, the checkpoint's own configuration decides.
    found = {f"--{flag.replace('_', '-')} {arguments[flag]}" for flag in QUANTIZATION_FLAGS if arguments.get(flag)}
    settings = getattr(served, "quantization_config", None)
    if settings and not found:
        found = {f"{path}, a checkpoint with quantization_config {settings.get('quant_method', settings)}"}
    if found:
        raise WeightPushError(
            f"{client.url} serves quantized weights ({' and '.join(sorted(found))}), and unquantized ones are pushed. "
            "Nothing was sent; serve a bfloat16 checkpoint, without a flag for quantization"
        )
    if (theirs := model.get("architectures")) and theirs != trained.architectures:
        differences = [f"architectures {theirs}, the trainer's are {trained.architectures}"]
    else:
        pairs = {key: (getattr(served, key, None), getattr(trained, key, None)) for key in _KEYS if served is not None}
        differences = [
            f"{key}={theirs}, the trainer's is {ours}" for key, (theirs, ours) in pairs.items() if theirs != ours
        ]
    served_dtype = arguments.get("dtype")
    if served_dtype not in (None, "auto", dtype, {"float16": "half"}.get(dtype)):
        differences.append(f"dtype {served_dtype}, inference.dtype is {dtype}")
    if differences:
        raise WeightPushError(
            f"{client.url} serves another model than is trained: {'; '.join(differences)}. Nothing was sent; start it "
            "with the model of actor_rollout_ref.model.path and the dtype of inference.dtype"
        )


def served_path(model_info: dict[str, Any]) -> str | None:
    """Return the path of a server's checkpoint, given its /model_info.

    ``model_path`` changes with every update from disk; ``tokenizer_path`` stays the original path.
    """
    return model_info.get("tokenizer_path") or model_info.get("model_path")


def _configuration(url: str, path: str | None, trained: PretrainedConfig) -> PretrainedConfig | None:
    try:
        # Loaded by the trained model's own class, so that no code from the server's path runs here.
        return type(trained).from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        logger.warning("%s: the configuration of its model, %s, cannot be read from here to compare", url, path)
        return None
