"""What a run leaves to be read: ``metrics.jsonl``, a line a step, and ``summary.json``, by the trainer.

Both are functions of the trained steps alone: a resumed run continues the counts from its checkpoint and drops the
lines of steps that the checkpoint does not hold, because they are trained again.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

PHASES = {  # phases of a step, in order, and the timers of the trainer that measure them
    "wait": ("wait",),
    "convert": ("convert",),
    "evaluate": ("evaluate",),  # waiting for an evaluation of the weights that this step replaces
    "log_prob": ("old_log_prob", "ref"),
    "advantage": ("adv",),
    "update": ("update_actor",),
    "push": ("update_weights",),
    "record": ("dump",),
}


@dataclass
class RunTotals:
    """Sums over all trained steps of a run, across restarts. Seconds are the trainer's, without its start."""

    steps: int = 0
    sequences_trained: int = 0
    tokens_trained: int = 0
    mean_score_first: float | None = None
    mean_score_last: float | None = None
    policy_version: int | None = None
    seconds: float = 0.0
    seconds_per_phase: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    alarms: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name, see alarms.py


class Stateful(Protocol):
    """What a checkpoint can hold: torch's own convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RunRecord:
    """Writes into ``directory``. Stands where verl expects a dataloader, whose state it saves with each checkpoint.

    ``parts``, by name, are saved and restored with it.
    """

    def __init__(self, directory: str | Path, parts: Mapping[str, Stateful] | None = None):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.totals = RunTotals()
        self.parts = dict(parts or {})

    @property
    def metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def __len__(self) -> int:
        return 0  # no epochs: verl then restores the state wherever a run stopped

    def state_dict(self) -> dict[str, Any]:
        return {"totals": asdict(self.totals), **{name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals = RunTotals(**state["totals"])
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])

    def begin(self) -> None:
        """Call once the checkpoint is loaded: cuts ``metrics.jsonl`` to the steps that are in it."""
        lines = self.metrics_path.read_bytes().splitlines() if self.metrics_path.exists() else []
        kept = [line for line in lines if _step(line) <= self.totals.steps]
        self.metrics_path.write_bytes(b"".join(line + b"\n" for line in kept))

    def add_step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """One line of metrics and of seconds by phase."""
        totals = self.totals
        phases = {phase: sum(timing.get(key, 0.0) for key in keys) for phase, keys in PHASES.items()}
        phases["other"] = max(0.0, timing["step"] - sum(phases.values()))
        totals.steps = step
        totals.seconds += timing["step"]
        totals.seconds_per_phase = dict(Counter(totals.seconds_per_phase) + Counter(phases))
        with self.metrics_path.open("ab") as file:
            line = {"step": step, "time": time.time(), **metrics, **{f"phase_s/{k}": v for k, v in phases.items()}}
            file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Time that belongs to a step, spent after its line was written."""
        self.totals.seconds += seconds
        self.totals.seconds_per_phase[phase] = self.totals.seconds_per_phase.get(phase, 0.0) + seconds

    def write_summary(self) -> None:
        update_summary(self.directory, asdict(self.totals))


def update_summary(directory: str | Path, values: Mapping[str, Any]) -> None:
    """Merge ``values`` into ``summary.json``; a reader sees the old or the new file, never a part."""
    path = Path(directory) / "summary.json"
    old = orjson.loads(path.read_bytes()) if path.exists() else {}
    partial = path.with_suffix(".partial")
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    partial.write_bytes(orjson.dumps({**old, **values}, option=options))
    os.replace(partial, path)


class LineReader:
    """Follows a file of JSON objects, one a line, that is being written, from its beginning; whole lines only."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._offset = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines that were added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [orjson.loads(line) for line in whole.splitlines()]


class MetricsReader(LineReader):
    """Follows the ``metrics.jsonl`` of a run."""

    def __init__(self, directory: str | Path):
        super().__init__(Path(directory) / "metrics.jsonl")


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl``."""
    return MetricsReader(directory).new_lines()


def read_evaluations(directory: str | Path) -> list[dict[str, Any]]:
    """All lines of ``evaluations.jsonl``; not one in which a killed launcher stopped."""
    return LineReader(Path(directory) / "evaluations.jsonl").new_lines()


def _step(line: bytes) -> float:
    try:
        return orjson.loads(line)["step"]
    except (orjson.JSONDecodeError, KeyError):  # the line in which a killed trainer stopped
        return float("inf")
