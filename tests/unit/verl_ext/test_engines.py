"""Which reference policy is offloaded (the real ``_build_fsdp_module``, up to where it would wrap the model), what a
resumed optimizer has of the configuration, and which adapters cannot be pushed.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import CPUOffload
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.fsdp_utils import CPUOffloadPolicy
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from random_models import FAMILIES, SIZES
from recipe.atropos.verl_ext.engines import AtroposFSDPEngine, CPUFSDPEngine, _check_mergeable


class Wrapped(Exception):
    """Carries what the model would have been wrapped with."""


def offload_of(monkeypatch, engine_class, strategy, **settings):
    """The offload that verl's code hands to FSDP: None, or an offloading one."""

    def stop(*_, **arguments):
        raise Wrapped(arguments.get("cpu_offload"))

    def stop2(module, kwargs, config):
        raise Wrapped(kwargs["offload_policy"])

    monkeypatch.setattr(transformer_impl, "FSDP", stop)
    monkeypatch.setattr(transformer_impl, "apply_fsdp2", stop2)
    monkeypatch.setattr(transformer_impl, "get_sharding_strategy", lambda *_, **__: None)
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", lambda **_: CPUOffloadPolicy(pin_memory=False))
    engine = engine_class.__new__(engine_class)
    engine.engine_config = FSDPEngineConfig(strategy=strategy, forward_only=True, **settings)
    engine.model_config = SimpleNamespace(lora_rank=0)
    engine.device_mesh = None
    engine._uses_fsdp2_cpu_offload_policy = False
    with pytest.raises(Wrapped) as raised:
        engine._build_fsdp_module(torch.nn.Linear(2, 2))
    assert engine.engine_config.forward_only, "what is asked later, whether there is an optimizer, stays"
    return raised.value.args[0]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("settings", [{}, {"param_offload": True}], ids=["stays", "offloaded"])
def test_reference_policy_is_offloaded_where_it_is_configured(monkeypatch, strategy, settings):
    offload = offload_of(monkeypatch, AtroposFSDPEngine, strategy, **settings)
    assert isinstance(offload, CPUOffload | CPUOffloadPolicy) == bool(settings)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verl_alone_offloads_it_always(monkeypatch, strategy):
    """Where this fails, verl has fixed it (its pull request 7182), and ``ConfiguredOffload`` can go."""
    assert offload_of(monkeypatch, FSDPEngineWithLMHead, strategy) is not None


def test_on_an_nvidia_gpu_verl_chooses_the_engine_of_this_recipe(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    for backend in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", backend) is AtroposFSDPEngine


def optimized(monkeypatch, steps, **settings):
    """verl's optimizer and schedule of the engine as ``settings`` configure them; its engine loads from a dict."""
    engine = CPUFSDPEngine.__new__(CPUFSDPEngine)
    engine.optimizer_config = FSDPOptimizerConfig(total_training_steps=steps, **settings)
    engine.rank, engine._is_offload_param, engine._is_offload_optimizer = 0, False, False
    engine.optimizer = engine._build_optimizer(torch.nn.Linear(1, 1, bias=False))
    engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
    parts = {"optimizer": engine.optimizer, "lr_scheduler": engine.lr_scheduler}

    def load(local_path, **_):
        for name, part in parts.items():
            part.load_state_dict(local_path[name])

    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    engine.checkpoint_manager = SimpleNamespace(load_checkpoint=load)
    engine.state = lambda: copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
    return engine


def rates(engine, updates):
    """The learning rates of so many updates: those that were used, and what the engine says that they were."""
    used, told = [], []
    for _ in range(updates):
        [group] = engine.optimizer.param_groups
        group["params"][0].grad = torch.ones(1, 1)
        used.append(group["lr"])
        engine.optimizer.step()
        told.append(engine.lr_scheduler_step())
    assert told == used
    return used


def test_a_resumed_optimizer_has_the_configured_numbers(monkeypatch):
    """And of the checkpoint the moments, and the position in the schedule."""
    cosine = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2}
    first = optimized(monkeypatch, 10, lr=1.0, weight_decay=0.0, **cosine)
    assert rates(first, 4) == pytest.approx([0.0, 0.5, 1.0, (1 + math.cos(math.pi / 8)) / 2])
    other = optimized(monkeypatch, 6, lr=0.1, weight_decay=0.3, betas=(0.5, 0.6), **cosine)
    other.load_checkpoint(first.state())
    [group] = other.optimizer.param_groups
    assert group["betas"] == (0.5, 0.6) and group["weight_decay"] == 0.3
    moments = [next(iter(engine.optimizer.state.values()))["exp_avg"] for engine in (first, other)]
    assert torch.equal(*moments) and moments[0].item() != 0
    assert rates(other, 3) == pytest.approx([0.05, 0.1 * (1 + math.cos(3 * math.pi / 4)) / 2, 0.0], abs=1e-9)
    same = optimized(monkeypatch, 10, lr=1.0, weight_decay=0.0, **cosine)
    same.load_checkpoint(first.state())
    assert rates(same, 6) == rates(first, 6)


def test_packed_experts_are_refused_with_layers_to_name():
    """PEFT counts them among ``all-linear``, which is the default."""
    config = AutoConfig.for_model("qwen3_moe", **SIZES, **FAMILIES["qwen3_moe"], vocab_size=64)
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ValueError, match=r"mlp.experts.*by name, such as \[q_proj,k_proj,v_proj,o_proj\].*all-linear"):
        _check_mergeable(model)
