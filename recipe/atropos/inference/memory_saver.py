"""Checks torch_memory_saver, the preloaded library with which a colocated SGLang server releases its GPU memory.

The library needs CUDA's runtime, which pip installs where the dynamic loader does not look. A process that preloads a
library with a missing dependency does not start: Python exits with status 127, without a line in SGLang's log.
"""

import functools
import os
from pathlib import Path

from recipe.atropos.errors import LaunchError
from recipe.atropos.utils.gpus import without_expandable_segments
from recipe.atropos.utils.machine import run_program, versions_in

_PACKAGE = "torch-memory-saver"
_TRIAL_SECONDS = 60.0


@functools.cache
def saver_variables(python: str) -> dict[str, str]:
    """Return the environment variables that a server of that interpreter needs to release its memory.

    Raises:
        LaunchError: the interpreter does not run.
    """
    folders = sorted({str(path.parent) for path in packages_of(python).glob("nvidia/*/lib/libcudart.so.*")})
    given = os.environ.get("LD_LIBRARY_PATH")
    variables = {"LD_LIBRARY_PATH": os.pathsep.join([*folders, *([given] if given else [])])} if folders else {}
    return variables | without_expandable_segments(os.environ)  # expandable segments cannot be released


def check_saver(python: str) -> None:
    """Start that interpreter with the library preloaded, as for SGLang.

    Raises:
        LaunchError: the library is not installed, not built for this CUDA version, or does not load.
    """
    packages = packages_of(python)
    versions = versions_in(python, (_PACKAGE,))
    fix = f"{python} -m pip install torch-memory-saver, or inference.colocated=false with a GPU for each"
    if versions[_PACKAGE] is None:
        raise LaunchError(f"inference.colocated=true: {python} has no package torch_memory_saver: {fix}")
    if versions["cuda"] is None:
        raise LaunchError(f"inference.colocated=true: {python} has torch for a CPU: install SGLang's CUDA build of it")
    major = versions["cuda"].split(".")[0]
    found = sorted(packages.glob(f"torch_memory_saver_hook_mode_preload_cu{major}.*.so"))
    if not found:
        raise LaunchError(
            f"inference.colocated=true: torch_memory_saver {versions[_PACKAGE]} of {python} has no library for CUDA "
            f"{versions['cuda']}, which its torch is for: {fix}"
        )
    variables = {**saver_variables(python), "LD_PRELOAD": str(found[0])}
    try:
        run_program(python, "-c", "pass", timeout=_TRIAL_SECONDS, **variables)
    except LaunchError as error:
        raise LaunchError(
            f"inference.colocated=true: {python} does not start with {found[0].name} ({error}): install "
            f"nvidia-cuda-runtime for CUDA {major} there, or add the folder of libcudart.so.{major} to LD_LIBRARY_PATH"
        ) from error


@functools.cache
def packages_of(python: str) -> Path:
    """Return the folder of that interpreter's packages."""
    try:
        return Path(run_program(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    except LaunchError as error:
        raise LaunchError(f"inference.python={error}: name another interpreter") from error
