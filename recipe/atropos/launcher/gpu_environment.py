"""Check, before anything is started, that the trainer's and SGLang's Python environments work on this machine's GPUs.

Compared: the NVIDIA driver with the CUDA version of each environment's torch; nvcc's with that of SGLang's; and both
sides' NCCL if weights go over it, or both sides' torch if they go as handles. Required: SGLang's kernels, and what
SGLang and Triton compile kernels with at run time: nvcc, a C++ and a C compiler, ninja, and Python.h.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping

from omegaconf import DictConfig
from packaging.version import Version

from recipe.atropos.config.preflight import Rules
from recipe.atropos.config.transports import WeightTransport, gpu_transport
from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference.server import server_path, sglang_python
from recipe.atropos.utils.machine import nvidia_smi, run_program, versions_in

_KERNELS = "sglang-kernel"  # SGLang's CPU environment does not have it
# Oldest Linux driver for each CUDA major version (NVIDIA's "CUDA Toolkit Release Notes", minor version compatibility).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
# From this torch on, handles of CUDA memory have version 3, which an older one refuses to open (pytorch issue 179618).
_NEW_HANDLES = Version("2.13")


def check_gpu_environment(config: DictConfig) -> list[str]:
    """Return warnings for the user; check nothing if the trainer or the servers run on a CPU.

    Raises:
        ConfigurationError: names everything that cannot work, each with its fix.
    """
    if "cpu" in (config.inference.device, config.trainer.device):
        return []
    packages = ("torch", _KERNELS, *map(_nccl_package, _OLDEST_DRIVER))
    try:
        interpreters = {"the trainer": sys.executable, "SGLang": sglang_python(config.inference.python)}
        sides = {side: versions_in(interpreter, packages) for side, interpreter in interpreters.items()}
    except LaunchError as error:  # the interpreter does not run
        raise ConfigurationError(f"inference.python={error}: name another interpreter") from error
    if wrong := [message for violated, message in _rules(config, interpreters, sides) if violated]:
        raise ConfigurationError("; ".join(wrong))
    driver = next((row[0] for row in nvidia_smi("gpu", "driver_version")), None)
    oldest = {side: _OLDEST_DRIVER.get(_major(found["cuda"]), 0) for side, found in sides.items()}
    return [  # no error, since NVIDIA's CUDA compatibility package may be there
        f"{side} has torch for CUDA {found['cuda']}, which needs an NVIDIA driver from {oldest[side]} on, and this "
        f"machine has {driver}: update the driver, or install torch for an older CUDA"
        for side, found in sides.items()
        if driver and int(_major(driver)) < oldest[side]
    ]


def _rules(config: DictConfig, interpreters: Mapping[str, str], sides: Mapping[str, Mapping[str, str | None]]) -> Rules:
    """Yield what cannot work; ``sides``: what is installed for the trainer and for SGLang."""
    for side, found in sides.items():
        yield (
            found["Python.h"] is None and (side == "SGLang" or config.actor_rollout_ref.actor.use_torch_compile),
            f"{interpreters[side]} has no Python.h, with which Triton compiles: install its header files (python3-dev, "
            "python3.12-dev, ...)",
        )
        yield (
            not found["torch"] or found["cuda"] is None,
            f"{side} has torch {found['torch']} without CUDA ({interpreters[side]}): install its CUDA build "
            "(docs/gpu.md), or set trainer.device=cpu",
        )
    trainer, server, python = sides["the trainer"], sides["SGLang"], interpreters["SGLang"]
    if server["torch"] and server["cuda"]:
        kernels = f"{python} has SGLang without its CUDA kernels: {_pip(python)} -r requirements/sglang.txt"
        yield server[_KERNELS] is None, kernels
        yield from _wrong_nvcc(python, server["cuda"])
        if trainer["torch"] and trainer["cuda"]:
            yield from _unlike(gpu_transport(config), trainer, server, python)
    yield from _missing_tools(python)


def _unlike(
    transport: type[WeightTransport], trainer: Mapping[str, str], server: Mapping[str, str], python: str
) -> Rules:
    """Yield versions of the two sides between which weights cannot go by ``transport``."""
    package = _nccl_package(_major(server["cuda"]))
    trainers, servers = trainer.get(_nccl_package(_major(trainer["cuda"]))), server.get(package)
    yield (
        transport.uses_nccl and trainers and servers and trainers != servers,  # None for a system-wide NCCL
        f"weights go over NCCL, which joins no two versions: the trainer has {trainers}, SGLang {servers}; "
        f"{_pip(sys.executable)} --no-deps {package}=={servers}, or set trainer.atropos.weight_sync.transport=disk",
    )
    yield (
        transport.shares_memory and Version(server["torch"]) < _NEW_HANDLES <= Version(trainer["torch"]),
        f"weights go as handles of GPU memory, and torch {server['torch']} of SGLang ({python}) opens none of "
        f"the trainer's torch {trainer['torch']}: install an SGLang with torch {_NEW_HANDLES} or newer "
        "(requirements/sglang.txt), or set trainer.atropos.weight_sync.transport=disk",
    )


def _nccl_package(cuda_major: str) -> str:
    return f"nvidia-nccl-cu{cuda_major}"


def _major(version: str) -> str:
    return version.partition(".")[0]


def _missing_tools(python: str) -> Rules:
    """Yield the compilation tools that SGLang and Triton would not find in a server run by ``python``."""

    def missing(*names: str) -> bool:
        return not any(shutil.which(name, path=server_path(python)) for name in names)

    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    yield missing(*compilers), "there is no C compiler ($CC, or gcc, clang), with which Triton compiles: install one"
    yield (
        missing(os.environ.get("CXX", "c++")),
        "there is no C++ compiler ($CXX, or c++), with which SGLang compiles kernels: install one",
    )
    yield (
        _nvcc(python) is None,
        f"there is no nvcc in {_cuda_home() or 'PATH or /usr/local/cuda'}, with which SGLang compiles kernels: "
        "install the CUDA toolkit, or set CUDA_HOME to its folder",
    )
    yield missing("ninja"), f"SGLang compiles kernels with ninja, which is not installed: {_pip(python)} ninja"


def _cuda_home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def _nvcc(python: str) -> str | None:
    """Return the nvcc that torch takes in a server run by ``python``."""
    home = _cuda_home()
    in_path = None if home else shutil.which("nvcc", path=server_path(python))
    return in_path or shutil.which("nvcc", path=os.path.join(home or "/usr/local/cuda", "bin"))


def _wrong_nvcc(python: str, cuda: str) -> Rules:
    """Yield an nvcc of another major version than torch's ``cuda``, with which torch refuses to compile extensions."""
    if (nvcc := _nvcc(python)) is None:
        return
    try:
        found = re.search(r"release ((\d+)\.\d+)", run_program(nvcc, "--version"))
    except LaunchError as error:
        yield True, f"{error}: repair the CUDA toolkit, or set CUDA_HOME to the folder of another"
        return
    yield (
        found and found[2] != _major(cuda),
        f"{nvcc} is of CUDA {found and found[1]}, and SGLang's torch ({python}) of {cuda}, which compiles with its own "
        "major version alone: install that toolkit, or set CUDA_HOME to its folder",
    )


def _pip(python: str) -> str:
    return f"{python} -m pip install"
