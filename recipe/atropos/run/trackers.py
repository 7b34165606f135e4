"""Trackers of a run: verl's (W&B, TensorBoard, MLflow, ...), of which none can end or delay it.

- Each tracker has a thread of its own. One that cannot start, fails or hangs is left out with one warning; every metric
  is in ``metrics.jsonl`` in any case.
- W&B tracks offline if it cannot go online, and a run has one W&B run over all its starts.
- The metrics to look at first are also sent as ``a_overview/...``; W&B and TensorBoard sort groups by name.
- TensorBoard forgets steps that an earlier start trained after its last checkpoint: they are trained again.
- W&B and TensorBoard also get a few rollouts of each step as text.
"""

import contextlib
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import indent
from typing import Any

import psutil
from omegaconf import DictConfig

from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import write_atomic
from recipe.atropos.utils.secret import public_config
from recipe.atropos.verl_ext.driver import Tracking

logger = logging.getLogger(__name__)

OVERVIEW = {
    "score": "atropos/mean_score",
    "response_length": "atropos/response_length",
    "share_of_groups_without_signal": "atropos/zero_signal_share",
    "entropy": "actor/entropy",
    "gradient_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "clip_fraction": "actor/pg_clipfrac",
    "logprob_difference": "atropos/logprob_diff/fresh_mean",
    "staleness": "atropos/staleness/mean",
    "seconds_per_step": "timing_s/step",
    "seconds_waiting": "timing_s/wait",
    "tokens_per_second_per_gpu": "perf/throughput",
}
_SAMPLES = 8  # rollouts of each step
_COLUMNS = ("env_name", "input", "output", "score", "policy_version_min", "policy_version_max")
_MOST_WAITING = 1000  # steps that a tracker may be behind before it counts as hung
_FINISH_SECONDS = 60.0  # for what is still to be uploaded


def overview(metrics: Mapping[str, Any], held_out: Mapping[int, float]) -> dict[str, float]:
    """Return the metrics to look at first, with the newest of the scores ``held_out``, which are by step."""
    found = {name: metrics[key] for name, key in OVERVIEW.items() if key in metrics}
    if held_out:
        found["held_out_score"] = held_out[max(held_out)]
    return {f"a_overview/{name}": value for name, value in found.items()}


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """The trackers of ``trainer.logger``. Use as a context manager, which waits for uploads at its end."""

    def __init__(self, config: DictConfig, done: int):
        """``done``: steps that the run has trained before; if there are any, their W&B run is continued."""
        trainer = config.trainer
        if "wandb" in trainer.logger:
            _name_wandb_run(RunDir(config.run.dir), resumed=done > 0)
        public = public_config(config)
        self._trackers = [_Tracker(name, partial(_start, name, trainer, public, done)) for name in trainer.logger]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for tracker in self._trackers:
            tracker.finish(exit_code=0 if error is None else 1)

    def log(
        self,
        metrics: Mapping[str, Any],
        step: int,
        held_out: Mapping[int, float],
        rollouts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Send a step's metrics and samples. ``held_out``: scores by step; ``rollouts``: lines of ``rollouts/``."""
        first, samples = overview(metrics, held_out), _spread(rollouts)
        for tracker in self._trackers:
            tracker.put(dict(metrics) if tracker.name == "console" else {**first, **metrics}, step, samples)


class _Tracker:
    """A tracker and its thread."""

    def __init__(self, name: str, start: Callable[[], Tracking]):
        self.name = name
        self._jobs: queue.Queue[tuple[dict[str, Any], int, list] | int] = queue.Queue(_MOST_WAITING)
        self._failed = False
        self._thread = threading.Thread(target=self._run, args=(start,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, metrics: dict[str, Any], step: int, samples: list) -> None:
        if self._failed:
            return
        try:
            self._jobs.put_nowait((metrics, step, samples))
        except queue.Full:
            self._fail(f"it is {_MOST_WAITING} steps behind")

    def finish(self, exit_code: int) -> None:
        if self._failed:
            return
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(exit_code)
            self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            self._fail(f"it was not done after {_FINISH_SECONDS:g} s; what it still had to send may be missing there")

    def _run(self, start: Callable[[], Tracking]) -> None:
        tracking = None
        try:
            tracking = start()
            while not isinstance(job := self._jobs.get(), int):
                metrics, step, samples = job
                tracking.log(data=metrics, step=step)
                if samples:
                    _log_samples(self.name, tracking.logger[self.name], step, samples)
            tracking.finish(exit_code=job)
        except BaseException as error:  # wandb's errors include SystemExit
            self._fail(f"{type(error).__name__}: {error}")
            if tracking is not None:
                tracking._finished = True  # else its end would call what has failed

    def _fail(self, why: str) -> None:
        if self._failed:
            return
        self._failed = True
        if self.name == "wandb":
            _end_wandb_process()
        logger.warning("trainer.logger=%s is left out from now on: %s; metrics.jsonl has all metrics", self.name, why)


def _start(name: str, trainer: DictConfig, public: dict[str, Any], done: int) -> Tracking:
    """Start a tracker: W&B offline if it cannot go online, TensorBoard without the steps after ``done``."""
    start = partial(Tracking, trainer.project_name, trainer.experiment_name, [name], config=public)
    try:
        tracking = start()
    except BaseException as error:
        if name != "wandb" or isinstance(error, ImportError):
            raise
        logger.warning("W&B tracks offline (%s); `wandb sync` uploads $WANDB_DIR/wandb", error)
        import wandb

        wandb.teardown()  # a session keeps the settings that it began with
        os.environ["WANDB_MODE"] = "offline"
        tracking = start()
    if name == "tensorboard":
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        begin = Event(step=done + 1, session_log=SessionLog(status=SessionLog.START))
        tracking.logger["tensorboard"].writer.file_writer.add_event(begin)
    return tracking


def _end_wandb_process() -> None:
    """End the process that sends to W&B: it would be waited for when this one exits, for as long as it takes."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb"):
                child.kill()


def _name_wandb_run(run: RunDir, resumed: bool) -> None:
    """Set the number of the W&B run, unless the user has: the same for all starts of a run."""
    if not (resumed and run.wandb_run.exists()):
        write_atomic(run.wandb_run, uuid.uuid4().hex[:8].encode())
    os.environ.setdefault("WANDB_RUN_ID", run.wandb_run.read_text())
    os.environ.setdefault("WANDB_RESUME", "allow")


def _spread(rollouts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return ``_SAMPLES`` of the rollouts, evenly spread over the batch, with the values of ``_COLUMNS``."""
    kept = min(_SAMPLES, len(rollouts))
    return [[rollouts[place * len(rollouts) // kept][column] for column in _COLUMNS] for place in range(kept)]


def _log_samples(name: str, tracker: Any, step: int, samples: list[list[Any]]) -> None:
    if name == "wandb":
        tracker.log({"a_overview/samples": tracker.Table(columns=list(_COLUMNS), data=samples)}, step=step)
    elif name == "tensorboard":
        rows = [dict(zip(_COLUMNS, sample, strict=True)) for sample in samples]
        text = "\n\n---\n\n".join(
            f"**{row['env_name']}**, score {row['score']:+g}, versions {row['policy_version_min']} to "
            f"{row['policy_version_max']}\n\n{indent(row['input'], 4 * ' ')}\n\n{indent(row['output'], 4 * ' ')}"
            for row in rows
        )
        tracker.writer.add_text("a_overview/samples", text, step)
