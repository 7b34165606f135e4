"""Alarms: problems that a run reveals while it goes on. One list of names, meanings and advice for all of the recipe.

The trainer adds ``atropos/alarms/NAME``, with the value that raised it, to the metrics of a step that shows one of
``OF_A_STEP``. The launcher's watchdog (``watchdog/``) raises and clears all alarms: it prints both, appends them to
``alarms.jsonl``, and records them in ``summary.json``. ``docs/alarms.md`` has the table, which ``table`` makes.
"""

import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

PREFIX = "atropos/alarms/"
EMPTY_BATCHES = 3  # in a row; one or two may be chance
# Mean absolute difference in nats, by SGLang's dtype: on fresh samples only kernels and rounding contribute to it.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.0104, "float16": 0.0104}

_LR, _CLIP = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.clip_grad"
_TEMPERATURE, _STALENESS = "actor_rollout_ref.rollout.temperature", "trainer.atropos.max_staleness"
_RESPONSE, _PROMPT, _GROUP_SIZE = "data.max_response_length", "data.max_prompt_length", "environment.group_size"

Name = Literal[
    "equal_scores",
    "policy_broken",
    "environment_raises",
    "too_long",
    "overlong_rows",
    "wrong_group_size",
    "groups_refused",
    "environment_silent",
    "server_unhealthy",
    "server_out_of_sync",
    "queue_full",
    "stale_samples",
    "empty_batches",
    "unknown_sampling",
    "other_temperature",
    "truncated_sampling",
    "penalized_sampling",
    "logprob_difference",
    "off_policy_samples",
    "gradient_not_finite",
    "learning_rate_zero",
    "all_rows_clipped",
    "reward_flat",
    "reward_collapsed",
    "entropy_collapsed",
]


class Alarm(NamedTuple):
    """What an alarm means, and what to try: both hold whenever it is raised. ``settings``: keys of the configuration
    that matter to it, whose values the report quotes.
    """

    means: str
    advice: str
    settings: tuple[str, ...] = ()


ALARMS: dict[Name, Alarm] = {
    "equal_scores": Alarm(
        "all groups of an environment, or most while no other is sent, have answers of equal scores: such a group has "
        "no advantage, and nothing is learned from it",
        "if all groups became equal at once, or scores do not fit the answers in rollouts/, look for a broken policy "
        "(its answers, actor/entropy, actor/grad_norm), then for a broken scorer or answer parser; else, if the mean "
        "score is the lowest, use easier problems, a better policy or a score with partial credit; if it is the "
        "highest, the task is solved: use harder problems; in between, problems are either too easy or too hard",
        (_TEMPERATURE, _RESPONSE, _GROUP_SIZE),
    ),
    "policy_broken": Alarm(
        "updates broke the policy: all its groups have equal scores since steps in which it moved far from its "
        "samples, or in which its entropy or gradient changed by ten times",
        "resume from a checkpoint before that step with a lower actor_rollout_ref.actor.optim.lr; if the policy's "
        "answers are as good as before, look for a broken scorer",
        (_LR, _CLIP, _STALENESS),
    ),
    "environment_raises": Alarm(
        "at least half of an environment's items fail with an exception",
        "see the traceback in the environment's log; python -m recipe.atropos verify-env runs the environment alone",
    ),
    "too_long": Alarm(
        "at least half of an environment's groups are dropped because they are too long",
        "raise data.max_response_length or data.max_prompt_length, or let the environment ask for shorter answers "
        "(its max_tokens)",
        (_RESPONSE, _PROMPT),
    ),
    "overlong_rows": Alarm(
        "at least a tenth of the rows are longer than data.max_prompt_length + data.max_response_length, and dropped: "
        "their scores count in their groups, but only shorter answers are trained on",
        "raise either length, or let the environment ask for shorter answers (its max_tokens); "
        "trainer.atropos.overlong=truncate trains on the beginning of a response",
        (_RESPONSE, _PROMPT, "trainer.atropos.overlong"),
    ),
    "wrong_group_size": Alarm(
        "at least half of an environment's groups do not have the size that it was configured for",
        "let collect_trajectories return config.group_size answers for each item, or set environment.group_size to "
        "what it returns",
        (_GROUP_SIZE,),
    ),
    "groups_refused": Alarm(
        "an environment's items end, but no group is sent, for a reason other than those above or for several",
        "docs/data-format.md says what each reason means; the environment's log has the first group of each",
    ),
    "environment_silent": Alarm(
        "nothing comes from an environment: it was abandoned, or no longer calls the API, or none of its items ends",
        "see the environment's log; set environment.args.worker_timeout to end items that hang; if items only take "
        "long, raise watchdog.silent_after",
        ("watchdog.silent_after",),
    ),
    "server_unhealthy": Alarm(
        "an SGLang server or the gateway does not answer, gets or finishes no request, or is far slower than the "
        "others",
        "see the log of the server that is named: often out of memory, or still paused by a push of weights; if "
        "answers only take long, raise watchdog.silent_after",
        ("watchdog.silent_after", _RESPONSE),
    ),
    "server_out_of_sync": Alarm(
        "an SGLang server or the gateway does not have the trainer's newest weights: it gets no requests, or samples "
        "with older weights",
        "look for a failed push in the trainer's log, and for a restart in the server's; try another "
        "trainer.atropos.weight_sync.transport, and weight_sync.verify=probe",
        tuple(f"trainer.atropos.{key}" for key in ("weight_sync.transport", "weight_sync.verify", "max_staleness")),
    ),
    "queue_full": Alarm(
        "the Trajectory API holds more tokens than its queue is for; while a batch is complete it delays posts: "
        "training is the bottleneck then",
        "set trainer.atropos.max_staleness, which paces the environments, or fewer groups in flight "
        "(environment.args.max_num_workers)",
        (_STALENESS,),
    ),
    "stale_samples": Alarm(
        "the weights that sampled are too old or not known: rows are trained on many updates late, or at least half "
        "are dropped for it",
        "if trainer.atropos.max_staleness is null, set it: it paces environments that run through the adapter; else "
        "see docs/staleness.md for the reasons of drops",
        (_STALENESS, "trainer.atropos.weight_sync.every"),
    ),
    "empty_batches": Alarm(
        "three batches in a row, or more, had no row to train on: the policy does not change meanwhile",
        "the trainer's log has the reasons by environment, and docs/data-format.md what each means; often another "
        "tokenizer, or an environment that does not run through the adapter where trainer.atropos.max_staleness is set",
        (_STALENESS, "trainer.atropos.max_empty_batches", "trainer.atropos.overlong"),
    ),
    "unknown_sampling": Alarm(
        "rows came without sampling parameters, and are taken to be sampled at actor_rollout_ref.rollout.temperature",
        "run their environment through recipe.atropos.utils.env_adapter, or let it send "
        "group_overrides.sampling_params",
        (_TEMPERATURE,),
    ),
    "other_temperature": Alarm(
        "rows were sampled at another temperature than actor_rollout_ref.rollout.temperature, and "
        "trainer.atropos.sampling_mismatch=warn trains on them with wrong logprobs",
        "set it to per_row, or let the environment sample at the trainer's; atropos/ENV/rows_with/other_temperature "
        "says which does not",
        (_TEMPERATURE, "trainer.atropos.sampling_mismatch"),
    ),
    "truncated_sampling": Alarm(
        "rows were sampled with top_p, top_k or min_p, or greedily: neither SGLang nor the trainer has their logprobs",
        "let the environment sample without",
        ("trainer.atropos.allow_truncated_sampling",),
    ),
    "penalized_sampling": Alarm(
        "rows were sampled with penalties, logit bias, min_new_tokens or a grammar: the trainer does not compute that "
        "distribution",
        "let the environment sample without",
        ("trainer.atropos.allow_truncated_sampling",),
    ),
    "logprob_difference": Alarm(
        "SGLang's logprobs differ from the trainer's, on fresh samples by more than trainer.atropos.logprob_tolerance "
        "in the mean, or on all samples by far more than usual where none is fresh",
        "likely causes, in this order: sampling parameters, tensors missing on the servers "
        "(trainer.atropos.weight_sync.verify=probe finds them), dtype, kernels; before them, where no sample was "
        "fresh, the updates since it was sampled: actor_rollout_ref.actor.optim.lr",
        ("trainer.atropos.logprob_tolerance", "inference.dtype", "trainer.atropos.weight_sync.verify", _TEMPERATURE),
    ),
    "off_policy_samples": Alarm(
        "the policy is far from the samples that it is trained on; fresh samples agree with it, so the updates since "
        "the others were sampled are the cause",
        "lower actor_rollout_ref.actor.optim.lr, or the age of samples (trainer.atropos.max_staleness, "
        "weight_sync.every)",
        (_LR, _STALENESS, "trainer.atropos.weight_sync.every"),
    ),
    "gradient_not_finite": Alarm(
        "the gradient of an optimizer step was not finite, so verl left that optimizer step out",
        "look at actor/pg_loss, the learning rate and the dtype",
        (_LR, _CLIP),
    ),
    "learning_rate_zero": Alarm(
        "the learning rate is 0: the policy does not change",
        "set actor_rollout_ref.actor.optim.lr; check lr_warmup_steps, and min_lr_ratio of the cosine schedule",
        (_LR, *(f"actor_rollout_ref.actor.optim.{key}" for key in ("lr_warmup_steps", "min_lr_ratio"))),
    ),
    "all_rows_clipped": Alarm(
        "nearly every response ends at one and the same maximum length: what comes after it was not sampled, or is not "
        "trained on",
        "raise data.max_response_length and the environment's max_tokens, or check that the policy ends its answers "
        "(chat template, end-of-sequence token)",
        (_RESPONSE, "trainer.atropos.overlong"),
    ),
    "reward_flat": Alarm(
        "the mean score has not risen since the first steps by more than its noise",
        "only if actor/grad_norm is far below actor_rollout_ref.actor.optim.clip_grad, raise "
        "actor_rollout_ref.actor.optim.lr; else look at the data and the scorer: do the "
        "scores in rollouts/ fit the answers, how high is atropos/zero_signal_share, does the policy ever score (or "
        "does it need easier problems)",
        (_LR, _CLIP, _TEMPERATURE, _GROUP_SIZE),
    ),
    "reward_collapsed": Alarm(
        "the mean score has fallen from its best to about what it was at the start, or below",
        "look at what else changed then: rollouts/, actor/entropy, the logprob difference, the environment's scores; "
        "if the policy itself got worse, resume from a checkpoint before the fall with a lower "
        "actor_rollout_ref.actor.optim.lr or a KL term (actor_rollout_ref.actor.use_kl_loss)",
        (_LR, "actor_rollout_ref.actor.use_kl_loss", _STALENESS),
    ),
    "entropy_collapsed": Alarm(
        "the policy's entropy has fallen below a tenth of what it was in the first steps, and the score is not near "
        "its highest: answers to a problem become alike",
        "resume from an earlier checkpoint with a lower learning rate, a higher "
        "actor_rollout_ref.actor.clip_ratio_high, or actor_rollout_ref.actor.entropy_coeff above 0",
        (_LR, *(f"actor_rollout_ref.actor.{key}" for key in ("clip_ratio_high", "entropy_coeff"))),
    ),
}

# What the trainer sees in a single step, and the words for its value.
OF_A_STEP: dict[Name, str] = {
    "logprob_difference": "{value:.2g} nats in the mean over fresh samples, above "
    "trainer.atropos.logprob_tolerance={tolerance:g}",
    "gradient_not_finite": "actor/grad_norm={value:g}",
    "empty_batches": "{value:.0f} batches before this step's",
    "unknown_sampling": "{value:.0f} rows",
    "other_temperature": "{value:.0f} rows",
    "truncated_sampling": "{value:.0f} rows",
    "penalized_sampling": "{value:.0f} rows",
}


def logprob_tolerance(given: float | None, dtype: str) -> float:
    """Return ``trainer.atropos.logprob_tolerance`` or, if it is null, the default for the served dtype."""
    return _TOLERANCE.get(dtype, _TOLERANCE["bfloat16"]) if given is None else given


def raised_by(metrics: Mapping[str, float], tolerance: float, mode: str) -> dict[Name, float]:
    """Return the alarms of a step as {name: value}; ``mode`` is ``trainer.atropos.sampling_mismatch``."""
    limits: dict[Name, tuple[str, float]] = {
        "logprob_difference": ("atropos/logprob_diff/fresh_mean", tolerance),
        "gradient_not_finite": ("actor/grad_norm", sys.float_info.max),
        "empty_batches": ("atropos/empty_batches", EMPTY_BATCHES - 1),
        "unknown_sampling": ("atropos/rows_with/unknown_sampling", 0),
        "truncated_sampling": ("atropos/rows_with/truncated_sampling", 0),
        "penalized_sampling": ("atropos/rows_with/penalized_sampling", 0),
    }
    if mode == "warn":
        limits["other_temperature"] = ("atropos/rows_with/other_temperature", 0)
    return {name: metrics[key] for name, (key, limit) in limits.items() if not metrics.get(key, 0) <= limit}


def of_line(line: Mapping[str, float]) -> dict[str, float]:
    """Return the alarms in a line of ``metrics.jsonl`` as {name: value}."""
    return {key.removeprefix(PREFIX): value for key, value in line.items() if key.startswith(PREFIX)}


def seen_in_step(name: Name, value: float | None, tolerance: float) -> str:
    """Return what a step showed; ``value`` is None where it is not finite, which JSON cannot hold."""
    return OF_A_STEP[name].format(value=float("nan") if value is None else value, tolerance=tolerance)


def describe(name: Name, value: float, tolerance: float) -> str:
    """Return a line of text for an alarm of a step: what it means, what was seen, and what to try."""
    return f"{ALARMS[name].means} ({seen_in_step(name, value, tolerance)}); {ALARMS[name].advice}"


def table() -> str:
    """Return the table of ``docs/alarms.md``."""
    rows = [f"| `{name}` | {alarm.means} | {alarm.advice} |\n" for name, alarm in ALARMS.items()]
    return "| alarm | meaning | what to try |\n|---|---|---|\n" + "".join(rows)
