"""What messages and pages tell to install is what the installed packages themselves take."""

import re
import subprocess
import tomllib
from collections import defaultdict
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.dependency_versions_table import deps

from helpers import ROOT

PLACES = ("recipe/**/*.py", "scripts/*.py", "docs/*.md", "*.md", "Dockerfile*")
QUOTED = "docs/migration.md"  # commands of other documents
COMMAND = re.compile(r"(?:pip install|_pip\([\w.]+\)\})((?: +[^\s`'\"|;,)]+)+)")
BUILT_WITH_TORCH = "flash-attn"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", ["VENV", "SGLANG_VENV", "SGLANG_0_5_12_VENV", "MUTATION_VENV"])
def test_make_removes_no_environment_of_the_users_own(name, tmp_path):
    """As docs/gpu.md builds some by hand; one that was interrupted is made anew."""
    own = tmp_path / "own"
    (own / "bin").mkdir(parents=True)
    command = ["make", "-C", str(ROOT), f"{name}={own}", f"{own}/.installed", "PYTHON=true", "PIP_INSTALL="]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode and "was not made by make" in done.stdout and (own / "bin").exists()
    (own / ".made").touch()
    subprocess.run(command, capture_output=True, timeout=60)
    assert not (own / "bin").exists()


def commands():
    """(where, arguments) of each ``pip install`` in code and pages."""
    paths = {path for pattern in PLACES for path in ROOT.glob(pattern)} - {ROOT / QUOTED}
    for path in sorted(paths):
        for match in COMMAND.finditer(path.read_text()):
            yield f"{path.relative_to(ROOT)}: {match[1].strip()}", match[1].split()


def requirements(arguments):
    """Those among the arguments, up to the first that is none: a sentence goes on there."""
    before = ""
    for argument in arguments:
        if not argument.startswith("-") and before not in ("-r", "-e", "--editable"):
            if not re.fullmatch(r"[A-Za-z][\w.-]*([=<>!~]=[\w.*]+)?", argument):
                return
            yield Requirement(argument)
        before = argument


def wishes():
    """What the installed packages want of each: their requirements, and transformers' table of optional ones."""
    found = defaultdict(list)
    for line in (*deps.values(), *(line for package in metadata.distributions() for line in package.requires or ())):
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            found[canonicalize_name(each.name)].append(each.specifier)
    return found


WISHES, COMMANDS = wishes(), [*commands()]


def problem(arguments):
    for each in requirements(arguments):
        name, pin = canonicalize_name(each.name), str(each.specifier).removeprefix("==")
        if name == BUILT_WITH_TORCH and "--no-build-isolation" not in arguments:
            return f"{name} is built with the torch that is installed: --no-build-isolation"
        for wish in WISHES[name] if "--no-deps" not in arguments else ():  # that is to go beside what others pin
            if pin and pin not in wish:
                return f"{each} is not {wish}"
            if not pin and re.search("<|==|~=", str(wish)):
                return f"{name} is the newest one, and {wish} is wanted: give a version"
    return None


@pytest.mark.parametrize("arguments", [pytest.param(given, id=where) for where, given in COMMANDS])
def test_installs_are_what_installed_packages_take(arguments):
    assert problem(arguments) is None
    for flag, value in zip(arguments, arguments[1:], strict=False):
        assert flag != "-r" or (ROOT / value).is_file()
        assert flag not in ("-e", "--editable") or set(re.findall(r"\[(\w+)\]", value)) <= EXTRAS.keys()


def test_installs_are_found_and_extras_build_without_torch():
    named = {canonicalize_name(each.name) for _, given in COMMANDS for each in requirements(given)}
    assert {BUILT_WITH_TORCH, "liger-kernel", "torch-memory-saver", "ninja", "nvidia-nccl-cu13"} <= named
    assert BUILT_WITH_TORCH not in {Requirement(each).name for extra in EXTRAS.values() for each in extra}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("kernels", "kernels is the newest one, and <0.13,>=0.12.0 is wanted"),
        ("kernels==0.17.2", "kernels==0.17.2 is not <0.13,>=0.12.0"),
        ("kernels==0.12.1", None),
        ("flash-attn==2.8.3", "--no-build-isolation"),
        ("--no-build-isolation flash-attn==2.8.3", None),
        ("numpy==1.0", "numpy==1.0 is not"),
        ("--no-deps numpy==1.0", None),
    ],
)
def test_installs_that_break_another_package_are_seen(command, told):
    assert told in (problem(command.split()) or "") if told else problem(command.split()) is None
