"""Run outputs that the trainer writes: ``metrics.jsonl``, with one line per step, and ``summary.json``; and what the
lines of alarms and of environments' reports say.

The trainer's depend only on the trained steps: a resumed run continues the counts from its checkpoint and drops the
lines of steps that the checkpoint does not include, because they are trained again. The launcher adds the rest of the
summary.
"""

import contextlib
import fcntl
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import (
    append_line,
    disk_errors,
    open_lock,
    read_json,
    read_lines,
    rewrite_lines,
    write_json,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_FRESH_SECONDS = 60.0  # for the marker file of a waiting trainer
PHASES = {  # phases of a step, in order, and the trainer's timers that measure them
    "wait": ("wait",),
    "convert": ("convert",),
    "evaluate": ("evaluate",),  # waiting for an evaluation of the weights that this step replaces
    "log_prob": ("old_log_prob", "ref"),
    "advantage": ("adv",),
    "update": ("update_actor",),
    "push": ("update_weights",),
    "record": (),  # hidden by the update; lines of earlier runs have seconds here
}


SCORES = ("atropos/mean_raw_score", "atropos/mean_score")
"""Names of a step's mean score before reward shaping; a run without reward shaping may have the second only."""


@dataclass
class RunTotals:
    """Totals over all trained steps of a run, across restarts. Seconds are the trainer's, without its startup."""

    steps: int = 0
    batches: int = 0  # number of the last batch in the weights; batches with nothing to train on count
    empty_batches: int = 0  # those with nothing to train on
    groups_trained: int = 0
    groups_dropped: int = 0  # groups with no sequence that was trained on
    sequences_trained: int = 0
    tokens_trained: int = 0
    mean_score_first: float | None = None
    mean_score_last: float | None = None
    policy_version: int | None = None
    seconds: float = 0.0
    seconds_per_phase: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def add_batch(self, score: float, groups: int, dropped: int, sequences: int, tokens: int, version: int) -> None:
        """Add what a step trained on, its mean score and the policy version after it; ``dropped`` counts groups."""
        self.mean_score_first = score if self.mean_score_first is None else self.mean_score_first
        self.mean_score_last = score
        self.groups_trained += groups
        self.groups_dropped += dropped
        self.sequences_trained += sequences
        self.tokens_trained += tokens
        self.policy_version = version


class RunRecord:
    """Writer of a run's outputs in ``directory``; its state is saved with each checkpoint.

    ``parts``, by name, are saved and restored with it.
    """

    def __init__(self, directory: str | Path, parts: Mapping[str, "Stateful"] | None = None):
        self.directory = RunDir(directory)
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.directory.waiting.unlink(missing_ok=True)  # left by a killed trainer
        self.totals = RunTotals()
        self.parts = dict(parts or {})

    def state_dict(self) -> dict[str, Any]:
        return {"totals": asdict(self.totals), **{name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = RunTotals.__dataclass_fields__.keys()  # earlier checkpoints have "alarms" too
        self.totals = RunTotals(**{name: value for name, value in state["totals"].items() if name in known})
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])

    def forget_counts(self) -> None:
        """Count from zero, since the checkpoint is another run's; only where that run stood is kept."""
        known = self.totals
        self.totals = RunTotals(steps=known.steps, batches=known.batches, policy_version=known.policy_version)

    def begin(self) -> None:
        """Drop and count the records of steps that are not in the checkpoint; call once the checkpoint is loaded."""
        lines = read_lines(self.directory.metrics)
        rewrite_lines(self.directory.metrics, [line for line in lines if line["step"] <= self.totals.steps])
        self.write_summary()

    def add_step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Write one line with metrics and seconds by phase."""
        totals = self.totals
        phases = {phase: sum(timing.get(key, 0.0) for key in keys) for phase, keys in PHASES.items()}
        phases["other"] = max(0.0, timing["step"] - sum(phases.values()))
        totals.steps = step
        totals.seconds += timing["step"]
        totals.seconds_per_phase = dict(Counter(totals.seconds_per_phase) + Counter(phases))
        line = {"step": step, "time": time.time(), **metrics, **{f"phase_s/{k}": v for k, v in phases.items()}}
        append_line(self.directory.metrics, line)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the run's folder while the trainer waits; call ``still_waiting`` every few seconds."""
        self.still_waiting()
        try:
            yield
        finally:
            self.directory.waiting.unlink(missing_ok=True)

    def still_waiting(self) -> None:
        self.directory.waiting.touch()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add time that belongs to a step but was spent after its line was written."""
        self.totals.seconds += seconds
        self.totals.seconds_per_phase[phase] = self.totals.seconds_per_phase.get(phase, 0.0) + seconds

    def write_summary(self) -> None:
        update_summary(self.directory.path, asdict(self.totals))


def account_of_groups(summary: Mapping[str, Any], received: int) -> dict[str, int]:
    """Return what happened to the groups that the Trajectory API has ``received`` in a run.

    Each was trained on once, or dropped by the trainer, or is left: in a batch that was not trained on, or in no batch.
    """
    account = {name: summary.get(f"groups_{name}", 0) for name in ("trained", "dropped")}
    return {"received": received, **account, "left": received - sum(account.values())}


class WaitingMark:
    """Marker file that a waiting trainer touches every few seconds; only changes of its time count, not the clock."""

    def __init__(self, directory: RunDir):
        self._path, self._seen, self._changed = directory.waiting, 0, 0.0

    def is_fresh(self) -> bool:
        """Return whether it exists and was touched in the last ``_FRESH_SECONDS``; a hung trainer does not touch it."""
        try:
            seen = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        return time.monotonic() - self._changed < _FRESH_SECONDS


def update_summary(directory: str | Path, values: Mapping[str, Any], remove: Collection[str] = ()) -> None:
    """Merge ``values`` into ``summary.json`` and delete the keys in ``remove``.

    A lock keeps concurrent processes from undoing each other's updates.

    Raises:
        DiskFull: the summary is unchanged.
    """
    path = RunDir(directory).summary
    with disk_errors(path), open(open_lock(path.with_name(".summary.lock")), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = {**read_json(path, {}), **values}
        write_json(path, {key: value for key, value in merged.items() if key not in remove})


def add_start(directory: str | Path, seconds: float) -> None:
    """Add a start that has ended to ``seconds_in_all``, in which those of a killed launcher are missing."""
    before = read_json(RunDir(directory).summary, {}).get("seconds_in_all", 0.0)
    update_summary(directory, {"seconds_in_all": before + seconds})


def score_of(line: Mapping[str, Any]) -> float | None:
    """Return the mean score of a step's samples before reward shaping, from a line of ``metrics.jsonl``."""
    return next((line[key] for key in SCORES if line.get(key) is not None), None)


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """Return all lines of ``metrics.jsonl``."""
    return read_lines(RunDir(directory).metrics)


def by_alarm(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str | None], list[dict[str, Any]]]:
    """Return the lines of ``alarms.jsonl`` by alarm and environment, in order; what changed last comes last."""
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for line in lines:
        key = line["alarm"], line.get("environment")
        found[key] = about = found.pop(key, [])
        about.append(line)
    return found


def left_open(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines that raised an alarm which no line clears, the newest last."""
    newest = [each[-1] for each in by_alarm(lines).values()]
    return [line for line in newest if line.get("state") == "raised"]


class ItemCounts:
    """What became of an environment's items over all its processes, from its reports.

    ``totals``: of what ended, by name; ``in_flight``: items that are begun, by replica; ``lost``: items that were begun
    when their process ended. ``restarts``: of its processes.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.in_flight: Counter[int] = Counter()
        self.lost = self.restarts = 0
        self._of_process: dict[int, Counter[str]] = {}  # by replica

    def add(self, line: Mapping[str, Any]) -> Counter[str]:
        """Add a line of a report, and return what it adds to the totals; each process counts from 0."""
        replica = line.get("replica", 0)
        if "started" in line:
            self.lost += self.in_flight.pop(replica, 0)
            self._of_process.pop(replica, None)
            self.restarts += line.get("restarted", False)
        if "counts" not in line:
            return Counter()
        counts = Counter(line["counts"])
        added = counts - self._of_process.get(replica, Counter())
        self._of_process[replica], self.in_flight[replica] = counts, line["in_flight"]
        self.totals += added
        return added
