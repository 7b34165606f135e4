"""The device that a run computes on: the GPUs of a machine, or its CPUs.

Guarantees:

- the trainer and the SGLang servers of one run follow one decision, ``trainer.device``; nothing is imported for it;
- a machine or a cluster with GPUs is never taken for one without: if none is visible but a cluster is joined, the
  cluster's GPUs count; if ``nvidia-smi`` is missing, the driver's entries count;
- a run on the CPUs of a machine with GPUs does not touch the GPUs.
"""

import functools
import glob
import os
import shutil
import subprocess

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.hosts import cluster_address

PLATFORM_VARIABLE = "VERL_PLATFORM"
"""verl's environment variable for the platform of a process: "nvidia" or "cpu", among others."""

BUCKET_MEGABYTES = {"cuda": 2048, "cpu": 512}
"""Size of weight buckets if ``update_weights_bucket_megabytes`` is null; a 32B model is 32 buckets of 2 GiB."""

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of a process that must not see any GPU."""

_SMI_FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/local/cuda/bin")  # where verl looks too
_SMI_SECONDS = 60.0


def visible_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use: those that CUDA_VISIBLE_DEVICES does not hide.

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
    """Count the machine's NVIDIA GPUs by the driver's entries in the file system, also in a container."""
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
        output = " ".join((listed.stdout + listed.stderr).split()) or f"exit status {listed.returncode}"
        raise ConfigurationError(
            f"this machine has GPUs, and nvidia-smi -L fails ({output}): repair the driver, or set "
            "CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def decide_device(config: DictConfig) -> None:
    """Set ``trainer.device``, once in a process, to "cuda" or "cpu"; everything else reads it there.

    ``auto`` follows VERL_PLATFORM; if that is not set, it is "cuda" if this machine has a GPU or a cluster is joined.

    Raises:
        ConfigurationError: nvidia-smi does not answer.
    """
    if config.trainer.device == "auto":
        platform = os.environ.get(PLATFORM_VARIABLE)
        on_gpus = platform != "cpu" if platform else visible_gpus() or cluster_address(config.ray_kwargs.ray_init)
        config.trainer.device = "cuda" if on_gpus else "cpu"


def platform_variables(config: DictConfig) -> dict[str, str]:
    """Return the environment of every trainer process, to be set before verl and torch are imported there.

    A VERL_PLATFORM that the user has set stays, if it is of the decided device.
    """
    on_cpu, platform = config.trainer.device == "cpu", os.environ.get(PLATFORM_VARIABLE)
    if not platform or (platform == "cpu") != on_cpu:
        platform = "cpu" if on_cpu else "nvidia"
    return {PLATFORM_VARIABLE: platform, **(WITHOUT_GPUS if on_cpu else nccl_variables())}


NCCL_FLAGS = {  # of SGLang, and the variables that they set to 1
    "enable_symm_mem": ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
    "enable_nccl_nvls": ("NCCL_NVLS_ENABLE",),
}


def nccl_variables() -> dict[str, str]:
    """Return the environment of every process in an NCCL group: NCCL cannot connect processes that differ in it.

    SGLang sets both variables to "0" if they are unset, verl sets neither; the user's values apply to both sides.
    """
    return {name: os.environ.get(name, "0") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}


def without_expandable_segments() -> dict[str, str]:
    """Return torch's allocator variables that enable expandable segments here, without that option; {} if none does.

    Memory of such a segment can neither be shared with every process of the user nor be released while it is in use.
    """
    found = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # torch's current name and its former one
        options = os.environ.get(name, "").split(",")
        kept = [option for option in options if option.replace(" ", "").lower() != "expandable_segments:true"]
        if len(kept) < len(options):
            found[name] = ",".join(kept)
    return found
