"""FlashAttention where it is installed and there is a GPU, torch's own elsewhere; Ulysses with the first alone."""

import importlib.util
from importlib import metadata

import pytest

from helpers.gpu import load_decided
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext.attention import INSTALL, KEY, set_attention

ACTOR = "actor_rollout_ref.actor"
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
ULYSSES_OF_THE_ENGINE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"


@pytest.fixture(autouse=True)
def gpus(machine):
    machine(4)


@pytest.fixture(params=[False, True], ids=["none", "flash_attn"])
def installed(request, monkeypatch):
    find = importlib.util.find_spec
    spec = "flash_attn" if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "flash_attn" else find(name))
    return request.param


def chosen(*overrides):
    config = load_decided("actor_rollout_ref.model.path=m", *overrides)
    told = set_attention(config)
    return config.actor_rollout_ref.model.override_config.attn_implementation, told


def test_attention_is_flash_or_the_cost_is_told(installed):
    found, told = chosen()
    assert found == ("flash_attention_2" if installed else "sdpa") and (told is None) == installed
    if not installed:
        assert "mask of 4,096 x 4,096 tokens" in told and "16 MiB" in told and INSTALL in told
    found, told = chosen(f"+{KEY}=eager")
    assert found == "eager" and "attention by eager" in told, "as given"


@pytest.mark.parametrize(("version", "is_told"), [("0.17.2", True), ("0.12.1", False)])
def test_attention_with_kernels_that_break_models_is_refused(monkeypatch, version, is_told):
    """transformers fails at every model with a kernels that it does not take; FlashAttention comes from none."""
    versions = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "kernels" else versions(name))
    for device in ("cuda", "cpu"):
        if is_told:
            with pytest.raises(
                ConfigurationError,
                match="kernels==0.17.2 is installed, and transformers 5.* takes kernels<0.13,>=0.12.0 .*uninstall",
            ):
                chosen(f"trainer.device={device}")
        else:
            assert chosen(f"trainer.device={device}")[0] == "sdpa"


@pytest.mark.parametrize(
    ("overrides", "flash", "plain"),
    [
        ([], 16384, 4096),
        (["data.max_prompt_length=8000", "data.max_response_length=12000"], 20000, 20000),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=8192"], 8192, 8192),
    ],
)
def test_attention_decides_the_tokens_of_a_micro_batch(installed, overrides, flash, plain):
    """Also of the logprobs', which refer to them; what is given stays."""
    config = load_decided("actor_rollout_ref.model.path=m", *overrides)
    set_attention(config)
    parts = config.actor_rollout_ref
    found = (parts.rollout.log_prob_max_token_len_per_gpu, parts.ref.log_prob_max_token_len_per_gpu)
    assert {parts.actor.ppo_max_token_len_per_gpu, *found} == {flash if installed else plain}


def test_attention_on_a_cpu_is_torchs(installed):
    assert chosen("trainer.device=cpu") == ("sdpa", None)
    with pytest.raises(ConfigurationError, match="attn_implementation=flash_attention_2 needs a GPU"):
        chosen("trainer.device=cpu", f"+{KEY}=flash_attention_2")


@pytest.mark.parametrize("ulysses", [ULYSSES, ULYSSES_OF_THE_ENGINE], ids=["actor", "engine"])
def test_attention_over_divided_sequences_is_flash_or_refused(installed, ulysses):
    if installed:
        assert chosen(ulysses) == ("flash_attention_2", None)
    else:
        with pytest.raises(ConfigurationError, match=f"size=2 with .*=sdpa: .*by FlashAttention alone; {INSTALL}"):
            chosen(ulysses)
        with pytest.raises(ConfigurationError, match=f"flash-attn is not installed; {INSTALL}"):
            chosen(f"+{KEY}=flash_attention_2")
    with pytest.raises(ConfigurationError, match="size=2 with .*=sdpa"):
        chosen(ulysses, f"+{KEY}=sdpa")
