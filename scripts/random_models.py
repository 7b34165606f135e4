"""Random models of many architectures, small enough for a CPU, each in Hugging Face format with a byte tokenizer.

For checks of whether an architecture works at all (``benchmarks/models.py``, ``scripts/gpu_check.py``, tests): two
layers of width 64, with one of each of the family's own features (experts, sliding windows, convolutions, scaled RoPE).
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME

from recipe.atropos.demo.small_policy import CHAT_TEMPLATE, SPECIAL_TOKENS
from recipe.atropos.utils.files import read_json, write_json

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"hidden_act": "gelu_pytorch_tanh"}  # SGLang reads this key, which the published configurations have too
_WINDOW = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {  # the only RoPE of DeepSeek's that SGLang has for a CPU
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"rope_parameters": _LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
    "gemma": _GEMMA,
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    | _GEMMA
    | _WINDOW,
    "gemma3_text": {"query_pre_attn_scalar": 16} | _WINDOW,
    "phi3": {},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
    "glm4": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "deepseek_v2": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,  # SGLang reads this and the next, which published configurations have
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "num_key_value_heads": 4,
        "rope_parameters": _YARN,
    }
    | _MLA,
    "gpt_oss": _EXPERTS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": _EXPERTS,
    "phimoe": _EXPERTS,
    "minimax": _EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "lfm2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
}
"""Settings specific to a family, by transformers' ``model_type``, in addition to ``SIZES``."""

_PUBLISHED_AS = {"phimoe": "PhiMoEForCausalLM"}  # SGLang knows it by this name; transformers 5 writes another

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def byte_tokenizer(
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE, pad: bool = True
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, after three special tokens; ``pad``: it has a pad token.

    It is a byte-level BPE because AutoTokenizer in transformers 5 loads the tokenizer of any Qwen2 folder as one: a
    WordLevel tokenizer would then encode every text to no tokens, and an empty prompt kills SGLang's scheduler.
    """
    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0] if pad else None,
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=chat_template,
    )


def make_random_model(
    folder: Path | str,
    model_type: str = "qwen2",
    seed: int = 0,
    *,
    dtype: str = "float32",
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE,
    pad: bool = True,
    **config: Any,
) -> Path:
    """Write the model and its tokenizer into ``folder``; return the folder.

    Two seeds give two models of one architecture, so one's weights can be pushed over the other's. The weights are wide
    (std 0.2) so that their greedy outputs differ. ``config`` overrides ``FAMILIES`` and ``SIZES`` in the model's
    configuration; its vocabulary is the tokenizer's (259) unless given.
    """
    tokenizer = byte_tokenizer(chat_template, pad)
    settings = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoConfig.for_model(model_type, **(settings | SIZES | FAMILIES[model_type] | config))
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if architecture := _PUBLISHED_AS.get(model_type):
        file = Path(folder, CONFIG_NAME)
        write_json(file, read_json(file) | {"architectures": [architecture]})
    return Path(folder)
