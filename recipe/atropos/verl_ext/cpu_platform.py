"""verl's platform for machines without an accelerator.

Loaded through the ``verl.plugins`` entry point in every process that imports verl. It registers the platform "cpu" with
verl's own registry. Guarantees:

- If an accelerator is visible, verl chooses it and nothing changes: ``is_platform_available`` returns False. It also
  does so in a process of a Ray cluster, whose other machines may have one, and if an NVIDIA driver is loaded.
- Otherwise verl detects "cpu" by itself. ``VERL_PLATFORM`` overrides both, and is what the trainer sets.

The matching FSDP engine is in ``engines``; the workers import it, because verl's engines cannot be imported while
verl itself is still being imported.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from recipe.atropos.utils.gpus import driver_gpus

_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_RAYLET_PID")  # set in a driver that joins a cluster; set in a worker


class _DeviceId(str):
    """The current device. verl passes it to ``Tensor.to`` and also formats it into ``f"{device_name}:{id}"``."""

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def _always(value: Any) -> Callable[..., Any]:
    """Return a function, or method, of any arguments that returns ``value``."""
    return lambda *_, **__: value


def _device_module() -> ModuleType:
    """``torch.cpu`` with the memory functions that verl calls on every device module."""
    module = ModuleType("recipe.atropos.verl_ext.torch_cpu")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})

    def host_memory(*_: Any, **__: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def resident_bytes(*_: Any, **__: Any) -> int:
        return psutil.Process().memory_info().rss

    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    actions = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    module.__dict__.update(
        **dict.fromkeys(sizes, resident_bytes),
        **dict.fromkeys(actions, _always(None)),
        is_available=_always(False),  # no accelerator: verl then skips its device memory management
        mem_get_info=host_memory,
        get_device_name=_always("cpu"),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Host processors: gloo for collectives, Ray's own CPU resource for placement."""

    _module = _device_module()

    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: self._module)
    is_available = _always(True)
    device_count = _always(1)
    current_device = _always(_DeviceId("cpu"))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("CPU")
    ray_noset_envvars = _always([])
    is_ipc_supported = _always(False)
    # Only accelerators need these.
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _always(None)
    cudart = _always(None)
    nvtx_range = _always(nullcontext())

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        if driver_gpus() or any(os.environ.get(name) for name in _RAY_VARIABLES):
            return False
        others = (name for name in PlatformRegistry.registered_names() if name != "cpu")
        return not any(PlatformRegistry.get(name)().is_platform_available(use_smi_check) for name in others)

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}
