"""Qwen2.5's published shapes, without weights."""

import json

PARAMETERS = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512}  # by its model cards
_SIZES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
_HEADS = {"0.5b": 2, "1.5b": 2, "7b": 4}


def write_qwen_config(folder, size):
    """Write the configuration alone, and return the folder."""
    settings = {"model_type": "qwen2", "num_key_value_heads": _HEADS[size], "tie_word_embeddings": size != "7b"}
    settings |= {"vocab_size": 152064 if size == "7b" else 151936, **_SIZES[size]}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
