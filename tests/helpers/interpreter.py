"""An interpreter of its own for an environment: what the adapter needs, without torch, verl, Ray and the recipe."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from helpers.environments import item_env
from recipe.atropos.launcher.environment_processes import _NEEDED

MODULE = "only_there"
"""A module that this interpreter alone has."""


def make_interpreter(folder: Path, *without: str) -> Path:
    """Return the python of a virtual environment in ``folder`` with links to what ``_NEEDED`` needs here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    todo, done = [name for need in _NEEDED if (name := need.partition(">=")[0]) not in without], set()
    while todo:
        name = re.sub("[-_.]+", "-", todo.pop()).lower()
        if name in done or name in without:
            continue
        done.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        todo += [re.match(r"[\w.-]+", line)[0] for line in found.requires or () if "extra ==" not in line]
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists() and not part.endswith(".pth"):
                (site / part).symlink_to(found.locate_file(part))
    (site / f"{MODULE}.py").write_text("NAME = 'there'\n")
    return folder / "bin" / "python"


def write_environment(file: Path) -> Path:
    """Write ``ItemEnv``, as an environment that needs ``MODULE`` and finds nothing of the trainer's."""
    head = f"""
import importlib.util
import {MODULE}
for name in ("torch", "verl", "ray", "hydra"):
    assert importlib.util.find_spec(name) is None, name
"""
    file.write_text(head + Path(item_env.__file__).read_text())
    return file
