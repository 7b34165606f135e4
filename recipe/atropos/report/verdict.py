"""The alarms of a run, what its scores say, and the verdict in one sentence: whether it learned, by how much, and what
is wrong.

Alarms are those that the run recorded. A run that recorded none, perhaps because an earlier version made it, is played
to the watchdog again. What only the servers told while the run went on is not in its files; a server that kept old
weights still shows in the trained rows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np

from recipe.atropos.config.derived import derived_wait
from recipe.atropos.report.run_history import RunHistory, shown
from recipe.atropos.run.evaluations import held_out
from recipe.atropos.run.record import by_alarm
from recipe.atropos.watchdog.alarms import ALARMS, UNKNOWN, Watchdog
from recipe.atropos.watchdog.history import AlarmLimits, History

# Steps, before a change of the training score is believed, and before none means anything: the first and last fifth of
# the demonstration differ by more than their noise from step 20 on with every seed.
_FEW, _EARLY = 4, 20
_LEAST = 0.02  # change of a held-out score whose number of items is unknown
_BEHIND_STEPS = 5  # in which one weight version comes again and again, at last so many updates older than the others
Seen = dict[tuple[str, str | None], str]  # by alarm and environment
_WAIT = "trainer.atropos.max_wait_time"
_LOOKS = 400  # of the watchdog at a recorded run of any length

Level = Literal["good", "warn", "bad", "neutral"]


class RunVerdict(NamedTuple):
    """``level`` says how the page shows it."""

    level: Level
    text: str


def verdict(history: RunHistory, alarms: Sequence[dict[str, Any]]) -> RunVerdict:
    """Return the sentence; ``alarms`` are those of ``all_alarms``."""
    raised = [alarm for alarm in alarms if alarm["state"] == "raised"]
    others = ", ".join(dict.fromkeys(alarm["alarm"] for alarm in raised[1:]))
    cause = f" {named(raised[0])}{f'; also {others}' if others else ''}." if raised else ""
    if not history.lines:
        text = f"{'No step was trained yet' if history.running else 'Stopped before its first step'}.{cause}"
        return RunVerdict("bad" if raised or not history.running else "neutral", text)
    outcome, level = _outcome(history)
    told = f"{outcome}: {_figures(history)} over {history.steps} steps"
    if not history.finished and not history.running:
        stopped = f"Stopped at step {history.steps} of {history.total_steps or 'an unknown number'}."
        return RunVerdict("bad" if raised else "warn", f"{stopped}{cause} Until then: {told[0].lower()}{told[1:]}.")
    if raised:
        return RunVerdict("warn" if level == "good" else "bad", f"{told}.{cause}")
    past = sum(alarm["state"] == "cleared" for alarm in alarms)
    return RunVerdict(level, f"{told}; {f'no alarm now, {past} earlier' if past else 'no alarm'}.")


def named(alarm: dict[str, Any]) -> str:
    """Return an alarm as a sentence without a full stop: name, environment, since when, meaning, what was seen last."""
    where = f" in {alarm['environment']}" if alarm["environment"] else ""
    since = f" since step {alarm['since_step']}" if alarm["since_step"] is not None else ""
    seen = (alarm["seen_last"] or "").rstrip(".")
    return f"Alarm {alarm['alarm']}{where}{since}: " + (f"{alarm['means']} ({seen})" if alarm["means"] else seen)


def _outcome(history: RunHistory) -> tuple[str, Level]:
    """By the held-out scores where there are two, else by the scores of training; what is worse has a lower figure."""
    held = gains(history)
    fell, rose = min(held.values(), default=0.0) < 0, max(held.values(), default=0.0) > 0
    if fell or rose:
        text = "Better on some held-out items, worse on others" if fell and rose else "Got worse" if fell else "Learned"
        return text, "bad" if fell else "good"
    before, after, noise = training_scores(history)
    steps = len(history.lines)
    if steps >= _FEW and after - before > noise:
        return ("Learned in training, but not on held-out items", "warn") if held else ("Learned", "good")
    if steps < _FEW or (steps < _EARLY and before - after <= noise):
        return "Too early to tell", "neutral"
    if before - after > noise:
        return ("Got worse in training, unchanged on held-out items" if held else "Got worse"), "bad"
    return "Learned nothing so far" if history.running else "Learned nothing", "warn"


def _figures(history: RunHistory) -> str:
    parts, scores = [], held_out(history.evaluations)
    for name, gain in gains(history).items():
        (_, before, *_), (_, after, items, _) = scores[name][0], scores[name][-1]
        several = f" {name}" if len(scores) > 1 else ""
        noise = f"the noise of {items:.0f} items" if items else "its noise"
        parts.append(f"held-out score{several} {from_to(before, after)}" + (f" (within {noise})" if not gain else ""))
    before, after, _ = training_scores(history)
    parts.append(f"mean training score {from_to(before, after)}")
    return ", ".join(parts)


# ---------------------------------------------------------------- scores


def gains(history: RunHistory) -> dict[str, float]:
    """Return the change of each held-out score from first to last, 0 where so few items make it by chance.

    Two standard errors of the difference of two shares; environments with one evaluation are left out.
    """
    found = {}
    for name, values in held_out(history.evaluations).items():
        if len(values) > 1:
            (_, before, of, _), (_, after, items, _) = values[0], values[-1]
            noise = _LEAST
            if of and items and 0 <= min(before, after) and max(before, after) <= 1:
                noise = 2 * float(np.sqrt(before * (1 - before) / of + after * (1 - after) / items))
            found[name] = after - before if abs(after - before) > noise else 0.0
    return found


def from_to(before: float, after: float) -> str:
    """Return two scores as text: three decimals, more where two different ones would look the same."""
    digits = next((n for n in range(3, 9) if f"{before:.{n}f}" != f"{after:.{n}f}"), 3)
    return f"{before:.{digits}f} → {after:.{digits}f}".replace("-", "−")


def score_range(history: RunHistory) -> tuple[float, float] | None:
    """Return the lowest and the highest score of a trained row, as shaped, if they were recorded."""
    low, high = history.column("critic/score/min"), history.column("critic/score/max")
    return (min(low), max(high)) if low and high else None


def extent(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}".replace("-", "−")


def training_scores(history: RunHistory) -> tuple[float, float, float]:
    """Return the mean score of the first and of the last fifth of the steps, and two standard errors of the change.

    Scores are raw: from before a reward bridge shaped them.
    """
    scores = np.array(history.column("atropos/mean_raw_score") or history.column("atropos/mean_score"))
    if not len(scores):
        return 0.0, 0.0, float("inf")
    part = max(1, len(scores) // 5)
    first, last = scores[:part], scores[-part:]
    noise = 2 * float(np.sqrt((first.var() + last.var()) / part)) if part > 1 else float("inf")
    return float(first.mean()), float(last.mean()), noise


# ---------------------------------------------------------------- alarms


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
        alarm["settings"] = {key: shown(history.config[key]) for key in known.settings if key in history.config}
        alarm |= {"means": known.means, "where": known.chart}
    return sorted(found, key=lambda alarm: (alarm["state"] != "raised", ALARMS.get(alarm["alarm"], UNKNOWN).cause))


def _newest(lines: Iterable[dict[str, Any]], recorded: bool, seen: Seen) -> list[dict[str, Any]]:
    """Return the newest state of each alarm in lines of ``alarms.jsonl``; ``seen``: what raised ones showed last."""
    found = []
    for key, about in by_alarm(lines).items():
        raised, last = [line for line in about if line["state"] == "raised"], about[-1]
        # a start from an earlier checkpoint clears it at that step
        ends = [step for step in (last.get("step"), last.get("since_step")) if step is not None]
        is_open = last["state"] == "raised"
        alarm = {name: last.get(name) for name in ("state", "since_step", "advice")}
        alarm |= {"alarm": key[0], "environment": key[1], "times": len(raised), "recorded": recorded}
        alarm |= {"seen": raised[-1]["seen"], "raised_step": raised[-1].get("step")}
        alarm |= {"seen_last": seen.get(key, last["seen"]) if is_open else last["seen"]}
        found.append(alarm | {"until_step": None if is_open else max(ends, default=None)})
    return found


def _of_summary(history: RunHistory) -> Seen:
    """Return what was seen last of each recorded alarm; of one in several environments, the summary does not tell."""
    about, known = by_alarm(history.alarms), history.summary.get("alarms", {})
    times = Counter(name for name, _ in about)
    return {key: known[key[0]]["seen"] for key in about if key[0] in known and times[key[0]] == 1}


def _played(history: RunHistory) -> tuple[list[dict[str, Any]], Seen]:
    """Return the lines that the watchdog would have written of the recorded steps and reports, and what it saw last."""
    lines: list[dict[str, Any]] = []
    wait = history.config.get(_WAIT) or derived_wait(_WAIT, history.config.get("data.max_response_length", 1536))
    watchdog = Watchdog(History(AlarmLimits.from_config({**history.config, _WAIT: wait})))
    events = [(line["time"], None, line) for line in history.lines]
    events += [(line["time"], name, line) for name, reports in history.reports.items() for line in reports]
    events.sort(key=lambda event: event[0])
    every = -(-len(events) // _LOOKS)
    for place, (now, environment, line) in enumerate(events, start=1):
        if environment is None:
            watchdog.history.add_step(line)
        else:
            watchdog.history.add_report(environment, line)
        if place % every == 0 or place == len(events):
            lines += watchdog.changes(now)
    return lines, {key: raised.finding.seen for key, raised in watchdog.raised.items()}


def _server_behind(history: RunHistory) -> Iterator[dict[str, Any]]:
    """Yield an alarm if rows of one weight version come at each of the newest steps, beside rows of newer ones."""

    def behind(line: dict[str, Any]) -> bool:
        oldest, newest = line.get("atropos/staleness/max"), line.get("atropos/staleness/min")
        return oldest not in (None, newest) and _oldest_version(line) == _oldest_version(history.lines[-1])

    late = list(takewhile(behind, reversed(history.lines)))
    if len(late) >= _BEHIND_STEPS <= late[0]["atropos/staleness/max"] - late[0]["atropos/staleness/min"]:
        yield {
            "alarm": "server_out_of_sync",
            "state": "raised",
            "since_step": late[-1]["step"],
            "seen": f"rows of weight version {_oldest_version(late[0])} are in every step since, at last "
            f"{late[0]['atropos/staleness/max']:.0f} updates old, beside rows of "
            f"{late[0]['atropos/staleness/min']:.0f}",
            "advice": ALARMS["server_out_of_sync"].advice,
        }


def _oldest_version(line: dict[str, Any]) -> int:
    return int(line["step"] - 1 - line["atropos/staleness/max"])
