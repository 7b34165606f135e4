"""Whether a given key exists and has an effect; if not, the message names the nearest key, or what to set instead."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.config.schema import documented
from recipe.atropos.config.unsupported import UNSUPPORTED
from recipe.atropos.errors import ConfigurationError

# Mappings whose keys are defined by the user or by another program.
FREE = (
    "inference.args",
    "environment.args",
    "environment.reward_bridge",
    "environments",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy",
    "ray_kwargs.ray_init",
)
_ONLY_IN_DATACLASSES = ("actor_rollout_ref.actor.checkpoint.save_lora_only",)  # verl's, but not in its YAML
_MISSPELLED = 0.85  # similarity of two names from which on one is taken for the other, misspelled
_T = TypeVar("_T")
# Keys of other recipes that join Atropos and verl, and their names here; docs/migration.md lists all.
# A key covers all keys below it, which keep their names. If the new one has a comma or "=", the value differs too.
RENAMED = {
    "model.partial_pretrain": "actor_rollout_ref.model.path",
    "model.strategy": "actor_rollout_ref.actor.strategy",
    "rollout.max_new_tokens": "data.max_response_length",
    "actor_rollout_ref.rollout.max_new_tokens": "data.max_response_length",
    "data.micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
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


def keys_of(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")


def is_free(key: str) -> bool:
    return any(f"{key}.".startswith(f"{free}.") for free in FREE)


def changes_of_key(key: str, value: Any, known: set[str], shipped: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield ``key={name: value}`` as (key.name, value), except for the free-form mappings.

    Raises:
        ConfigurationError: there is no such key, it has no effect here, or its value is of another kind.
    """
    if not is_free(key):
        reason = _unsupported(key)[0]
        if key not in known and key not in _ONLY_IN_DATACLASSES:
            meant = _misspelled(key, known) if reason else None
            if not reason or (meant and not _unsupported(meant)[0]):
                near = f"; did you mean {meant}?" if meant else _nearest(key, known)
                raise ConfigurationError(f"{key}: no such key{near}")
            raise without_effect(key, value, meant or key)
        default = OmegaConf.select(shipped, key)
        if isinstance(value, dict) and OmegaConf.is_dict(default):

            def changes_below(item: tuple[str, Any]) -> list[tuple[str, Any]]:
                return list(changes_of_key(f"{key}.{item[0]}", item[1], known, shipped))

            found, wrong = of_all(changes_below, value.items())
            if wrong:
                raise ConfigurationError("\n".join(wrong))
            yield from chain(*found)
            return
        if OmegaConf.is_dict(default) and not _interpolates(value):
            raise ConfigurationError(
                f"{key}={value}: give a mapping, or one of its keys: {key}.{next(iter(default))}=..."
            )
        default = OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
        if reason and (followed := reference(key, shipped)):
            if value == followed:
                return
            value = Derived(value)
        elif reason and value != default:
            raise without_effect(key, value)
        if not isinstance(value, Derived) and key not in documented() and (wanted := _another_kind(value, default)):
            raise ConfigurationError(f"{key}={value}: give {wanted}, like verl's {default}")
    yield key, value


@dataclass(frozen=True)
class Derived:
    """Value given for a key that has no effect here and follows another: valid only if it equals that one's."""

    given: Any


def reference(key: str, shipped: DictConfig) -> str | None:
    """Return ``${OTHER}`` if that is the shipped value, else None."""
    mapping, _, name = key.rpartition(".")
    values = OmegaConf.select(shipped, mapping) if mapping else shipped
    if not (OmegaConf.is_dict(values) and name in values.keys() and OmegaConf.is_interpolation(values, name)):
        return None
    return OmegaConf.to_container(values)[name]


def without_effect(key: str, value: Any, meant: str | None = None) -> ConfigurationError:
    reason, instead = _unsupported(meant or key)
    advice = f"set {instead} instead" if instead else "leave it out"
    return ConfigurationError(f"{key}={value} has no effect here: {reason}; {advice}")


def _unsupported(key: str) -> tuple[str | None, str | None]:
    if key not in UNSUPPORTED and key in documented():
        return None, None
    return next((UNSUPPORTED[prefix] for prefix in prefixes(key) if prefix in UNSUPPORTED), (None, None))


def _another_kind(value: Any, default: Any) -> str | None:
    """Return what to give if ``value`` is not of the kind of ``default``; for undocumented verl keys."""
    if value is None or default is None or _interpolates(value):
        return None
    kinds = {bool: "true or false", int | float: "a number", list: "a list", dict: "a mapping", str: "a string"}
    wanted = next((name for kind, name in kinds.items() if isinstance(default, kind)), None)
    return None if wanted == next((name for kind, name in kinds.items() if isinstance(value, kind)), None) else wanted


def _interpolates(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _misspelled(key: str, known: set[str]) -> str | None:
    """Return the key whose names are those of ``key``, but for a letter or two; None if there is none."""
    mapping, _, name = key.rpartition(".")
    if mapping and mapping not in known and (mapping := _misspelled(mapping, known)) is None:
        return None
    names = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == mapping]
    found = difflib.get_close_matches(name, names, n=1, cutoff=_MISSPELLED)
    return f"{mapping}.{found[0]}".removeprefix(".") if found else None


def _nearest(key: str, known: set[str]) -> str:
    """Suggest a key that has an effect: one that ends with this key or its last name, else the most similar."""
    known = {other for other in known if not _unsupported(other)[0]}
    ends = (f".{key}", "." + key.rpartition(".")[2])
    same_name = next((same for end in ends if (same := [other for other in known if other.endswith(end)])), None)
    found = difflib.get_close_matches(key, same_name or known, n=1, cutoff=0.0 if same_name else 0.6)
    return f"; did you mean {found[0]}?" if found else "; recipe/atropos/config/trainer.yaml lists the keys"


def check_renamed(values: Mapping[str, Any]) -> None:
    """Raise ConfigurationError with a line for each key of ``RENAMED`` in ``values``, which names the new key."""
    if lines := list(_lines(values, "")):
        raise ConfigurationError("\n".join(lines))


def _lines(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{key}.")
        elif old := next((prefix for prefix in prefixes(key) if prefix in RENAMED), None):
            new = RENAMED[old] + key.removeprefix(old)
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            complete = "=" in new or "," in new
            instead = (
                "leave it out" if "=" in new and value is False else f"give {new if complete else f'{new}={shown}'}"
            )
            yield f"{key}={shown}: this key has another name here; {instead}"


def prefixes(key: str) -> list[str]:
    """Return the dotted key and the mappings around it, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
