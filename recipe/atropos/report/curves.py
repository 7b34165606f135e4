"""The curves of a run, its phases, histograms and counts, each with a title, a unit and what it means.

Every value here is read from the run's files; long series are made short enough for a page, without hiding a spike.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from recipe.atropos.report.chart_table import CHARTS, Chart
from recipe.atropos.report.run_history import SENT, RunHistory, extent, phases_of

T = TypeVar("T")
POINTS = 400  # of a curve; a screen has hardly more pixels for one
BARS = 60  # of a timeline
_BINS = 24  # of a histogram


def curves(history: RunHistory, alarms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts: ``{"id", "title", "unit", "about", "own", "series", "limit", "log", "marks"}``.

    A series is ``{"label", "x", "y"}``, perhaps with ``low`` and ``high``. ``marks`` are alarms that the chart shows,
    ``own`` says what holds for this run alone.
    """
    charts = []
    of_scores = {"score": _scores, "heldout": _held_out}
    for chart in CHARTS:
        found = of_scores.get(chart.id, _of_metrics)(history, chart)
        if any(y is not None for each in found["series"] for y in each["y"]):
            marks = [
                {"x": alarm["since_step"], "alarm": alarm["alarm"]}
                for alarm in alarms
                if alarm["where"] == chart.id and alarm["since_step"] is not None
            ]
            given = {name: getattr(chart, name) for name in ("id", "title", "unit", "about", "zero", "log")}
            charts.append({**given, "limit": history.config.get(chart.limit), "own": "", **found, "marks": marks})
    return charts


def _scores(history: RunHistory, chart: Chart) -> dict[str, Any]:
    keys = {"all trained rows": "atropos/mean_score", "before shaping": "atropos/mean_raw_score"}
    if all(line.get("atropos/mean_score") == line.get("atropos/mean_raw_score") for line in history.lines):
        del keys["before shaping"]
    scores = {key for line in history.lines for key in line if key.endswith("/mean_score") and key.count("/") == 2}
    names = sorted(key.split("/")[1] for key in scores if key.startswith("atropos/"))
    if len(names) > 1:
        keys |= {name: f"atropos/{name}/mean_score" for name in names}
    series = _series(history, keys)
    for name, outcomes in history.outcomes.items():
        rows = [
            (min(each.step, history.steps), each.ended, each.score)
            for each in outcomes
            if each.score is not None and each.step and each.ended
        ]
        number, items, score = np.array(rows).reshape(-1, 3).T
        steps, place = np.unique(number, return_inverse=True)
        means = np.bincount(place, items * score) / np.bincount(place, items)
        which = f", {name}" if len(history.reports) > 1 else ""
        series.append({"label": f"everything scored{which}"} | decimated(steps.astype(int).tolist(), means.tolist()))
    span = history.score_range
    return {"series": series, "own": f"single answers scored from {span}" if span else ""}


def _held_out(history: RunHistory, chart: Chart) -> dict[str, Any]:
    series = []
    for name, values in history.held_out.items():
        xs, ys, items, _ = zip(*values, strict=True)
        which = f" ({items[-1]:.0f} items)" if items[-1] else ""
        series.append({"label": f"{name}{which}", "points": True} | decimated(xs, ys))
    names = sorted({values[0].metric for values in history.held_out.values()})
    values = [y for each in series for y in each["y"] if y is not None]
    own = f"{', '.join(names)}, from {extent(min(values), max(values))}" if values else ""
    return {"series": series, "own": own, "share": all(0 <= y <= 1 for y in values)}


def _of_metrics(history: RunHistory, chart: Chart) -> dict[str, Any]:
    keys = dict(chart.keys)
    if chart.prefix:
        keys |= {name: chart.prefix + name for name in sorted(history.totals(chart.prefix))}
    return {"series": [each for each in _series(history, keys) if not chart.quiet or any(each["y"])]}


def _series(history: RunHistory, keys: Mapping[str, str]) -> list[dict[str, Any]]:
    """Counts that a step does not have are 0; other metrics are unknown then."""
    steps = [line["step"] for line in history.lines]
    counts = ("atropos/dropped/", "atropos/rows_with/")
    return [
        {"label": label}
        | decimated(steps, [line.get(key, 0 if key.startswith(counts) else None) for line in history.lines])
        for label, key in keys.items()
    ]


# ---------------------------------------------------------------- phases


def timeline(history: RunHistory) -> dict[str, Any]:
    """Return the mean seconds of each phase over the steps of a bar, and each phase's seconds in all.

    What is spent after a step's line was written, to save a checkpoint, is in the latter alone.
    """
    bars: list[dict[str, Any]] = []
    seconds = history.summary.get("seconds_per_phase") or {
        name: sum(phases_of(line)[name] for line in history.lines) for name in phases_of({})
    }
    names = [*(phases_of({}) | seconds)]
    for part in buckets(len(history.lines), BARS):
        lines = history.lines[part]
        first, last = lines[0]["step"], lines[-1]["step"]
        means = [sum(phases_of(line).get(name, 0.0) for line in lines) / len(lines) for name in names]
        label = str(first) if first == last else f"{first} to {last}"
        bars.append({"label": label, "values": [round(mean, 3) for mean in means]})
    return {"names": names, "bars": bars, "seconds": {name: round(value, 1) for name, value in seconds.items()}}


# ---------------------------------------------------------------- outcomes


def outcomes(history: RunHistory) -> list[dict[str, Any]]:
    """Return per environment what became of its items over time: counts by outcome in bars of equal time."""
    found = []
    for name, each in history.outcomes.items():
        totals = history.item_totals(name)
        names = sorted(totals, key=lambda outcome: (outcome != SENT, -totals[outcome]))
        begin = each[0].time if history.started is None else history.started
        end = max(begin + 1, *(one.time for one in each))
        n = min(BARS, len(each))
        counts = [Counter() for _ in range(n)]
        steps: list[int | None] = [None] * n
        for one in each:
            place = max(0, min(n - 1, int((one.time - begin) / (end - begin) * n)))
            counts[place] += one.counts
            steps[place] = one.step
        width = (end - begin) / n / 60
        bars = [
            {
                "label": f"{width * (place + 1):.1f} min" + (f", step {steps[place]}" if steps[place] else ""),
                "values": [count[outcome] for outcome in names],
            }
            for place, count in enumerate(counts)
        ]
        found.append({"environment": name, "names": names, "bars": bars})
    return found


# ---------------------------------------------------------------- histograms


def staleness_histogram(history: RunHistory) -> dict[str, Any] | None:
    """Return the rows by age in updates, for the first, the middle and the last third of the steps."""
    prefix, steps = "atropos/staleness/rows_", len(history.lines)
    counts = [
        (place * 3 // steps, int(key.removeprefix(prefix)), n)
        for place, line in enumerate(history.lines)
        for key, n in line.items()
        if key.startswith(prefix)
    ]
    return _binned(counts, "updates")


def length_histogram(rollouts: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return the rows by response tokens, for the first, the middle and the last third of the steps that were read."""
    counts = [
        (place * 3 // len(rollouts), row["response_tokens"], 1)
        for place, rows in enumerate(rollouts.values())
        for row in rows
        if "response_tokens" in row
    ]
    return _binned(counts, "tokens")


def _binned(counts: Sequence[tuple[int, int, float]], unit: str) -> dict[str, Any] | None:
    """Return the histogram of (third of the steps, value, number of rows)."""
    values = [value for _, value, _ in counts]
    if not values:
        return None
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // _BINS))
    edges = range(low, high + 1, width)
    labels = [str(edge) if width == 1 else f"{edge} to {min(high, edge + width - 1)}" for edge in edges]
    rows = np.zeros((3, len(edges)))
    for third, value, n in counts:
        rows[third, (value - low) // width] += n
    series = [
        {"label": label, "values": (third / third.sum()).round(4).tolist(), "rows": int(third.sum())}
        for label, third in zip(("first third of the steps", "middle", "last third"), rows, strict=True)
        if third.any()
    ]
    return {"unit": unit, "labels": labels, "series": series}


# ---------------------------------------------------------------- long series


def buckets(n: int, limit: int = POINTS) -> list[slice]:
    """Return at most ``limit`` slices of about equal length that cover range(n) in order."""
    edges = np.linspace(0, n, min(n, limit) + 1).round().astype(int).tolist()
    return [slice(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


def spread(items: Sequence[T], limit: int) -> list[T]:
    """Return at most ``limit`` of the items, evenly spread, the first and the last included."""
    places = np.linspace(0, len(items) - 1, min(len(items), limit)).round().astype(int)
    return [items[place] for place in np.unique(places)]


def decimated(xs: Sequence[float], ys: Sequence[float | None], limit: int = POINTS) -> dict[str, Any]:
    """Return a series as ``{"x", "y"}``, with ``"low"`` and ``"high"`` of each bucket if it had to be shortened.

    ``y`` is the mean of its bucket and ``x`` its last; missing and infinite values are None.
    """
    values = np.array([np.nan if y is None else y for y in ys], dtype=float)
    values[~np.isfinite(values)] = np.nan
    if len(values) <= limit:
        return {"x": list(xs), "y": [_short(y) for y in values]}
    parts = buckets(len(values), limit)
    known = [values[part][~np.isnan(values[part])] for part in parts]
    found: dict[str, list[Any]] = {"x": [xs[part.stop - 1] for part in parts]}
    for name, reduce in (("y", np.mean), ("low", np.min), ("high", np.max)):
        found[name] = [_short(reduce(part)) if len(part) else None for part in known]
    return found


def _short(value: float) -> float | None:
    """Return a number with 5 significant digits, None for NaN."""
    return None if np.isnan(value) else float(f"{value:.5g}")
