"""Whether a server serves the model that is trained. A tensor of another shape kills SGLang's scheduler, and one of
another name is passed over in silence, so this is asked before anything is sent."""

import logging

from transformers import PretrainedConfig

from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.servers import WeightPushError

logger = logging.getLogger(__name__)

# What the names and shapes of the tensors follow from.
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
    """``dtype`` is the one that weights are cast to before they travel, e.g. "bfloat16".

    Raises:
        WeightPushError: the server has another architecture, another size or another dtype; names it, and both values.
        InferenceError: the server does not answer.
    """
    model, arguments = await client.model_info(), (await client.capabilities()).arguments
    if (theirs := model.get("architectures")) and theirs != trained.architectures:
        differences = [f"architectures {theirs}, the trainer's are {trained.architectures}"]
    else:
        # model_path changes with every update from disk; the tokenizer's stays where the model was.
        differences = _other_sizes(client.url, model.get("tokenizer_path") or model.get("model_path"), trained)
    served_dtype = arguments.get("dtype")
    if served_dtype not in (None, "auto", dtype, {"float16": "half"}.get(dtype)):
        differences.append(f"dtype {served_dtype}, inference.dtype is {dtype}")
    if differences:
        raise WeightPushError(
            f"{client.url} serves another model than is trained: {'; '.join(differences)}. Nothing was sent; start it "
            "with the model of actor_rollout_ref.model.path and the dtype of inference.dtype"
        )


def _other_sizes(url: str, path: str, trained: PretrainedConfig) -> list[str]:
    try:
        # By the trained model's own class: no code that stands at a server's path is run here.
        served = type(trained).from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        logger.warning("%s: the configuration of its model, %s, cannot be read from here to compare", url, path)
        return []
    pairs = {key: (getattr(served, key, None), getattr(trained, key, None)) for key in _KEYS}
    return [f"{key}={theirs}, the trainer's is {ours}" for key, (theirs, ours) in pairs.items() if theirs != ours]
