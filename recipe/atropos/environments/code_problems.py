"""Problems whose answers are programs, in HumanEval's and MBPP's formats: generated, from a local file, or the hub.

A HumanEval row has ``prompt`` (the beginning of a function), ``entry_point`` and ``test``; an MBPP row ``text``
(``prompt`` in the sanitized version), ``code``, ``test_list`` and ``test_setup_code`` (``test_imports``). ``job``
builds the sandbox job of a problem and an answer.
"""

import ast
import builtins
import itertools
import logging
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipe.atropos.environments.data_sets import load_dataset
from recipe.atropos.environments.sandbox.runner import Job, ProblemCode
from recipe.atropos.environments.word_problems import Split, split_of
from recipe.atropos.errors import ConfigurationError

logger = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
_HELD_OUT_SHARE = 5  # one problem in five of a dataset with a single split
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)


class Problem(ProblemCode):
    """A problem: ``question`` is the prompt; ``begun`` the beginning of the program to complete, or ""."""

    task: str
    question: str
    begun: str
    gold: str


# ---------------------------------------------------------------------- formats


def read_problem(row: dict[str, Any], where: str, shown_tests: int = 1) -> Problem:
    """Parse a row of either format; an MBPP question shows ``shown_tests`` tests, as it does not name the function.

    Raises:
        ConfigurationError: the row is in neither format; ``where`` is in the message.
    """
    humaneval = {"prompt", "entry_point", "test"} <= row.keys()
    if not humaneval and not ({"code", "test_list"} <= row.keys() and row.keys() & {"text", "prompt"}):
        raise ConfigurationError(
            f"{where}: the fields are {', '.join(map(str, row))}; rows of HumanEval have prompt, entry_point and test, "
            "of MBPP text (or prompt), code and test_list"
        )
    try:
        problem = _humaneval(row, where) if humaneval else _mbpp(row, where, shown_tests)
        ast.parse(f"{problem['setup']}\n{problem['tests']}")
    except (SyntaxError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{where}: a field cannot be read: {error}; correct the row") from error
    return problem


def _humaneval(row: dict[str, Any], where: str) -> Problem:
    return Problem(
        task=str(row.get("task_id", where)),
        question=f"Complete this function.\n\n```python\n{row['prompt'].strip()}\n```",
        begun=row["prompt"],
        names=[row["entry_point"]],
        setup=row["prompt"] + "    pass\n",  # the tests may use functions that precede the requested one
        tests=f"{row['test']}\n\ncheck({row['entry_point']})\n",
        gold=row["prompt"] + row.get("canonical_solution", ""),
    )


def _mbpp(row: dict[str, Any], where: str, shown_tests: int) -> Problem:
    imports, setup = row.get("test_imports") or [], row.get("test_setup_code") or ""
    tests, tree = "\n".join(row["test_list"]), ast.parse(row["code"])
    imports = [*(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)), *imports]
    used = {node.id for node in ast.walk(ast.parse(f"{setup}\n{tests}")) if isinstance(node, ast.Name)}
    if not (names := used & _defined(tree)):
        raise ConfigurationError(f"{where}: its tests use nothing that its code defines; correct test_list or code")
    shown = "\n".join(row["test_list"][:shown_tests])
    return Problem(
        task=str(row.get("task_id", where)),
        question=(row.get("text") or row["prompt"]).strip() + (f"\n\nIt must pass this:\n{shown}" if shown else ""),
        begun="",
        names=sorted(names),
        setup="\n".join([*imports, setup]),
        tests=tests,
        gold=row["code"],
    )


def _defined(tree: ast.Module) -> set[str]:
    """Return the functions, classes and variables at the top level of a program."""
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return named | {target.id for target in targets if isinstance(target, ast.Name)}


def _unknown_names(problem: Problem) -> set[str]:
    """Return the names that the tests use and nothing defines, so that they fail for any answer."""
    trees = [ast.parse(problem["setup"]), ast.parse(problem["tests"])]
    known, used = {*problem["names"], *dir(builtins)}, set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str() as name):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {alias.asname or alias.name.partition(".")[0] for alias in names}
    return set() if "*" in known else used - known


# ---------------------------------------------------------------------- answers


def job(problem: Problem, text: str) -> Job:
    """Build a job from the text after ``</think>``: the code block that defines the function, else the first block,
    else all of it. The code is put after what precedes the function in ``begun`` or, if it does not define the
    function, after all of ``begun``."""
    text = text.rpartition("</think>")[2]
    blocks = _FENCED.findall(text) or [text]
    program = next((block for block in blocks if _defines(block, problem["names"])), None)
    if program is None:
        program = problem["begun"] + blocks[0]
    elif problem["begun"]:
        last = problem["begun"].rfind("\ndef ") + 1  # of its functions
        program = problem["begun"][:last] + program
    return Job(program=program, names=problem["names"], setup=problem["setup"], tests=problem["tests"])


def _defines(program: str, names: list[str]) -> bool:
    try:
        return set(names) <= _defined(ast.parse(program))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


# ---------------------------------------------------------------------- datasets


def load_problems(
    dataset: str, split: Split, config: str | None, size: int | None, seed: int, shown_tests: int = 1
) -> list[Problem]:
    """Return the first ``size`` problems of a split (None: all, of generated ones 4096).

    ``dataset`` is "synthetic", a .jsonl, .json or .parquet file, a folder with a file for each split, or a name on the
    hub. A dataset with a single split (HumanEval has only "test") is divided: one problem in five, chosen by a digest
    of the question, is held out.

    Raises:
        ConfigurationError: there is no such dataset, or a row is in neither format.
    """
    if dataset == SYNTHETIC:
        rows = list(generate(split, size or 4096, seed))
        return [read_problem(row, f"{SYNTHETIC} row {i}", shown_tests) for i, row in enumerate(rows)]
    splits = _load(dataset, config)
    if len(splits) > 1 and split not in splits:
        raise ConfigurationError(
            f"--env.dataset_name={dataset}: no split {split!r} beside {', '.join(splits)}; rename one to it"
        )
    name = split if split in splits else next(iter(splits))
    problems = [read_problem(row, f"{dataset} {name} row {i}", shown_tests) for i, row in enumerate(splits[name])]
    if broken := [problem["task"] for problem in problems if _unknown_names(problem)]:
        what = "%s %s: left out %d problems whose tests use names that neither code nor setup defines: %s"
        logger.warning(what, dataset, name, len(broken), ", ".join(broken[:20]))
        problems = [problem for problem in problems if not _unknown_names(problem)]
    if len(splits) == 1:
        total = len(problems)
        problems = [problem for problem in problems if split_of(problem["question"], _HELD_OUT_SHARE) == split]
        logger.warning(
            "%s has one split, %s: %d of its %d problems are for %s", dataset, name, len(problems), total, split
        )
    if not problems:
        raise ConfigurationError(f"--env.dataset_name={dataset}: no problems for the split {split!r}; give more rows")
    return problems[:size]


def _load(dataset: str, config: str | None) -> dict[str, Any]:
    fix = f"give a .jsonl or .parquet file, a folder of such files, a name that the hub can resolve, or {SYNTHETIC!r}"
    path = Path(dataset).expanduser()
    if path.is_file():
        kind = "parquet" if path.suffix == ".parquet" else "json"
        return load_dataset("dataset_name", kind, fix, data_files=str(path), shown=dataset)
    return load_dataset("dataset_name", str(path) if path.is_dir() else dataset, fix, config)


# ---------------------------------------------------------------------- generated problems

_NAMES = ("pick", "scan", "find", "take", "look", "read", "tell", "work", "solve", "answer", "result", "search")
_REDUCTIONS: dict[str, tuple[str, Callable[[list[int]], Any]]] = {
    "how many numbers of xs are": ("len([x for x in xs if {}])", len),
    "the sum of the numbers of xs that are": ("sum(x for x in xs if {})", sum),
    "the list of the numbers of xs that are": ("[x for x in xs if {}]", list),
}
CONDITIONS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "greater than": (">", lambda x, k: x > k),
    "at least": (">=", lambda x, k: x >= k),
    "less than": ("<", lambda x, k: x < k),
    "at most": ("<=", lambda x, k: x <= k),
}


def generate(split: Split, size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield ``size`` distinct problems about lists of numbers, in MBPP's format, in an order given by ``seed``.

    A digest of its text assigns a problem to a split, whatever the seed.

    Raises:
        ConfigurationError: there are not that many.
    """
    rng = random.Random(f"code problems, {split}, {seed}")
    every = list(itertools.product(_NAMES, _REDUCTIONS, CONDITIONS, range(2, 99)))
    rng.shuffle(every)
    rows = 0
    for name, reduction, condition, k in every:
        text = f"Write a function {name}(xs) that returns {reduction} {condition} {k}."
        if rows < size and split_of(text) == split:
            rows += 1
            yield _row(rows, text, name, reduction, condition, k, rng)
    if rows < size:
        raise ConfigurationError(
            f"--env.dataset_name={SYNTHETIC} has {rows} problems in {split}, not {size}; ask for fewer"
        )


def _row(
    number: int, text: str, name: str, reduction: str, condition: str, k: int, rng: random.Random
) -> dict[str, Any]:
    (expression, reduced), (sign, holds) = _REDUCTIONS[reduction], CONDITIONS[condition]
    tests = []
    for _ in range(3):  # each includes the limit and its neighbors
        xs = [k - 1, k, k + 1, *(rng.randint(0, 2 * k) for _ in range(4))]
        rng.shuffle(xs)
        tests.append(f"assert {name}({xs}) == {reduced([x for x in xs if holds(x, k)])}")
    return {
        "task_id": f"{SYNTHETIC}/{number}",
        "text": text,
        "code": f"def {name}(xs):\n    return {expression.format(f'x {sign} {k}')}",
        "test_list": tests,
        "test_setup_code": "",
    }
