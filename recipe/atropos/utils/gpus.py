"""What a run computes on: the GPUs of a machine, or its processors.

Guarantees:

- the trainer and the SGLang servers of one run go by one decision, ``trainer.device``; nothing is imported for it;
- a machine or a cluster with GPUs is never taken for one without: where none is seen, but a cluster is joined, its GPUs
  count, and the driver counts where its ``nvidia-smi`` is missing;
- a run on the processors of a machine with GPUs leaves these alone.
"""

import functools
import glob
import os
import shutil
import subprocess
from collections.abc import Mapping

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.hosts import joins_cluster

PLATFORM_VARIABLE = "VERL_PLATFORM"
"""verl's own: which of its platforms a process takes, "nvidia" or "cpu" among others."""

BUCKET_MEGABYTES = {"cuda": 2048, "cpu": 512}
"""Of weights on their way, where ``update_weights_bucket_megabytes`` is null; a 32B model is 32 pieces of 2 GiB."""

_PLATFORMS = {"cuda": "nvidia", "cpu": "cpu"}
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's present name and its former one
_SMI_FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/local/cuda/bin")  # where verl looks too
_SMI_SECONDS = 60.0


def visible_gpus() -> int:
    """How many NVIDIA GPUs this process may use: those of the machine that CUDA_VISIBLE_DEVICES does not hide.

    Raises:
        ConfigurationError: nvidia-smi does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _gpus_of_the_machine()
    named = [name.strip() for name in visible.split(",")]
    named = named[: named.index("-1")] if "-1" in named else named  # as CUDA reads it
    return min(len([name for name in named if name]), _gpus_of_the_machine())


def driver_gpus() -> int:
    """The machine's NVIDIA GPUs by what the driver's module leaves in the file system, also in a container."""
    return len(glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*"))


@functools.cache
def _gpus_of_the_machine() -> int:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SMI_FOLDERS))
    if (program := shutil.which("nvidia-smi", path=path)) is None:
        return driver_gpus()
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"nvidia-smi -L does not answer within {_SMI_SECONDS:g} s: repair the GPU's driver, or set "
            "CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        ) from error
    if listed.returncode != 0 and driver_gpus():
        told = " ".join((listed.stdout + listed.stderr).split()) or f"exit status {listed.returncode}"
        raise ConfigurationError(
            f"this machine has GPUs, and nvidia-smi -L fails ({told}): repair the driver, or set CUDA_VISIBLE_DEVICES= "
            "(empty) to run on the CPU"
        )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def device_of(config: DictConfig) -> str:
    """What the trainer computes on, "cuda" or "cpu": ``trainer.device``.

    Its ``auto`` is what VERL_PLATFORM says; else "cuda" if this machine has a GPU, or a cluster is joined.

    Raises:
        ConfigurationError: nvidia-smi does not answer.
    """
    if config.trainer.device != "auto":
        return config.trainer.device
    if platform := os.environ.get(PLATFORM_VARIABLE):
        return "cpu" if platform == "cpu" else "cuda"
    return "cuda" if visible_gpus() or joins_cluster(config.ray_kwargs.ray_init) else "cpu"


def platform_variables(config: DictConfig) -> dict[str, str]:
    """Environment of every process of the trainer, before verl and torch are imported there.

    Raises:
        ConfigurationError: nvidia-smi does not answer.
    """
    device = device_of(config)
    platform = os.environ.get(PLATFORM_VARIABLE) if config.trainer.device == "auto" else None
    own = without_gpus() if device == "cpu" else nccl_variables()
    return {PLATFORM_VARIABLE: platform or _PLATFORMS[device], **own}


NCCL_FLAGS = {  # of SGLang, and what they set to 1
    "enable_symm_mem": ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
    "enable_nccl_nvls": ("NCCL_NVLS_ENABLE",),
}


def nccl_variables() -> dict[str, str]:
    """Environment of every process that NCCL joins: it joins none that differ in these.

    SGLang sets both to "0" where they are unset, verl neither; what the user has set holds for both sides.
    """
    return {name: os.environ.get(name, "0") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}


def without_gpus() -> dict[str, str]:
    """Environment of a process that is to see none."""
    return {"CUDA_VISIBLE_DEVICES": ""}


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables of torch's allocator that ask for expandable segments, and do so no more; {} where none does.

    Memory of such a segment can neither be shared with every process of the user nor be given back while it is in use.
    """
    found = {}
    for name in _ALLOCATOR_VARIABLES:
        options = environment.get(name, "").split(",")
        kept = [option for option in options if option.replace(" ", "").lower() != "expandable_segments:true"]
        if len(kept) < len(options):
            found[name] = ",".join(kept)
    return found
