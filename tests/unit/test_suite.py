"""The tests themselves: where they are, their names, and the size of their files."""

import ast
from collections import Counter

from helpers import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.glob("*/**/test_*.py"))
UNIT = [path for path in FILES if path.is_relative_to(TESTS / "unit")]
STARTS = {*"running_sglang running_api running_trajectory_api server cluster terminal".split()}  # helpers and fixtures


def used_by(path):
    """What a file imports, the fixtures of its tests and fixtures, and the marks that only tests/e2e has."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test_") or any("fixture" in ast.unparse(each) for each in node.decorator_list):
                yield from (argument.arg for argument in node.args.args)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("pytest.mark.e2e", "pytest.mark.slow"):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.usefixtures":
            yield from (name.value for name in node.args)


def test_suite_has_folders_for_packages_alone():
    folders = {path.parent.relative_to(TESTS / "unit") for path in UNIT}
    assert all((ROOT / "recipe/atropos" / folder).is_dir() for folder in folders)


def test_suite_has_what_starts_servers_or_takes_long_in_e2e():
    assert not {path.name for path in UNIT if {*used_by(path)} & {*STARTS, "e2e", "slow"}}


def test_suite_has_each_file_name_once():
    assert Counter(path.name for path in FILES).most_common(1)[0][1] == 1, "pytest imports them by their names"


def test_suite_has_test_names_of_at_most_60_characters():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [name for name in names if name.startswith("test_") and len(name) > 60]
