"""What benchmarks/credit.py makes of runs: the budget at which a miss is censored, and which ratios are bounds."""

import importlib.util
import json

import pytest

from helpers import ROOT
from recipe.atropos.trajectory_api import records

_SPEC = importlib.util.spec_from_file_location("credit_benchmark", ROOT / "benchmarks" / "credit.py")
credit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(credit)
RESULTS = ROOT / "benchmarks" / "credit.jsonl"


def line(to_80, end, task="keys 4", method="outcome GRPO", rate=4e-4, seed=0):
    run = {"task": task, "method": method, "rate": rate, "seed": seed, "to_80": to_80, "tokens": [0, end]}
    return {**run, "accuracy": [0.1, 0.5 if to_80 is None else 0.8], "seconds": 60}


def test_a_miss_counts_as_the_tasks_budget():
    """A run that ended early with short episodes, as much as the one that took the most; other tasks, and what is
    exploratory, have no part in it."""
    lines = [line(100.0, 200), line(None, 300), line(None, 900), line(950.0, 960, "keys 8")]
    lines.append(line(None, 3000, method="outcome GRPO, groups of 8"))
    budget = credit.budget_of(lines, "keys 4")
    assert budget == 900
    assert credit.censored(lines[:3], budget) == [100.0, 900, 900]
    assert credit.censored([line(950.0, 960)], budget) == [900], "what needs more than the budget misses"


@pytest.mark.parametrize(
    ("needed", "reference", "value", "kind", "shown"),
    [
        ([20, 40], [30, 90], 0.5, "", "0.50"),
        ([20, 40], [20, 100], 0.5, "<=", "<= 0.50"),  # the reference may need any more
        ([20, 100], [20, 40], 2.0, ">=", ">= 2.00"),
        ([50, 100, 100], [30, 70, 100], 1.25, "no bound", "1.25, no bound"),
        ([20, 100], [60, 100], 0.75, "not comparable", "not comparable"),
        ([100], [100, 100], 1.0, "not comparable", "not comparable"),
    ],
)
def test_a_ratio_is_a_bound_where_one_side_alone_misses(needed, reference, value, kind, shown):
    ratio = credit.ratio_of(needed, reference, 100)
    assert ratio == (pytest.approx(value), kind) and str(ratio) == shown


@pytest.mark.parametrize(
    ("value", "kind", "low", "high", "within"),
    [
        (0.2, "", 0.0, 0.25, True),
        (0.2, "<=", 0.0, 0.25, True),
        (0.2, ">=", 0.0, 0.25, False),
        (0.2, "no bound", 0.0, 0.25, False),
        (0.3, "<=", 0.0, 0.25, False),
        (1.0, "", 0.9, 1.1, True),
        (1.0, "<=", 0.9, 1.1, False),
        (1.0, ">=", 0.9, 1.1, False),
        (1.0, "not comparable", 0.9, 1.1, False),
    ],
)
def test_a_target_is_met_by_what_a_bound_allows(value, kind, low, high, within):
    assert credit.Ratio(value, kind).within(low, high) == within


def test_the_runs_of_the_file_are_of_these_settings(capsys):
    results = credit.read_results(RESULTS)
    ratios = credit.table(results, ["keys 4", "keys 8"])
    assert credit.met(ratios, "keys 8") and not credit.met(ratios, "keys 4"), "as the page says"
    page = (ROOT / "docs" / "token-advantages.md").read_text()
    *rows, _, _ = capsys.readouterr().out.splitlines()
    for row in (row for row in rows[2:] if "(exploratory)" not in row):
        *_, tokens, ratio, _ = map(str.strip, row.split("|"))
        assert tokens in page, row
        assert ratio in ("", "not comparable") or ratio.split(",")[0].replace("<=", "≤") in page, row


def test_seeds_follow_the_best_rate_of_final_methods():
    """A row is called exploratory until all runs of it are there, which only final methods have."""
    planned = list(credit.missing([], list(credit.RECIPES)))
    assert {key.seed for key in planned} == {0}
    other = [key for key in planned if key.method not in credit.FINAL or key.task in ("grid 6", "keys 16")]
    assert len({(key.task, key.method) for key in other}) == len(other) and {key.rate for key in other} == {4e-4}
    assert {"GRPO of partial scores", "turn tree, progress"} <= {key.method for key in other}
    done = [line(100.0 + (key.rate != 8e-4), 200, *key) for key in planned if key.task == "keys 4"]
    later = list(credit.missing(done, ["keys 4"]))
    assert {(key.rate, key.seed) for key in later} == {(8e-4, seed) for seed in range(1, 5)}
    assert {key.method for key in later} == set(credit.FINAL)
    assert not credit.is_final(done, "keys 4", "two epochs")
    done += [line(100.0, 200, *key) for key in later]
    assert credit.is_final(done, "keys 4", "two epochs") and not list(credit.missing(done, ["keys 4"]))


def test_a_target_needs_final_runs(capsys):
    runs = [line(1000.0, 1100), line(100.0, 200, method="progress, lam 0")]
    ratios = credit.table(runs, ["keys 4"])
    assert not credit.met(ratios, "keys 4") and ratios == {"keys 4, progress, lam 0 (exploratory)": (0.1, "")}
    assert "All 2 runs, with those of other learning rates: 1,300 tokens, 0.0 hours" in capsys.readouterr().out


def test_tokens_for_values_alone_count_as_sampled(tmp_path):
    """At the evaluation after the update that learns from them."""
    group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "inference_logprobs": [[1.0, -0.1]]}
    overrides = [{"value_tokens": [40]}, {}, None]
    lines = [{"number": n, "batch": [{**group, "group_overrides": one}]} for n, one in enumerate(overrides, 1)]
    write_lines(tmp_path / "export", lines)
    records.import_(tmp_path / "trajectories", tmp_path / "export")
    steps = [{"step": n, "atropos/batch": n, "atropos/trained_tokens": 10.0} for n in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", steps)
    evaluations = [{"step": n, "metrics": {"right": 0.1 * n}, "main": "right"} for n in (0, 1, 3)]
    write_lines(tmp_path / "evaluations.jsonl", evaluations)
    assert credit.curve(tmp_path) == ([0, 50, 70], [0.0, 0.1, pytest.approx(0.3)])


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
