"""Check, before anything is started, that the trainer's and SGLang's Python environments work on this machine's GPUs.

Compared: the NVIDIA driver with the CUDA version of each environment's torch; nvcc's with that of SGLang's; and both
sides' NCCL if weights go over it, or both sides' torch if they go as handles. Required: SGLang's kernels, and what
SGLang and Triton compile kernels with at run time: nvcc, a C++ and a C compiler, ninja, and Python.h.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig
from packaging.version import Version

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
    try:
        found = list(_misfits(config))
    except LaunchError as error:  # the interpreter does not run
        raise ConfigurationError(f"inference.python={error}: name another interpreter") from error
    if wrong := [message for message, fatal in found if fatal]:
        raise ConfigurationError("; ".join(wrong))
    return [message for message, _ in found]


def _misfits(config: DictConfig) -> Iterator[tuple[str, bool]]:
    """Yield each mismatch and whether it is fatal: an old driver may have NVIDIA's CUDA compatibility package."""
    python, transport = sglang_python(config.inference.python), gpu_transport(config)
    driver = next((row[0] for row in nvidia_smi("gpu", "driver_version")), None)
    sides: dict[str, dict[str, str | None]] = {}  # what is installed, where torch is built for CUDA
    for side, interpreter in (("the trainer", sys.executable), ("SGLang", python)):
        found = versions_in(interpreter, ("torch", _KERNELS, *map(_nccl_package, _OLDEST_DRIVER)))
        if found["Python.h"] is None and (side == "SGLang" or config.actor_rollout_ref.actor.use_torch_compile):
            yield (
                f"{interpreter} has no Python.h, with which Triton compiles: install its header files (python3-dev, "
                "python3.12-dev, ...)",
                True,
            )
        if found["torch"] is None or found["cuda"] is None:
            yield (
                f"{side} has torch {found['torch']} without CUDA ({interpreter}): install its CUDA build "
                "(docs/gpu.md), or set trainer.device=cpu",
                True,
            )
            continue
        sides[side] = found
        oldest = _OLDEST_DRIVER.get(_major(found["cuda"]))
        if driver and oldest and int(_major(driver)) < oldest:
            yield (
                f"{side} has torch for CUDA {found['cuda']}, which needs an NVIDIA driver from {oldest} on, and this "
                f"machine has {driver}: update the driver, or install torch for an older CUDA",
                False,
            )
    if server := sides.get("SGLang"):
        if server[_KERNELS] is None:
            yield f"{python} has SGLang without its CUDA kernels: {_pip(python)} -r requirements/sglang.txt", True
        yield from _wrong_nvcc(python, server["cuda"])
    if len(sides) == 2:
        yield from _unlike(transport, sides["the trainer"], server, python)
    yield from _missing_tools(python)


def _unlike(
    transport: type[WeightTransport], trainer: Mapping[str, str], server: Mapping[str, str], python: str
) -> Iterator[tuple[str, bool]]:
    """Yield versions of the two sides between which weights cannot go by ``transport``."""
    package = _nccl_package(_major(server["cuda"]))
    trainers, servers = trainer.get(_nccl_package(_major(trainer["cuda"]))), server.get(package)
    if transport.uses_nccl and trainers and servers and trainers != servers:  # None for a system-wide NCCL
        yield (
            f"weights go over NCCL, which joins no two versions: the trainer has {trainers}, SGLang {servers}; "
            f"{_pip(sys.executable)} --no-deps {package}=={servers}, or set "
            "trainer.atropos.weight_sync.transport=disk",
            True,
        )
    if transport.shares_memory and Version(server["torch"]) < _NEW_HANDLES <= Version(trainer["torch"]):
        yield (
            f"weights go as handles of GPU memory, and torch {server['torch']} of SGLang ({python}) opens none of "
            f"the trainer's torch {trainer['torch']}: install an SGLang with torch {_NEW_HANDLES} or newer "
            "(requirements/sglang.txt), or set trainer.atropos.weight_sync.transport=disk",
            True,
        )


def _nccl_package(cuda_major: str) -> str:
    return f"nvidia-nccl-cu{cuda_major}"


def _major(version: str) -> str:
    return version.partition(".")[0]


def _missing_tools(python: str) -> Iterator[tuple[str, bool]]:
    """Yield the compilation tools that SGLang and Triton would not find in a server run by ``python``."""
    path = server_path(python)

    def found(*names: str) -> bool:
        return any(shutil.which(name, path=path) for name in names)

    if not (found(os.environ["CC"]) if os.environ.get("CC") else found("gcc", "clang")):
        yield "there is no C compiler ($CC, or gcc, clang), with which Triton compiles: install one", True
    if not found(os.environ.get("CXX", "c++")):
        yield "there is no C++ compiler ($CXX, or c++), with which SGLang compiles kernels: install one", True
    if _nvcc(python) is None:
        yield (
            f"there is no nvcc in {_cuda_home() or 'PATH or /usr/local/cuda'}, with which SGLang compiles kernels: "
            "install the CUDA toolkit, or set CUDA_HOME to its folder",
            True,
        )
    if not found("ninja"):
        yield f"SGLang compiles kernels with ninja, which is not installed: {_pip(python)} ninja", True


def _cuda_home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def _nvcc(python: str) -> str | None:
    """Return the nvcc that torch takes in a server run by ``python``."""
    home = _cuda_home()
    in_path = None if home else shutil.which("nvcc", path=server_path(python))
    return in_path or shutil.which("nvcc", path=os.path.join(home or "/usr/local/cuda", "bin"))


def _wrong_nvcc(python: str, cuda: str) -> Iterator[tuple[str, bool]]:
    """Yield an nvcc of another major version than torch's ``cuda``, with which torch refuses to compile extensions."""
    if (nvcc := _nvcc(python)) is None:
        return
    try:
        found = re.search(r"release (\d+)\.\d+", run_program(nvcc, "--version"))
    except LaunchError as error:
        yield f"{error}: repair the CUDA toolkit, or set CUDA_HOME to the folder of another", True
        return
    if found and found[1] != _major(cuda):
        yield (
            f"{nvcc} is of CUDA {found[0].split()[1]}, and SGLang's torch ({python}) of {cuda}, which compiles "
            "with its own major version alone: install that toolkit, or set CUDA_HOME to its folder",
            True,
        )


def _pip(python: str) -> str:
    return f"{python} -m pip install"
