"""``--resume-from RUN[@STEP]``: start a new run from the weights that another run trained.

The new run has a new optimizer, starts at step 0, and needs the other run only once, to copy its weights to its own
``start/``:

- if either run has no LoRA adapter: the full model, with any adapter merged, as the model to train (and the reference
  policy);
- if both runs have a LoRA adapter: the adapter, whose training continues on the same base.

This module does not import torch, because the launcher uses it.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.checkpoint.model_card import base_model
from recipe.atropos.checkpoint.store import ADAPTER_CONFIG, checkpoints_of, choose_checkpoint, step_of
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import update_summary
from recipe.atropos.run.status import RUNS, find_run
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.process import run_command
from recipe.atropos.utils.secret import read_config_yaml

_MODEL = "actor_rollout_ref.model"


def forget_start(folder: RunDir) -> None:
    """Discard another run's weights from a folder without checkpoints whose run now starts from a model instead."""
    if "resumed_from" in read_json(folder.summary, {}) and not checkpoints_of(folder).whole():
        update_summary(folder.path, {}, remove=["resumed_from"])
        shutil.rmtree(folder.start, ignore_errors=True)


@dataclass(frozen=True)
class Start:
    """Weights that the run in ``folder`` starts from: a LoRA adapter with PEFT's configuration ``adapter``, or a model.

    ``trust_remote_code`` is the new run's."""

    folder: RunDir
    source: RunDir
    step: int
    adapter: Mapping[str, Any] | None
    trust_remote_code: bool
    base: str
    """Folder or hub name of the model for the new run."""

    @classmethod
    def of(cls, config: DictConfig, directory: Path, given: set[str]) -> "Start":
        """Build from ``run.resume_from`` for the run in ``directory``; ``given`` are the keys that the user set.

        Raises:
            ConfigurationError: there is no such run or checkpoint, the run in ``directory`` started from other weights,
                or a key contradicts it.
        """
        key, folder = f"run.resume_from={config.run.resume_from}", RunDir(directory)
        if MODEL_KEY in given:
            raise ConfigurationError(
                f"{key} with {MODEL_KEY} (--model): the weights are that run's; leave out one of them"
            )
        name, step = re.fullmatch(r"(.+?)(?:@(\d+))?", config.run.resume_from).groups()
        missing = f"no {RunDir(name).config.name} there"
        try:
            source = find_run(name)
        except (ConfigurationError, OSError) as error:  # a run that has begun with its weights does not need it
            source, missing = (
                RunDir(Path(name).expanduser() if os.sep in name else RUNS / name),
                str(error).removeprefix(f"{name}: "),
            )
        if source.path == folder.path:
            raise ConfigurationError(f"{key} is the run's own folder: leave it out, the same command resumes a run")
        began = read_json(folder.summary, {}).get("resumed_from")
        rank, trusted = (config.actor_rollout_ref.model[key] for key in ("lora_rank", "trust_remote_code"))
        known = began and began["run"] == str(source.path) and step in (None, str(began["step"]))
        if known and folder.start.exists():
            adapter = read_json(folder.start / ADAPTER_CONFIG)
            if adapter and adapter["r"] != rank:
                raise ConfigurationError(
                    f"{_MODEL}.lora_rank={rank} with {key}: run.dir={directory} has begun with that run's adapter, of "
                    f"rank {adapter['r']}; give that rank, or another folder (--run-dir)"
                )
            base = adapter["base_model_name_or_path"] if adapter else str(folder.start)
            return cls(folder, source, began["step"], adapter, trusted, base)
        if checkpoints_of(folder).whole():
            what = f"the weights of {began['run']}, step {began['step']}" if began else f"the model of {MODEL_KEY}"
            raise ConfigurationError(
                f"{key}: run.dir={directory} has begun with {what}; give another folder (--run-dir)"
            )
        if not source.config.is_file():
            raise ConfigurationError(f"{key}: {missing}; give RUN or RUN@STEP")
        try:
            checkpoint = choose_checkpoint(source, step and int(step))
        except ConfigurationError as error:
            raise ConfigurationError(f"{key}: {error}") from error
        adapter = read_json(checkpoint / "actor" / ADAPTER_CONFIG) if rank else None
        if adapter and adapter["r"] != rank:
            raise ConfigurationError(
                f"{_MODEL}.lora_rank={rank} with {key}, whose adapter has rank {adapter['r']}: give that "
                "rank to train it on, 0 to train the whole model, or --model with an export of that run"
            )
        base = read_config_yaml(source.config).actor_rollout_ref.model.path if adapter else str(folder.start)
        return cls(folder, source, step_of(checkpoint), adapter, trusted, base)

    @property
    def values(self) -> dict[str, Any]:
        """Configuration values for the new run, by key, including the settings of an adapter."""
        values: dict[str, Any] = {"run.resume_from": f"{self.source.path}@{self.step}", MODEL_KEY: self.base}
        if self.adapter:
            targets = self.adapter["target_modules"]  # unordered, but a resumed run must have the same configuration
            values |= {
                f"{_MODEL}.lora_adapter_path": str(self.folder.start),
                f"{_MODEL}.lora_alpha": self.adapter["lora_alpha"],
                f"{_MODEL}.target_modules": targets if isinstance(targets, str) else sorted(targets),
            }
        return values

    @property
    def model_before_the_copy(self) -> str:
        """Return a model path for use before ``make``, which has at least the model's configuration and tokenizer."""
        if self.adapter or self.folder.start.exists():
            return self.base
        return str(choose_checkpoint(self.source, self.step) / "actor" / "huggingface")

    def make(self) -> None:
        """Copy the weights unless they are there; the caller must hold the folder's lock.

        Raises:
            AtroposError: the export failed; with its last lines.
        """
        origin = {"run": str(self.source.path), "step": self.step}
        began = read_json(self.folder.summary, {}).get("resumed_from", {})
        if not self.folder.start.exists() or began.items() & origin.items() != origin.items():
            base = base_model(read_config_yaml(self.source.config), read_json(self.source.summary, {}))
            # In a separate process: torch and transformers cost time and memory that the launcher should not spend.
            command = [sys.executable, "-m", "recipe.atropos", "export", str(self.source.path)]
            command += ["--step", str(self.step), "--out", str(self.folder.start)]
            command += ["--adapter"] if self.adapter else []
            command += ["--trust-remote-code"] if self.trust_remote_code else []
            status, printed = run_command("export", command, log_path=self.folder.log("start"))
            if status != 0:
                raise AtroposError(f"run.resume_from={self.source.path}@{self.step}: {printed.strip()[-2000:]}")
            self.folder.mark_format()  # else the summary alone looks like a run from before there was a format
            update_summary(self.folder.path, {"resumed_from": {**origin, "base": base}})
