r"""Word problems in GSM8K's format: generated, from a local folder, or from the hub.

A row is ``{"question": str, "answer": str}``; the answer ends in ``#### NUMBER`` and holds its arithmetic as
``<<12+7=19>>19``, as in https://github.com/openai/grade-school-math.

The generated splits share no problem by construction: a problem belongs to the split that a digest of its question
names. The same (split, size, seed) gives the same rows in every process.
"""

import hashlib
import random
from pathlib import Path
from typing import Literal

import orjson

Row = dict[str, str]
Split = Literal["train", "test"]

SYNTHETIC = "synthetic"
_HELD_OUT_SHARE = 10  # one problem in ten is held out

_NAMES = ("Anna", "Ben", "Carla", "Daniel", "Emma", "Felix", "Grace", "Hugo")
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "stamps")
_TEMPLATES = {
    "+": (
        "{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?",
        "{name} has {a} {items} and finds {b} more. How many {items} does {name} have now?",
    ),
    "-": (
        "{name} has {a} {items} and gives {b} away. How many {items} does {name} have now?",
        "{name} has {a} {items} and loses {b} of them. How many {items} does {name} have now?",
        "{name} has {a} {items} and sells {b} of them. How many {items} does {name} have now?",
    ),
}
_LARGEST = 20  # of any number in a problem or its answer


def generate(split: Split, size: int, seed: int = 0) -> list[Row]:
    """``size`` distinct problems of one step, numbers up to 20, in an order given by ``seed``.

    Raises:
        ValueError: an unknown split, or more problems than there are.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: generated problems have the splits train and test")
    rng = random.Random(f"word problems, {split}, {seed}")
    rows: dict[str, Row] = {}
    for _ in range(200 * size + 1000):
        if len(rows) == size:
            return list(rows.values())
        row = _problem(rng)
        if split_of(row["question"]) == split:
            rows.setdefault(row["question"], row)
    raise ValueError(f"dataset {SYNTHETIC!r} has fewer than {size} problems in split {split}; ask for fewer")


def split_of(question: str) -> Split:
    """The split that a generated question belongs to, whatever the seed."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0 else "train"


def _problem(rng: random.Random) -> Row:
    templates = [(operator, text) for operator, texts in _TEMPLATES.items() for text in texts]
    operator, template = rng.choice(templates)
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


def load_problems(
    dataset: str, split: Split, config: str | None = "main", size: int | None = None, seed: int = 0
) -> list[Row]:
    """The first ``size`` rows of a split (all, where None): generated, of a local file or folder, or of the hub.

    ``dataset`` is "synthetic", a ``.jsonl`` file, a folder with ``SPLIT.jsonl`` or ``CONFIG/SPLIT.jsonl``, or a name on
    the hub (``openai/gsm8k``).

    Raises:
        FileNotFoundError: a path that is not there.
        ValueError: a row without question or answer, naming file and line; a generated split too small.
    """
    if dataset == SYNTHETIC:
        return generate(split, size or 4096, seed)
    path = Path(dataset).expanduser()
    if path.exists() or _only_a_path(dataset):
        return _read_jsonl(_local_file(path, split, config))[:size]
    import datasets

    rows = datasets.load_dataset(dataset, config, split=split if size is None else f"{split}[:{size}]")
    return [_checked(row, f"{dataset} row {i}") for i, row in enumerate(rows)]


def _only_a_path(dataset: str) -> bool:
    return dataset.startswith((".", "/", "~")) or dataset.endswith(".jsonl") or dataset.count("/") > 1


def _local_file(path: Path, split: str, config: str | None) -> Path:
    candidates = [path] if path.is_file() else [path / f"{split}.jsonl", path / (config or "") / f"{split}.jsonl"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    wanted = " or ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(
        f"dataset {str(path)!r}: no {wanted}; give a GSM8K .jsonl file or folder, a name on the hub, or {SYNTHETIC!r}"
    )


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{file} line {number} is not JSON: {error}") from error
            rows.append(_checked(row, f"{file} line {number}"))
    if not rows:
        raise ValueError(f"{file} holds no rows")
    return rows


def _checked(row: dict, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object with question and answer")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{where} has no text under {key!r}; GSM8K rows have question and answer")
    if "####" not in row["answer"]:
        raise ValueError(f"{where}: the answer does not end in '#### NUMBER'")
    return {"question": row["question"], "answer": row["answer"]}


def gold_answer(row: Row) -> str:
    """The number after ``####``, without thousands separators: what a boxed answer is compared with."""
    return row["answer"].split("####")[-1].strip().replace(",", "")
