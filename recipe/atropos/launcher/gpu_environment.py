"""Whether the two environments can work on this machine's GPUs, known before anything is started.

What is compared: the NVIDIA driver with the CUDA that each environment's torch is for; NCCL's version on both sides,
where weights go over it; and whether a C compiler is there for what torch compiles at run time.
"""

import shutil
import sys
from collections.abc import Iterator

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference.server import default_sglang_python
from recipe.atropos.utils.gpus import device_of
from recipe.atropos.utils.machine import nvidia_smi, versions_in

# The oldest Linux driver of each CUDA major, by NVIDIA's "CUDA Toolkit Release Notes", minor version compatibility.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def check_gpu_environment(config: DictConfig) -> list[str]:
    """Returns what the user should know; nothing is asked where the run computes on a CPU.

    Raises:
        ConfigurationError: naming what cannot work, and the fix, of all that cannot.
    """
    if device_of(config) == "cpu" or config.inference.device == "cpu":
        return []
    try:
        found = list(_misfits(config))
    except LaunchError as error:  # an interpreter that does not run
        raise ConfigurationError(f"inference.python={error}: name another interpreter") from error
    if wrong := [told for told, fatal in found if fatal]:
        raise ConfigurationError("; ".join(wrong))
    return [told for told, _ in found]


def _misfits(config: DictConfig) -> Iterator[tuple[str, bool]]:
    """What does not fit, and whether it can never work: a driver may have NVIDIA's package for newer CUDA versions."""
    python = config.inference.python or default_sglang_python()
    drivers = nvidia_smi("gpu", "driver_version")
    driver = drivers[0][0] if drivers else None
    nccl: dict[str, tuple[str, str | None]] = {}
    for side, interpreter in (("the trainer", sys.executable), ("SGLang", python)):
        found = versions_in(interpreter, ("torch",))
        cuda = found["cuda"]
        if found["torch"] is None or cuda is None:
            yield (
                f"{side} has torch {found['torch']} without CUDA ({interpreter}): install its CUDA build "
                "(docs/gpu.md), or set trainer.device=cpu",
                True,
            )
            continue
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
    transport = config.trainer.atropos.weight_sync.transport
    goes_over_nccl = transport == "distributed" or (transport == "auto" and not config.inference.colocated)
    known = {version for _, version in nccl.values() if version is not None}  # of a system's own NCCL nothing is known
    if goes_over_nccl and len(known) > 1:
        (package, trainers), (_, servers) = nccl["the trainer"], nccl["SGLang"]
        yield (
            f"weights go over NCCL, which joins no two versions: the trainer has {trainers}, SGLang {servers}; "
            f"{sys.executable} -m pip install --no-deps {package}=={servers}, or set "
            "trainer.atropos.weight_sync.transport=disk",
            True,
        )
    if config.actor_rollout_ref.actor.use_torch_compile and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield (
            "there is no C compiler (cc, gcc, clang) for what torch compiles: install one, or set "
            "actor_rollout_ref.actor.use_torch_compile=false",
            True,
        )
