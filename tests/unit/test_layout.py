"""Imports go one way: from the entry points down to the leaves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recipe.atropos

RECIPE = Path(recipe.atropos.__file__).parent
# From the bottom to the top; a module may import from its own package, and from the layers below.
LAYERS = (
    ("errors",),
    ("tensors", "utils"),
    ("verl_ext",),
    ("data", "run"),
    ("algorithm", "credit", "terminal", "trajectory_api", "watchdog"),
    ("config", "sources"),
    ("checkpoint", "data_source", "inference"),
    ("sessions",),
    ("adapter", "report", "weight_sync"),
    ("environments", "fsdp_workers", "gem", "launcher"),
    ("workers",),
    ("demo", "ray_trainer"),
    ("main",),
    ("commands", "train_run"),
    ("launch_services",),
    ("__main__",),
    ("utils.debug", "utils.env_adapter"),  # entry points, where their users were promised them
)
PLACES = {name: number for number, layer in enumerate(LAYERS) for name in layer}
MODULES = {
    ".".join(path.relative_to(RECIPE).with_suffix("").parts): path
    for path in RECIPE.rglob("*.py")
    if path.name not in ("__init__.py", "sitecustomize.py")
}


def layer_of(module):
    return PLACES[module] if module in PLACES else PLACES[module.partition(".")[0]]


def imported_by(path):
    """Modules of the recipe, wherever in the file they are imported."""
    prefix = "recipe.atropos."
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix(prefix) for alias in node.names if alias.name.startswith(prefix))
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
            base = f"{node.module}."[len(prefix) :]
            for alias in node.names:
                whole = base + alias.name
                yield whole if whole in MODULES or not base else base[:-1]


def defined_in(module):
    """Names that a module defines or imports at its top level."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def test_names_that_are_imported_exist():
    """Also those that only a function imports, or a command, which no test may run."""
    defined = {module: {*defined_in(module)} for module in MODULES}
    missing = [
        f"{module}: from {node.module} import {alias.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (source := str(node.module).removeprefix("recipe.atropos.")) in defined
        for alias in node.names
        if alias.name not in defined[source] and f"{source}.{alias.name}" not in MODULES
    ]
    assert not missing


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_the_layers_below(module):
    """So no two packages import each other."""
    place, package = layer_of(module), module.partition(".")[0]
    others = [name for name in imported_by(MODULES[module]) if name.partition(".")[0] != package or name in PLACES]
    assert not [name for name in others if layer_of(name) >= place and name != module]


def test_the_trainer_imports_nothing_of_the_launcher():
    found, left = set(), ["main", "train_run", "ray_trainer", "fsdp_workers"]
    while left:
        if (module := left.pop()) in MODULES and module not in found:
            found.add(module)
            left += imported_by(MODULES[module])
    assert not [module for module in found if module.startswith(("launcher", "launch_services"))]


def test_layout_is_not_shadowed_by_another_recipe(tmp_path):
    """Other wheels (TransferQueue's) and verl's own checkout have a folder recipe at the top, too."""
    (tmp_path / "recipe").mkdir()
    code = "import recipe.atropos.errors as found, sys; sys.exit(found.__file__ != sys.argv[1])"
    for other in ("simple_use_case.py", "__init__.py"):
        (tmp_path / "recipe" / other).touch()
        subprocess.run([sys.executable, "-c", code, MODULES["errors"]], cwd=tmp_path, check=True, timeout=60)


def test_functions_have_at_most_70_lines():
    for path in RECIPE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 70, f"{path}: {node.name}"
