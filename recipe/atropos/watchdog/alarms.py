"""Alarms: problems that a run reveals while it goes on. All that are declared in ``rules/``.

The trainer adds ``atropos/alarms/NAME``, with the value that raised it, to the metrics of a step that shows one with
``in_step``. The watchdog applies all rules to a run's history, and says which alarms are raised and cleared; the
launcher's prints both, appends them to ``alarms.jsonl``, and records them in ``summary.json``. ``docs/alarms.md`` has
the table, which ``table`` makes.

Guarantees of the watchdog:

- an alarm (of one environment, if it is about one) is raised once, and cleared once;
- it is cleared when its cause has not been seen for ``CLEAR_SECONDS`` and, if steps show it, for ``CLEAR_STEPS`` steps;
- nothing is read or written here: a recorded run gives the same alarms again.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import recipe.atropos.watchdog.rules as rules
from recipe.atropos.run.record import left_open
from recipe.atropos.watchdog.history import History
from recipe.atropos.watchdog.registry import ALARMS, RULES, Alarm, Finding, seen_in_step

for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    importlib.import_module(_module.name)

UNKNOWN = Alarm("")  # of another version
CLEAR_SECONDS, CLEAR_STEPS = 30.0, 5


def causes_first() -> list[str]:
    """Return the names of all alarms, causes before their symptoms."""
    return sorted(ALARMS, key=lambda name: ALARMS[name].cause)


if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[tuple(causes_first())]


def raised_by(metrics: Mapping[str, float], tolerance: float, mode: str) -> dict[str, float]:
    """Return the alarms of a step as {name: value}; ``mode`` is ``trainer.atropos.sampling_mismatch``."""
    shown = {name: alarm.in_step for name, alarm in ALARMS.items() if alarm.in_step is not None}
    return {
        name: metrics[each.metric]
        for name, each in shown.items()
        if not metrics.get(each.metric, 0) <= each.limit(tolerance, mode)
    }


def describe(name: str, value: float, tolerance: float) -> str:
    """Return a line of text for an alarm of a step: what it means, what was seen, and what to try."""
    return f"{ALARMS[name].means} ({seen_in_step(name, value, tolerance)}); {ALARMS[name].advice}"


def table() -> str:
    """Return the table of ``docs/alarms.md``."""
    rows = [f"| `{name}` | {ALARMS[name].means} | {ALARMS[name].advice} |\n" for name in causes_first()]
    return "| alarm | meaning | what to try |\n|---|---|---|\n" + "".join(rows)


# ---------------------------------------------------------------- the watchdog


@dataclass
class _Raised:
    finding: Finding  # the first, with the newest numbers
    seen_at: float
    seen_step: int


class Watchdog:
    """See the module. ``raised``: what is raised now, by alarm and environment."""

    def __init__(self, history: History):
        self.history = history
        self.raised: dict[tuple[str, str | None], _Raised] = {}

    def changes(self, now: float) -> list[dict[str, Any]]:
        """Return a line of ``alarms.jsonl`` for each alarm that is raised or cleared now (seconds since 1970)."""
        history, step = self.history, self.history.step or 0
        found = {(f.alarm, f.environment): f for f in findings(history, now)}
        lines = []
        for key, finding in found.items():
            if key not in self.raised:
                self.raised[key] = _Raised(finding, now, step)
                lines.append(alarm_line(finding, "raised", now, history.step))
            known = self.raised[key]
            known.finding = replace(finding, since=known.finding.since, since_step=known.finding.since_step)
            known.seen_at, known.seen_step = now, step
        for key, known in list(self.raised.items()):
            known.seen_step = min(known.seen_step, step)  # a trainer that is started again goes back
            quiet = now - known.seen_at >= CLEAR_SECONDS
            if key not in found and quiet and (not known.finding.of_steps or step - known.seen_step >= CLEAR_STEPS):
                del self.raised[key]
                lines.append(alarm_line(known.finding, "cleared", now, history.step))
        return lines


def findings(history: History, now: float) -> list[Finding]:
    """Return what all rules find."""
    return [finding for rule in dict.fromkeys(RULES.values()) for finding in rule(history, now)]


def alarm_line(finding: Finding, state: str, now: float, step: int | None) -> dict[str, Any]:
    return {
        "time": now,
        "step": step,
        "alarm": finding.alarm,
        "environment": finding.environment,
        "state": state,
        "since_step": finding.since_step,
        "since": finding.since,
        "seen": finding.seen,
        "advice": ALARMS[finding.alarm].advice,
    }


def account(lines: Sequence[dict[str, Any]], step: int | None) -> dict[str, dict[str, Any]]:
    """Return, by alarm, what ``summary.json`` says of it, from the lines of ``alarms.jsonl`` and the newest step.

    ``raised`` counts how often, ``first_step`` to ``last_step`` is from the first evidence to the last, ``steps`` of
    them it was raised; ``now``: whether it still is.
    """
    found: dict[str, dict[str, Any]] = {}
    open_lines = left_open(lines)
    for line in lines:
        name, first = line["alarm"], line["since_step"]
        entry = found.setdefault(name, {"raised": 0, "first_step": first, "last_step": None, "steps": 0})
        entry |= {"seen": line["seen"], "means": ALARMS.get(name, UNKNOWN).means, "advice": line["advice"]}
        entry["raised"] += line["state"] == "raised"
        entry["now"] = any(other["alarm"] == name for other in open_lines)
    for line in [*(line for line in lines if line["state"] == "cleared"), *open_lines]:
        entry, first = found[line["alarm"]], line["since_step"]
        last = line["step"] if line["state"] == "cleared" else step
        if last is not None:
            last = max(last, first or 0)  # a start that resumes from an earlier checkpoint clears it at that step
            entry["last_step"] = max(last, entry["last_step"] or 0)
            entry["steps"] += last - first + 1 if first is not None else last
    return found
