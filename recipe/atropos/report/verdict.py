"""The verdict on a run in one sentence: whether it learned, by how much, and what is wrong."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from recipe.atropos.report.run_history import RunHistory, from_to

# Steps, before a change of the training score is believed, and before none means anything: the first and last fifth of
# the demonstration differ by more than their noise from step 20 on with every seed.
_FEW, _EARLY = 4, 20

Level = Literal["good", "warn", "bad", "neutral"]


class RunVerdict(NamedTuple):
    """``level`` says how the page shows it."""

    level: Level
    text: str


def verdict(history: RunHistory, alarms: Sequence[dict[str, Any]]) -> RunVerdict:
    """Return the sentence; ``alarms`` are those of ``alarm_list.all_alarms``."""
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
    held = history.gains
    fell, rose = min(held.values(), default=0.0) < 0, max(held.values(), default=0.0) > 0
    if fell or rose:
        text = "Better on some held-out items, worse on others" if fell and rose else "Got worse" if fell else "Learned"
        return text, "bad" if fell else "good"
    before, after, noise = history.training_scores
    steps = len(history.lines)
    if steps >= _FEW and after - before > noise:
        return ("Learned in training, but not on held-out items", "warn") if held else ("Learned", "good")
    if steps < _FEW or (steps < _EARLY and before - after <= noise):
        return "Too early to tell", "neutral"
    if before - after > noise:
        return ("Got worse in training, unchanged on held-out items" if held else "Got worse"), "bad"
    return "Learned nothing so far" if history.running else "Learned nothing", "warn"


def _figures(history: RunHistory) -> str:
    parts, scores = [], history.held_out
    for name, gain in history.gains.items():
        (_, before, *_), (_, after, items, _) = scores[name][0], scores[name][-1]
        several = f" {name}" if len(scores) > 1 else ""
        noise = f"the noise of {items:.0f} items" if items else "its noise"
        parts.append(f"held-out score{several} {from_to(before, after)}" + (f" (within {noise})" if not gain else ""))
    before, after, _ = history.training_scores
    parts.append(f"mean training score {from_to(before, after)}")
    return ", ".join(parts)
