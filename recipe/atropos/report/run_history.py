"""The history of a run, as its folder has it: what the report shows, read once; and what its scores say.

Everything is optional: a run that has trained no step yet, was killed, or was made by an earlier version is read too.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from pathlib import Path
from typing import Any

import numpy as np

from recipe.atropos.config.compose import leaves
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.evaluations import Evaluation, held_out, read_evaluations
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import PHASES, ItemCounts, read_metrics
from recipe.atropos.run.status import is_finished
from recipe.atropos.utils.files import read_json, read_lines, read_yaml
from recipe.atropos.utils.secret import HIDDEN, without_secrets

SENT = "sent"
_ADDRESS = re.compile(r"(https?://)(?:[^/\s@]*@)?([^/\s@'\"]+)/[^\s'\"]+")
_LEAST = 0.02  # change of a held-out score whose number of items is unknown
OUTCOMES = ("not_sent/", "failed/")  # of an item, beside SENT, in an environment's report


@dataclass(frozen=True)
class Outcomes:
    """What became of an environment's items between two lines of its report: groups by outcome."""

    time: float  # Unix, s, of the later line
    step: int | None
    counts: Counter[str]
    score: float | None  # mean over everything scored in between, sent or not

    @property
    def ended(self) -> int:
        """Number of items that did not fail, which have scores."""
        return sum(number for name, number in self.counts.items() if not name.startswith("failed/"))


@dataclass
class RunHistory:
    """A run's files. ``lines`` are those of ``metrics.jsonl``, in order; ``config`` is flat, by dotted key."""

    run: RunDir
    lines: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    running: bool = False
    host: str | None = None  # another machine, on which it runs as far as its files say

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def steps(self) -> int:
        """Number of the last trained step."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def total_steps(self) -> int | None:
        return self.config.get("trainer.total_training_steps")

    @property
    def finished(self) -> bool:
        return is_finished(self.run, self.steps, self.total_steps)

    @cached_property
    def started(self) -> float | None:
        """Unix time of the earliest line of any file; None if there is none."""
        files = (self.lines, self.evaluations, *self.reports.values())
        # An evaluation that failed has no time.
        return min((line["time"] for lines in files for line in lines[:1] if "time" in line), default=None)

    @cached_property
    def held_out(self) -> dict[str, list[Evaluation]]:
        """The evaluations of each environment, in order."""
        return held_out(self.evaluations)

    @property
    def gains(self) -> dict[str, float]:
        """The change of each held-out score from first to last, 0 where so few items make it by chance.

        Two standard errors of the difference of two shares; environments with one evaluation are left out.
        """
        found = {}
        for name, values in self.held_out.items():
            if len(values) > 1:
                (_, before, of, _), (_, after, items, _) = values[0], values[-1]
                noise = _LEAST
                if of and items and 0 <= min(before, after) and max(before, after) <= 1:
                    noise = 2 * float(np.sqrt(before * (1 - before) / of + after * (1 - after) / items))
                found[name] = after - before if abs(after - before) > noise else 0.0
        return found

    @property
    def training_scores(self) -> tuple[float, float, float]:
        """The mean score of the first and of the last fifth of the steps, and two standard errors of the change.

        Scores are raw: from before a reward bridge shaped them.
        """
        scores = np.array(self.column("atropos/mean_raw_score") or self.column("atropos/mean_score"))
        if not len(scores):
            return 0.0, 0.0, float("inf")
        part = max(1, len(scores) // 5)
        first, last = scores[:part], scores[-part:]
        noise = 2 * float(np.sqrt((first.var() + last.var()) / part)) if part > 1 else float("inf")
        return float(first.mean()), float(last.mean()), noise

    @property
    def score_range(self) -> str:
        """The lowest and the highest score of a trained row, as shaped; "" if they were not recorded."""
        low, high = self.column("critic/score/min"), self.column("critic/score/max")
        return extent(min(low), max(high)) if low and high else ""

    @cached_property
    def outcomes(self) -> dict[str, list[Outcomes]]:
        """What became of the items, by environment that has any, in order; lines without a new item are left out."""
        return {name: found for name, lines in self.reports.items() if (found := list(_differences(lines)))}

    def column(self, key: str) -> list[float]:
        """Return a metric of all steps that have it."""
        return [line[key] for line in self.lines if line.get(key) is not None]

    def totals(self, prefix: str) -> Counter[str]:
        """Return the sums over all steps of the metrics that start with ``prefix``, by the rest of their names."""
        found: Counter[str] = Counter()
        for line in self.lines:
            own = {key: value for key, value in line.items() if key.startswith(prefix)}
            found.update({key.removeprefix(prefix): n for key, n in own.items() if isinstance(n, int | float)})
        return found

    def item_totals(self, name: str) -> Counter[str]:
        """Return what became of an environment's items over all its processes, by outcome."""
        return sum((each.counts for each in self.outcomes[name]), Counter())

    def session_totals(self, name: str) -> Counter[str]:
        """Return the counts of an environment's sessions over all its processes, by name."""
        totals = sum((Counter(added) for _, added in _added(self.reports[name])), Counter())
        return Counter({key.removeprefix("sessions/"): n for key, n in totals.items() if key.startswith("sessions/")})


def read_history(folder: str | Path) -> RunHistory:
    """Read a run's folder, also while the run goes on.

    Raises:
        ConfigurationError: there is no run in the folder.
    """
    run = RunDir(folder)
    if not any(path.exists() for path in (run.config, run.metrics, run.summary, run.environments)):
        raise ConfigurationError(f"{folder}: no run is in this folder; give a run's folder, such as runs/demo")
    reports: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(run.environments.glob("*.jsonl")):  # NAME.jsonl, of other replicas NAME.K.jsonl
        reports.setdefault(path.name.partition(".")[0], []).append(read_lines(path))
    config = without_secrets(read_yaml(run.config)) if run.config.exists() else {}
    holder = run.holder()
    # Of one elsewhere nothing is known: it runs unless its launcher has ended its services.
    running = holder is not None and holder.lives() and (holder.is_here or read_json(run.services) != {})
    return RunHistory(
        run,
        read_metrics(run.path),
        read_evaluations(run.path),
        read_json(run.summary, {}),
        read_lines(run.alarms),
        # each replica's in their own order, which the clock may not show: it was set back, perhaps
        {name: list(merge(*each, key=lambda line: line["time"])) for name, each in reports.items() if any(each)},
        dict(leaves(config)),
        running,
        holder.host if running and not holder.is_here else None,
    )


def shown(value: Any) -> str:
    """Return a setting as the page shows it; its addresses may hold keys, in their paths or before the @."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return _ADDRESS.sub(rf"\1\2/{HIDDEN}", text)


def from_to(before: float, after: float) -> str:
    """Return two scores as text: three decimals, more where two different ones would look the same."""
    digits = next((n for n in range(3, 9) if f"{before:.{n}f}" != f"{after:.{n}f}"), 3)
    return f"{before:.{digits}f} → {after:.{digits}f}".replace("-", "−")


def extent(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}".replace("-", "−")


def phases_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by phase, in order."""
    return {phase: line.get(f"phase_s/{phase}", 0.0) for phase in (*PHASES, "other")}


def _added(lines: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], Counter[str]]]:
    """Yield what each line adds to the counts before."""
    counts = ItemCounts()
    yield from ((line, counts.add(line)) for line in lines)


def _differences(lines: Iterable[Mapping[str, Any]]) -> Iterable[Outcomes]:
    """Yield what became of the items since the line before; lines without a new item are left out."""
    for line, added in _added(lines):
        named = {name: n for name, n in added.items() if name.startswith(OUTCOMES) and n > 0}
        if sent := added.get("groups_sent", 0) + added.get("groups_written", 0):
            named[SENT] = sent
        if named:
            yield Outcomes(line["time"], line.get("step"), Counter(named), line.get("means", {}).get("score"))
