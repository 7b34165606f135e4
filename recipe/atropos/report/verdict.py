"""The verdict on a run in one sentence: whether it learned, by how much, and what is wrong."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from recipe.atropos.report.history import History
from recipe.atropos.report.signs import gains, held_out

_FEW = 4  # steps, before anything is said about learning

Level = Literal["good", "warn", "bad", "neutral"]


@dataclass(frozen=True)
class Verdict:
    """``level`` says how the page shows it."""

    level: Level
    text: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def verdict(history: History, alarms: Sequence[dict[str, Any]]) -> Verdict:
    """Return the sentence; ``alarms`` are those of ``signs.all_alarms``."""
    raised = [alarm for alarm in alarms if alarm["state"] == "raised"]
    if not history.lines:
        cause = f" {named(raised[0])}." if raised else ""
        return Verdict("bad" if raised else "neutral", f"No step was trained{_so_far(history)}.{cause}")
    outcome, learned = _outcome(history)
    told = f"{outcome}{_figures(history)} {_over(history)}"
    if learned == "no" and raised:
        return Verdict("bad", f"{told}. {named(raised[0])}{_others(raised[1:])}.")
    if raised:
        return Verdict("bad" if learned == "worse" else "warn", f"{told}. {named(raised[0])}{_others(raised[1:])}.")
    levels: dict[str, Level] = {"yes": "good", "no": "warn", "worse": "bad", "early": "neutral"}
    past = [alarm for alarm in alarms if alarm["state"] == "cleared"]
    clear = f"no alarm now, {len(past)} earlier" if past else "no alarm"
    return Verdict(levels[learned], f"{told}; {clear}.")


def named(alarm: dict[str, Any]) -> str:
    """Return an alarm as part of a sentence: name, environment, since when, what was seen."""
    where = f" in {alarm['environment']}" if alarm["environment"] else ""
    since = f" since step {alarm['since_step']}" if alarm["since_step"] is not None else ""
    return f"Alarm {alarm['alarm']}{where}{since}: {alarm['seen'].rstrip('.')}"


def _others(alarms: Sequence[dict[str, Any]]) -> str:
    names = [*dict.fromkeys(alarm["alarm"] for alarm in alarms)]
    return f"; also {', '.join(names)}" if names else ""


def _outcome(history: History) -> tuple[str, Literal["yes", "no", "worse", "early"]]:
    """By the held-out scores where there are two, else by the scores of training."""
    held = gains(history) if any(len(values) > 1 for values in held_out(history).values()) else []
    so_far = "So far: " if history.running and not history.finished else ""
    if any(gain < 0 for gain in held):
        return f"{so_far}Got worse:", "worse"
    if any(gain > 0 for gain in held):
        return f"{so_far}Learned:", "yes"
    before, after, noise = score_change(history)
    if len(history.lines) < _FEW:
        return "Too early to tell:", "early"
    if held and after - before > 2 * noise:
        return f"{so_far}Learned in training, but not on held-out items:", "no"
    if after - before > 2 * noise:
        return f"{so_far}Learned:", "yes"
    if before - after > 2 * noise:
        return f"{so_far}Got worse:", "worse"
    return f"{so_far}Learned nothing:", "no"


def score_change(history: History) -> tuple[float, float, float]:
    """Return the mean raw score of the first and of the last fifth of the steps, and the noise of their difference."""
    scores = np.array(history.column("atropos/mean_raw_score") or history.column("atropos/mean_score"))
    part = max(1, len(scores) // 5)
    first, last = scores[:part], scores[-part:]
    noise = float(np.sqrt((first.var() + last.var()) / part)) if part > 1 else 0.0
    return float(first.mean()), float(last.mean()), noise + 0.01


def _figures(history: History) -> str:
    parts = []
    for name, values in held_out(history).items():
        if len(values) > 1:
            several = f" {name}" if len(held_out(history)) > 1 else ""
            parts.append(f"held-out score{several} {values[0][1]:.2f} → {values[-1][1]:.2f}")
    before, after, _ = score_change(history)
    parts.append(f"mean training score {before:.2f} → {after:.2f}".replace("-", "−"))
    return " " + ", ".join(parts)


def _over(history: History) -> str:
    of = f" of {history.total_steps}" if not history.finished and history.total_steps else ""
    steps = f"over {history.steps}{of} steps"
    return steps if history.finished or history.running else f"{steps}, then stopped"


def _so_far(history: History) -> str:
    return " yet" if history.running else ""
