"""Tiny models of many architectures, and what streams their weights as the trainer's engine does, without a rank."""

from types import SimpleNamespace

import torch
from helpers_sglang import make_tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from recipe.atropos.engines import PushedWeights

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "mixtral": EXPERTS,
    "phimoe": EXPERTS,
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "lfm2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": EXPERTS,
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
}
WITHOUT_LORA = ("gpt_oss", "minimax")  # attention without q_proj and v_proj of every layer, or with others
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256}


def make_family(folder, family, seed=0):
    return make_tiny_model(folder, seed, family.removesuffix("-tied"), **SIZES | FAMILIES[family])


class Plain:
    """What the stream needs of verl's engine: a model that is loaded as it loads it, and that nothing wraps."""

    _uses_fsdp2_cpu_offload_policy = _is_offload_param = False

    def __init__(self, folder, lora_rank=0):
        self.model_config = SimpleNamespace(path=folder, lora_rank=lora_rank, lora={"merge": True})
        self.module = self._build_module()
        if lora_rank:
            targets = ["q_proj", "v_proj"]
            self.module = get_peft_model(self.module, LoraConfig(r=lora_rank, target_modules=targets))

    def save_checkpoint(self, local_path, contents=("model",), **options):
        """As verl's engine does, by its manager; needs a process group."""
        config = {"save_contents": list(contents), "load_contents": list(contents), **options}
        tokenizer = AutoTokenizer.from_pretrained(self.model_config.path)
        manager = FSDPCheckpointManager(self.module, processing_class=tokenizer, checkpoint_config=config)
        manager.save_checkpoint(str(local_path))

    def _build_module(self):
        return AutoModelForCausalLM.from_pretrained(self.model_config.path, dtype=torch.float32)


class Engine(PushedWeights, Plain):
    """Streams whole weights."""

    def train(self):
        """Other values, everywhere."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
