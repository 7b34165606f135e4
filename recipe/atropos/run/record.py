"""Run outputs that the trainer writes: ``metrics.jsonl``, with one line per step, and ``summary.json``; and what the
lines of evaluations, alarms and environments' reports say.

The trainer's depend only on the trained steps: a resumed run continues the counts from its checkpoint and drops the
lines of steps that the checkpoint does not include, because they are trained again. The launcher adds the rest of the
summary.
"""

import contextlib
import fcntl
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipe.atropos.errors import AtroposError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import (
    append_line,
    disk_errors,
    read_json,
    read_lines,
    rewrite_lines,
    write_atomic,
    write_json,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

NONE_YET = -1  # no version has been evaluated

_POLL_SECONDS, _MEANWHILE_SECONDS = 0.1, 2.0  # between two looks for an evaluation, and at what else is to be done
_FRESH_SECONDS = 60.0  # for the marker file of a waiting trainer
PHASES = {  # phases of a step, in order, and the trainer's timers that measure them
    "wait": ("wait",),
    "convert": ("convert",),
    "evaluate": ("evaluate",),  # waiting for an evaluation of the weights that this step replaces
    "log_prob": ("old_log_prob", "ref"),
    "advantage": ("adv",),
    "update": ("update_actor",),
    "push": ("update_weights",),
    "record": ("dump",),
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
        self.directory.waiting.unlink(missing_ok=True)  # left by a killed trainer
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


class NotEvaluated(AtroposError, RuntimeError):
    """The launcher did not report in time that the weights were evaluated."""


def needs_evaluation(version: int, every: int | None) -> bool:
    """Return whether the trainer keeps ``version`` until it is evaluated: the first, and then each ``every`` updates.

    The last version is evaluated when the trainer has ended.
    """
    return version == 0 or bool(every and version % every == 0)


def mark_evaluated(path: Path, version: int) -> None:
    """Tell the trainer which ``version`` was evaluated last, in a file whose reader never sees a part of the number.

    Without the launcher, no file is configured, and the trainer does not wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, str(version).encode())


def wait_until_evaluated(
    path: str | Path, version: int, timeout: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Wait until ``version``, or a later one, was evaluated; call ``meanwhile`` every few seconds.

    Raises:
        NotEvaluated: it was not evaluated within ``timeout`` seconds.
    """
    begun = looked = time.monotonic()
    while int(Path(path).read_text()) < version:
        now = time.monotonic()
        if now - begun > timeout:
            raise NotEvaluated(
                f"version {version} of the weights was not evaluated within {timeout:g} s; see the launcher's output, "
                "or raise evaluation.timeout"
            )
        if now - looked > _MEANWHILE_SECONDS:
            meanwhile()
            looked = time.monotonic()
        time.sleep(_POLL_SECONDS)


def update_summary(directory: str | Path, values: Mapping[str, Any], remove: Collection[str] = ()) -> None:
    """Merge ``values`` into ``summary.json`` and delete the keys in ``remove``.

    A lock keeps concurrent processes from undoing each other's updates.

    Raises:
        DiskFull: the summary is unchanged.
    """
    path = RunDir(directory).summary
    with disk_errors(path), open(path.with_name(".summary.lock"), "ab") as lock:
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


def is_accuracy(metric: str) -> bool:
    """Return whether this metric of an evaluation is a share of correct answers, shown in percent."""
    return metric.endswith(("percent_correct", "accuracy"))


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """Return all lines of ``metrics.jsonl``."""
    return read_lines(RunDir(directory).metrics)


def read_evaluations(directory: str | Path) -> list[dict[str, Any]]:
    """Return all lines of ``evaluations.jsonl``."""
    return read_lines(RunDir(directory).evaluations)


class Evaluation(NamedTuple):
    """An environment's main metric at a step; ``items``: on how many it was measured, if that is known."""

    step: int
    score: float
    items: int | None
    metric: str


def held_out(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Evaluation]]:
    """Return the evaluations of each environment, in order, from lines of ``evaluations.jsonl``.

    Those that failed or have no value for the main metric of the environment's first one are left out.
    """
    found: dict[str, list[Evaluation]] = {}
    for line in lines:
        metrics, known = line.get("metrics", {}), found.get(line["env"])
        metric = known[0].metric if known else line.get("main")
        if metric in metrics:
            evaluation = Evaluation(line["step"], metrics[metric], item_count(metrics), metric)
            found.setdefault(line["env"], []).append(evaluation)
    return found


def item_count(metrics: Mapping[str, float]) -> int | None:
    """Return on how many items an environment measured its metrics, if it says so."""
    found = next((value for name, value in metrics.items() if name.endswith("total")), None)
    return None if found is None else int(found)


def heldout_scores(directory: str | Path) -> dict[int, float]:
    """Return the mean of the environments' main metrics, by step, for steps at which all environments were evaluated.

    "All" means those of the two newest steps, so that one failed evaluation does not make another step the best one.
    """
    values: dict[int, dict[str, float]] = {}
    for env, evaluations in held_out(read_evaluations(directory)).items():
        for step, score, *_ in evaluations:
            values.setdefault(step, {})[env] = score
    needed = {env for step in sorted(values)[-2:] for env in values[step]}
    scores = {step: [found[env] for env in needed] for step, found in values.items() if needed <= found.keys()}
    return {step: sum(found) / len(found) for step, found in scores.items()}


def by_alarm(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str | None], list[dict[str, Any]]]:
    """Return the lines of ``alarms.jsonl`` by alarm and environment, in order; what changed last comes last."""
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for line in lines:
        key = line["alarm"], line.get("environment")
        found[key] = [*found.pop(key, ()), line]
    return found


def left_open(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines that raised an alarm which no line clears, the newest last."""
    newest = [each[-1] for each in by_alarm(lines).values()]
    return [line for line in newest if line.get("state") == "raised"]


class ItemCounts:
    """What became of an environment's items over all its processes, from its reports.

    ``totals``: of what ended, by name; ``in_flight``: items that are begun, by replica; ``lost``: items that were begun
    when their process ended.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.in_flight: Counter[int] = Counter()
        self.lost = 0
        self._of_process: dict[int, Counter[str]] = {}  # by replica

    def add(self, line: Mapping[str, Any]) -> Counter[str]:
        """Add a line of a report, and return what it adds to the totals; each process counts from 0."""
        replica = line.get("replica", 0)
        if "started" in line:
            self.lost += self.in_flight.pop(replica, 0)
            self._of_process.pop(replica, None)
        if "counts" not in line:
            return Counter()
        counts = Counter(line["counts"])
        added = counts - self._of_process.get(replica, Counter())
        self._of_process[replica], self.in_flight[replica] = counts, line["in_flight"]
        self.totals += added
        return added
