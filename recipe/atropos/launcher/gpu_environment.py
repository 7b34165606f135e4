"""Check, before anything is started, that the trainer's and SGLang's Python environments work on this machine's GPUs.

Compared: the NVIDIA driver with the CUDA version of each environment's torch, and the NCCL versions of both sides if
weights go over NCCL. Required: SGLang's kernels, and what SGLang and Triton compile kernels with at run time: nvcc, a
C++ and a C compiler, ninja, and Python.h.
"""

import os
import shutil
import sys
from collections.abc import Iterator

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference.server import server_path, sglang_python
from recipe.atropos.launcher.placement import goes_over_nccl
from recipe.atropos.utils.gpus import device_of
from recipe.atropos.utils.machine import nvidia_smi, versions_in

_KERNELS = "sglang-kernel"  # SGLang's CPU environment does not have it
# Oldest Linux driver for each CUDA major version (NVIDIA's "CUDA Toolkit Release Notes", minor version compatibility).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def check_gpu_environment(config: DictConfig) -> list[str]:
    """Return warnings for the user; check nothing if the trainer or the servers run on a CPU.

    Raises:
        ConfigurationError: names everything that cannot work, each with its fix.
    """
    if device_of(config) == "cpu" or config.inference.device == "cpu":
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
    python = sglang_python(config.inference.python)
    drivers = nvidia_smi("gpu", "driver_version")
    driver = drivers[0][0] if drivers else None
    nccl: dict[str, tuple[str, str | None]] = {}
    without_header: list[str] = []
    for side, interpreter in (("the trainer", sys.executable), ("SGLang", python)):
        found = versions_in(interpreter, ("torch", _KERNELS))
        cuda = found["cuda"]
        if found["Python.h"] is None and (side == "SGLang" or config.actor_rollout_ref.actor.use_torch_compile):
            without_header.append(interpreter)
        if found["torch"] is None or cuda is None:
            yield (
                f"{side} has torch {found['torch']} without CUDA ({interpreter}): install its CUDA build "
                "(docs/gpu.md), or set trainer.device=cpu",
                True,
            )
            continue
        if side == "SGLang" and found[_KERNELS] is None:
            yield (
                f"{interpreter} has SGLang without its CUDA kernels: {_pip(interpreter)} -r requirements/sglang.txt",
                True,
            )
        major = cuda.split(".")[0]
        oldest = _OLDEST_DRIVER.get(major)
        if driver and oldest and int(driver.split(".")[0]) < oldest:
            yield (
                f"{side} has torch for CUDA {cuda}, which needs an NVIDIA driver from {oldest} on, and this machine "
                f"has {driver}: update the driver, or install torch for an older CUDA",
                False,
            )
        package = f"nvidia-nccl-cu{major}"
        nccl[side] = package, versions_in(interpreter, (package,))[package]
    known = {version for _, version in nccl.values() if version is not None}  # None for a system-wide NCCL
    if goes_over_nccl(config) and len(known) > 1:
        (package, trainers), (_, servers) = nccl["the trainer"], nccl["SGLang"]
        yield (
            f"weights go over NCCL, which joins no two versions: the trainer has {trainers}, SGLang {servers}; "
            f"{_pip(sys.executable)} --no-deps {package}=={servers}, or set "
            "trainer.atropos.weight_sync.transport=disk",
            True,
        )
    yield from _missing_tools(python)
    for interpreter in without_header:
        yield (
            f"{interpreter} has no Python.h, with which Triton compiles: install its header files (python3-dev, "
            "python3.12-dev, ...)",
            True,
        )


def _missing_tools(python: str) -> Iterator[tuple[str, bool]]:
    """Yield the compilation tools that SGLang and Triton would not find in a server run by ``python``."""
    path = server_path(python)

    def found(*names: str) -> bool:
        return any(shutil.which(name, path=path) for name in names)

    if not (found(os.environ["CC"]) if os.environ.get("CC") else found("gcc", "clang")):
        yield "there is no C compiler ($CC, or gcc, clang), with which Triton compiles: install one", True
    if not found(os.environ.get("CXX", "c++")):
        yield "there is no C++ compiler ($CXX, or c++), with which SGLang compiles kernels: install one", True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    in_path = not home and found("nvcc")
    if not in_path and not shutil.which("nvcc", path=os.path.join(home or "/usr/local/cuda", "bin")):
        yield (
            f"there is no nvcc in {home or 'PATH or /usr/local/cuda'}, with which SGLang compiles kernels: install the "
            "CUDA toolkit, or set CUDA_HOME to its folder",
            True,
        )
    if not found("ninja"):
        yield f"SGLang compiles kernels with ninja, which is not installed: {_pip(python)} ninja", True


def _pip(python: str) -> str:
    return f"{python} -m pip install"
