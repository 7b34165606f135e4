"""Recorded batches: where they end, who made their advantages and how ``inspect`` shows them, and how noisy the
gradient is that they give."""

import copy
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoModelForCausalLM

from helpers.trainer import compose_config, random_group
from recipe.atropos.__main__ import main
from recipe.atropos.commands.inspect import show, style_of
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.report.run_history import read_history
from recipe.atropos.report.token_view import token_columns
from recipe.atropos.run.folder import RunDir
from recipe.atropos.sources.recorded import RecordedSource
from recipe.atropos.trajectory_api import records

SCORES = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]


@pytest.fixture
def recorded(tmp_path, model_path):
    """A function that stores groups as a run's first step; returns the run."""

    def store(groups, *overrides):
        config = compose_config(f"actor_rollout_ref.model.path={model_path}", f"run.dir={tmp_path}", *overrides)
        run = RunDir(tmp_path)
        OmegaConf.save(config, run.config)
        (tmp_path / "batches.jsonl").write_text(json.dumps({"number": 1, "batch": groups}))
        records.import_(run.trajectories, tmp_path / "batches.jsonl")
        run.metrics.write_text(json.dumps({"step": 1, "atropos/batch": 1}) + "\n")
        return run

    return store


@pytest.fixture
def groups():
    """Of three words, so that the gradients of two groups are not orthogonal."""
    rng = np.random.default_rng(0)
    return [random_group(rng, 6, turns=3) | {"scores": scores} for scores in SCORES]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ["credit, spans=turns lam=0.25 gamma=0.5", "of the environment", "GRPO"]),
        (["trainer.atropos.use_advantages=false"], ["GRPO"]),
        (["algorithm.adv_estimator=rloo"], ["RLOO"]),
    ],
)
def test_inspect_says_who_made_the_advantages(recorded, groups, overrides, told):
    for group in groups[:2]:
        group["group_overrides"] = {"turn_values": [[0.5, 0.25, 9]] * 4}
        add_credit(group, Credit(lam=0.25, gamma=0.5))
    del groups[1]["group_overrides"]["credit"]
    run = recorded(groups, *overrides)
    for number, expected in enumerate(told):
        console = Console(width=400, file=io.StringIO(), record=True)
        show(run, 1, number, 0, table=False, console=console)
        assert f"; advantages: {expected}\n" in console.export_text()


def test_inspect_runs_no_code_that_a_run_names(recorded, groups, model_path, tmp_path, capsys):
    """Whatever its configuration says; nor does the report, whose samples then lack their tokens."""
    model = shutil.copytree(model_path, tmp_path / "model")
    ran = tmp_path / "ran"
    (model / "own.py").write_text(
        "from transformers import Qwen2Config\n"
        f"open({str(ran)!r}, 'w')\n"
        "class Own(Qwen2Config):\n    model_type = 'own'\n"
    )
    config = json.loads((model / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (model / "config.json").write_text(json.dumps(config | own))
    overrides = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.trust_remote_code=true"]
    run = recorded(groups, *overrides)
    with pytest.raises(SystemExit, match="give --trust-remote-code"):
        main(["inspect", str(run.path)])
    with pytest.raises(ValueError, match="custom code"):
        token_columns(read_history(run.path), {1: []}, 9, 9)
    assert not ran.exists()
    assert main(["inspect", str(run.path), "--trust-remote-code"]) == 0 and ran.exists()


def test_recorded_steps_of_a_model_that_is_gone_say_so(recorded, groups, model_path):
    """Not that a path is no name on the hub, which is asked only for a name."""
    run = recorded(groups, "actor_rollout_ref.model.path=/gone/model")
    told = r"actor_rollout_ref\.model\.path=/gone/model: no model there"
    for command in (["inspect", str(run.path)], ["credit", f"--run={run.path}"]):
        with pytest.raises(SystemExit, match=told):
            main(command)
    with pytest.raises(ConfigurationError, match=told):
        token_columns(read_history(run.path), {1: []}, 9, 9)
    assert main(["credit", f"--run={run.path}", f"--model={model_path}"]) == 0


def test_inspect_shows_no_control_characters_of_a_model(recorded, groups, monkeypatch):
    """They could rewrite what the terminal shows."""
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.decode", lambda self, ids: f"<{ids[0]}\x1b[2J>")
    console = Console(width=400, file=io.StringIO())
    show(recorded(groups), 1, 0, 0, table=True, console=console)
    assert f"<{groups[0]['tokens'][0][0]}>" in console.file.getvalue() and "\x1b" not in console.file.getvalue()


def gradient_noise(model_path, groups, advantages):
    """Unbiased noise over unbiased signal, from the lists that environments send; sampled at a temperature of 0.5."""
    policy, found = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"), []
    for group, of_group in zip(groups, advantages, strict=True):
        total = 0.0
        for tokens, masks, values in zip(group["tokens"], group["masks"], of_group, strict=True):
            logits = policy(torch.tensor([tokens])).logits[0]
            for t in range(1, len(tokens)):
                if masks[t] != -100:
                    total = total + values[t] * torch.distributions.Categorical(logits=2 * logits[t - 1]).log_prob(
                        torch.tensor(tokens[t])
                    )
        parts = torch.autograd.grad(total, list(policy.parameters()), allow_unused=True, materialize_grads=True)
        found.append(np.concatenate([part.numpy().ravel() for part in parts]))
    mean = np.mean(found, 0)
    noise = np.var(found, axis=0, ddof=1).sum() / len(found)
    return noise / (mean @ mean - noise)


def test_credit_of_a_run_measures_the_gradients_noise(recorded, groups, model_path, capsys):
    groups[1] = copy.deepcopy(groups[0]) | {"scores": [1.0, 0.25, 0.0, 0.5]}  # or the mean does not exceed the noise
    for group, sign in zip(groups, (1, 0.5, -1), strict=True):
        group["group_overrides"] = {"turn_values": [[0.5 * sign, 0.25, 9], [0.0, 0.5, 9], [0.25, 0, 9], [1, 0.75, 9]]}
        add_credit(group, Credit(lam=0.0))
    run = recorded(groups, "actor_rollout_ref.rollout.temperature=0.5")
    assert main(["credit", f"--run={run.path}", "--rows=11"]) == 0  # two groups of four
    out = capsys.readouterr().out
    assert f"step 1, 2 groups, policy {model_path};" in out
    own, grpo, ratio = (float(number) for number in re.findall(r" {3}([\d.e+-]+)$", out, re.MULTILINE))
    outcome = [
        [[(score - np.mean(scores)) / np.std(scores, ddof=1)] * 200 for score in scores]
        for scores in (group["scores"] for group in groups[:2])
    ]
    assert own == pytest.approx(gradient_noise(model_path, groups[:2], [g["advantages"] for g in groups[:2]]), rel=1e-2)
    assert grpo == pytest.approx(gradient_noise(model_path, groups[:2], outcome), rel=1e-2)
    assert ratio == pytest.approx(own / grpo, rel=1e-2) and abs(ratio - 1) > 0.02


def test_credit_of_a_run_needs_two_groups(recorded, groups):
    run = recorded(groups)
    with pytest.raises(SystemExit, match="--rows=7 holds 1 whole groups of step 1"):
        main(["credit", f"--run={run.path}", "--rows=7"])


def test_colors_tell_mask_sign_size_and_unlikely_tokens_apart():
    token = {"trained": True, "advantage": 1.0, "logprob": -0.1}
    good, bad = style_of(token, 1.0), style_of(token | {"advantage": -1.0}, 1.0)
    small, none = style_of(token | {"advantage": 0.1}, 1.0), style_of(token | {"advantage": 0.0}, 1.0)
    green, red = good.bgcolor.get_truecolor(), bad.bgcolor.get_truecolor()
    assert green.green > green.red and red.red > red.green and small.bgcolor.get_truecolor().green < green.green
    assert len({none.bgcolor.get_truecolor().red, none.bgcolor.get_truecolor().green}) == 1
    assert style_of(token | {"trained": False, "advantage": None}, 1.0).bgcolor is None
    assert style_of(token | {"logprob": -4.0}, 1.0).underline and not good.underline


def test_a_recording_that_ends_says_where(tmp_path):
    group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}
    lines = [{"number": number, "batch": [group | {"scores": [float(number)]}]} for number in (3, 4)]
    exported = tmp_path / "batches.jsonl"
    exported.write_text("\n".join(map(json.dumps, lines)))
    records.import_(tmp_path / "store", exported)
    with RecordedSource(tmp_path / "store", after=3) as source:
        number, [read] = source.next_batch()
        assert number == 4 and read.scores.tolist() == [4.0] and read.tokens.tolist() == [1, 2]
        with pytest.raises(records.TrajectoryStoreError, match="has no such batch; it has batches 3 to 4"):
            source.next_batch()
    with pytest.raises(records.TrajectoryStoreError, match="give the folder of a server"):
        RecordedSource(tmp_path, after=0).next_batch()
