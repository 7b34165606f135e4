"""Alarms: problems that a step's metrics reveal but that do not stop the run.

The trainer adds ``atropos/alarms/NAME`` to a step's metrics, with the value that raised it, and records in
``summary.json`` when each was raised. The launcher reads alarms from ``metrics.jsonl`` and prints them.
"""

import sys
from collections.abc import Mapping
from typing import Any

PREFIX = "atropos/alarms/"
# Mean absolute difference in nats, by SGLang's dtype: on fresh samples only kernels and rounding contribute to it.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.0104, "float16": 0.0104}

_TEXTS = {
    "logprob_difference": "SGLang's logprobs of fresh samples differ from the trainer's by {value:.2g} nats in the "
    "mean, above trainer.atropos.logprob_tolerance={tolerance:g}; likely causes, in this order: sampling parameters, "
    "tensors missing on the servers (weight_sync.verify=probe finds them), dtype, kernels",
    "gradient_not_finite": "the gradient of an optimizer step was not finite, so verl left the step out: the policy is "
    "what it was before; look at actor/pg_loss, the learning rate and the dtype",
    "unknown_sampling": "{value:.0f} rows of a step came without sampling parameters, and are taken to be sampled at "
    "actor_rollout_ref.rollout.temperature; run their environment through recipe.atropos.utils.env_adapter, or let it "
    "send group_overrides.sampling_params",
    "other_temperature": "{value:.0f} rows of a step were sampled at another temperature than "
    "actor_rollout_ref.rollout.temperature (atropos/ENV/rows_with/other_temperature says by whom), and "
    "trainer.atropos.sampling_mismatch=warn trains on them with wrong logprobs; set it to per_row, or let the "
    "environment sample at the trainer's",
    "truncated_sampling": "{value:.0f} rows of a step were sampled with top_p, top_k or min_p, or greedily: neither "
    "SGLang nor the trainer has their logprobs; let the environment sample without",
    "penalized_sampling": "{value:.0f} rows of a step were sampled with penalties, logit bias, min_new_tokens or a "
    "grammar: the trainer does not compute that distribution; let the environment sample without",
}


def logprob_tolerance(given: float | None, dtype: str) -> float:
    """Return ``trainer.atropos.logprob_tolerance`` or, if it is null, the default for the served dtype."""
    return _TOLERANCE.get(dtype, _TOLERANCE["bfloat16"]) if given is None else given


def raised_by(metrics: Mapping[str, float], tolerance: float, mode: str) -> dict[str, float]:
    """Return the alarms of a step as {name: value}; ``mode`` is ``trainer.atropos.sampling_mismatch``."""
    limits = {
        "logprob_difference": ("atropos/logprob_diff/fresh_mean", tolerance),
        "gradient_not_finite": ("actor/grad_norm", sys.float_info.max),
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


def describe(name: str, value: float, tolerance: float) -> str:
    """Return a message that says what an alarm means and what to do."""
    return _TEXTS[name].format(value=value, tolerance=tolerance)


def remember(alarms: dict[str, dict[str, Any]], step: int, raised: Mapping[str, float], tolerance: float) -> list[str]:
    """Add a step's alarms to those of the run; return the names of the new ones."""
    new = [name for name in raised if name not in alarms]
    for name, value in raised.items():
        known = alarms.setdefault(name, {"first_step": step, "steps": 0, "largest": value})
        known |= {"last_step": step, "steps": known["steps"] + 1, "largest": max(known["largest"], value)}
        known["what"] = describe(name, known["largest"], tolerance)
    return new
