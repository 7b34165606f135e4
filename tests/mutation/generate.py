"""Mutants by Cosmic Ray's default operators, as JSON on stdout: `python generate.py SEED N FILE...`

It runs in an environment of its own (requirements/mutation.txt): Cosmic Ray's requirements are not the trainer's.

Of all places in the files that an operator changes, N are drawn, and at each one of its mutations: so no place with
eleven arithmetic operators to try outweighs one with a single comparison. Left out is what tests cannot or should not
see: annotations, the text of messages (f-strings, what is logged), docstrings, and the guards ``strict=`` of zip and
``frozen=`` of dataclasses, which no correct code meets.
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


def excluded(node: Any) -> bool:
    """Whether a parso node is part of an annotation, of an f-string, of a call of the logger, or of a guard."""
    child = node
    while (parent := child.parent) is not None:
        annotation = {"annassign": 1, "tfpdef": 2}.get(parent.type)  # `: annotation = value`, `name: annotation`
        if parent.type == "fstring" or annotation is not None and child is parent.children[annotation]:
            return True
        if parent.type == "funcdef" and child is parent.annotation:
            return True
        if parent.type == "argument" and parent.children[0].get_code().strip() in ("strict", "frozen"):
            return True
        if parent.type in ("atom_expr", "power") and parent.children[0].get_code().strip() == "logger":
            return True
        child = parent
    return False


def mutants(path: str, source: str) -> Iterator[dict[str, Any]]:
    """Every mutation of a file, without its text; in the order of the operators, then of the places."""
    tree = get_ast(source)
    lines = source.splitlines()
    nodes = list(ast_nodes(tree))
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # needs settings: none of the default ones
        operator, occurrence = operator_class(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if not excluded(node):
                    yield {
                        "file": path,
                        "function": ASTQuery(node).get_definition_name() or "",
                        "line": lines[start[0] - 1].strip(),
                        "place": start,
                        "operator": name.removeprefix("core/"),
                        "occurrence": occurrence,
                    }
                occurrence += 1


def drawn(seed: int, n: int, paths: list[str]) -> tuple[list[dict[str, Any]], int, int]:
    """The sample, with the mutated ``source`` of each; how many mutations and how many places there are."""
    sources = {path: Path(path).read_text() for path in paths}
    places: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for path, source in sources.items():
        for mutant in mutants(path, source):
            places[path, *mutant["place"]].append(mutant)
    source = random.Random(seed)
    chosen = sorted(places) if n >= len(places) else sorted(source.sample(sorted(places), n))
    sample = [source.choice(places[place]) for place in chosen]
    for mutant in sample:
        operator = get_operator(f"core/{mutant['operator']}")()
        mutant["source"] = mutate_code(sources[mutant["file"]], operator, mutant["occurrence"])
    return sample, sum(map(len, places.values())), len(places)


if __name__ == "__main__":
    sample, total, places = drawn(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    json.dump({"mutants": sample, "total": total, "places": places}, sys.stdout)
