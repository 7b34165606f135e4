"""Which versions a run uses: of Python, of packages, and of the recipe."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from recipe.atropos.errors import LaunchError
from recipe.atropos.inference.server import sglang_python
from recipe.atropos.utils.machine import installed

_PACKAGES = "verl-atropos verl atroposlib torch transformers ray sglang flash-attn liger-kernel numpy omegaconf".split()
_CHECKOUT = Path(__file__).resolve().parents[3]
_GIT_SECONDS = 10.0


def installed_versions(python: str | None) -> dict[str, str]:
    """Return the versions of what is installed, by name; what is not is left out.

    ``python``: ``inference.python``, whose SGLang is named "sglang (servers)". "recipe (commit)" is that of the
    checkout, with "-dirty" if it has changes. No interpreter is started.
    """
    found = {"recipe (commit)": _commit(), "python": platform.python_version(), **installed(_PACKAGES)}
    if "sglang" not in found:
        with contextlib.suppress(LaunchError):  # no interpreter has it
            folders = Path(sglang_python(python)).parent.parent.glob("lib/python*/site-packages")
            servers = importlib.metadata.distributions(name="sglang", path=[*map(str, folders)])
            found["sglang (servers)"] = next((package.version for package in servers), "")
    return {name: version for name, version in found.items() if version}


def _commit() -> str:
    if not (_CHECKOUT / ".git").exists():  # installed from a wheel, perhaps below another repository
        return ""
    git = ["git", "--no-optional-locks", "-C", str(_CHECKOUT)]
    describe = ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    # A git hook names its own repository in GIT_DIR.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.check_output(
            git + describe, env=env, stderr=subprocess.DEVNULL, text=True, timeout=_GIT_SECONDS
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
