"""Held-out evaluation: when it is due, of which weights, and what is kept of it; and the pages a run leaves."""

import asyncio
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from helpers.environments.item_env import ItemEnv, ItemEnvConfig
from helpers.runs import run_of
from helpers.seeded_runs import healthy_run
from helpers.trainer import compose_config
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.launcher.evaluation import Evaluations, evaluation_text, heldout_summary, main_metric
from recipe.atropos.launcher.launch import write_page_of_failure, write_pictures
from recipe.atropos.launcher.plots import plot_reward, reward_figure
from recipe.atropos.run.evaluations import (
    NotEvaluated,
    mark_evaluated,
    needs_evaluation,
    read_evaluations,
    wait_until_evaluated,
)
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import append_line, read_lines, rewrite_lines


def line(step, env="a", value=0.5):
    metrics = {"eval/accuracy": value}
    return {"step": step, "version": step, "env": env, "metrics": metrics, "main": "eval/accuracy", "seconds": 1.0}


def write(folder, *lines, torn=b""):
    (folder / "evaluations.jsonl").write_bytes(b"".join(orjson.dumps(entry) + b"\n" for entry in lines) + torn)


def evaluations(folder, *options):
    config = compose_config("environments.a.target=m", "environments.b.target=m", *options)
    return Evaluations(run_of(config, folder), None)


# ---------------------------------------------------------------- what is due


def test_evaluation_of_a_resumed_run_repeats_the_unfinished(tmp_path):
    """What is trained again is repeated too.

    It was killed while b evaluated version 4; the line of version 6 is of updates that no checkpoint holds."""
    failed = {"step": 2, "version": 2, "env": "b", "error": "why"}
    write(tmp_path, line(0), line(0, "b"), line(2), failed, line(4), line(6), torn=b'{"step": 4, "env": "b"')
    kept = evaluations(tmp_path, "evaluation.every=2")
    assert [spec.name for spec in kept.due(4)] == ["b"]
    asyncio.run(kept.begin(5))
    left = [(entry["step"], entry["env"]) for entry in read_evaluations(tmp_path)]
    assert left == [(0, "a"), (0, "b"), (2, "a"), (4, "a")]
    assert (tmp_path / "evaluation/evaluated").read_text() == "5", "the trainer goes on"
    assert [spec.name for spec in kept.due(2)] == ["b"] and [spec.name for spec in kept.due(6)] == ["a", "b"]


def test_an_environment_that_reports_nothing_is_not_asked_again(tmp_path):
    """And one whose evaluation is off never."""
    assert [spec.name for spec in evaluations(tmp_path, "environments.a.evaluate=false").due(0)] == ["b"]
    write(tmp_path, line(0), line(0, "b") | {"metrics": {}})
    kept = evaluations(tmp_path)
    asyncio.run(kept.begin(3))
    assert [spec.name for spec in kept.due(9)] == ["a"]


def test_evaluation_is_repeated_of_what_is_trained_again(tmp_path):
    """By a trainer that starts again. Until it has pushed, the servers hold what is not the new version 10."""
    done, running, marker = [], asyncio.Event(), tmp_path / "evaluation/evaluated"
    held = SimpleNamespace(version=0)

    async def version():
        return held.version

    async def evaluate(spec, version):
        done.append(version)
        await running.wait()
        append_line(tmp_path / "evaluations.jsonl", line(version))

    async def polled(version):
        held.version = version
        for _ in range(20):
            await kept.poll()
            await asyncio.sleep(0)

    async def scene():
        running.set()
        for each in (5, 10):
            await polled(each)
        running.clear()
        await polled(15)
        await kept.begin_again(4)
        running.set()
        assert marker.read_text() == "4" and read_evaluations(tmp_path) == []
        await polled(10)
        assert done == [5, 10, 15]
        for each in (4, 5, 10):
            await polled(each)
            (tmp_path / "waiting").touch()
        await kept.stop()

    config = compose_config("environments.a.target=m", "evaluation.every=5")
    kept = Evaluations(run_of(config, tmp_path), SimpleNamespace(version=version))
    kept._one = evaluate
    asyncio.run(scene())
    assert done == [5, 10, 15, 5, 10] and marker.read_text() == "10"
    assert [entry["step"] for entry in read_evaluations(tmp_path)] == [5, 10]


# ---------------------------------------------------------------- the hold


def test_evaluation_holds_the_trainer_until_the_launchers_word(tmp_path, monkeypatch):
    """It looks after its servers meanwhile. Environments sample while the first weights are evaluated."""
    assert [version for version in range(7) if needs_evaluation(version, None)] == [0]
    assert [version for version in range(7) if needs_evaluation(version, 3)] == [0, 3, 6]
    monkeypatch.setattr("recipe.atropos.run.evaluations._MEANWHILE_SECONDS", 0.2)
    path, looks = tmp_path / "evaluation" / "evaluated", []
    mark_evaluated(path, -1)
    wait_until_evaluated(path, 4, 30, lambda: looks.append(mark_evaluated(path, 4)))
    assert len(looks) == 1
    wait_until_evaluated(path, 3, 0)
    with pytest.raises(NotEvaluated, match="version 5 .* was not evaluated within 0.2 s.*evaluation.timeout"):
        wait_until_evaluated(path, 5, 0.2)


# ---------------------------------------------------------------- what is found


class WithoutServer(ItemEnv):
    async def answer(self, number, **sampling):
        return [], [[number]], []


class Broken(WithoutServer):
    async def answer(self, number, **sampling):
        raise NotImplementedError("in what evaluate calls")


def evaluated(environment, folder, model_path, says):
    _, [server] = environment.config_init()
    server.model_name = str(model_path)
    settings = ItemEnvConfig(tokenizer_name=str(model_path), says=says, data_dir_to_save_evals=str(folder))
    asyncio.run(adapt(environment)(settings, [server])._run_evaluate())
    path = folder / "metrics.json"
    return orjson.loads(path.read_bytes())["results"]["all"] if path.exists() else None


@pytest.mark.parametrize("says", ["log", "attribute", "return"])
def test_evaluation_is_kept_however_the_environment_says_it(tmp_path, model_path, says):
    assert evaluated(WithoutServer, tmp_path, model_path, says) == {"eval/spread": 1.0, "eval/total": 4}
    assert (tmp_path / "samples.jsonl").exists() == (says == "log")


@pytest.mark.parametrize("says", ["nothing", "never"])
def test_evaluation_that_is_missing_is_no_error_but_said(tmp_path, model_path, says, caplog):
    assert evaluated(WithoutServer, tmp_path, model_path, says) is None
    assert ("evaluate is not implemented" if says == "never" else "evaluate reports nothing") in caplog.text


def test_what_is_lacking_within_an_evaluation_is_an_error(tmp_path, model_path):
    with pytest.raises(NotImplementedError, match="in what evaluate calls"):
        evaluated(Broken, tmp_path, model_path, "log")


def test_numbers_of_numpy_are_kept(tmp_path, model_path):
    class Numpy(WithoutServer):
        async def evaluate(self, *args, **kwargs):
            await self.evaluate_log(metrics={"eval/accuracy": np.float32(0.5), "eval/total": np.int64(8)})

    assert evaluated(Numpy, tmp_path, model_path, "log") == {"eval/accuracy": 0.5, "eval/total": 8}


@pytest.mark.parametrize(
    ("metrics", "main", "text"),
    [
        ({"eval/total": 8, "eval/accuracy": 0.25}, "eval/accuracy", "held-out accuracy 25.0% (8 problems, greedy)"),
        ({"eval/reward": 1.5, "eval/length": 7}, "eval/reward", "eval/reward 1.5 (greedy)"),
        ({}, None, "evaluate reports nothing: not evaluated any more"),
    ],
)
def test_of_all_metrics_one_is_shown(metrics, main, text):
    assert (main_metric(metrics), evaluation_text(metrics, greedy=True)) == (main, text)


def test_evaluation_summary_has_the_first_and_the_newest(tmp_path):
    failed = {"step": 6, "version": 6, "env": "b", "error": "why"}
    found = ((0, "a", 0.1), (0, "b", 0.2), (3, "a", 0.3), (3, "b", 0.4), (6, "a", 0.5))
    write(tmp_path, *(line(*each) for each in found), failed)
    summary = heldout_summary(tmp_path, several=True)
    assert set(summary) == {"heldout"}
    newest = {"before": 0.2, "version_before": 0, "after": 0.4, "version_after": 3}
    assert summary["heldout"]["b"] == {"metric": "eval/accuracy", "items": None, **newest}
    assert summary["heldout"]["a"]["after"] == 0.5
    write(tmp_path, line(0, value=0.1) | {"metrics": {"eval/accuracy": 0.1, "eval/total": 9}})
    alone = heldout_summary(tmp_path, several=False)
    assert alone["heldout_accuracy_before"] == 0.1 and alone["heldout_problems"] == 9
    assert "heldout_accuracy_after" not in alone


def test_the_picture_shows_every_evaluation_of_every_environment(tmp_path):
    """And of the training scores a running mean, once it has more than one point."""
    for steps, curves in ((5, 1), (6, 2)):
        lines = [{"step": s, "atropos/mean_score": 0.1 * s} for s in range(1, steps + 1)]
        rewrite_lines(tmp_path / "metrics.jsonl", lines)
        assert len(reward_figure(tmp_path).axes[0].lines) == curves
    write(tmp_path, *(line(step, env, step / 10) for step in (0, 3, 6) for env in "ab"), line(0, "c"))
    scores = {"atropos/mean_score": 0.0, "atropos/a/mean_score": 0.5, "atropos/b/mean_score": -0.5}
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps({"step": s, **scores}) + b"\n" for s in range(1, 7)))
    left, right = reward_figure(tmp_path).axes
    drawn = {curve.get_label(): list(curve.get_xdata()) for curve in right.lines}
    assert drawn == {"held out, a: accuracy": [0, 3, 6], "held out, b: accuracy": [0, 3, 6]}
    assert {"score, a", "score, b"} <= {curve.get_label() for curve in left.lines}


def test_the_picture_shows_names_that_are_no_formulas(tmp_path):
    folder, names = tmp_path / "$a_$", ("$b_$", "$c_$")
    folder.mkdir()
    write(folder, *(line(step, name) for step in (0, 3) for name in names))
    rewrite_lines(folder / "metrics.jsonl", [{"step": 1, **{f"atropos/{name}/mean_score": 0.5 for name in names}}])
    assert plot_reward(folder).read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- what the launcher leaves of a run to look at


def test_the_launcher_leaves_a_plot_and_a_page(tmp_path, capsys):
    run = RunDir(healthy_run(tmp_path))
    write_pictures(run)
    page = run.report.read_text()
    assert run.reward_picture.stat().st_size > 10_000 and "Learned: " in page and "writes this page with them" in page
    assert capsys.readouterr().out == ""


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    run = RunDir(healthy_run(tmp_path / "a run"))
    run.summary.write_text("{")
    write_pictures(run)
    told = capsys.readouterr().out
    assert "summary.json is damaged" in told and f" report '{run.path}' writes it" in told
    assert not run.report.exists()


def test_a_run_that_fails_leaves_a_page_and_says_where(tmp_path, capsys):
    run = RunDir(healthy_run(tmp_path))
    write_page_of_failure(run)
    assert "Learned: " in run.report.read_text() and "report.html: the run up to its end" in capsys.readouterr().out
    empty = RunDir(tmp_path / "empty")
    write_page_of_failure(empty)
    assert not empty.report.exists() and capsys.readouterr().out == ""
    # Its launcher writes the page, and still holds the folder.
    run = RunDir(healthy_run(tmp_path / "stopped"))
    rewrite_lines(run.metrics, read_lines(run.metrics)[:30])
    with run.lock():
        write_page_of_failure(run)
    page = run.report.read_text()
    assert '"state":"stopped before it was finished"' in page and "Stopped at step 30 of 60." in page
