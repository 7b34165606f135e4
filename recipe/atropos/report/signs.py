"""Alarms of a run: those that it recorded, and what its history shows where none was recorded.

A run's own alarms, in ``alarms.jsonl``, come first. Runs of earlier versions have some in ``summary.json`` only, or
none: ``signs`` looks for the same causes in the curves, over the newest steps. It is coarse on purpose: a page must not
cry wolf, and shows the curves beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from recipe.atropos.report.history import History, Outcomes

SEVERITY = (  # causes before their symptoms: the first one raised is the one that the verdict names
    "environment_raises",
    "environment_silent",
    "wrong_group_size",
    "too_long",
    "server_out_of_sync",
    "server_unhealthy",
    "other_temperature",
    "truncated_sampling",
    "penalized_sampling",
    "unknown_sampling",
    "sampling_mismatch",
    "equal_scores",
    "gradient_not_finite",
    "learning_rate_zero",
    "stale_samples",
    "entropy_collapsed",
    "all_rows_clipped",
    "logprob_difference",
    "queue_full",
    "reward_collapsed",
    "reward_flat",
)
_STEPS = 5  # evidence of a curve: so many steps in a row
_ITEMS = 16  # evidence of an environment: so many items
_MANY = 0.5  # of the items or rows
_ALL_EQUAL = 0.98  # a task that is nearly solved has many groups of equal scores, but not all
_SOLVED = 0.95  # of the highest score that was seen
_COLLAPSED = 0.1  # of the entropy at the beginning
_LONG_RUN = 30  # steps, before a reward is called flat
_UPDATES = 8  # older samples than so many updates are far off-policy


def all_alarms(history: History) -> list[dict[str, Any]]:
    """Return a run's alarms, raised ones first, causes before symptoms.

    Each is ``{"alarm", "environment", "state", "since_step", "until_step", "seen", "advice", "times", "recorded"}``;
    ``recorded`` is false for one that only the page found.
    """
    found = _recorded(history)
    known = {alarm["alarm"] for alarm in found}
    found += [alarm for alarm in _of_summary(history) if alarm["alarm"] not in known]
    known = {alarm["alarm"] for alarm in found if alarm["state"] == "raised"}
    found += [alarm for alarm in signs(history) if alarm["alarm"] not in known]
    return sorted(found, key=lambda alarm: (alarm["state"] != "raised", severity(alarm["alarm"])))


def severity(name: str) -> int:
    return SEVERITY.index(name) if name in SEVERITY else len(SEVERITY)


def _recorded(history: History) -> list[dict[str, Any]]:
    """The newest state of each alarm in ``alarms.jsonl``."""
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    for line in history.alarms:
        before = found.get((line["alarm"], line.get("environment")))
        alarm = before or _alarm(line["alarm"], environment=line.get("environment"), times=0)
        alarm["state"] = line["state"]
        if line["state"] == "raised":
            alarm |= {key: line.get(key) for key in ("since_step", "seen", "advice")}
            alarm |= {"until_step": None, "times": alarm["times"] + 1, "recorded": True}
        else:
            alarm["until_step"] = line.get("step")
        found[line["alarm"], line.get("environment")] = alarm
    return list(found.values())


def _of_summary(history: History) -> Iterator[dict[str, Any]]:
    """Alarms that the trainer counted in ``summary.json``, with its own text."""
    for name, known in history.summary.get("alarms", {}).items():
        if isinstance(known, dict) and "first_step" in known:
            last = known.get("last_step", known["first_step"])
            raised = last >= history.steps - _STEPS
            seen = f"{known.get('what', '')} (at {known.get('steps', 1)} steps)"
            yield _alarm(name, known["first_step"], seen) | {
                "state": "raised" if raised else "cleared",
                "until_step": None if raised else last,
                "recorded": True,
            }


def _alarm(name: str, since: int | None = None, seen: str = "", advice: str = "", **values: Any) -> dict[str, Any]:
    return {
        "alarm": name,
        "environment": None,
        "state": "raised",
        "since_step": since,
        "until_step": None,
        "seen": seen,
        "advice": advice,
        "times": 1,
        "recorded": False,
        **values,
    }


# ---------------------------------------------------------------- in the curves


def signs(history: History) -> list[dict[str, Any]]:
    """Return the causes that a run's history shows in its newest steps."""
    found = [alarm for name, outcomes in history.outcomes.items() for alarm in _of_items(name, outcomes)]
    rules: Sequence[Callable[[History], dict[str, Any] | None]] = (
        _cut_responses,
        _server_behind,
        _stale,
        _entropy,
        _learning_rate,
        _reward,
    )
    return found + [alarm for rule in rules if (alarm := rule(history)) is not None]


def _of_items(name: str, outcomes: list[Outcomes]) -> Iterator[dict[str, Any]]:
    rules = (
        ("environment_raises", "failed/", _MANY, "its items raise", "the environment's log has the traceback"),
        ("equal_scores", "not_sent/equal_scores", _ALL_EQUAL, "all answers of a group get the same score", _EQUAL),
        ("too_long", "not_sent/too_long", _MANY, "groups are longer than the environment may send", _LONG),
        ("wrong_group_size", "not_sent/wrong_size", _MANY, "groups have another size than configured", _SIZE),
    )
    for alarm, prefix, share, what, advice in rules:
        if alarm == "equal_scores" and _solved(outcomes):
            continue
        since = len(outcomes)
        while since and outcomes[since - 1].share(prefix) >= share:
            since -= 1
        late = outcomes[since:]
        ended, hit = (
            sum(each.total for each in late),
            sum(n for each in late for key, n in each.counts.items() if key.startswith(prefix)),
        )
        if ended >= _ITEMS:
            kinds = sorted({key.removeprefix(prefix) for each in late for key in each.counts if key.startswith(prefix)})
            which = f" ({', '.join(kinds)})" if kinds != [""] else ""
            seen = f"{what}{which}: {hit} of the last {ended} items"
            yield _alarm(alarm, late[0].step, seen, advice, environment=name)


_EQUAL = (
    "make the task easier or harder, raise the temperature or the group size, or look at the scores: "
    "is the answer's format one that the environment can score?"
)
_LONG = "raise the environment's max_token_length and data.max_response_length, or let it ask for shorter answers"
_SIZE = "make the environment's group_size the one that its items return"


def _solved(outcomes: list[Outcomes]) -> bool:
    """Whether the newest scores are about the highest that were seen, so that equal ones mean success."""
    scores = [each.score for each in outcomes if each.score is not None]
    return len(scores) > 1 and scores[-1] > scores[0] and scores[-1] >= _SOLVED * max(scores) and scores[-1] > 0


def _trailing(history: History, holds: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The newest steps at all of which a condition holds; [] if they are too few to say so."""
    late: list[dict[str, Any]] = []
    for line in reversed(history.lines):
        if not holds(line):
            break
        late.append(line)
    return late[::-1] if len(late) >= _STEPS else []


def _share(line: dict[str, Any], key: str, of: str) -> float:
    return line.get(key, 0.0) / max(1.0, line.get(of, 0.0))


def _cut_responses(history: History) -> dict[str, Any] | None:
    limit = history.config.get("data.max_response_length") or float("inf")

    def cut(line: dict[str, Any]) -> bool:
        at_limit = line.get("response_length/mean", 0.0) >= 0.98 * limit
        return at_limit or _share(line, "atropos/rows_with/response_truncated", "atropos/rows") >= _MANY

    if not (late := _trailing(history, cut)):
        return None
    share = np.mean([_share(line, "atropos/rows_with/response_truncated", "atropos/rows") for line in late])
    mean = np.mean([line.get("response_length/mean", 0.0) for line in late])
    seen = f"{share:.0%} of the responses are cut at data.max_response_length={limit}; their mean length is {mean:.0f}"
    return _alarm("too_long", late[0]["step"], f"{seen} tokens", "raise data.max_response_length, or let " + _SHORTER)


_SHORTER = "the environment ask for shorter answers: what is cut off has no answer to score"


def _server_behind(history: History) -> dict[str, Any] | None:
    """One weight version comes back step after step, older and older, beside fresh rows."""

    def behind(line: dict[str, Any]) -> bool:
        oldest, newest = line.get("atropos/staleness/max", 0.0), line.get("atropos/staleness/min", 0.0)
        return oldest - newest >= _STEPS or line.get("atropos/dropped/not_pushed", 0) > 0

    late = _trailing(history, behind)
    versions = {line["step"] - 1 - int(line.get("atropos/staleness/max", 0)) for line in late[-_STEPS:]}
    refused = sum(line.get("atropos/dropped/not_pushed", 0) for line in late)
    if not late or (len(versions) > 1 and not refused):
        return None
    age = late[-1].get("atropos/staleness/max", 0)
    seen = f"rows of weight version {versions.pop()} still come at step {late[-1]['step']}, {age:.0f} updates later"
    seen = f"{refused:.0f} rows came from weights that no trainer pushed" if refused else seen + ", beside fresh ones"
    advice = "a server did not take the newer weights: look at its log, restart it, and keep environments on the gateway"
    return _alarm("server_out_of_sync", late[0]["step"], seen, advice)


def _stale(history: History) -> dict[str, Any] | None:
    def stale(line: dict[str, Any]) -> bool:
        dropped = _share(line, "atropos/dropped/stale", "atropos/received") >= 0.25
        return dropped or line.get("atropos/staleness/mean", 0.0) >= _UPDATES

    if not (late := _trailing(history, stale)):
        return None
    mean = np.mean([line.get("atropos/staleness/mean", 0.0) for line in late])
    dropped = sum(line.get("atropos/dropped/stale", 0) for line in late)
    received = sum(line.get("atropos/received", 0) for line in late)
    seen = f"trained rows are {mean:.1f} updates old in the mean, and {dropped:.0f} of {received:.0f} were dropped as stale"
    advice = "environments sample faster than the trainer trains: set trainer.atropos.max_staleness, fewer workers or groups"
    return _alarm("stale_samples", late[0]["step"], seen, advice)


def _entropy(history: History) -> dict[str, Any] | None:
    first = history.column("actor/entropy")[:_STEPS]
    if len(first) < _STEPS:
        return None
    start = float(np.median(first))
    late = _trailing(history, lambda line: line.get("actor/entropy", start) < _COLLAPSED * start)
    if not late:
        return None
    seen = f"entropy fell from {start:.3g} to {late[-1]['actor/entropy']:.2g} nats: the policy gives one answer only"
    advice = "lower the learning rate, raise the temperature, or set actor.entropy_coeff or actor.clip_ratio_high"
    return _alarm("entropy_collapsed", late[0]["step"], seen, advice)


def _learning_rate(history: History) -> dict[str, Any] | None:
    late = _trailing(history, lambda line: line.get("actor/lr") == 0)
    advice = "look at actor.optim: lr, lr_warmup_steps, lr_scheduler_type and total_training_steps"
    return _alarm("learning_rate_zero", late[0]["step"], "the learning rate is 0", advice) if late else None


def _reward(history: History) -> dict[str, Any] | None:
    """No change, or a fall, beyond the noise between steps; by the scores of all answers where they are known."""
    scores = np.array(history.column("atropos/mean_raw_score"))
    if len(scores) < _LONG_RUN:
        return None
    part = len(scores) // 3
    first, last = scores[:part], scores[-part:]
    noise = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / part))
    change = float(last.mean() - first.mean())
    gain = gains(history)
    told = f"mean score {first.mean():.2f} over the first {part} steps, {last.mean():.2f} over the last {part}"
    if change < -3 * noise - 0.02 and not any(each > 0 for each in gain):
        advice = "resume from the best checkpoint with a lower learning rate, and look at entropy and logprob difference"
        return _alarm("reward_collapsed", int(history.lines[-part]["step"]), told, advice)
    if abs(change) <= 2 * noise and not any(each > 0 for each in gain):
        advice = "look at samples and scores: does the score depend on the answer? Is the learning rate too low?"
        return _alarm("reward_flat", int(history.lines[0]["step"]), told, advice)
    return None


def gains(history: History) -> list[float]:
    """Return the change of each environment's held-out score, 0 where it is within the noise of so few items."""
    found = []
    for values in held_out(history).values():
        (_, before, items), (_, after, _) = values[0], values[-1]
        noise = 2 * np.sqrt(0.5 / items) if items else 0.02  # of two shares of so many items
        found.append(after - before if len(values) > 1 and abs(after - before) > min(noise, 0.1) else 0.0)
    return found


def held_out(history: History) -> dict[str, list[tuple[int, float, float | None]]]:
    """Return each environment's evaluations: step, main metric, number of items if it is reported."""
    found: dict[str, list[tuple[int, float, float | None]]] = {}
    for line in history.evaluations:
        if line.get("main") and line["main"] in line.get("metrics", {}):
            items = line["metrics"].get("eval/total")
            found.setdefault(line["env"], []).append((line["step"], line["metrics"][line["main"]], items))
    return found


