"""The watchdog: applies all rules to a run's history, and says which alarms are raised and cleared.

Guarantees:

- an alarm (of one environment, if it is about one) is raised once, and cleared once;
- it is cleared when its cause has not been seen for ``CLEAR_SECONDS`` and, if steps show it, for ``CLEAR_STEPS`` steps;
- nothing is read or written here: a recorded run gives the same alarms again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe.atropos.watchdog.alarms import ALARMS
from recipe.atropos.watchdog.environment_rules import environment_findings
from recipe.atropos.watchdog.findings import Finding
from recipe.atropos.watchdog.history import History
from recipe.atropos.watchdog.service_rules import service_findings
from recipe.atropos.watchdog.training_rules import training_findings

CLEAR_SECONDS, CLEAR_STEPS = 30.0, 5


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
            if key in self.raised:
                known = self.raised[key]
                first = known.finding
                known.finding = replace(finding, since=first.since, since_step=first.since_step)
                known.seen_at, known.seen_step = now, step
            else:
                self.raised[key] = _Raised(finding, now, step)
                lines.append(alarm_line(finding, "raised", now, history.step))
        for key, known in list(self.raised.items()):
            known.seen_step = min(known.seen_step, step)  # a trainer that is started again goes back
            quiet = now - known.seen_at >= CLEAR_SECONDS
            if key not in found and quiet and (not known.finding.of_steps or step - known.seen_step >= CLEAR_STEPS):
                del self.raised[key]
                lines.append(alarm_line(known.finding, "cleared", now, history.step))
        return lines


def findings(history: History, now: float) -> list[Finding]:
    """Return what all rules find."""
    return [
        *environment_findings(history, now),
        *service_findings(history, now),
        *training_findings(history),
    ]


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


def left_open(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of ``alarms.jsonl`` that raised an alarm which no line clears."""
    open_: dict[tuple[str, str | None], dict[str, Any]] = {}
    for line in lines:
        key = line["alarm"], line["environment"]
        if line["state"] == "raised":
            open_[key] = dict(line)
        else:
            open_.pop(key, None)
    return list(open_.values())


def account(lines: Iterable[Mapping[str, Any]], step: int | None) -> dict[str, dict[str, Any]]:
    """Return, by alarm, what ``summary.json`` says of it, from the lines of ``alarms.jsonl`` and the newest step.

    ``raised`` counts how often, ``first_step`` to ``last_step`` is from the first evidence to the last, ``steps`` of
    them it was raised; ``now``: whether it still is.
    """
    found: dict[str, dict[str, Any]] = {}
    open_: dict[tuple[str, str | None], Mapping[str, Any]] = {}
    for line in lines:
        name, key = line["alarm"], (line["alarm"], line["environment"])
        entry = found.setdefault(name, {"raised": 0, "first_step": line["since_step"], "last_step": None, "steps": 0})
        means = ALARMS[name].means if name in ALARMS else ""  # perhaps another version's
        entry |= {"seen": line["seen"], "means": means, "advice": line["advice"]}
        if line["state"] == "raised":
            entry["raised"] += 1
            open_[key] = line
        else:
            begun = open_.pop(key, line)
            _add_steps(entry, begun["since_step"], line["step"])
    for (name, _), line in open_.items():
        _add_steps(found[name], line["since_step"], step)
    for name, entry in found.items():
        entry["now"] = any(alarm == name for alarm, _ in open_)
    return found


def _add_steps(entry: dict[str, Any], first: int | None, last: int | None) -> None:
    if last is not None:
        last = max(last, first or 0)  # a start that resumes from an earlier checkpoint clears it at that step
        entry["last_step"] = max(last, entry["last_step"] or 0)
        entry["steps"] += last - first + 1 if first is not None else last
