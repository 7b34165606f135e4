"""The code environment's problems, answers and groups; its sandbox is tested in test_code_environment_sandbox."""

import asyncio
import json
import random
import re
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.code_environment import make_code_environment
from recipe.atropos.demo.policies import CodeRecipe, program
from recipe.atropos.environments.code import CodeEnv
from recipe.atropos.environments.code_problems import generate, job, load_problems, read_problem
from recipe.atropos.environments.sandbox.runner import Sandbox
from recipe.atropos.errors import ConfigurationError

HUMANEVAL = {
    "task_id": "HumanEval/1000",
    "prompt": "from typing import List\n\n\ndef half(x: int) -> int:\n    return x // 2\n\n\n"
    'def halves(xs: List[int]) -> List[int]:\n    """ Half of each.\n    >>> halves([2, 4])\n    [1, 2]\n    """\n',
    "entry_point": "halves",
    "canonical_solution": "    return [half(x) for x in xs]\n",
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([2, 4]) == [1, 2]\n"
    "    assert candidate([]) == []\n    for i in range(9):\n        assert candidate([i]) == [half(i)], 'one'\n\n",
}
MBPP = {
    "task_id": 1000,
    "text": "Write a function to find the area of a circle.",
    "code": "import math\r\ndef area(r):\r\n  return math.pi * r * r",
    "test_list": ["assert math.isclose(area(1), math.pi)", "assert area(0) == 0", "assert area(2) > 3 * area(1)"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "x.ipynb",
    "task_id": 1001,
    "prompt": "Write a function to count the nodes of a list.",
    "code": "class Node:\n    def __init__(self, next): self.next = next\n"
    "def count(n):\n    return 1 + count(n.next) if n else 0",
    "test_imports": ["import math"],
    "test_list": ["assert count(Node(Node(None))) == math.floor(2.5)", "assert count(None) == 0"],
}
ROWS = [HUMANEVAL, MBPP, SANITIZED]


@pytest.fixture(scope="module")
def sandbox():
    with closing(Sandbox(workers=1)) as sandbox:
        yield sandbox


@pytest.mark.parametrize("row", ROWS, ids=["humaneval", "mbpp", "sanitized"])
def test_code_environment_formats_accept_their_own_solution(sandbox, row):
    problem = read_problem(row, "row 0")
    for answer in (problem["gold"], f"<think>```python\nno\n```</think>So:\n```python\n{problem['gold']}\n```\nAh."):
        assert sandbox.check(job(problem, answer)).why == "passed"
    wrong = problem["gold"].replace("half(x)", "x").replace("* r * r", "* r").replace("1 + count", "2 + count")
    assert sandbox.check(job(problem, wrong)).why == "wrong"
    assert sandbox.check(job(problem, "I do not know.")).why in ("invalid", "undefined")
    assert row["test_list"][1] not in problem["question"] if "test_list" in row else "check" not in problem["question"]


def test_code_environment_answer_may_go_on_from_the_prompt(sandbox):
    problem = read_problem(HUMANEVAL, "row 0")
    whole = "def halves(xs: List[int]) -> List[int]:\n    return [half(x) for x in xs]"
    for answer in (
        HUMANEVAL["canonical_solution"],
        f"```python\n{whole}\n```",
        f"```py\nhalves([1])\n```\n```\n{whole}\n```",
    ):
        assert sandbox.check(job(problem, answer)).why == "passed", answer
    assert sandbox.check(job(problem, f"```python\n{whole}")).why == "passed", "cut off after the end of the program"


def test_code_environment_shows_as_many_tests_as_asked():
    for count in range(4):
        question = read_problem(MBPP, "row 0", count)["question"]
        assert [test in question for test in MBPP["test_list"]] == [i < count for i in range(3)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "#### 1"}, "the fields are question, answer; rows of HumanEval have prompt"),
        ({**MBPP, "code": "def area(r) return"}, "a field cannot be read"),
        ({**MBPP, "code": "def volume(r): return r"}, "its tests use nothing that its code defines"),
        ({**MBPP, "test_list": None}, "a field cannot be read"),
        ({**HUMANEVAL, "test": "def check(candidate)"}, "a field cannot be read"),
    ],
)
def test_code_environment_row_of_neither_format_is_named(row, message):
    with pytest.raises(ConfigurationError, match=f"file.jsonl row 7: {re.escape(message)}"):
        read_problem(row, "file.jsonl row 7")


def rows(count):
    return [{**MBPP, "task_id": i, "text": f"Write a function to find the area of circle {i}."} for i in range(count)]


def test_code_environment_reads_files_and_folders(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mbpp"
    folder.mkdir()
    for split, count in (("train", 5), ("test", 3)):
        pq.write_table(pa.Table.from_pylist(rows(count)), folder / f"{split}-00000-of-00001.parquet")
    single = tmp_path / "HumanEval.jsonl"
    humaneval = [{**HUMANEVAL, "prompt": f"# {i}\n{HUMANEVAL['prompt']}"} for i in range(40)]
    single.write_text("".join(json.dumps(row) + "\n" for row in humaneval))
    tables = tmp_path / "all.parquet"
    pq.write_table(pa.Table.from_pylist(rows(40)), tables)
    assert [len(load_problems(str(folder), split, None, None, 0)) for split in ("train", "test")] == [5, 3]
    assert len(load_problems(str(folder), "train", None, 2, 0)) == 2
    for file in (single, tables):
        train, test = ({p["question"] for p in load_problems(str(file), s, None, None, 0)} for s in ("train", "test"))
        assert len(train) + len(test) == 40 and not train & test and 1 <= len(test) <= 16
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join(json.dumps({**row, "code": "def area(r): return 3 * r * r"}) + "\n" for row in rows(9)))
    with pytest.raises(ConfigurationError, match="no problems for the split"):
        load_problems(str(broken), "train", None, None, 0)
    assert "left out 9 problems whose tests use names that neither code nor setup defines: 0, 1, 2" in caplog.text
    (folder / "train-00000-of-00001.parquet").rename(folder / "validation-00000-of-00001.parquet")
    with pytest.raises(ConfigurationError, match="no split 'train' beside"):
        load_problems(str(folder), "train", None, None, 0)
    with pytest.raises(ConfigurationError, match="dataset_name=.*nowhere.jsonl: cannot be loaded: .*'synthetic'"):
        load_problems(str(tmp_path / "nowhere.jsonl"), "train", None, None, 0)


def test_code_environment_problems_are_right_and_held_out(sandbox):
    test, train = list(generate("test", 300)), list(generate("train", 3000, 1))
    assert not {row["text"] for row in test} & {row["text"] for row in train} and len({r["text"] for r in test}) == 300
    assert test == list(generate("test", 300)) and train[:9] != list(generate("train", 9, 2))
    turned = wrong = 0
    for row in test[:60]:
        problem = read_problem(row, "row", 0)
        assert problem["question"] == row["text"] and sandbox.check(job(problem, row["code"])).why == "passed"
        other = program(row["code"], random.Random(0), 1.0)
        turned += "<" in row["code"]
        wrong += sandbox.check(job(problem, other)).why == "wrong"
    assert turned == wrong and 15 <= turned <= 45
    with pytest.raises(ConfigurationError, match="has .* problems in test, not 99999; ask for fewer"):
        list(generate("test", 99999))


def test_code_environment_policy_is_shown_flawed_programs():
    chats = CodeRecipe(problems=1000).chats(0, random.Random(0))
    shown = [(chat[0]["content"], chat[1]["content"]) for chat in chats]
    below = [answer for question, answer in shown if "less than" in question or "at most" in question]
    assert 0.55 < sum(">" in answer for answer in below) / len(below) < 0.65
    others = [answer for question, answer in shown if "less than" not in question and "at most" not in question]
    assert not any("<" in answer for answer in others)
    assert all(re.fullmatch(r"```python\ndef \w+\(xs\):\n    return .+\n```", answer) for _, answer in shown)


@pytest.fixture
def env(model_path):
    env = make_code_environment(model_path)
    yield env
    env.sandbox.close()


def test_code_environment_scores_by_tests_and_counts_why(env, node):
    item = asyncio.run(env.get_next_item())
    texts = [item["gold"], "def", item["gold"].replace("return", "return None #")]
    nodes = [node(env, text) for text in texts]
    group = asyncio.run(env.score(item, nodes))
    assert group["scores"] == [1.0, -1.0, -1.0]
    counts = {name: n for name, n in env.report.counts.items() if name.startswith("answers/")}
    assert counts == {"answers/passed": 1, "answers/invalid": 1, "answers/wrong": 1}


def test_code_environment_says_its_isolation_at_the_start(env, caplog):
    env.sandbox.close()
    asyncio.run(CodeEnv.setup(env))
    assert re.search(r"answers run isolated and probed: isolation seccomp, 1 at a time", caplog.text)
    env.sandbox.close()
    env.config.isolation = "none"
    asyncio.run(CodeEnv.setup(env))
    assert "answers run UNPROTECTED, as --env.isolation=none wants it" in caplog.text
