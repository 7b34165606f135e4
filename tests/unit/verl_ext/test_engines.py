"""Which reference policy is offloaded: the real ``_build_fsdp_module``, up to where it would wrap the model."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import CPUOffload
from verl.utils.fsdp_utils import CPUOffloadPolicy
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.atropos.verl_ext.engines import AtroposFSDPEngine


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
