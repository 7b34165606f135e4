"""What the environments say was reached, the credit that it gives, and how trainer and debugger show it."""

import io
import json
import re

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from helpers.trainer import compose_config
from recipe.atropos.adapter.restore import group_of_nodes
from recipe.atropos.commands.inspect import show
from recipe.atropos.config.compose import load_config
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.environments import calculator, gsm8k
from recipe.atropos.environments.word_problems import SYNTHETIC, progress
from recipe.atropos.run.folder import RunDir
from recipe.atropos.trajectory_api import records

ROW = {"question": "?", "answer": "first 12 + 7 = <<12+7=19>>19\nthen <<19-4=15>>15\n#### 15"}
IGNORED = -100
STEPS = Credit(spans=r"=\s*-?[\d,.]+", values="recipe.atropos.environments.gsm8k:steps_done")
CALLS = Credit(values="recipe.atropos.environments.calculator:steps_done")


@pytest.fixture
def make(make_env):
    return lambda environment: make_env(environment, dataset_name=SYNTHETIC, group_size=2, max_token_length=400)


@pytest.mark.parametrize(
    ("results", "expected"), [([], -1), (["19"], -1 / 3), (["19", "15.0", "15"], 1 / 3), (["error: x", "7", "-"], -1)]
)
def test_progress_is_the_share_of_the_worked_solution(results, expected):
    assert progress(ROW, results) == pytest.approx(expected)
    assert progress({"question": "?", "answer": "<<5*.5=2.5>>2.5 <<1=one>> #### 1,000"}, ["2.5"]) == 0.0


@pytest.mark.parametrize(
    ("steps_done", "text", "expected"),
    [
        (gsm8k.steps_done, "12 + 7 = 19 and 19 - 4 = $15.", 1 / 3),
        (gsm8k.steps_done, "12 + 7 =19, 20 - 4 = 16", -1 / 3),
        (gsm8k.steps_done, "19 and 15", -1),
        (calculator.steps_done, "<call>12 + 7</call>\n19\n<call>1 +</call>", -1 / 3),
        (calculator.steps_done, "19, 15: I guess", -1),
        (calculator.steps_done, "<call>12 + 7</call><call>19 - 4</call>", 1 / 3),  # without a reply
    ],
)
def test_progress_of_an_answer_or_of_calls(steps_done, text, expected):
    assert steps_done(ROW, text) == pytest.approx(expected)


def test_credit_of_calls(make, node):
    env = make(calculator.CalculatorEnv)
    right = node(env, "<call>12 + 7</call>", "<call>19 - 4</call>", r"\boxed{15}")
    wrong = node(env, "<call>12 + </call>", "<call>12 - 7</call>", r"\boxed{5}")
    late = node(env, "<call>12 + 7</call>", "<call>12 - 7</call>", r"\boxed{5}")
    group = group_of_nodes([right, wrong, late], [1.0, -1.0, -1.0])
    add_credit(group, CALLS.model_copy(update={"lam": 0.0}), env.tokenizer, ROW)
    first = [
        [advantages[start] for start, _ in trained_spans(one.masked_tokens)]
        for one, advantages in zip((right, wrong, late), group["advantages"], strict=True)
    ]
    assert first[0][0] == first[2][0] > 0 > first[1][0], "the same call, whatever followed"
    assert first[0][1] > 0 > first[2][1] and first[0][2] > 0 > first[2][2]


def test_credit_of_presets():
    for preset, expected in (("advantages", STEPS), ("calculator_advantages", CALLS)):
        credit = load_config([f"preset={preset}"]).environment.credit
        assert Credit.parse(OmegaConf.to_container(credit), "environment.credit") == expected


def test_promises_debug_shows_the_advantage_of_each_token(make, node, tmp_path):
    env = make(gsm8k.GSM8kEnv)
    nodes = [node(env, rf"{shown} so \boxed{{{answer}}}") for shown, answer in (("12 + 7 = 19", 15), ("1 + 1 = 3", 3))]
    group = group_of_nodes(nodes, [1.0, -1.0])
    add_credit(group, STEPS.model_copy(update={"lam": 0.0}), env.tokenizer, ROW)
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
    assert shown == pytest.approx(sent, abs=1e-4) and len(set(shown)) == 2
    assert "score -1," in console.export_text(clear=False)
    colors = re.findall(r"48;2;(\d+);(\d+);(\d+)", console.export_text(styles=True))
    red = {(r, g, b) for r, g, b in colors if int(r) > int(g)}
    assert len(red) >= 2, "a shade for the step, one for the answer"
