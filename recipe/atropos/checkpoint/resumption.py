"""Whether a run folder may go on with a configuration, and what is other than before."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from recipe.atropos.checkpoint.store import Checkpoints, model_of
from recipe.atropos.config.compose import OF_EACH_START, leaves
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run_dir import FORMAT, RunDir
from recipe.atropos.utils.files import read_json, write_atomic, write_json
from recipe.atropos.utils.secret import config_yaml, is_secret

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf's own takes seconds on a busy machine
_SAMPLE_BYTES = 1 << 20  # of each weights file at its beginning and its end
_SHOWN_FIRST = (
    "seed",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.optim.lr",
)
_MOST_SHOWN = 20


def prepare_folder(folder: RunDir, config: DictConfig, by_launcher: bool = False) -> list[str]:
    """Make the folder ready for ``config``; only for the holder of its lock, before anything is started.

    Returns the lines to show where a run is resumed with other values: ``key: old -> new``.

    Raises:
        ConfigurationError: the folder has another format, or the checkpoint to resume from is of another model.
    """
    folder.check_format()
    folder.remove_partial()
    checkpoints = Checkpoints(config.trainer.default_local_dir)
    checkpoints.remove_incomplete()
    resumed = checkpoints.to_resume(config.trainer)
    model, trained = model_identity(config.actor_rollout_ref.model.path), model_of(resumed) if resumed else None
    if trained is not None and not _same_model(trained, model):
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={model['path']} is another model than {trained['path']}, which was trained "
            f"to {resumed}: give that model, or another folder (--run-dir)"
        )
    identity = {"format": FORMAT, "model": model}
    if read_json(folder.identity) != identity:
        write_json(folder.identity, identity)
    goes_on = resumed is not None and resumed.parent == checkpoints.directory
    before = folder.config.read_bytes() if goes_on and folder.config.exists() else None
    after = config_yaml(config, by_launcher)
    write_atomic(folder.config, after)
    return [] if before is None else changed_keys(*(yaml.load(text, _YAML) for text in (before, after)))


def model_identity(path: str) -> dict[str, Any]:
    """What tells a model from another one: its path, and of a local folder a digest of configuration and weights.

    Of the weights only the sizes and the ends of each file are read; a model that moved is the same.
    """
    folder = Path(os.path.expanduser(path))
    if not (folder / "config.json").is_file():
        return {"path": path, "digest": None}
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with file.open("rb") as weights:
            size = weights.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {size}".encode())
            for start in (0, max(0, size - _SAMPLE_BYTES)):
                weights.seek(start)
                digest.update(weights.read(_SAMPLE_BYTES))
    return {"path": path, "digest": digest.hexdigest()}


def _same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    key = "digest" if one["digest"] and other["digest"] else "path"
    return one[key] == other[key]


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` of the keys whose values differ, those that matter most first, at most so many."""
    old, new = ({key: value for key, value in leaves(config) if value != {}} for config in (before, after))
    changed = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    changed = [key for key in changed if not is_secret(key) and key not in OF_EACH_START]
    changed.sort(key=lambda key: (_SHOWN_FIRST.index(key) if key in _SHOWN_FIRST else len(_SHOWN_FIRST), key))
    lines = [f"{key}: {old.get(key, 'not given')} -> {new.get(key, 'not given')}" for key in changed[:_MOST_SHOWN]]
    return lines + [f"and {len(changed) - _MOST_SHOWN} more keys"] * (len(changed) > _MOST_SHOWN)
