"""The tables of `make test-mutations` fit the code of today."""

import ast

from mutation.run import PATHS, TESTS, accepted, named_mutants

from helpers import ROOT


def test_mutations_that_are_named_still_have_their_place():
    mutants = named_mutants([])
    assert len(mutants) > 35 and len({mutant.name for mutant in mutants}) == len(mutants)
    assert all(mutant.tests and mutant.source for mutant in mutants)
    assert all(name in PATHS for tests in (*TESTS.values(), *(mutant.tests for mutant in mutants)) for name in tests)


def test_mutations_that_are_named_still_have_their_tests():
    """pytest's -k looks for a keyword in the names of files and tests, and in what parameters are called."""
    names = {name: name + " ".join(_names_in(ROOT / path)) for name, path in PATHS.items()}
    lost = [
        mutant.name
        for mutant in named_mutants([])
        if mutant.keywords and not any(mutant.keywords in names[name] for name in mutant.tests)
    ]
    assert not lost


def _names_in(path):
    """The names of a file's test functions, and the strings of their decorators."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name
            strings = (each for decorator in node.decorator_list for each in ast.walk(decorator))
            yield from (
                each.value for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def test_mutations_that_are_accepted_still_have_their_line():
    assert all(len(reason) > 10 and name.partition("::")[0] in TESTS for (name, _), reason in accepted().items())
