"""Rules about the trained steps: samples, logprobs, gradient, reward, entropy, each threshold beside its reason."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from recipe.atropos.data.reasons import Reason
from recipe.atropos.watchdog.history import FIRST_STEPS, PREFIX, History
from recipe.atropos.watchdog.registry import (
    ALARMS,
    CLIP,
    GROUP_SIZE,
    LR,
    PROMPT,
    RESPONSE,
    STALENESS,
    TEMPERATURE,
    Finding,
    InStep,
    alarm,
    seen_in_step,
)

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
_LR_STEPS = 3  # a warmup begins with one at 0
_CLIPPED_STEPS, _CLIPPED = 3, 0.9  # of the rows
# Rows that all have one length, without a limit of the trainer's: its max_tokens is the environment's. Answers of a
# word or two may all have one length by nature.
_EQUAL_STEPS, _EQUAL_TOKENS = 5, 16
_ENTROPY_STEPS, _ENTROPY = 5, 0.1  # of its mean over the first steps
_ENTROPY_FIRST = 5
_HIGHEST = 0.9  # of the way from the lowest to the highest score: a task that is solved
# The mean over 50 steps is flat, from step 150 on, if it is not above that of the first 20 by more than a standard
# error, and if two more are at most 5% of the scores' range: with more noise, a slow rise could be there. It never
# rose if none of the means in between was above the first by more than chance makes the largest.
_BEFORE_FLAT, _FLAT_STEPS = 150, 50
_FLAT, _FLAT_SHARE, _EVER = 2.0, 0.05, 3.0
_COLLAPSED_STEPS, _BEST_STEPS = 10, 20
# Of what was gained, what is left; the fall in standard errors, more than noise makes between the best of 1,000 steps
# and the newest; and as a share of the scores' range, so that a slow wave is none: more of it in the first 150 steps,
# which cannot tell how slow the waves are.
_LEFT, _FALL, _FALL_SHARE, _EARLY_SHARE, _EARLY = 0.25, 7.0, 0.2, 0.35, 150
_BENDS = 8  # of the means of ten steps: with fewer, one fall or rise is their median


def _finding(name: str, seen: str, first: dict[str, Any], environment: str | None = None) -> Finding:
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


def _lasting(
    history: History, n: int, bad: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yield the newest ``n`` steps and the first bad step, as `_onset` does, if each of them is bad."""
    steps = history.recent(n)
    if steps and all(map(bad, steps)):
        yield steps, _onset(history, steps, bad)


@alarm(
    "other_temperature",
    means=(
        "rows were sampled at another temperature than actor_rollout_ref.rollout.temperature, and "
        "trainer.atropos.sampling_mismatch=warn trains on them with wrong logprobs"
    ),
    advice=(
        "set it to per_row, or let the environment sample at the trainer's; "
        "atropos/ENV/rows_with/other_temperature says which does not"
    ),
    settings=(TEMPERATURE, "trainer.atropos.sampling_mismatch"),
    chart="sampling",
    cause=100,
    in_step=InStep(
        "atropos/rows_with/other_temperature",
        "{value:.0f} rows",
        lambda tolerance, mode: 0.0 if mode == "warn" else math.inf,
    ),
)
@alarm(
    "truncated_sampling",
    means="rows were sampled with top_p, top_k or min_p, or greedily: their logprobs are not known",
    advice="let the environment sample without",
    settings=("trainer.atropos.allow_truncated_sampling",),
    chart="sampling",
    cause=110,
    in_step=InStep("atropos/rows_with/truncated_sampling"),
)
@alarm(
    "penalized_sampling",
    means=(
        "rows were sampled with penalties, logit bias, min_new_tokens or a grammar: another distribution than the "
        "trainer's"
    ),
    advice="let the environment sample without",
    settings=("trainer.atropos.allow_truncated_sampling",),
    chart="sampling",
    cause=120,
    in_step=InStep("atropos/rows_with/penalized_sampling"),
)
@alarm(
    "unknown_sampling",
    means="rows came without sampling parameters, and count as sampled at actor_rollout_ref.rollout.temperature",
    advice=(
        "run their environment through recipe.atropos.utils.env_adapter, or let it send group_overrides.sampling_params"
    ),
    settings=(TEMPERATURE,),
    chart="sampling",
    cause=130,
    in_step=InStep("atropos/rows_with/unknown_sampling"),
)
@alarm(
    "gradient_not_finite",
    means="the gradient of an optimizer step was not finite, so verl skipped that step",
    advice="look at actor/pg_loss, the learning rate and the dtype",
    settings=(LR, CLIP),
    chart="gradient",
    in_step=InStep("actor/grad_norm", "actor/grad_norm={value:g}", lambda tolerance, mode: sys.float_info.max),
)
def _of_a_step(history: History, now: float) -> Iterator[Finding]:
    """What the trainer saw in a single step; a difference of fresh samples lasts until other fresh ones show none."""
    newest = history.recent(1)
    for name in [name for name, declared in ALARMS.items() if declared.in_step and newest]:
        key = PREFIX + name
        of, among = newest[0], list(history.steps)
        if name == "logprob_difference":
            among = _with_fresh_samples(history)
            of = among[-1] if among else {}
        if key in of:
            text = seen_in_step(name, of[key], history.limits.logprob_tolerance)
            onset = _onset(history, [of], lambda step, key=key: key in step, among)
            yield _finding(name, f"{text}, at step {of['step']}", onset)


def _with_fresh_samples(history: History) -> list[dict[str, Any]]:
    """Return the steps of this start in which samples were fresh."""
    return [step for step in history.steps if step["step"] > history.begin and (_FRESH in step or _fresh_differ(step))]


def _fresh_differ(step: dict[str, Any]) -> bool:
    return PREFIX + "logprob_difference" in step


@alarm(
    "logprob_difference",
    means=(
        "SGLang's logprobs differ from the trainer's: on fresh samples by more than "
        "trainer.atropos.logprob_tolerance in the mean, or, where none is fresh, by far more than usual"
    ),
    advice=(
        "in this order: where no sample was fresh, the updates since it was sampled "
        "(actor_rollout_ref.actor.optim.lr); sampling parameters; tensors missing on the servers "
        "(trainer.atropos.weight_sync.verify=probe finds them); dtype; kernels"
    ),
    settings=(
        "trainer.atropos.logprob_tolerance",
        "inference.dtype",
        "trainer.atropos.weight_sync.verify",
        TEMPERATURE,
    ),
    chart="logprobs",
    in_step=InStep(
        "atropos/logprob_diff/fresh_mean",
        "{value:.2g} nats in the mean over fresh samples, above trainer.atropos.logprob_tolerance={tolerance:g}",
        lambda tolerance, mode: tolerance,
    ),
)
@alarm(
    "off_policy_samples",
    means=(
        "the policy is far from the samples that it is trained on, but agrees with fresh ones: the updates "
        "between are the cause"
    ),
    advice=(
        "lower actor_rollout_ref.actor.optim.lr, or the age of samples (trainer.atropos.max_staleness, "
        "weight_sync.every)"
    ),
    settings=(LR, STALENESS, "trainer.atropos.weight_sync.every"),
    chart="logprobs",
    cause=140,
)
def _gap(history: History, now: float) -> Iterator[Finding]:
    """Where fresh samples agree, older ones differ by the updates since; where none is fresh, that cannot be told."""
    for steps, onset in _lasting(history, _GAP_STEPS, lambda step: (step.get(_DIFFERENCE) or 0.0) > _GAP):
        fresh = _with_fresh_samples(history)[-1:]
        if any(map(_fresh_differ, fresh)):
            return
        gaps, ages, rates = (_values(steps, key) for key in (_DIFFERENCE, "atropos/staleness/mean", "actor/lr"))
        age = f", of samples {np.mean(ages):.1f} updates old" if ages else ""
        age += f" at actor/lr={rates[-1]:.2g}" if rates else ""
        text = f"{np.mean(gaps):.2g} nats in the mean over the last {len(steps)} steps{age}, above {_GAP:g}; "
        text += f"fresh samples agree (step {fresh[0]['step']})" if fresh else "no sample was fresh"
        yield _finding("off_policy_samples" if fresh else "logprob_difference", text, onset)


def broken_policy(history: History, since: int | None) -> str:
    """Return what the steps around step ``since`` show of updates that broke the policy; "" if nothing, or if the
    policy scores near its highest in each environment.
    """
    around = [
        step for step in history.steps if step["step"] > history.begin and abs(step["step"] - (since or 0)) <= _AROUND
    ]
    if not around or _all_near_highest(history):
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


@alarm(
    "overlong_rows",
    means=(
        "at least a tenth of the rows are longer than data.max_prompt_length + data.max_response_length, and "
        "dropped: only shorter answers are trained on"
    ),
    advice=(
        "raise either length, let the environment ask for shorter answers, or set trainer.atropos.overlong=truncate"
    ),
    settings=(RESPONSE, PROMPT, "trainer.atropos.overlong"),
    chart="drops",
    cause=50,
)
@alarm(
    "stale_samples",
    means=(
        "the weights that sampled are too old or not known: rows are trained on many updates late, or at least "
        "half are dropped"
    ),
    advice="if trainer.atropos.max_staleness is null, set it; else see docs/staleness.md",
    settings=(STALENESS, "trainer.atropos.weight_sync.every"),
    chart="staleness",
    cause=170,
)
def _samples(history: History, now: float) -> Iterator[Finding]:
    limits, steps = history.limits, history.recent(_DROPPED_STEPS)
    received = sum(_values(steps, "atropos/received"))

    def lost(step: dict[str, Any], reasons: Iterable[Reason], share: float) -> bool:
        dropped = sum(step.get(f"atropos/dropped/{reason}", 0) for reason in reasons)
        return dropped >= share * step.get("atropos/received", math.inf) > 0

    of_alarm: tuple[tuple[str, tuple[Reason, ...], float], ...] = (
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
    ages = _values(steps, "atropos/staleness/mean")  # none of a batch whose versions are unknown
    old = _OLD + limits.push_every - 1
    if limits.max_staleness is None and ages and min(ages) >= old:
        text = f"samples are {np.mean(ages):.1f} updates old in the mean over the last {len(steps)} steps"
        onset = _onset(history, steps, lambda step: (step.get("atropos/staleness/mean") or 0.0) >= old)
        yield _finding("stale_samples", text, onset)


@alarm(
    "all_rows_clipped",
    means="nearly every response ends at the same maximum length",
    advice=(
        "raise data.max_response_length and the environment's max_tokens, or check that the policy ends its answers "
        "(chat template, end-of-sequence token)"
    ),
    settings=(RESPONSE, "trainer.atropos.overlong"),
    chart="length",
    cause=70,
)
def _clipped(history: History, now: float) -> Iterator[Finding]:
    steps = history.recent(_CLIPPED_STEPS)
    rows, cut = sum(_values(steps, "atropos/rows")), sum(_values(steps, "atropos/rows_with/response_truncated"))
    if steps and rows and cut >= _CLIPPED * rows:
        text = f"{cut:.0f} of {rows:.0f} responses of the last {len(steps)} steps were cut at the trainer's limit"
        key = "atropos/rows_with/response_truncated"
        onset = _onset(history, steps, lambda step: step.get(key, 0) >= _CLIPPED * step.get("atropos/rows", math.inf))
        yield _finding("all_rows_clipped", text, onset)
        return
    ends = ("response_length/min", "response_length/max")
    [length] = _values(history.recent(1), ends[0]) or [0.0]
    for steps, onset in _lasting(history, _EQUAL_STEPS, lambda step: {step.get(key) for key in ends} == {length}):
        if length >= _EQUAL_TOKENS:
            text = f"every response of the last {len(steps)} steps has exactly {length:.0f} tokens"
            yield _finding("all_rows_clipped", text, onset)


@alarm(
    "learning_rate_zero",
    means="the learning rate is 0: the policy does not change",
    advice="set actor_rollout_ref.actor.optim.lr; check lr_warmup_steps, and min_lr_ratio of the cosine schedule",
    settings=(LR, *(f"actor_rollout_ref.actor.optim.{key}" for key in ("lr_warmup_steps", "min_lr_ratio"))),
    chart="lr",
)
def _learning_rate(history: History, now: float) -> Iterator[Finding]:
    for steps, onset in _lasting(history, _LR_STEPS, lambda step: step.get("actor/lr") == 0.0):
        yield _finding("learning_rate_zero", f"actor/lr=0 in the last {len(steps)} steps", onset)


@alarm(
    "reward_collapsed",
    means="the mean score has fallen from its best to about that of the start, or below",
    advice=(
        "look at what else changed then (rollouts/, actor/entropy, the logprob difference); resume from a "
        "checkpoint before the fall with a lower actor_rollout_ref.actor.optim.lr or a KL term "
        "(actor_rollout_ref.actor.use_kl_loss)"
    ),
    settings=(LR, "actor_rollout_ref.actor.use_kl_loss", STALENESS),
    chart="score",
)
@alarm(
    "reward_flat",
    means="the mean score has not risen since the first steps by more than its noise",
    advice=(
        "only if actor/grad_norm is far below actor_rollout_ref.actor.optim.clip_grad, raise "
        "actor_rollout_ref.actor.optim.lr; else look at data and scorer: do the scores in rollouts/ fit the "
        "answers, how high is atropos/zero_signal_share, are the problems too hard"
    ),
    settings=(LR, CLIP, TEMPERATURE, GROUP_SIZE),
    chart="score",
)
def _scores(history: History, now: float) -> Iterator[Finding]:
    keys = _score_keys(history.recent(1))
    for key in keys:
        name = key.split("/")[1] if len(keys) > 1 else None
        steps = [step for step in history.steps if step.get(key) is not None]
        first = [step[key] for step in history.first if step.get(key) is not None]
        if len(first) == FIRST_STEPS and not _near_highest(history, key):
            low, high = _extremes(history, key)
            scores = np.array([step[key] for step in steps])
            yield from _collapsed(history, steps, scores, key, name, float(np.mean(first)), high - low)
            yield from _flat(history, steps, scores, name, first, high - low)


def _collapsed(
    history: History,
    steps: list[dict[str, Any]],
    scores: np.ndarray,
    key: str,
    name: str | None,
    start: float,
    spread: float,
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
        onset = _onset(history, newest, lambda step: step[key] < (best + now) / 2, steps)
        yield _finding("reward_collapsed", text, onset, name)


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
    most = min(error, _FLAT_SHARE * spread - _FLAT * error)
    if -_EVER * error <= risen <= most and ever <= _EVER * error:
        text = (
            f"mean score {means[-1]:.3g} over the last {_FLAT_STEPS} steps, {start:.3g} over the first {len(first)} "
            f"(standard error of the difference {error:.2g})"
        )
        norms = _values(steps[-_FLAT_STEPS:], "actor/grad_norm")
        text += f"; actor/grad_norm {np.mean(norms):.3g} in the mean" if norms else ""
        yield _finding("reward_flat", text, history.first[0], name)


@alarm(
    "entropy_collapsed",
    means=(
        "the policy's entropy has fallen below a tenth of that of the first steps, and the score is not near its "
        "highest"
    ),
    advice=(
        "resume from an earlier checkpoint with a lower learning rate, a higher "
        "actor_rollout_ref.actor.clip_ratio_high, or actor_rollout_ref.actor.entropy_coeff above 0"
    ),
    settings=(LR, *(f"actor_rollout_ref.actor.{key}" for key in ("clip_ratio_high", "entropy_coeff"))),
    chart="entropy",
    cause=150,
)
def _entropy(history: History, now: float) -> Iterator[Finding]:
    before = _values(history.first[:_ENTROPY_FIRST], "actor/entropy")
    if len(before) < _ENTROPY_FIRST or history.first[_ENTROPY_FIRST - 1] in history.recent(_ENTROPY_STEPS):
        return
    start = float(np.mean(before))

    def low(step: dict[str, Any]) -> bool:
        return any(entropy < _ENTROPY * start for entropy in _values([step], "actor/entropy"))

    for steps, onset in _lasting(history, _ENTROPY_STEPS, low):
        if not _all_near_highest(history):
            entropy = np.mean(_values(steps, "actor/entropy"))
            text = f"actor/entropy {entropy:.2g} nats over the last {len(steps)} steps, {start:.2g} over the first"
            yield _finding("entropy_collapsed", text, onset)


# ---------------------------------------------------------------- numbers


def _values(steps: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [step[key] for step in steps if step.get(key) is not None]


def _rolling(values: np.ndarray, n: int) -> np.ndarray:
    """Return the means of all n neighbors."""
    return np.convolve(values, np.full(n, 1 / n), "valid")


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


def _score_keys(steps: Iterable[dict[str, Any]]) -> list[str]:
    """Return the keys of the environments' mean scores."""
    return sorted({key for step in steps for key in step if key.endswith("/mean_raw_score") and key.count("/") == 2})


def _extremes(history: History, key: str) -> tuple[float, float]:
    """Return the lowest and highest score of a sequence, of the environment that ``key`` is the mean score of.

    Steps of earlier versions have only those over all environments.
    """
    steps, own = [*history.first, *history.steps], key.removesuffix("mean_raw_score")
    low = _values(steps, f"{own}raw_score_min") or _values(steps, "critic/score/min")
    high = _values(steps, f"{own}raw_score_max") or _values(steps, "critic/score/max")
    return min(low, default=0.0), max(high, default=0.0)


def _near_highest(history: History, key: str) -> bool:
    """Whether the score is near its highest: of what was trained on or, since equal groups are not, of all."""
    low, high = _extremes(history, key)
    newest = _values(list(history.steps)[-_COLLAPSED_STEPS:], key)
    own = history.environments.get(key.split("/")[1])
    best = max(float(np.mean(newest)), low if own is None or own.score is None else own.score)
    return high > low and best >= low + _HIGHEST * (high - low)


def _all_near_highest(history: History) -> bool:
    """Whether the score of each environment of the newest steps is near its highest."""
    keys = _score_keys(list(history.steps)[-_COLLAPSED_STEPS:])
    return bool(keys) and all(_near_highest(history, key) for key in keys)
