"""The page as a file: what it holds, what it never holds, and how large it gets."""

import json
import os
import re
import tomllib

import pytest

from helpers import ROOT
from helpers.runs import make_run
from helpers.seeded_runs import Seeded, healthy_run, seeded_run
from recipe.atropos.__main__ import main
from recipe.atropos.inference.installed import installed_versions
from recipe.atropos.report.curves import curves, outcomes
from recipe.atropos.report.page import describe, page, write_report
from recipe.atropos.report.run_history import read_history
from recipe.atropos.utils.files import append_line, read_lines, rewrite_lines, write_json


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_has_all_sections_of_a_run(healthy, monkeypatch):
    [run] = data_of(write_report(healthy.run.path).read_text())["runs"]
    charts = {chart["id"] for chart in run["curves"]}
    assert {"score", "heldout", "entropy", "logprobs", "kl", "gradient", "lr", "length", "staleness", "speed"} <= charts
    assert len(run["timeline"]["bars"]) == 60 and run["staleness"]["series"] and run["lengths"]["series"]
    reasons = {each["reason"]: each["count"] for each in run["dropped"]}
    assert reasons["sent"] == 1008 and reasons["not_sent/equal_scores"] == 622
    changed = {key: default for key, _, default, _ in run["configuration"] if default is not None}
    assert changed["actor_rollout_ref.actor.optim.lr"] == "1e-06" and "trainer.critic_warmup" not in changed
    assert run["versions"].keys() >= {"python", "verl", "torch"} and not run["recorded"]
    own = {chart["id"]: chart["own"] for chart in run["curves"] if chart.get("own")}
    held_out = "eval/percent_correct, from 0.3672 to 0.9961"
    assert own == {"score": "single answers scored from −1 to 1", "heldout": held_out}
    assert ["scores of trained answers, lowest to highest", "−1 to 1"] in run["figures"]
    monkeypatch.setitem(healthy.summary["seconds_per_phase"], "save", 300.0)  # the lines of its steps have it not
    timeline = describe(healthy, tokens=False)["timeline"]
    assert timeline["names"][-1] == "save" and timeline["seconds"]["save"] == 300.0
    assert {len(bar["values"]) for bar in timeline["bars"]} == {len(timeline["names"])}


def test_the_page_has_the_versions_that_the_run_recorded(tmp_path, monkeypatch):
    folder = make_run(tmp_path)
    write_json(folder.identity, {"format": 1, "versions": {"torch": "1.2.3"}})
    run = describe(read_history(folder.path), tokens=False)
    assert run["versions"] == {"torch": "1.2.3"} and run["recorded"]
    # The commit is the recipe's: a git hook names its own repository in the environment.
    without = installed_versions(None).get("recipe (commit)")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert installed_versions(None).get("recipe (commit)") == without


def test_all_that_an_environment_scored_in_a_step_counts(tmp_path):
    """A report of a single group, or of one replica, is not the curve's point."""
    folder = make_run(tmp_path)
    for replica, (items, score) in enumerate([(3, 1.0), (1, -1.0)]):
        line = {"time": 1.0 + replica, "replica": replica, "step": 1, "in_flight": 0}
        line |= {"counts": {"items": items, "groups_sent": items}, "means": {"score": score}}
        folder.environments.mkdir(exist_ok=True)
        append_line(folder.environment_report("sums", replica), line)
    history = read_history(folder.path)
    [chart] = [chart for chart in curves(history, []) if chart["id"] == "score"]
    [series] = [each for each in chart["series"] if each["label"].startswith("everything scored")]
    assert series["y"] == [0.5]


def test_items_are_counted_once_where_the_clock_was_set_back(tmp_path):
    folder = make_run(tmp_path)
    folder.environments.mkdir(exist_ok=True)
    for time, items in ((9000.0, 10), (9010.0, 20), (10.0, 30), (20.0, 40)):
        line = {"time": time, "step": 1, "in_flight": 0, "means": {}}
        append_line(folder.environment_report("sums"), line | {"counts": {"items": items, "groups_sent": items}})
    history = read_history(folder.path)
    assert history.item_totals("sums") == {"sent": 40}
    [chart] = outcomes(history)
    assert sum(sum(bar["values"]) for bar in chart["bars"]) == 40


def test_cut_rows_are_marked_and_said_to_be_trained_on(tmp_path):
    """In the chart as in the table: trainer.atropos.overlong=truncate cuts the response's end."""
    run = describe(read_history(seeded_run(tmp_path, "truncation")), tokens=False)
    [cut] = [each for each in run["dropped"] if each["reason"] == "response_truncated"]
    [chart] = [chart for chart in run["curves"] if chart["id"] == "cut"]
    for text in (cut["meaning"], chart["about"]):
        assert "beginning is trained on" in text and "cut off is not" in text
    [length] = [chart for chart in run["curves"] if chart["id"] == "length"]
    assert length["marks"] == [{"x": 21, "alarm": "all_rows_clipped"}], "at the onset"


def test_the_page_needs_no_network_and_holds_no_secret(tmp_path):
    run = Seeded(tmp_path)
    run.config += "openai:\n  api_key: sk-very-secret\n"
    run.set("api_url", "http://127.0.0.1:8000/sk-in-the-path")
    text = write_report(run.write(recorded=False)).read_text()
    assert "sk-" not in text and "openai.api_key" in text and "http://127.0.0.1:8000/***" in text
    outside = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\s\"']+", outside)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)|@import|\bsrc=|fetch\(", outside)


def test_a_sample_cannot_end_the_data_or_run_a_script(tmp_path):
    run = healthy_run(tmp_path)
    rows = read_lines(run / "rollouts/60.jsonl")
    evil = "</script><script>window.evil = 1</script><!--{{script}}"
    rewrite_lines(run / "rollouts/60.jsonl", [row | {"output": evil} for row in rows])
    text = write_report(run).read_text()
    assert "</script><script>window.evil" not in text
    assert evil in {row["answer"] for row in data_of(text)["runs"][0]["samples"]["rows"]}


def test_the_page_of_a_long_run_is_hardly_larger(tmp_path):
    run, times = Seeded(tmp_path), 40
    run.lines = [line | {"step": at + 1} for at, line in enumerate(run.lines * times)]
    for step in range(61, 60 * times, 7):
        row = read_lines(run.run.rollouts / "60.jsonl")[0] | {"step": step, "output": "word " * 4_000}
        rewrite_lines(run.run.rollouts / f"{step}.jsonl", [row | {"uid": str(uid)} for uid in range(20)])
    text = page([read_history(run.write(recorded=False))])
    assert 100_000 < len(text) < 2_000_000


def test_a_run_goes_on_while_the_process_that_holds_it_lives(tmp_path):
    """On another machine, as far as its files say."""

    def said(name, **holder):
        return describe(read_history(make_run(tmp_path / name, **holder).path), tokens=False)["state"]

    assert said("alive") == "running" and said("ended", host="far") == "stopped before it was finished"
    launcher = {"pid": os.getpid(), "started": 1.0}
    assert said("killed", started=1.0, launcher=launcher) == "stopped before it was finished"
    elsewhere = "running on far, as far as its files say"
    assert said("elsewhere", host="far", launcher=launcher) == elsewhere
    alone = make_run(tmp_path / "alone", host="far")
    alone.services.unlink()
    assert describe(read_history(alone.path), tokens=False)["state"] == elsewhere, "a trainer without a launcher"


def test_a_run_with_a_single_file_has_a_page(tmp_path):
    """Also with steps that have no time."""
    lines = [{"step": step, "time": 5.0, "atropos/mean_score": 0.5} for step in range(1, 6)]
    rewrite_lines(tmp_path / "metrics.jsonl", [lines[0] | {"timing_s/step": 2.0}, *lines[1:]])
    run = describe(read_history(tmp_path))
    assert [chart["id"] for chart in run["curves"]] == ["score"] and run["samples"]["rows"] == []
    assert ["median step", "2.00 s"] in run["figures"]
    # As of a model without a chat template: there is no other line yet, and none tells when the run started.
    files = make_run(tmp_path, steps=0)
    assert "started" not in dict(describe(read_history(files.path), tokens=False)["figures"])
    rewrite_lines(files.evaluations, [{"step": 0, "version": 0, "env": "gsm8k", "error": "no evaluation"}])
    assert describe(read_history(files.path), tokens=False)["state"] == "running"


def test_the_command_writes_the_page_of_one_run_or_two(tmp_path, monkeypatch, capsys):
    """It finds a run by its name; two of one name are told apart. Its errors are one line."""
    for folder in ("runs/one", "b/one"):
        make_run(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "one"]) == 0 and capsys.readouterr().out == "runs/one/report.html\n"
    assert main(["report", "one", str(tmp_path / "b/one"), "--output", "new/both.html"]) == 0
    names = [run["name"] for run in data_of((tmp_path / "new/both.html").read_text())["runs"]]
    assert names == ["runs/one (1)", "b/one (2)"]
    monkeypatch.chdir(tmp_path / "b/one")
    assert describe(read_history("."), tokens=False)["name"] == "one"
    with pytest.raises(SystemExit, match="^error: .*: no run there "):
        main(["report", str(tmp_path)])
    target = tmp_path / "b/one/config.yaml/new/report.html"  # as on a disk that is mounted read-only
    with pytest.raises(SystemExit, match=rf"^error: {target}: Not a directory; give another file \(--output\)$"):
        main(["report", str(tmp_path / "b/one"), "--output", str(target)])


def test_an_installed_package_has_the_files_of_the_page():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    recipe = ROOT / "recipe/atropos"
    shipped = {path for pattern in settings["recipe.atropos"] for path in recipe.glob(pattern)}
    assert {path for path in (recipe / "report").iterdir() if path.suffix in (".html", ".css", ".js")} <= shipped
