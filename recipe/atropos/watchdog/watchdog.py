"""The watchdog: applies all rules to a run's history, and says which alarms are raised and cleared.

Guarantees:

- an alarm (of one environment, if it is about one) is raised once, and cleared once;
- it is cleared when its cause has not been seen for ``CLEAR_SECONDS`` and, if steps show it, for ``CLEAR_STEPS`` steps;
- nothing is read or written here: a recorded run gives the same alarms again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe.atropos.run.record import left_open
from recipe.atropos.watchdog.alarms import ALARMS, UNKNOWN
from recipe.atropos.watchdog.history import History
from recipe.atropos.watchdog.registry import RULES, Finding

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


def account(lines: Iterable[Mapping[str, Any]], step: int | None) -> dict[str, dict[str, Any]]:
    """Return, by alarm, what ``summary.json`` says of it, from the lines of ``alarms.jsonl`` and the newest step.

    ``raised`` counts how often, ``first_step`` to ``last_step`` is from the first evidence to the last, ``steps`` of
    them it was raised; ``now``: whether it still is.
    """
    found: dict[str, dict[str, Any]] = {}
    lines = list(lines)
    for line in lines:
        name, first = line["alarm"], line["since_step"]
        entry = found.setdefault(name, {"raised": 0, "first_step": first, "last_step": None, "steps": 0, "now": False})
        entry |= {"seen": line["seen"], "means": ALARMS.get(name, UNKNOWN).means, "advice": line["advice"]}
        entry["raised"] += line["state"] == "raised"
        if line["state"] == "cleared":
            _add_steps(entry, first, line["step"])
    for line in left_open(lines):
        _add_steps(found[line["alarm"]], line["since_step"], step)
        found[line["alarm"]]["now"] = True
    return found


def _add_steps(entry: dict[str, Any], first: int | None, last: int | None) -> None:
    if last is not None:
        last = max(last, first or 0)  # a start that resumes from an earlier checkpoint clears it at that step
        entry["last_step"] = max(last, entry["last_step"] or 0)
        entry["steps"] += last - first + 1 if first is not None else last
