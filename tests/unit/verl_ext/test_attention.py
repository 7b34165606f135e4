"""FlashAttention where it is installed and there is a GPU, torch's own elsewhere; Ulysses with the first alone."""

import importlib.util

import pytest
from huggingface_hub import constants
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

from recipe.atropos.config.compose import load_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext import attention
from recipe.atropos.verl_ext.attention import KEY, set_attention

ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
ULYSSES_OF_THE_ENGINE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"


@pytest.fixture(params=["none", "flash_attn", "kernels"])
def installed(request, monkeypatch):
    find = importlib.util.find_spec
    known = {name: name == request.param for name in ("flash_attn", "kernels")}
    monkeypatch.setattr(
        attention.importlib.util, "find_spec", lambda name: known[name] if name in known else find(name)
    )
    return request.param != "none"


def chosen(*overrides):
    config = load_config(["actor_rollout_ref.model.path=m", *overrides])
    told = set_attention(config)
    return config.actor_rollout_ref.model.override_config.attn_implementation, told


def test_attention_is_flash_or_the_cost_is_told(machine, installed):
    machine(1)
    found, told = chosen()
    assert found == ("flash_attention_2" if installed else "sdpa") and (told is None) == installed
    if not installed:
        assert "mask of 16,384 x 16,384 tokens" in told and "256 MiB" in told and "pip install kernels" in told
    found, told = chosen(f"+{KEY}=eager")
    assert found == "eager" and "attention by eager" in told, "as given"


def test_attention_is_no_kernel_of_the_hub_unless_asked(machine, monkeypatch, tmp_path):
    machine(1)
    found = {"flash_attn": None, "kernels": "kernels"}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        attention.importlib.util, "find_spec", lambda name: found[name] if name in found else find(name)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert chosen()[0] == "sdpa"
    with pytest.raises(ConfigurationError, match="kernels has none in the hub's cache and HF_HUB_OFFLINE is set"):
        chosen(f"+{KEY}=flash_attention_2")
    (tmp_path / f"models--{FLASH_ATTN_KERNEL_FALLBACK['flash_attention_2'].replace('/', '--')}").mkdir()
    assert chosen()[0] == "flash_attention_2"


def test_attention_on_a_cpu_is_torchs(machine, installed):
    machine(1)
    assert chosen("trainer.device=cpu") == ("sdpa", None)
    with pytest.raises(ConfigurationError, match="attn_implementation=flash_attention_2 needs a GPU"):
        chosen("trainer.device=cpu", f"+{KEY}=flash_attention_2")


@pytest.mark.parametrize("ulysses", [ULYSSES, ULYSSES_OF_THE_ENGINE], ids=["actor", "engine"])
def test_attention_over_divided_sequences_is_flash_or_refused(machine, installed, ulysses):
    machine(4)
    if installed:
        assert chosen(ulysses) == ("flash_attention_2", None)
    else:
        with pytest.raises(
            ConfigurationError, match="size=2 with .*=sdpa: .*by FlashAttention alone; pip install kernels"
        ):
            chosen(ulysses)
        with pytest.raises(ConfigurationError, match="neither flash-attn nor kernels is installed"):
            chosen(f"+{KEY}=flash_attention_2")
    with pytest.raises(ConfigurationError, match="size=2 with .*=sdpa"):
        chosen(ulysses, f"+{KEY}=sdpa")
