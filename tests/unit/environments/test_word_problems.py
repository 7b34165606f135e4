"""The generated problems and the ones that are read."""

import operator
import re
import subprocess
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.environments import word_problems
from recipe.atropos.environments.word_problems import (
    SYNTHETIC,
    SYNTHETIC_STEPS,
    generate,
    gold_answer,
    load_problems,
    split_of,
)

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


DATASETS, SPLITS = st.sampled_from([SYNTHETIC, SYNTHETIC_STEPS]), st.sampled_from(["train", "test"])


@given(DATASETS, SPLITS, st.integers(1, 60), st.integers(0, 5))
def test_rows_are_distinct_and_in_gsm8ks_format(dataset, split, size, seed):
    """Each step goes on from the one before. A problem is of one split, whatever the seed."""
    rows = generate(split, size, seed, dataset)
    assert len({row["question"] for row in rows}) == size
    for row in rows:
        steps = re.findall(r"<<(\d+)([-+*])(\d+)=(\d+)>>(\d+)", row["answer"])
        before = [None, *(result for _, _, _, result, _ in steps)]
        for last, (a, op, b, result, repeated) in zip(before, steps, strict=False):
            assert last in (None, a) and result == repeated
            assert OPERATORS[op](int(a), int(b)) == int(result) > 0
            assert int(result) <= 20 if dataset == SYNTHETIC else int(b) > 10
        assert gold_answer(row) == result and len(steps) == row.get("level", 1)
        assert re.findall(r"\d+", row["question"]) == [steps[0][0], *(b for _, _, b, _, _ in steps)]
        assert len(steps) in ([1] if dataset == SYNTHETIC else [2, 3]) and split_of(row["question"]) == split


def test_another_process_generates_the_same_rows():
    code = "from recipe.atropos.environments.word_problems import generate; print(generate('test', 20, 3))"
    outputs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert outputs == {f"{generate('test', 20, 3)}\n"} != {f"{generate('test', 20, 4)}\n"}


def test_more_problems_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(word_problems, "_NAMES", ("Anna",))
    monkeypatch.setattr(word_problems, "_ITEMS", ("apples",))
    with pytest.raises(ValueError, match="has fewer than 500 problems in split test"):
        generate("test", 500)


@pytest.mark.parametrize("where", ["file", "folder", "config folder"])
def test_local_problems_in_gsm8ks_own_format_are_read(tmp_path, where):
    file = {"file": "any.jsonl", "folder": "train.jsonl", "config folder": "main/train.jsonl"}[where]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    row = {"question": "How many?", "answer": "Many.\n#### 1,234"}
    path.write_bytes(orjson.dumps(row) + b"\n\n" + orjson.dumps(row) + b"\n")
    rows = load_problems(str(path if where == "file" else tmp_path), "train")
    assert rows == [row, row] and gold_answer(rows[0]) == "1234"
    assert load_problems(str(path if where == "file" else tmp_path), "train", size=1) == [row]


def test_a_file_of_both_splits_holds_a_tenth_out(tmp_path):
    rows = [{"question": f"How many are {n}?", "answer": f"#### {n}"} for n in range(200)]
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    train, test = (load_problems(str(path), split) for split in ("train", "test"))
    assert sorted(train + test, key=rows.index) == rows and 10 < len(test) < 30
    path.write_bytes(orjson.dumps(train[0]))
    with pytest.raises(ValueError, match="all.jsonl holds no rows for the split 'test'"):
        load_problems(str(path), "test")


@pytest.mark.parametrize("dataset", ["/no/such/data.jsonl", "./missing", "missing.jsonl", "a/b/c"])
def test_a_dataset_that_is_not_there_is_named(dataset):
    with pytest.raises(FileNotFoundError, match=re.escape(dataset.lstrip("./"))):
        load_problems(dataset, "train")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 is not JSON"),
        (b"[]", "line 2 is not an object"),
        (b'{"question": "q"}', "line 2 has no text under 'answer'"),
        (b'{"question": "q", "answer": "5"}', "line 2: the answer does not end in '#### NUMBER'"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, line, words):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "#### 1"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=re.escape(words)):
        load_problems(str(path), "train")
