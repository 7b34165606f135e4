"""verl's platform for machines without an accelerator.

Loaded through the ``verl.plugins`` entry point in every process that imports verl. It registers the platform "cpu" with
verl's own registry. Guarantees:

- If an accelerator is visible, verl chooses it and nothing changes: ``is_platform_available`` returns False. It also
  does so in a process of a Ray cluster, whose other machines may have one, and if an NVIDIA driver is loaded.
- Otherwise verl detects "cpu" by itself. ``VERL_PLATFORM`` overrides both, and is what the trainer sets.

The matching FSDP engine is in ``cpu_engine``; the workers import it, because verl's engines cannot be imported while
verl itself is still being imported.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from recipe.atropos.utils.gpus import driver_gpus

_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_RAYLET_PID")  # set in a driver that joins a cluster; set in a worker


def _in_a_cluster() -> bool:
    return any(os.environ.get(name) for name in _RAY_VARIABLES)


class _DeviceId(str):
    """The current device. verl passes it to ``Tensor.to`` and also formats it into ``f"{device_name}:{id}"``."""

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def _device_module() -> ModuleType:
    """``torch.cpu`` with the memory functions that verl calls on every device module."""
    module = ModuleType("recipe.atropos.verl_ext.torch_cpu")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})

    def host_memory(*_: Any, **__: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def resident_bytes(*_: Any, **__: Any) -> int:
        return psutil.Process().memory_info().rss

    def nothing(*_: Any, **__: Any) -> None:
        return None

    module.is_available = lambda: False  # no accelerator: verl then skips its device memory management
    module.mem_get_info = host_memory
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, resident_bytes)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
        setattr(module, name, nothing)
    module.get_device_name = lambda *_: "cpu"
    module.get_rng_state = torch.get_rng_state
    module.set_rng_state = torch.set_rng_state
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Host processors: gloo for collectives, Ray's own CPU resource for placement."""

    _module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        if driver_gpus() or _in_a_cluster():
            return False
        others = (name for name in PlatformRegistry.registered_names() if name != "cpu")
        return not any(PlatformRegistry.get(name)().is_platform_available(use_smi_check) for name in others)

    def current_device(self) -> str:
        return _DeviceId("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _nothing(self, *_: Any) -> None:
        """Do nothing: only accelerators need this."""

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
