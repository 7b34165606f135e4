"""The alarms of a run: those that it recorded, or else what the watchdog finds in its recorded history.

A run that recorded no alarm, perhaps because an earlier version made it, is played to the watchdog again. What only the
servers told while the run went on is not in its files; a server that kept old weights still shows in the trained rows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from recipe.atropos.config.derived import derived_wait
from recipe.atropos.report.run_history import RunHistory, shown
from recipe.atropos.run.record import by_alarm
from recipe.atropos.watchdog.alarms import ALARMS, UNKNOWN, Watchdog
from recipe.atropos.watchdog.history import AlarmLimits, History

_BEHIND_STEPS = 5  # in which one weight version comes again and again, at last so many updates older than the others
Seen = dict[tuple[str, str | None], str]  # by alarm and environment
_WAIT = "trainer.atropos.max_wait_time"
_LOOKS = 400  # of the watchdog at a recorded run of any length


def all_alarms(history: RunHistory) -> list[dict[str, Any]]:
    """Return a run's alarms, raised ones first, causes before symptoms.

    Each is ``{"alarm", "environment", "state", "since_step", "raised_step", "until_step", "seen", "seen_last", "means",
    "advice", "settings", "where", "times", "recorded"}``: ``since_step`` is the first that showed it, ``seen`` is from
    when it was raised, ``seen_last`` from its end or now; ``where`` is its chart or section; ``times`` counts how often
    it was raised; ``recorded`` is false if only the page found it.
    """
    recorded = bool(history.alarms)
    lines, newest = (history.alarms, _of_summary(history)) if recorded else _played(history)
    found = _newest(lines, recorded, newest)
    if not any(alarm["alarm"] == "server_out_of_sync" for alarm in found):
        found += _newest(_server_behind(history), False, {})
    for alarm in found:
        known = ALARMS.get(alarm["alarm"], UNKNOWN)
        alarm |= {
            "means": known.means,
            "where": known.chart,
            "settings": {key: shown(history.config[key]) for key in known.settings if key in history.config},
        }
    return sorted(found, key=lambda alarm: (alarm["state"] != "raised", ALARMS.get(alarm["alarm"], UNKNOWN).cause))


def _newest(lines: Iterable[dict[str, Any]], recorded: bool, seen: Seen) -> list[dict[str, Any]]:
    """Return the newest state of each alarm in lines of ``alarms.jsonl``; ``seen``: what raised ones showed last."""
    found = []
    for (name, environment), about in by_alarm(lines).items():
        raised, last = [line for line in about if line["state"] == "raised"], about[-1]
        begun = raised[-1] if raised else {"seen": about[0].get("seen")}
        alarm = {
            "alarm": name,
            "environment": environment,
            **{key: last.get(key) for key in ("state", "since_step", "advice")},
            "seen": begun.get("seen"),
            "raised_step": begun.get("step"),
            "times": len(raised),
            "recorded": recorded,
        }
        if last["state"] == "raised":
            alarm |= {"seen_last": seen.get((name, environment), last["seen"]), "until_step": None}
        else:  # a start from an earlier checkpoint clears it at that step
            ends = [step for step in (last.get("step"), last.get("since_step")) if step is not None]
            alarm |= {"seen_last": last.get("seen"), "until_step": max(ends, default=None)}
        found.append(alarm)
    return found


def _of_summary(history: RunHistory) -> Seen:
    """Return what was seen last of each recorded alarm; of one in several environments, the summary does not tell."""
    about = {(line["alarm"], line.get("environment")) for line in history.alarms}
    names = [name for name, _ in about]
    known = history.summary.get("alarms", {})
    return {key: known[key[0]]["seen"] for key in about if key[0] in known and names.count(key[0]) == 1}


def _played(history: RunHistory) -> tuple[list[dict[str, Any]], Seen]:
    """Return the lines that the watchdog would have written of the recorded steps and reports, and what it saw last."""
    lines: list[dict[str, Any]] = []
    wait = history.config.get(_WAIT) or derived_wait(_WAIT, history.config.get("data.max_response_length", 1536))
    watchdog = Watchdog(History(AlarmLimits.from_config({**history.config, _WAIT: wait})))
    sources = {None: history.lines, **history.reports}
    events = [(environment, line) for environment, found in sources.items() for line in found]
    every = -(-len(events) // _LOOKS)
    for place, (environment, line) in enumerate(sorted(events, key=lambda event: event[1]["time"]), start=1):
        if environment is None:
            watchdog.history.add_step(line)
        else:
            watchdog.history.add_report(environment, line)
        if place % every == 0 or place == len(events):
            lines += watchdog.changes(line["time"])
    return lines, {key: raised.finding.seen for key, raised in watchdog.raised.items()}


def _server_behind(history: RunHistory) -> Iterator[dict[str, Any]]:
    """Yield an alarm if rows of one weight version come at each of the newest steps, beside rows of newer ones."""
    late: list[dict[str, Any]] = []
    for line in reversed(history.lines):
        oldest, newest = line.get("atropos/staleness/max"), line.get("atropos/staleness/min")
        if oldest is None or oldest == newest or (late and _oldest_version(line) != _oldest_version(late[0])):
            break
        late.append(line)
    if len(late) < _BEHIND_STEPS or late[0]["atropos/staleness/max"] - late[0]["atropos/staleness/min"] < _BEHIND_STEPS:
        return
    first, last = late[-1], late[0]
    yield {
        "alarm": "server_out_of_sync",
        "state": "raised",
        "since_step": first["step"],
        "seen": f"rows of weight version {_oldest_version(last)} are in every step since, at last "
        f"{last['atropos/staleness/max']:.0f} updates old, beside rows of {last['atropos/staleness/min']:.0f}",
        "advice": ALARMS["server_out_of_sync"].advice,
    }


def _oldest_version(line: dict[str, Any]) -> int:
    return int(line["step"] - 1 - line["atropos/staleness/max"])
