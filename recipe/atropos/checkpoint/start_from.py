"""``--resume-from RUN[@STEP]``: a new run that begins with the weights that another one trained.

It has a new optimizer, counts from step 0, and keeps a copy of these weights in its own folder (``start/``), so that it
needs the other run only once:

- of a run without an adapter, or where the new one has none: the whole model, any adapter merged, which is then the
  model that is trained (and the reference policy);
- of a run with a LoRA adapter, where the new run trains one too: the adapter, which is trained on over the same base.

Without torch: the launcher asks.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from recipe.atropos.checkpoint.model_card import base_model
from recipe.atropos.checkpoint.store import ADAPTER_CONFIG, checkpoints_of, choose_checkpoint, step_of
from recipe.atropos.config.models import KEY as MODEL_KEY
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.run_dir import RunDir
from recipe.atropos.run_record import update_summary
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.process import run_command
from recipe.atropos.utils.secret import read_config_yaml

_MODEL = "actor_rollout_ref.model"


def forget_start(folder: RunDir) -> None:
    """Of a folder without checkpoints, whose run now begins with a model instead of another run's weights."""
    if "resumed_from" in read_json(folder.summary, {}) and not checkpoints_of(folder).whole():
        update_summary(folder.path, {}, remove=["resumed_from"])
        shutil.rmtree(folder.start, ignore_errors=True)


class NotExported(AtroposError, RuntimeError):
    """The other run's weights could not be copied; the message holds the last lines of the export."""


@dataclass(frozen=True)
class Start:
    """Which weights the run in ``folder`` begins with; ``adapter``: PEFT's configuration of the LoRA adapter that is
    all of them, or None: they are a whole model. ``trust_remote_code``: of the new run."""

    folder: RunDir
    source: RunDir
    step: int
    adapter: Mapping[str, Any] | None
    trust_remote_code: bool
    base: str
    """The model's folder or hub name, for the new run."""

    @classmethod
    def of(cls, config: DictConfig, directory: Path, given: set[str]) -> "Start":
        """By ``run.resume_from`` of ``config``, for the run in ``directory``; ``given`` are the keys that the user set.

        Raises:
            ConfigurationError: there is no such run or checkpoint, the run in ``directory`` began with another, or a
                key contradicts it.
        """
        key, folder = f"run.resume_from={config.run.resume_from}", RunDir(directory)
        if MODEL_KEY in given:
            raise ConfigurationError(
                f"{key} with {MODEL_KEY} (--model): the weights are that run's; leave out one of them"
            )
        name, step = re.fullmatch(r"(.+?)(?:@(\d+))?", config.run.resume_from).groups()
        source = RunDir(Path(name).expanduser())
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
            raise ConfigurationError(f"{key}: no {source.config.name} there; give the folder of a run, RUN or RUN@STEP")
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
        """Of the new run's configuration, by key; of an adapter that is trained on, its own."""
        values: dict[str, Any] = {"run.resume_from": f"{self.source.path}@{self.step}", MODEL_KEY: self.base}
        if self.adapter:
            targets = self.adapter["target_modules"]  # in no order, and a resumed run has the same configuration
            values |= {
                f"{_MODEL}.lora_adapter_path": str(self.folder.start),
                f"{_MODEL}.lora_alpha": self.adapter["lora_alpha"],
                f"{_MODEL}.target_modules": targets if isinstance(targets, str) else sorted(targets),
            }
        return values

    def for_checks(self, config: DictConfig) -> DictConfig:
        """``config`` before ``make``, with a model path that has the configuration and the tokenizer of the model."""
        config = config.copy()
        if not self.adapter and not self.folder.start.exists():
            with open_dict(config):
                path = choose_checkpoint(self.source, self.step) / "actor" / "huggingface"
                config.actor_rollout_ref.model.path = str(path)
        return config

    @property
    def log(self) -> Path:
        """Of the copying."""
        return self.folder.log("start")

    def make(self) -> None:
        """Copy the weights, unless they are there; for the holder of the folder's lock.

        Raises:
            NotExported: why.
        """
        told = {"run": str(self.source.path), "step": self.step}
        began = read_json(self.folder.summary, {}).get("resumed_from", {})
        if not self.folder.start.exists() or began.items() & told.items() != told.items():
            base = base_model(read_config_yaml(self.source.config), read_json(self.source.summary, {}))
            # In a process of its own: torch and transformers take seconds and memory that a launcher does not need.
            command = [
                sys.executable,
                "-m",
                "recipe.atropos.checkpoint.export",
                str(self.source.path),
                "--step",
                str(self.step),
            ]
            command += ["--out", str(self.folder.start), *(["--adapter"] if self.adapter else [])]
            command += ["--trust-remote-code"] if self.trust_remote_code else []
            status, printed = run_command("export", command, log_path=self.log)
            if status != 0:
                raise NotExported(f"run.resume_from={self.source.path}@{self.step}: {printed.strip()[-2000:]}")
            self.folder.mark_format()  # else the summary alone looks like a run of a version before there was a format
            update_summary(self.folder.path, {"resumed_from": {**told, "base": base}})
