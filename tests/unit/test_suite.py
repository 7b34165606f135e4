"""The tests themselves: where each of them is."""

import ast
from collections import Counter

import pytest

from helpers import ROOT

FILES = sorted((ROOT / "tests").glob("*/**/test_*.py"))
UNIT = [path for path in FILES if path.is_relative_to(ROOT / "tests/unit")]
STARTS = {"running_sglang", "running_api", "server", "cluster", "terminal"}  # helpers and fixtures
MIXED = {"test_reward_bridge_env.py"}  # its last two tests start servers, and are marked so


def test_suite_has_each_file_name_once():
    assert Counter(path.name for path in FILES).most_common(1)[0][1] == 1, "pytest imports them by their names"


def test_suite_has_a_folder_of_unit_tests_for_a_package():
    folders = {path.parent.relative_to(ROOT / "tests/unit") for path in UNIT}
    assert all((ROOT / "recipe/atropos" / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("path", [path for path in UNIT if path.name not in MIXED], ids=lambda path: path.stem)
def test_suite_has_what_starts_servers_or_takes_long_in_e2e(path):
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test_") or any("fixture" in ast.unparse(each) for each in node.decorator_list):
                used |= {argument.arg for argument in node.args.args}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("pytest.mark.e2e", "pytest.mark.slow"):
            used.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.usefixtures":
            used |= {name.value for name in node.args}
    assert not used & {*STARTS, "e2e", "slow"}
