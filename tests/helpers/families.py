"""Tiny models of many architectures, and what streams their weights as the trainer's engine does, without a rank."""

import functools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import random_models
from random_models import make_random_model
from recipe.atropos.verl_ext.engines import PushedWeights

FAMILIES = [*random_models.FAMILIES, "qwen2-tied", "llama-tied"]
WITHOUT_LORA = ("gpt_oss", "minimax", "phi3", "deepseek_v2", "lfm2")  # attention without q_proj and v_proj everywhere


def make_family(folder, family, seed=0):
    return make_random_model(folder, family.removesuffix("-tied"), seed, tie_word_embeddings=family.endswith("-tied"))


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    """The folder of a tiny model, by its family and seed; made once."""

    @functools.cache
    def make(family, seed=0):
        folder = make_family(tmp_path_factory.mktemp("models") / family, family, seed)
        GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=2).save_pretrained(folder)
        return folder

    return make


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
