"""Rules about the trained steps: samples, logprobs, gradient, reward, entropy, each threshold beside its reason."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from recipe.atropos.data.reasons import Reason
from recipe.atropos.watchdog import alarms
from recipe.atropos.watchdog.findings import Finding
from recipe.atropos.watchdog.history import FIRST_STEPS, History

_VERSIONS = (Reason.STALE, Reason.UNKNOWN_VERSION, Reason.NOT_PUSHED, Reason.FUTURE_VERSION)
_OVERLONG = (Reason.OVERLONG_PROMPT, Reason.OVERLONG_RESPONSE)
# Shares of the sequences. Long ones are no chance selection: without a tenth of them, training favors short answers.
_DROPPED_STEPS, _DROPPED, _DROPPED_LONG = 3, 0.5, 0.1
_OLD_STEPS, _OLD = 5, 8.0  # updates; with a decoupled loss, training is as good up to about 8 (AReaL, 2505.24298)
# Nats, on samples of any age: the demonstration's are at 0.002 two updates later; tokens of weights that are not the
# ones in the trainer, or at another temperature, at 0.3 to 0.7 (docs/algorithms.md).
_GAP_STEPS, _GAP = 5, 0.25
_DIFFERENCE, _FRESH = "atropos/logprob_diff/mean", "atropos/logprob_diff/fresh_mean"
# Steps around the one since which groups are equal, and times (or a part) of what was first: the demonstration's
# entropy and gradient norm stay within 1.5.
_AROUND, _BROKEN = 4, 10.0
_LR_STEPS = 3  # warmup begins, and a cosine ends, with one step at 0
_CLIPPED_STEPS, _CLIPPED = 3, 0.9  # of the rows
# Rows that all have one length, without a limit of the trainer's: its max_tokens is the environment's. Answers of a
# word or two may all have one length by nature.
_EQUAL_STEPS, _EQUAL_TOKENS = 5, 16
_ENTROPY_STEPS, _ENTROPY = 5, 0.1  # of its mean over the first steps
_ENTROPY_FIRST = 5
_HIGHEST = 0.9  # of the way from the lowest to the highest score: a task that is solved
# The mean over 50 steps is flat, from step 150 on, if it is not above that of the first 20, later if it is not by more
# than a standard error; and if two more are at most 5% of the scores' range: with more noise, a slow rise could be
# there. It never rose if none of the means in between was above the first by more than chance makes the largest.
_BEFORE_FLAT, _CERTAIN, _FLAT_STEPS = 150, 250, 50
_FLAT, _FLAT_SHARE, _EVER = 2.0, 0.05, 3.0
_COLLAPSED_STEPS, _BEST_STEPS = 10, 20
# Of what was gained, what is left; the fall in standard errors, more than noise makes between the best of 1,000 steps
# and the newest; and as a share of the scores' range, so that a slow wave is none: more of it in the first 150 steps,
# which cannot tell how slow the waves are.
_LEFT, _FALL, _FALL_SHARE, _EARLY_SHARE, _EARLY = 0.25, 7.0, 0.2, 0.35, 150
_BENDS = 8  # of the means of ten steps: with fewer, one fall or rise is their median


def training_findings(history: History) -> Iterator[Finding]:
    """Yield what the newest steps show; none before this start of the run has trained enough of its own."""
    if history.recent(1):
        for rule in (_of_a_step, _gap, _samples, _clipped, _learning_rate, _scores, _entropy):
            yield from rule(history)


def _finding(name: alarms.Name, seen: str, first: dict[str, Any], environment: str | None = None) -> Finding:
    """``first``: the step that it began with."""
    return Finding(name, seen, first["time"], first["step"], environment, of_steps=True)


def _onset(
    history: History,
    newest: Sequence[dict[str, Any]],
    bad: Callable[[dict[str, Any]], bool],
    among: Iterable[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the first bad step: of the newest, or an earlier one of this start where all in between are bad too."""
    onset = next((step for step in newest if bad(step)), newest[0])
    for step in reversed(list(history.steps if among is None else among)):
        if step["step"] < onset["step"]:
            if step["step"] <= history.begin or not bad(step):
                break
            onset = step
    return onset


def _of_a_step(history: History) -> Iterator[Finding]:
    """What the trainer saw in a single step; a difference of fresh samples lasts until other fresh ones show none."""
    newest = history.steps[-1]
    for name in alarms.OF_A_STEP:
        key = alarms.PREFIX + name
        of, among = newest, list(history.steps)
        if name == "logprob_difference":
            among = _with_fresh_samples(history)
            of = among[-1] if among else {}
        if key in of:
            text = alarms.seen_in_step(name, of[key], history.limits.logprob_tolerance)
            onset = _onset(history, [of], lambda step, key=key: key in step, among)
            yield _finding(name, f"{text}, at step {of['step']}", onset)


def _with_fresh_samples(history: History) -> list[dict[str, Any]]:
    """Return the steps of this start in which samples were fresh."""
    return [step for step in history.steps if step["step"] > history.begin and (_FRESH in step or _fresh_differ(step))]


def _fresh_differ(step: dict[str, Any]) -> bool:
    return alarms.PREFIX + "logprob_difference" in step


def _gap(history: History) -> Iterator[Finding]:
    """Where fresh samples agree, older ones differ by the updates since; where none is fresh, that cannot be told."""
    steps, fresh = history.recent(_GAP_STEPS), _with_fresh_samples(history)[-1:]
    gaps, ages, rates = (_values(steps, key) for key in (_DIFFERENCE, "atropos/staleness/mean", "actor/lr"))
    if steps and len(gaps) == len(steps) and min(gaps) > _GAP and not any(map(_fresh_differ, fresh)):
        age = f", of samples {np.mean(ages):.1f} updates old" if ages else ""
        age += f" at actor/lr={rates[-1]:.2g}" if rates else ""
        text = f"{np.mean(gaps):.2g} nats in the mean over the last {len(steps)} steps{age}, above {_GAP:g}; "
        text += f"fresh samples agree (step {fresh[0]['step']})" if fresh else "no sample was fresh"
        onset = _onset(history, steps, lambda step: (step.get(_DIFFERENCE) or 0.0) > _GAP)
        yield _finding("off_policy_samples" if fresh else "logprob_difference", text, onset)


def broken_policy(history: History, since: int | None) -> str:
    """Return what the steps around step ``since`` show of updates that broke the policy; "" if nothing, or if the
    policy scores near its highest.
    """
    around = [
        step for step in history.steps if step["step"] > history.begin and abs(step["step"] - (since or 0)) <= _AROUND
    ]
    if not around or _near_highest(history, "atropos/mean_raw_score", _extremes(history)):
        return ""
    found = []
    gap = max(_values(around, _DIFFERENCE), default=0.0)
    if gap > _GAP and not any(map(_fresh_differ, around)):
        found.append(f"samples differ from the policy by {gap:.2g} nats")
    for key, worst in (("actor/entropy", min), ("actor/entropy", max), ("actor/grad_norm", max)):
        first, values = history.first[0].get(key), _values(around, key)
        if first and values and not first / _BROKEN <= worst(values) <= first * _BROKEN:
            found.append(f"{key}={worst(values):.2g}, {first:.2g} in the first step")
    return "; ".join(found)


def _samples(history: History) -> Iterator[Finding]:
    limits, steps = history.limits, history.recent(_DROPPED_STEPS)
    received = sum(_values(steps, "atropos/received"))

    def lost(step: dict[str, Any], reasons: Iterable[Reason], share: float) -> bool:
        dropped = sum(step.get(f"atropos/dropped/{reason}", 0) for reason in reasons)
        return dropped >= share * step.get("atropos/received", math.inf) > 0

    of_alarm: tuple[tuple[alarms.Name, tuple[Reason, ...], float], ...] = (
        ("stale_samples", _VERSIONS, _DROPPED),
        ("overlong_rows", _OVERLONG, _DROPPED_LONG),
    )
    for name, reasons, share in of_alarm:
        dropped = {reason: sum(_values(steps, f"atropos/dropped/{reason}")) for reason in reasons}
        if (total := sum(dropped.values())) and total >= share * received:
            told = ", ".join(f"{reason} {n:.0f}" for reason, n in dropped.items() if n)
            text = f"{total:.0f} of {received:.0f} sequences of the last {len(steps)} steps were dropped: {told}"
            yield _finding(name, text, _onset(history, steps, partial(lost, reasons=reasons, share=share)))
    steps = history.recent(_OLD_STEPS)
    ages = _values(steps, "atropos/staleness/mean")
    old = _OLD + limits.push_every - 1
    if limits.max_staleness is None and ages and min(ages) >= old:
        text = f"samples are {np.mean(ages):.1f} updates old in the mean over the last {len(steps)} steps"
        onset = _onset(history, steps, lambda step: (step.get("atropos/staleness/mean") or 0.0) >= old)
        yield _finding("stale_samples", text, onset)


def _clipped(history: History) -> Iterator[Finding]:
    steps = history.recent(_CLIPPED_STEPS)
    rows, cut = sum(_values(steps, "atropos/rows")), sum(_values(steps, "atropos/rows_with/response_truncated"))
    if steps and rows and cut >= _CLIPPED * rows:
        text = f"{cut:.0f} of {rows:.0f} responses of the last {len(steps)} steps were cut at the trainer's limit"
        key = "atropos/rows_with/response_truncated"
        onset = _onset(history, steps, lambda step: step.get(key, 0) >= _CLIPPED * step.get("atropos/rows", math.inf))
        yield _finding("all_rows_clipped", text, onset)
        return
    steps = history.recent(_EQUAL_STEPS)
    lengths = {*_values(steps, "response_length/min"), *_values(steps, "response_length/max")}
    if len(lengths) == 1 and min(lengths) >= _EQUAL_TOKENS:
        text = f"every response of the last {len(steps)} steps has exactly {min(lengths):.0f} tokens"
        ends = ("response_length/min", "response_length/max")
        onset = _onset(history, steps, lambda step: {step.get(key) for key in ends} == lengths)
        yield _finding("all_rows_clipped", text, onset)


def _learning_rate(history: History) -> Iterator[Finding]:
    steps = history.recent(_LR_STEPS)
    rates = _values(steps, "actor/lr")
    if rates and len(rates) == len(steps) and max(rates) == 0.0:
        onset = _onset(history, steps, lambda step: step.get("actor/lr") == 0.0)
        yield _finding("learning_rate_zero", f"actor/lr=0 in the last {len(steps)} steps", onset)


def _scores(history: History) -> Iterator[Finding]:
    newest = history.steps[-1]
    low, high = extremes = _extremes(history)
    keys = [key for key in newest if key.endswith("/mean_raw_score") and key.count("/") == 2]
    for key in sorted(keys) if len(keys) > 1 else ["atropos/mean_raw_score"]:
        name = key.split("/")[1] if len(keys) > 1 else None
        steps = [step for step in history.steps if step.get(key) is not None]
        first = [step[key] for step in history.first if step.get(key) is not None]
        if len(first) == FIRST_STEPS and not _near_highest(history, key, extremes):
            scores = np.array([step[key] for step in steps])
            yield from _collapsed(history, steps, scores, name, float(np.mean(first)), high - low)
            yield from _flat(history, steps, scores, name, first, high - low)


def _collapsed(
    history: History, steps: list[dict[str, Any]], scores: np.ndarray, name: str | None, start: float, spread: float
) -> Iterator[Finding]:
    newest = steps[-_COLLAPSED_STEPS:]
    if len(steps) < _BEST_STEPS + _COLLAPSED_STEPS or newest[0]["step"] <= history.begin:
        return
    means = _rolling(scores[:-_COLLAPSED_STEPS], _BEST_STEPS)
    at = int(means.argmax())
    best, now = max(float(means[at]), start), float(scores[-_COLLAPSED_STEPS:].mean())
    error = _error(scores, _BEST_STEPS, _COLLAPSED_STEPS)
    share = _FALL_SHARE if len(steps) >= _EARLY else _EARLY_SHARE
    large = best - now > max(_FALL * error, share * spread)
    if large and now <= start + _LEFT * (best - start):
        text = (
            f"mean score {now:.3g} over the last {len(newest)} steps, after {best:.3g} at its best "
            f"(step {steps[at + _BEST_STEPS - 1]['step']}) and {start:.3g} at the start"
        )
        yield _finding("reward_collapsed", text, steps[at + _fall(scores[at:])], name)


def _flat(
    history: History,
    steps: list[dict[str, Any]],
    scores: np.ndarray,
    name: str | None,
    first: list[float],
    spread: float,
) -> Iterator[Finding]:
    if len(steps) < _BEFORE_FLAT or steps[-_FLAT_STEPS]["step"] <= history.begin:
        return
    error = _error(scores, len(first), _FLAT_STEPS)
    means, start = _rolling(scores, _FLAT_STEPS), float(np.mean(first))
    risen, ever = means[-1] - start, means.max() - start
    certain = min(1.0, (len(steps) - _BEFORE_FLAT) / (_CERTAIN - _BEFORE_FLAT))
    most = min(certain * error, _FLAT_SHARE * spread - _FLAT * error)
    if -_EVER * error <= risen <= most and ever <= _EVER * error:
        text = (
            f"mean score {means[-1]:.3g} over the last {_FLAT_STEPS} steps, {start:.3g} over the first {len(first)} "
            f"(standard error of the difference {error:.2g})"
        )
        norms = _values(steps[-_FLAT_STEPS:], "actor/grad_norm")
        text += f"; actor/grad_norm {np.mean(norms):.3g} in the mean" if norms else ""
        yield _finding("reward_flat", text, history.first[0], name)


def _entropy(history: History) -> Iterator[Finding]:
    steps = history.recent(_ENTROPY_STEPS)
    before = _values(history.first[:_ENTROPY_FIRST], "actor/entropy")
    now = _values(steps, "actor/entropy")
    if len(before) < _ENTROPY_FIRST or len(now) < _ENTROPY_STEPS or history.first[_ENTROPY_FIRST - 1] in steps:
        return
    start = float(np.mean(before))
    if max(now) < _ENTROPY * start and not _near_highest(history, "atropos/mean_raw_score", _extremes(history)):
        text = f"actor/entropy {np.mean(now):.2g} nats over the last {len(now)} steps, {start:.2g} over the first"
        onset = _onset(
            history, steps, lambda step: (_values([step], "actor/entropy") or [math.inf])[0] < _ENTROPY * start
        )
        yield _finding("entropy_collapsed", text, onset)


# ---------------------------------------------------------------- numbers


def _values(steps: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [step[key] for step in steps if step.get(key) is not None]


def _rolling(values: np.ndarray, n: int) -> np.ndarray:
    """Return the means of all n neighbors."""
    return np.convolve(values, np.full(n, 1 / n), "valid")


def _fall(scores: np.ndarray) -> int:
    """Return where the values after the one change of mean that explains most of a fall begin."""
    at, sums = np.arange(1, len(scores)), scores.cumsum()
    falls = sums[:-1] / at - (sums[-1] - sums[:-1]) / (len(scores) - at)
    return int((falls * np.sqrt(at * (len(scores) - at))).argmax()) + 1


def _error(scores: np.ndarray, n: int, m: int) -> float:
    """Return the standard error of the difference between the means of n and of m steps.

    Noise is what a step's score is away from the mean of the 10 around it. Where neighbors are alike it is more than
    that: what the mean of ten steps is away from the line through those before and after, in the median of many.
    """
    trend = _rolling(scores, 10)
    single = float(np.std(scores[5 : 5 + len(trend)] - trend) / math.sqrt(0.9))
    tens = scores[len(scores) % 10 :].reshape(-1, 10).mean(axis=1)
    bends = np.abs(np.diff(tens, 2))
    alike = float(np.median(bends) / 0.6745 / math.sqrt(6) * math.sqrt(10)) if len(bends) >= _BENDS else 0.0
    return max(single, alike) * math.sqrt(1 / n + 1 / m)


def _extremes(history: History) -> tuple[float, float]:
    """Return the lowest and highest score of a sequence; where a bridge shapes the scores, of the steps' means."""
    steps = [*history.first, *history.steps]
    if all(step.get("atropos/mean_score") == step.get("atropos/mean_raw_score") for step in steps):
        low, high = _values(steps, "critic/score/min"), _values(steps, "critic/score/max")
    else:
        low = high = _values(steps, "atropos/mean_raw_score")
    return (min(low), max(high)) if low and high else (0.0, 0.0)


def _near_highest(history: History, key: str, extremes: tuple[float, float]) -> bool:
    """Whether the score is near its highest: of what was trained on or, since equal groups are not, of all."""
    low, high = extremes
    newest = _values(list(history.steps)[-_COLLAPSED_STEPS:], key)
    own = [e for e in history.environments.values() if key.count("/") == 1 or key.split("/")[1] == e.name]
    best = max([float(np.mean(newest)) if newest else low, *(e.score for e in own if e.score is not None)])
    return high > low and best >= low + _HIGHEST * (high - low)
