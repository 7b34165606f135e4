r"""Word problems in GSM8K's format: generated, from a local folder, or from the hub.

A row is ``{"question": str, "answer": str}``, with a ``level`` if its source has one; the answer ends in
``#### NUMBER`` and writes its arithmetic as ``<<12+7=19>>19``, as in https://github.com/openai/grade-school-math.

The splits of a single file, and of generated problems, share no problem by construction: a digest of its question
assigns a problem to a split. The same (split, size, seed) gives the same rows in every process.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from recipe.atropos.config.models import looks_local
from recipe.atropos.environments.data_sets import load_dataset, read_jsonl

WordProblem = dict[str, Any]
Split = Literal["train", "test"]

GSM8K = "openai/gsm8k"  # on the hub
SYNTHETIC = "synthetic"  # one step per problem
SYNTHETIC_STEPS = "synthetic-steps"  # two or three steps, with numbers too large for a small policy without a tool
_HELD_OUT_SHARE = 10  # one problem in ten is held out

_NAMES = ("Anna", "Ben", "Carla", "Daniel", "Emma", "Felix", "Grace", "Hugo")
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "stamps")
_TEMPLATES = (
    ("+", "{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?"),
    ("+", "{name} has {a} {items} and finds {b} more. How many {items} does {name} have now?"),
    ("-", "{name} has {a} {items} and gives {b} away. How many {items} does {name} have now?"),
    ("-", "{name} has {a} {items} and loses {b} of them. How many {items} does {name} have now?"),
    ("-", "{name} has {a} {items} and sells {b} of them. How many {items} does {name} have now?"),
)
_LARGEST = 20  # largest number in a one-step problem or its answer

_BEGINNINGS = {"": "{name} has {a} {items}.", "*": "{name} has {a} boxes of {b} {items}."}
_CHANGES = {
    "+": ("{name} buys {b} more.", "{name} finds {b} more."),
    "-": ("{name} gives {b} away.", "{name} loses {b} of them.", "{name} sells {b} of them."),
}


def generate(split: Split, size: int, seed: int = 0, dataset: str = SYNTHETIC) -> list[WordProblem]:
    """Return ``size`` distinct problems of a generated dataset, in an order given by ``seed``.

    Raises:
        ValueError: the split has fewer problems.
    """
    rng = random.Random(f"word problems, {split}, {seed}")
    rows: dict[str, WordProblem] = {}
    for _ in range(200 * size + 1000):
        if len(rows) == size:
            return list(rows.values())
        row = GENERATED[dataset](rng)
        if split_of(row["question"]) == split:
            rows.setdefault(row["question"], row)
    raise ValueError(f"dataset {dataset!r} has fewer than {size} problems in split {split}; ask for fewer")


def split_of(question: str, share: int = _HELD_OUT_SHARE) -> Split:
    """Return the split of a question, whatever the seed: one in ``share`` is held out."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % share == 0 else "train"


def _one_step(rng: random.Random) -> WordProblem:
    operator, template = rng.choice(_TEMPLATES)
    if operator == "+":
        a = rng.randint(1, _LARGEST - 1)
        b = rng.randint(1, _LARGEST - a)
        result = a + b
    else:
        a = rng.randint(2, _LARGEST)
        b = rng.randint(1, a - 1)
        result = a - b
    name, items = rng.choice(_NAMES), rng.choice(_ITEMS)
    return {
        "question": template.format(name=name, items=items, a=a, b=b),
        "answer": f"{name} has {a} {operator} {b} = <<{a}{operator}{b}={result}>>{result} {items} now.\n#### {result}",
    }


def _several_steps(rng: random.Random) -> WordProblem:
    """Return a problem of two or three steps, its level; each starts from the previous result."""
    name, items = rng.choice(_NAMES), rng.choice(_ITEMS)
    beginning = rng.choice(list(_BEGINNINGS))
    steps = rng.choice([2, 3, 3])
    if beginning == "*":
        a, b = rng.randint(11, 29), rng.randint(11, 34)
        total, arithmetic = a * b, [_shown(a, "*", b, a * b)]
    else:
        a, b = rng.randint(101, 899), None
        total, arithmetic = a, []
    sentences = [_BEGINNINGS[beginning].format(name=name, items=items, a=a, b=b)]
    while len(arithmetic) < steps:
        operator = rng.choice(["+", "-"])
        if operator == "-" and total <= 11:
            continue
        b = rng.randint(11, 599) if operator == "+" else rng.randint(11, min(599, total - 1))
        result = total + b if operator == "+" else total - b
        sentences.append(rng.choice(_CHANGES[operator]).format(name=name, b=b))
        arithmetic.append(_shown(total, operator, b, result))
        total = result
    return {
        "question": " ".join([*sentences, f"How many {items} does {name} have now?"]),
        "answer": "\n".join([*arithmetic, f"#### {total}"]),
        "level": steps,
    }


def _shown(a: int, operator: str, b: int, result: int) -> str:
    return f"{a} {operator} {b} = <<{a}{operator}{b}={result}>>{result}"


GENERATED: dict[str, Callable[[random.Random], WordProblem]] = {SYNTHETIC: _one_step, SYNTHETIC_STEPS: _several_steps}


def load_problems(
    dataset: str, split: Split, config: str | None = "main", size: int | None = None, seed: int = 0
) -> list[WordProblem]:
    """Return the first ``size`` rows of a split (None: all, of generated ones 4096), from any of the sources.

    ``dataset`` is "synthetic" or "synthetic-steps", a ``.jsonl`` file, of which one problem in ten is held out, a
    folder with ``SPLIT.jsonl`` or ``CONFIG/SPLIT.jsonl``, or a name on the hub (``openai/gsm8k``).

    Raises:
        FileNotFoundError: the path does not exist.
        ConfigurationError: the hub has no such dataset, or cannot be reached.
        ValueError: a row lacks question or answer (names file and line), or a generated split is too small.
    """
    if dataset in GENERATED:
        return generate(split, size or 4096, seed, dataset)
    path = Path(dataset).expanduser()
    if looks_local(dataset) or dataset.endswith(".jsonl"):
        file = _local_file(path, split, config)
        local = [_checked(row, where) for where, row in read_jsonl(file)]
        if file == path:  # of both splits
            local = [row for row in local if split_of(row["question"]) == split]
        if not local:
            raise ValueError(f"{file} holds no rows for the split {split!r}; give more")
        return local[:size]
    fix = (
        "where the hub cannot be reached, give a folder in GSM8K's format, dataset_name=FOLDER with train.jsonl and "
        f"test.jsonl, or, to try things out, generated problems, dataset_name={SYNTHETIC}"
    )
    rows = load_dataset("dataset_name", dataset, fix, config, split=split if size is None else f"{split}[:{size}]")
    return [_checked(row, f"{dataset} row {i}") for i, row in enumerate(rows)]


def _local_file(path: Path, split: str, config: str | None) -> Path:
    candidates = [path] if path.is_file() else [path / f"{split}.jsonl", path / (config or "") / f"{split}.jsonl"]
    if (found := next(filter(Path.is_file, candidates), None)) is None:
        raise FileNotFoundError(
            f"dataset {str(path)!r}: no {' or '.join(map(str, candidates))}; give a GSM8K .jsonl file or folder, a "
            f"name on the hub, or one of {', '.join(GENERATED)}"
        )
    return found


def _checked(row: dict, where: str) -> WordProblem:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object with question and answer")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{where} has no text under {key!r}; GSM8K rows have question and answer")
    if "####" not in row["answer"]:
        raise ValueError(f"{where}: the answer does not end in '#### NUMBER'")
    return {key: row[key] for key in ("question", "answer", "level") if key in row}


def gold_answer(row: WordProblem) -> str:
    """Return the number after ``####`` without thousands separators, to compare a boxed answer with."""
    return row["answer"].split("####")[-1].strip().replace(",", "")


def progress(row: WordProblem, results: Iterable[str]) -> float:
    """Return how much of the worked solution (``<<12+7=19>>``) is among ``results``, numbers as texts: from -1 for
    nothing up to 1, of which the last part is left for the answer.
    """
    wanted = {_number(each) for each in re.findall(r"=([^=<>]+)>>", row["answer"])} - {None}
    found = wanted & {_number(each) for each in results}
    return 2 * len(found) / (len(wanted) + 1) - 1


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", "").strip().rstrip("."))
    except ValueError:
        return None
