"""What benchmarks/credit.py makes of runs: the budget at which a miss is censored, and which ratios are bounds."""

import importlib.util

import pytest

from helpers import ROOT

_SPEC = importlib.util.spec_from_file_location("credit_benchmark", ROOT / "benchmarks" / "credit.py")
credit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(credit)
RESULTS = ROOT / "benchmarks" / "credit.jsonl"


def line(to_80, end, task="keys 4"):
    return {"task": task, "to_80": to_80, "tokens": [0, end]}


def test_a_miss_counts_as_the_tasks_budget():
    """A run that ended early with short episodes, as much as the one that took the most; other tasks have their own."""
    lines = [line(100.0, 200), line(None, 300), line(None, 900), line(950.0, 960, "keys 8")]
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
    """It is met only if each value that a bound allows meets it."""
    assert credit.Ratio(value, kind).within(low, high) == within


def test_the_runs_of_the_file_are_of_these_settings(capsys):
    """The page's figures are those of the command's table."""
    results = credit.read_results(RESULTS)
    ratios = credit.table(results, ["keys 4", "keys 8"], short=False)
    assert credit.met(ratios, "keys 4") and credit.met(ratios, "keys 8")
    page = (ROOT / "docs" / "token-advantages.md").read_text()
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()]
    for row in rows[2:]:
        tokens, ratio = row[5], row[6].removesuffix(" |")
        assert tokens in page, row
        assert ratio in ("1", "not comparable") or ratio.split(",")[0].replace("<=", "≤") in page, row
