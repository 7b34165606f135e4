"""Queries of nvidia-smi and of interpreters of other environments; none of them touches a GPU."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable, Sequence

from recipe.atropos.errors import LaunchError


def nvidia_smi(of: str, fields: str) -> list[list[str]]:
    """Return the rows of ``nvidia-smi --query-OF=FIELDS``; [] if it fails or takes longer than 20 s."""
    command = ["nvidia-smi", f"--query-{of}={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def gpu_memory() -> int | None:
    """Return the bytes of this machine's smallest GPU; None if nvidia-smi names none."""
    return min((int(mib) << 20 for (mib,) in nvidia_smi("gpu", "memory.total") if mib.isdigit()), default=None)


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages in this interpreter's environment, by name; one that is not there is left out."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


_PROBE = """
import importlib.metadata, importlib.util, json, os, runpy, sys, sysconfig
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
spec = importlib.util.find_spec("torch")
file = spec and os.path.join(spec.submodule_search_locations[0], "version.py")
found["cuda"] = runpy.run_path(file)["cuda"] if file else None
header = os.path.join(sysconfig.get_path("include"), "Python.h")
found["Python.h"] = header if os.path.isfile(header) else None
print(json.dumps(found))
"""


def versions_in(python: str, packages: Sequence[str], timeout: float = 120.0) -> dict[str, str | None]:
    """Return the versions of packages in an interpreter's environment, without importing them.

    "cuda" is the CUDA version of its torch, "Python.h" the path of the header that compiling extensions needs.

    Raises:
        LaunchError: as ``run_program``.
    """
    return json.loads(run_program(python, "-c", _PROBE, *packages, timeout=timeout))


def run_program(program: str, *arguments: str, timeout: float = 120.0, **variables: str) -> str:
    """Return the output of a program, such as another environment's interpreter; ``variables`` are added to its own.

    Raises:
        LaunchError: it does not exist, fails, or takes longer than ``timeout`` seconds.
    """
    command, environment = [program, *arguments], {**os.environ, "PYTHONPATH": "", **variables}
    try:
        return subprocess.run(
            command, cwd="/", env=environment, capture_output=True, text=True, timeout=timeout, check=True
        ).stdout
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{program} does not start within {timeout:g} s") from error
    except (OSError, subprocess.SubprocessError) as error:
        output = " ".join((getattr(error, "stderr", None) or str(error)).split())
        raise LaunchError(f"{program} does not run ({output})") from error
