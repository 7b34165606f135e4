"""Check whether a run folder can be resumed with a configuration, and find what changed."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.checkpoint.store import Checkpoints, checkpoints_of, model_of, step_of
from recipe.atropos.config.compose import LAUNCHER_KEYS, leaves
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import FORMAT, RunDir
from recipe.atropos.utils.files import read_json, read_lines, read_yaml, usable, write_atomic, write_json
from recipe.atropos.utils.secret import API_KEY, config_yaml, is_secret, without_secrets

_SAMPLE_BYTES = 1 << 20  # read at the beginning and at the end of each weights file
_SHOWN_FIRST = (
    "seed",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.optim.lr",
)
_MOST_SHOWN = 20
_ENGINE = ".checkpoint_engine.engine_kwargs."  # copies of other keys, in configurations of earlier versions


def prepare_folder(
    folder: RunDir, config: DictConfig, versions: dict[str, str], given: Mapping[str, Any] | None = None
) -> list[str]:
    """Prepare the folder for ``config``; the caller must hold its lock and must not have started anything yet.

    ``versions``: of what the run uses, to be recorded. ``given``: what its configuration was composed of, by key, to be
    recorded for other runs; None: they cannot be started from its configuration.

    Returns lines to show if a run is resumed with changed values: ``key: old -> new``.

    Raises:
        ConfigurationError: the folder has another format, its checkpoints are another run's or cannot be written, or
            the checkpoint to resume from is of another model, of another number or layout of ranks, or beyond the last
            step.
        RunDirError: a file of the folder is damaged.
    """
    folder.check_format()
    folder.remove_partial()
    checkpoints = _own_checkpoints(folder, config)
    checkpoints.remove_incomplete()
    resumed = check_folder(folder, config)
    model = model_identity(config.actor_rollout_ref.model.path)
    identity = {"format": FORMAT, "dir": str(folder.path), "model": model, "versions": versions}
    recorded = read_json(folder.identity, {})
    if folder.is_other(recorded.get("dir", "")):  # this is a copy of that run, which goes on with its W&B run
        folder.wandb_run.unlink(missing_ok=True)
    if recorded != identity:
        write_json(folder.identity, identity)
    with usable(f"trainer.default_local_dir={checkpoints.directory}", "a folder that can be written"):
        checkpoints.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(checkpoints.owner, str(folder.path).encode())
    goes_on = resumed is not None and resumed.parent == checkpoints.directory
    before = read_yaml(folder.config) if goes_on and folder.config.exists() else None
    write_atomic(folder.config, config_yaml(config))
    if given is not None:
        nested = OmegaConf.create({})  # since what is below a secret's name is secret
        for key, value in {**given, "run.dir": str(folder.path)}.items():
            OmegaConf.update(nested, key, API_KEY if key == "inference.api_key" else value, force_add=True)
        public = without_secrets(OmegaConf.to_container(nested))
        write_atomic(folder.given, OmegaConf.to_yaml(OmegaConf.create(public)).encode())
    return [] if before is None else changed_keys(before, read_yaml(folder.config))


def check_folder(folder: RunDir, config: DictConfig) -> Path | None:
    """Return the checkpoint that a run of ``config`` resumes from, or None; nothing is changed. Raises as
    ``prepare_folder``.
    """
    folder.check_format()
    for path in (folder.metrics, folder.evaluations, folder.alarms, *folder.environments.glob("*.jsonl")):
        read_lines(path)
    read_json(folder.summary)
    checkpoints = _own_checkpoints(folder, config)
    resumed = checkpoints.to_resume(config.trainer)
    if resumed is None and config.trainer.resume_mode == "auto" and (others := checkpoints_of(folder)).whole():
        raise ConfigurationError(
            f"trainer.default_local_dir={checkpoints.directory}, and this run has its checkpoints in "
            f"{others.directory}: give that or move them, or begin another run (--run-dir)"
        )
    model, trained = model_identity(config.actor_rollout_ref.model.path), model_of(resumed) if resumed else None
    by = "digest" if trained and trained["digest"] and model["digest"] else "path"
    if trained is not None and trained[by] != model[by]:
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={model['path']} is another model than {trained['path']}, which was trained "
            f"to {resumed}: give that model, or another folder (--run-dir)"
        )
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    saved = {int(path.name.split("_")[3]) for path in resumed.glob("actor/model_world_size_*.pt")} if resumed else set()
    if saved - {ranks}:
        raise ConfigurationError(
            f"trainer.nnodes * trainer.n_gpus_per_node = {ranks}, and {resumed} was saved by {max(saved)} ranks: give "
            "as many, or begin another run with its model (verl-atropos export)"
        )
    owner = Checkpoints(resumed.parent).run_dir() if resumed else ""
    then = _layout(OmegaConf.create(read_yaml(RunDir(owner).config))) if owner and RunDir(owner).config.exists() else {}
    for key, now in _layout(config).items():
        if then.get(key, now) != now:
            raise ConfigurationError(
                f"{key}={OmegaConf.select(config, key)}, and {resumed} was saved with {then[key]}: give that, or begin "
                "another run with its model (verl-atropos export)"
            )
    if resumed and step_of(resumed) > (steps := config.trainer.total_training_steps):
        raise ConfigurationError(
            f"trainer.total_training_steps={steps}, and {resumed} was trained further: give at least its step "
            "(--steps), or another folder (--run-dir)"
        )
    return resumed


def _layout(config: DictConfig) -> dict[str, Any]:
    """Return what decides on the shards of a checkpoint, beside the number of ranks; of an old configuration, less."""
    keys = ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.fsdp_config.fsdp_size")
    strategy, size = (OmegaConf.select(config, key) for key in keys)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    found = dict(zip(keys, (strategy, size if size is None or 0 < size < ranks else -1), strict=True))
    model = "actor_rollout_ref.model."
    if rank := OmegaConf.select(config, f"{model}lora_rank"):
        for key in (f"{model}target_modules", f"{model}exclude_modules"):
            value = OmegaConf.select(config, key) or "null"
            found[key] = sorted(value) if OmegaConf.is_list(value) else value
    found[f"{model}lora_rank"] = rank
    return {key: value for key, value in found.items() if value is not None}


def _own_checkpoints(folder: RunDir, config: DictConfig) -> Checkpoints:
    """Return the run's checkpoints. Raises ConfigurationError if another run has its own there."""
    checkpoints = Checkpoints(config.trainer.default_local_dir)
    with usable(f"trainer.default_local_dir={checkpoints.directory}", "a folder that can be written"):
        owner = checkpoints.run_dir()
    if folder.is_other(owner) and not checkpoints.directory.is_relative_to(folder.path):  # unlike those of a copy
        raise ConfigurationError(
            f"trainer.default_local_dir={checkpoints.directory} is that of the run in {owner}: resume that run "
            "(--run-dir), or give this one a folder of its own"
        )
    return checkpoints


def model_identity(path: str) -> dict[str, Any]:
    """Return a model's identity: its path and, for a local folder, a digest of its configuration and weights.

    Only the size, beginning and end of each weights file are read. A model that was moved has the same digest.
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


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return ``key: old -> new`` for keys whose values differ, most important first, at most ``_MOST_SHOWN``."""
    old, new = ({key: value for key, value in leaves(config) if value != {}} for config in (before, after))
    changed = [
        key
        for key in old.keys() | new.keys()
        if old.get(key) != new.get(key) and not is_secret(key) and key not in LAUNCHER_KEYS and _ENGINE not in key
    ]
    changed.sort(key=lambda key: (_SHOWN_FIRST.index(key) if key in _SHOWN_FIRST else len(_SHOWN_FIRST), key))
    lines = [f"{key}: {old.get(key, 'not given')} -> {new.get(key, 'not given')}" for key in changed[:_MOST_SHOWN]]
    return lines + [f"and {len(changed) - _MOST_SHOWN} more keys"] * (len(changed) > _MOST_SHOWN)
