"""Qwen2.5's published shapes, and Qwen3-30B-A3B's, without weights."""

import json

PARAMETERS = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512}  # by its model cards
_SIZES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
_MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
_MOE |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
_MOE |= {"moe_intermediate_size": 768, "intermediate_size": 6144, "tie_word_embeddings": False, "norm_topk_prob": True}
_HEADS = {"0.5b": 2, "1.5b": 2, "7b": 4}


def write_qwen_config(folder, size):
    """Write the configuration alone, and return the folder."""
    if size == "30b-a3b":
        (folder / "config.json").write_text(json.dumps(_MOE))
        return folder
    settings = {"model_type": "qwen2", "num_key_value_heads": _HEADS[size], "tie_word_embeddings": size != "7b"}
    settings |= {"vocab_size": 152064 if size == "7b" else 151936, **_SIZES[size]}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
