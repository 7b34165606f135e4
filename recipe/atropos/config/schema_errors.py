"""The check of a configuration against the schema: a line for each wrong value, with its key and what to give."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from recipe.atropos.config.schema import Configuration, documented
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.secret import shown_value

# Other choices, of verl or by other names, and why they are not available here; by key.
EXCLUDED = {
    "algorithm.adv_estimator": {
        "gae": "needs a critic, which this recipe does not train",
        "remax": "needs a greedy rollout for each prompt, which environments do not send",
        "dr_grpo": "is grpo with algorithm.norm_adv_by_std_in_grpo=false and "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "gdpo": "needs several named rewards for each sequence, of which the Trajectory API carries one",
    },
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        "geo_mean": "is averaged by verl over each micro-batch, padding rows included, and these are added up, so it "
        "grows with their number; gspo is the nearest",
    },
    "trainer.device": {"gpu": "is called cuda"},
    "inference.device": {"gpu": "is called cuda"},
    "actor_rollout_ref.actor.strategy": {
        "megatron": "is not supported: weights are pushed from the FSDP engines only",
    },
    "actor_rollout_ref.rollout.name": {
        "vllm": "is not supported: only SGLang serves token ids, logprobs and weight versions as needed here",
    },
}


def check_schema(values: Mapping[str, Any]) -> None:
    """Raise ConfigurationError with a line for each invalid value: the key, the value, and what to give."""
    if lines := wrong_values(values):
        raise ConfigurationError("\n".join(lines.values()))


def wrong_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the line of each invalid value, by its key."""
    lines: dict[str, str] = {}
    try:
        Configuration.model_validate(values)
    except ValidationError as error:
        for problem in error.errors():
            key, line = _line(values, problem)
            lines.setdefault(key, line)  # a union reports each of its branches
    return lines


def nearest(key: str, known: Iterable[str]) -> str:
    """Return ``; did you mean KEY?``, or "" if no key in ``known`` is similar."""
    found = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def _line(values: Mapping[str, Any], problem: Mapping[str, Any]) -> tuple[str, str]:
    keys: list[str] = []
    index, value = "", values
    for part in problem["loc"]:  # a union adds the name of its branch
        if isinstance(value, Mapping) and (part in value or problem["type"] == "missing"):
            keys.append(str(part))
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            index, value = f"[{part}]", value[part]
        else:
            break
    key = ".".join(keys) + index
    fields = documented()
    name = ".".join([keys[0], "NAME", *keys[2:]] if keys[0] == "environments" else keys)
    field = fields.get(name)
    if problem["type"] == "extra_forbidden":
        return key, f"{key}: no such key{nearest(name, fields).replace('.NAME.', f'.{keys[1]}.')}"
    if key == "actor_rollout_ref.model.path" and value in (None, ""):
        return key, f"{key} is not set: give --model, a folder in Hugging Face format or a hub name"
    if problem["type"] == "missing":
        return key, f"{key} is missing"
    choices = problem.get("ctx", {}).get("expected", "").replace("'", "").replace(" or ", ", ")
    if isinstance(value, str) and value in EXCLUDED.get(key, {}):
        return key, f"{key}={value} {EXCLUDED[key][value]}; choose one of {choices}"
    null = field is not None and type(None) in get_args(field.annotation) and not index
    shown = _shown(shown_value(key, value))
    if problem["type"] == "literal_error":
        near = nearest(shown, choices.split(", "))
        return key, f"{key}={shown}; choose one of {choices}{', null' if null else ''}{near}"
    template = _WANTED.get(problem["type"])
    wanted = template.format(**problem.get("ctx", {})) if template else problem["msg"]
    return key, f"{key}={shown}: give {wanted}{', or null' if null else ''}"


def _shown(value: Any) -> str:
    """Return a value as JSON, and a string as it is, in quotes if it would be read as something else."""
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    try:
        json.loads(value)
    except ValueError:
        return value
    return repr(value)


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list, [A, B]",
    "too_short": "{min_length} of them",
    "too_long": "{max_length} of them",
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "less than {lt:g}",
}
