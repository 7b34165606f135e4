"""docs: what they name is there, and what is generated is current."""

import ast
import re
from pathlib import Path

import pytest

from configuration_page import reference
from helpers import ROOT
from helpers.promises import code, tables
from recipe.atropos.data import reasons

RECIPE = ROOT / "recipe/atropos"
_UNNAMED = ("__init__", "__pycache__")
NAMED = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", (ROOT / "docs/architecture.md").read_text())


def names_of(node, prefix=""):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            yield from names_of(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, name in NAMED if name])
def test_each_function_of_the_walk_is_there(file, name):
    assert name in names_of(ast.parse((RECIPE / file).read_text()))


def test_each_package_and_each_page_is_named():
    page = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w]+)/`", page)) | {Path(file).stem for file, _ in NAMED}
    assert {path.stem for path in RECIPE.iterdir() if path.is_dir() or path.suffix == ".py"} <= {*named, *_UNNAMED}
    index = (ROOT / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"(docs/{path.name})" not in index] == []


def test_the_references_of_keys_and_reasons_are_current():
    text = (ROOT / "docs/configuration.md").read_text()
    assert text == reference(), "python scripts/configuration_page.py > docs/configuration.md"
    [_, table] = (ROOT / "docs/data-format.md").read_text().split("## Reasons")
    assert reasons.table() in table, "paste what data.reasons.table() returns"


def test_troubleshooting_page_quotes_messages_that_there_are():
    """A user sees a message, and looks for its words."""
    rows = [row for row in tables("troubleshooting.md")["Troubleshooting"] if len(row) == 3]
    texts = [
        node.value
        for path in RECIPE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    quoted = [words for row in rows for words in code(row[0])]
    assert len(quoted) > 20
    assert [words for words in quoted if not any(words in text for text in texts)] == []
