"""Advantages of single tokens, as the examples of an environment give them and as the trainer reads them."""

import asyncio
import io
import json
import re
from fractions import Fraction

import numpy as np
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from helpers.trainer import compose_config
from recipe.atropos.commands.inspect import show
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.environments.calculator_advantages import CalculatorAdvantagesEnv
from recipe.atropos.environments.gsm8k_advantages import (
    ANSWER,
    ELSEWHERE,
    WEIGHTS,
    GSM8kAdvantagesEnv,
    arithmetic_steps,
    results_of,
    token_span,
)
from recipe.atropos.environments.word_problems import SYNTHETIC
from recipe.atropos.run.folder import RunDir
from recipe.atropos.trajectory_api import records

ROW = {"question": "?", "answer": "first 12 + 7 = <<12+7=19>>19\nthen <<19-4=15>>15\n#### 15"}
IGNORED = -100


@pytest.fixture
def make(make_env):
    return lambda environment: make_env(environment, dataset_name=SYNTHETIC, group_size=2, max_token_length=400)


def said(tokenizer, node, advantages, condition):
    """The text of each run of trained tokens whose advantage fulfils ``condition``."""
    texts, run = [], []
    for token, mask, advantage in zip(
        [*node.tokens, 0], [*node.masked_tokens, IGNORED], [*advantages, 0.0], strict=True
    ):
        if mask != IGNORED and condition(advantage):
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


@pytest.mark.timeout(20)  # it takes milliseconds; it took minutes where each place was tried anew
@pytest.mark.parametrize("text", ["1" * 50_000, "1+" * 50_000, "(" * 50_000, "1 " + " " * 50_000, "1,111" * 20_000])
def test_promises_arithmetic_steps_take_linear_time(text):
    assert not list(arithmetic_steps(text, set()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 + 7 = 19", [("12 + 7 = 19", 1)]),
        ("12+7=18, so", [("12+7=18", -1)]),
        ("12 - 5 = 7", [("12 - 5 = 7", 0)]),
        ("1. First 12 + 7 = 19. 2. Then 19 - 4 = 15.", [("12 + 7 = 19", 1), ("19 - 4 = 15", 1)]),
        ("2 + 3 = 5 * 4 = 21", [("2 + 3 = 5", 0), ("5 * 4 = 21", -1)]),
        ("2 + 3 + 4 = 9", [("2 + 3 + 4 = 9", 0)]),
        ("(2 + 3) * 4 = 20", [("(2 + 3) * 4 = 20", 0)]),
        ("$1,200 x 2 = $2,400 in all", [("$1,200 x 2 = $2,400", 0)]),
        ("10 / 3 = 3.33", [("10 / 3 = 3.33", 0)]),
        ("10 / 3 = 3", [("10 / 3 = 3", -1)]),
        ("10 ÷ 4 = 2.5 and 3 × 5 = 15", [("10 ÷ 4 = 2.5", 0), ("3 × 5 = 15", 1)]),
        ("he has 19 = many; 7 / 0 = 7; x = 3; 5 +", []),
    ],
)
def test_promises_arithmetic_steps_are_checked(text, expected):
    found = [(text[start:end], grade) for start, end, grade in arithmetic_steps(text, {Fraction(19), Fraction(15)})]
    assert found == expected


def test_promises_results_are_those_of_the_worked_solution():
    assert results_of(ROW) == {19, 15}
    assert results_of({"question": "?", "answer": "<<5*.5=2.5>>2.5 <<1=one>> #### 1,000"}) == {Fraction(5, 2), 1000}


@pytest.mark.parametrize("text", ["12 + 7 = 35", "7 × 3 = 21 äöü 👍 2 + 2 = 4"])
def test_promises_spans_hold_whole_tokens_of_their_text(make, text):
    tokenizer = make(GSM8kAdvantagesEnv).tokenizer
    tokens = tokenizer.encode(text)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            place = token_span(tokenizer, tokens, start, end)
            assert text[start:end] in tokenizer.decode(tokens[place])
            shorter = [tokens[place.start + 1 : place.stop], tokens[place.start : place.stop - 1]]
            assert all(text[start:end] not in tokenizer.decode(part) for part in shorter)


def test_promises_advantages_by_answer_and_steps(make, node):
    env = make(GSM8kAdvantagesEnv)
    right = node(env, r"12 + 7 = 19 19 - 4 = 15 \boxed{15} as said")
    wrong = node(env, r"12 + 7 = 18 18 - 4 = 14 \boxed{14}")
    unsaid = node(env, "12 + 7 = 19 so")
    nodes = [right, wrong, unsaid]
    group = asyncio.run(env.score(ROW, nodes))
    advantages = group["advantages"]
    assert group["scores"] == [1.0, -1.0, -1.0] and list(map(len, advantages)) == [len(n.tokens) for n in nodes]
    for one, values in zip(nodes, advantages, strict=True):
        assert {value for value, mask in zip(values, one.masked_tokens, strict=True) if mask == IGNORED} == {0.0}
    decode = env.tokenizer
    assert said(decode, right, advantages[0], lambda value: value > 0.5)[-1].strip() == r"\boxed{15}"
    assert said(decode, wrong, advantages[1], lambda value: value < -0.5)[-1].strip() == r"\boxed{14}"
    assert said(decode, unsaid, advantages[2], lambda value: value < -0.5) == ["<|im_end|>"], "for the answer"
    graded = [text.strip() for text in said(decode, right, advantages[0], lambda value: 0.1 < value <= 0.5)]
    assert " ".join(graded) == "12 + 7 = 19 19 - 4 = 15"
    elsewhere = said(decode, right, advantages[0], lambda value: 0 < value <= 0.1)
    assert elsewhere[-1].split()[:1] == ["as"], "the answer ends with its box"
    assert said(decode, wrong, advantages[1], lambda value: -1 < value < -0.5)[0].strip() == "12 + 7 = 18"
    elsewhere = said(decode, unsaid, advantages[2], lambda value: abs(value) < 0.1)
    assert elsewhere == [" so"]


def test_promises_advantages_of_a_group_have_mean_zero(make, node):
    env = make(GSM8kAdvantagesEnv)
    rng = np.random.default_rng(0)
    for _ in range(20):
        texts = [rf"{a} + 2 = {a + wrong} so \boxed{{{a}}}" for a, wrong in rng.integers(1, 17, (4, 2))]
        nodes = [node(env, *texts[: 1 + i % 2], text) for i, text in enumerate(texts)]
        advantages = asyncio.run(env.score(ROW, nodes))["advantages"]
        flat = np.concatenate(advantages)
        trained = np.concatenate([n.masked_tokens for n in nodes]) != IGNORED
        assert abs(flat[trained].mean()) < 1e-12 and not flat[~trained].any()


def test_promises_equal_tokens_of_a_kind_have_no_advantage(make, node):
    env = make(GSM8kAdvantagesEnv)
    nodes = [node(env, r"12 + 7 = 19 \boxed{15}"), node(env, r"12 + 7 = 19 \boxed{16}")]
    first, second = asyncio.run(env.score(ROW, nodes))["advantages"]
    step = len(nodes[0].tokens) - len(env.tokenizer.encode(r" \boxed{15}")) - 1
    assert not any(first[3:step]) and not any(second[3:step]) and max(first) == WEIGHTS[ANSWER]
    assert sorted({round(abs(value), 9) for value in first}) == [0.0, WEIGHTS[ELSEWHERE], WEIGHTS[ANSWER]]
    same = asyncio.run(env.score(ROW, [nodes[1], nodes[1]]))["advantages"]
    assert not np.any(same), "nothing to choose between"


def test_promises_calls_of_the_calculator_are_graded(make, node):
    env = make(CalculatorAdvantagesEnv)
    good, bad = "<call>12 + 7</call>", "<call>12 + </call>"
    right = node(env, good, "<call>19 - 4</call>", r"\boxed{15}")
    wrong = node(env, bad, "<call>12 - 7</call>", r"\boxed{5}")
    first, second = asyncio.run(env.score(ROW, [right, wrong]))["advantages"]
    positive = said(env.tokenizer, right, first, lambda value: value > 0.1)
    assert positive == [good, "<call>19 - 4</call>", r"\boxed{15}"]
    assert said(env.tokenizer, wrong, second, lambda value: value < -0.5) == [bad, r"\boxed{5}"]
    graded = {grade for _, _, grade in env.steps(f"{good}{bad}<call>1 + 1</call>", results_of(ROW))}
    assert graded == {1.0, 0.0, -1.0}


def test_promises_the_trainer_reads_each_tokens_advantage(make, node):
    env = make(CalculatorAdvantagesEnv)
    nodes = [
        node(env, "<call>12 + 7</call>", r"\boxed{15}"),
        node(env, "<call>1 + 7</call>", r"\boxed{8}"),
    ]
    group = asyncio.run(env.score(ROW, nodes))
    rows, report = groups_to_data_proto([group], RowLimits(110, 0), multiple_of=2)
    assert not report.dropped and rows.non_tensor_batch["has_advantages"].all()
    mask = rows.batch["response_mask"].bool()
    for row, (one, advantages) in enumerate(zip(nodes, group["advantages"], strict=True)):
        sent = [value for value, m in zip(advantages, one.masked_tokens, strict=True) if m != IGNORED]
        assert rows.batch["atropos_advantages"][row][mask[row]].tolist() == pytest.approx(sent, abs=1e-6)
    assert not rows.batch["atropos_advantages"][~mask].any()


def test_promises_debug_shows_the_advantage_of_each_token(make, node, tmp_path):
    env = make(GSM8kAdvantagesEnv)
    nodes = [node(env, rf"{shown} so \boxed{{{answer}}}") for shown, answer in (("12 + 7 = 19", 15), ("1 + 1 = 3", 3))]
    group = asyncio.run(env.score(ROW, nodes))
    config = compose_config(f"actor_rollout_ref.model.path={env.tokenizer.name_or_path}", f"run.dir={tmp_path}")
    run, exported = RunDir(tmp_path), tmp_path / "batches.jsonl"
    OmegaConf.save(config, run.config)
    exported.write_text(json.dumps({"number": 1, "batch": [group]}))
    records.import_(run.trajectories, exported)
    run.metrics.write_text(json.dumps({"step": 1, "atropos/batch": 1}) + "\n")
    console = Console(record=True, width=200, color_system="truecolor", force_terminal=True, file=io.StringIO())
    show(run, 1, 0, 1, table=True, console=console)
    lines = [line for line in console.export_text(clear=False).splitlines() if " yes " in line]
    shown = [float(line.split("\u2502")[-2]) for line in lines]
    sent = [
        value for value, mask in zip(group["advantages"][1], nodes[1].masked_tokens, strict=True) if mask != IGNORED
    ]
    assert shown == pytest.approx(sent, abs=1e-4) and len(set(shown)) >= 3
    assert "score -1," in console.export_text(clear=False)
    colors = re.findall(r"48;2;(\d+);(\d+);(\d+)", console.export_text(styles=True))
    red = {(r, g, b) for r, g, b in colors if int(r) > int(g)}
    assert len(red) >= 3, "a shade for each kind: answer, step, elsewhere"
