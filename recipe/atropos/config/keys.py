"""Whether a given key exists and has an effect, and whether values fit the schema; if not, the message names the
nearest key, what to set instead, or what to give.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from recipe.atropos.config.schema import Configuration, documented
from recipe.atropos.config.unsupported import UNSUPPORTED
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.secret import shown_value

# Mappings whose keys are defined by the user or by another program.
FREE = (
    "inference.args",
    "environment.args",
    "environment.credit",
    "environment.reward_bridge",
    "environments",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "ray_kwargs.ray_init",
)
_ONLY_IN_CODE = tuple(  # verl's, but not in its YAML
    f"actor_rollout_ref.{role}.fsdp_config.wrap_policy.{key}"
    for role in ("actor", "ref")
    for key in ("transformer_layer_cls_to_wrap", "disable")
)
_MISSPELLED = 0.92  # similarity of two dotted keys from which on one is taken for the other, misspelled
_T = TypeVar("_T")
# Keys of other recipes that join Atropos and verl, and their names here; docs/migration.md lists all.
# A key covers all keys below it, which keep their names. If the new one has a comma or "=", the value differs too.
RENAMED = {
    "model.partial_pretrain": "actor_rollout_ref.model.path",
    "model.strategy": "actor_rollout_ref.actor.strategy",
    "rollout.max_new_tokens": "data.max_response_length",
    "actor_rollout_ref.rollout.max_new_tokens": "data.max_response_length",
    "data.micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu and "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu, with actor_rollout_ref.actor.use_dynamic_bsz=false",
    "data.balance_dp_token": "trainer.balance_batch",
    "optim": "actor_rollout_ref.actor.optim",
    "use_advantage_weighting": "actor_rollout_ref.actor.policy_loss.loss_mode=advantage_weighted_sft",
    "advantage_normalization": "trainer.atropos.advantage_normalization",
    "advantage_clipping": "trainer.atropos.advantage_clipping",
    "reward_config": "environment.reward_bridge",
    # atroposlib's example_trainer
    "model_name": "actor_rollout_ref.model.path",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "training_steps": "trainer.total_training_steps",
    "batch_size": "data.train_batch_size, which counts groups of actor_rollout_ref.rollout.n sequences",
    "seq_len": "data.max_prompt_length and data.max_response_length, in tokens",
    "device": "trainer.device",
    "save_path": "trainer.default_local_dir",
    "vllm_port": "inference.gateway_port",
    "vllm_restart_interval": "trainer.atropos.weight_sync.every",
    "use_wandb": "trainer.logger=[console,wandb]",
    "wandb_project": "trainer.project_name",
    "wandb_group": "trainer.experiment_name",
}


def of_all(function: Callable[[Any], _T], items: Iterable[Any]) -> tuple[list[_T], list[str]]:
    """Apply a function to all items; return its results, and the messages of the ConfigurationErrors that it raised."""
    found, wrong = [], []
    for item in items:
        try:
            found.append(function(item))
        except ConfigurationError as error:
            wrong.append(str(error))
    return found, wrong


def keys_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a nested mapping and of all mappings in it."""
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")


def is_free(key: str) -> bool:
    return any(f"{key}.".startswith(f"{free}.") for free in FREE)


def flat(key: str, value: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield ``key={name: value}`` as (key.name, value), unless the mapping is free-form or where no mapping is shipped.

    ``known``: the shipped values, with interpolations, by key.
    """
    if isinstance(value, dict) and not is_free(key) and isinstance(known.get(key, value or None), dict):
        for name, inner in value.items():
            yield from flat(f"{key}.{name}", inner, known)
    else:
        yield key, value


def checked(key: str, value: Any, known: Mapping[str, Any], shipped: DictConfig) -> tuple[str, Any]:
    """Return key and value. A key without effect that follows another is accepted, since the other may change too.

    Raises:
        ConfigurationError: there is no such key, it has no effect here, or its value is of another kind.
    """
    shown = shown_value(key, value)
    _check_renamed(key, shown)
    if is_free(key):
        return key, value
    reason = unsupported(key)[0]
    if key not in known and key not in _ONLY_IN_CODE:
        meant = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=_MISSPELLED)), None) if reason else None
        if not reason or (meant and not unsupported(meant)[0]):
            near = f"; did you mean {meant}?" if meant else _suggested(key, known)
            raise ConfigurationError(f"{key}: no such key{near}")
        raise without_effect(key, shown, meant)
    default = known.get(key)
    if reason and value != default and not _interpolates(default):
        raise without_effect(key, shown)
    if isinstance(default, dict) and not _interpolates(value):
        raise ConfigurationError(f"{key}={shown}: give a mapping, or one of its keys: {key}.{next(iter(default))}=...")
    if not reason and _interpolates(default):
        default = OmegaConf.select(shipped, key)
    if key not in documented() and (wanted := _another_kind(value, default)):
        raise ConfigurationError(f"{key}={shown}: give {wanted}, like verl's {default}")
    return key, value


def without_effect(key: str, value: Any, meant: str | None = None) -> ConfigurationError:
    reason, instead = unsupported(meant or key)
    advice = f"set {instead} instead" if instead else "leave it out"
    return ConfigurationError(f"{key}={value} has no effect here: {reason}; {advice}")


def unsupported(key: str) -> tuple[str | None, str | None]:
    """Return why a key has no effect here, and what to set instead; None if it has one."""
    if key not in UNSUPPORTED and key in documented():
        return None, None
    return next((UNSUPPORTED[prefix] for prefix in prefixes(key) if prefix in UNSUPPORTED), (None, None))


def _another_kind(value: Any, default: Any) -> str | None:
    """Return what to give if ``value`` is not of the kind of ``default``; for undocumented verl keys."""
    if value is None or default is None or _interpolates(value) or _interpolates(default):
        return None
    kinds = {bool: "true or false", int | float: "a number", list: "a list", dict: "a mapping", str: "a string"}
    wanted = next((name for kind, name in kinds.items() if isinstance(default, kind)), None)
    return None if wanted == next((name for kind, name in kinds.items() if isinstance(value, kind)), None) else wanted


def _interpolates(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _suggested(key: str, known: Iterable[str]) -> str:
    """Suggest a key that has an effect: one that ends with this key or its last name, else the most similar."""
    known = [other for other in known if not unsupported(other)[0]]
    ends = (f".{key}", "." + key.rpartition(".")[2])
    same_name = next((same for end in ends if (same := [other for other in known if other.endswith(end)])), None)
    near = nearest(key, same_name or known, cutoff=0.0 if same_name else 0.6)
    return near or "; recipe/atropos/config/trainer.yaml lists the keys"


def _check_renamed(key: str, value: Any) -> None:
    if old := next((prefix for prefix in prefixes(key) if prefix in RENAMED), None):
        new = RENAMED[old] + key.removeprefix(old)
        given = new if "=" in new or "," in new else f"{new}={as_given(value)}"
        instead = "leave it out" if "=" in new and value is False else f"give {given}"
        raise ConfigurationError(f"{key}={as_given(value)}: this key has another name here; {instead}")


def as_given(value: Any) -> str:
    """Return a value as a command line gives it."""
    return value if isinstance(value, str) else json.dumps(value, default=list)


def prefixes(key: str) -> list[str]:
    """Return the dotted key and the mappings around it, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


# ---------------------------------------------------------------- values

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


def wrong_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each invalid value, by its key: the key, the value, and what to give."""
    lines: dict[str, str] = {}
    try:
        Configuration.model_validate(values)
    except ValidationError as error:
        for problem in error.errors():
            key, line = _line(values, problem)
            lines.setdefault(key, line)  # a union reports each of its branches
    return lines


def nearest(key: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``; did you mean KEY?``, or "" if no key in ``known`` is similar."""
    found = difflib.get_close_matches(key, list(known), n=1, cutoff=cutoff)
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
    "less_than": "less than {lt:.10g}",
}
