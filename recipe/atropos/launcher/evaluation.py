"""Evaluations that the environments run on their own held-out items: schedule, weight version, and results.

Guarantees:

- before the first update, after every ``evaluation.every`` updates and after the last update, every environment with
  ``evaluate`` enabled evaluates, each in a separate process that posts nothing and does not affect pacing; the
  environments sample meanwhile, but not during the last one;
- each evaluation uses a single weight version: the trainer replaces weights that are due for evaluation only once this
  module reports them as evaluated (``evaluated``), and the served version is checked before and after;
- each evaluation writes ``evaluation/VERSION/NAME/`` and one line of ``evaluations.jsonl``: ``{"step", "version",
  "env", "metrics", "main", "seconds", "time"}``, or one with ``error``. A resumed run repeats only evaluations that
  did not finish and those of updates that it trains again;
- a failure before the first update or after the last one is an error, except for an abandoned environment; in between,
  it is printed and recorded, and training continues.
"""

import asyncio
import json
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from recipe.atropos.config.env_specs import EnvironmentSpec
from recipe.atropos.launcher.environment_processes import environment_command, environment_variables
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.sglang import InferenceServices
from recipe.atropos.run.evaluations import (
    NONE_YET,
    held_out,
    is_accuracy,
    item_count,
    mark_evaluated,
    needs_evaluation,
    read_evaluations,
)
from recipe.atropos.run.record import update_summary
from recipe.atropos.terminal.progress import say
from recipe.atropos.utils.files import append_line, rewrite_lines
from recipe.atropos.utils.process import ServiceFailed

_POLL_SECONDS = 0.5
_NO_API = "http://127.0.0.1:1"


async def _nothing() -> None: ...


def main_metric(metrics: Mapping[str, float]) -> str | None:
    """Return the name of the metric to display: an accuracy if there is one, else the first."""
    return next(iter([*filter(is_accuracy, metrics), *metrics]), None)


def evaluation_text(metrics: Mapping[str, float], greedy: bool) -> str:
    """Return what an evaluation found, as text."""
    main, items = main_metric(metrics), item_count(metrics)
    if main is None:
        return "evaluate reports nothing: not evaluated any more"
    what = f"held-out accuracy {metrics[main]:.1%}" if is_accuracy(main) else f"{main} {metrics[main]:.4g}"
    details = [*([f"{items} problems"] if items else []), *(["greedy"] if greedy else [])]
    return f"{what} ({', '.join(details)})" if details else what


class Evaluations:
    """Runs the evaluations that are due; a version is the trainer's step."""

    def __init__(self, run: Run, inference: InferenceServices):
        self._run, self._inference = run, inference
        self._specs = {name: spec for name, spec in run.plan.specs.items() if spec.evaluate}
        self._several = len(run.plan.specs) > 1
        self._settings, self._last = run.config.evaluation, run.config.trainer.total_training_steps
        self._path = run.files.evaluations
        self._task: asyncio.Task[None] | None = None
        self._pushed = True  # by the trainer that runs now, which waits for nothing before its first push
        self._mark(NONE_YET)

    def _mark(self, version: int) -> None:
        """Tell the trainer that ``version`` is the latest that was evaluated."""
        self._settled = version
        mark_evaluated(self._run.files.evaluated, version)

    # ---------------------------------------------------------------- when

    async def begin(self, version: int, meanwhile: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Evaluate ``version``, this start's first push, if it is due; environments may sample beside it.

        ``meanwhile`` is called again and again.

        Raises:
            ServiceFailed: an evaluation failed, or another service ended.
        """
        self._keep(version)
        if version == 0 or self._between(version):
            await self.evaluate_alone(version, meanwhile)
        self._mark(version)

    async def begin_again(self, version: int) -> None:
        """Repeat what a new trainer, which is only starting, trains again after ``version``."""
        self._keep(version)
        self._mark(min(version, self._settled))
        self._pushed = False
        await self.stop()

    def _keep(self, version: int) -> None:
        """Drop the evaluations that failed, and those of updates after ``version``."""
        lines = read_evaluations(self._run.files.path)
        rewrite_lines(self._path, [line for line in lines if line["step"] <= version and "error" not in line])

    def _between(self, version: int) -> bool:
        return 0 < version < self._last and needs_evaluation(version, self._settings.every)

    async def poll(self) -> None:
        """Start an evaluation that is due, concurrently with training, and collect one that is done."""
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        self._pushed |= self._run.files.waiting.exists()
        if self._task is None and self._settings.every and self._pushed:
            version = await self._inference.version()
            if version is not None and version > self._settled and self._between(version):
                self._task = asyncio.create_task(self._meanwhile(version))

    async def _meanwhile(self, version: int) -> None:
        try:
            await self._all(version)
        except ServiceFailed as failure:
            say(f"version {version}: {failure}", "eval", "bold red")
        self._mark(version)

    async def evaluate_alone(self, version: int, meanwhile: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Evaluate ``version`` and check the services meanwhile, because ``watch`` is not running.

        Raises:
            ServiceFailed: an evaluation failed, or another service ended, or no server is left.
        """
        self._task = asyncio.create_task(self._all(version))
        while not self._task.done():
            await meanwhile()
            self._run.check()
            await asyncio.wait([self._task], timeout=_POLL_SECONDS)
        task, self._task = self._task, None
        task.result()

    async def stop(self) -> None:
        """Cancel the evaluation in progress, if any; call it also however the run ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    # ---------------------------------------------------------------- how

    def due(self, version: int) -> list[EnvironmentSpec]:
        """Return the environments that have not evaluated ``version`` successfully, and never reported nothing."""
        lines = [line for line in read_evaluations(self._run.files.path) if "error" not in line]
        done = {line["env"] for line in lines if line["step"] == version or not line["metrics"]}
        return [spec for name, spec in self._specs.items() if name not in done]

    async def _all(self, version: int) -> None:
        """Evaluate ``version`` concurrently on all environments that have not done so.

        Raises:
            ServiceFailed: an environment that is not abandoned failed; all others are done and recorded.
        """
        specs = self.due(version)
        results = await asyncio.gather(*(self._one(spec, version) for spec in specs), return_exceptions=True)
        failures = []
        for spec, result in zip(specs, results, strict=True):
            if isinstance(result, ServiceFailed):
                append_line(self._path, {"step": version, "version": version, "env": spec.name, "error": str(result)})
                if self._run.abandoned.issuperset(spec.services):
                    say(f"version {version}: {result}", "eval", "bold red")
                    continue
            if isinstance(result, BaseException):
                failures.append(result)
        if failures:
            raise failures[0]

    async def _one(self, spec: EnvironmentSpec, version: int) -> None:
        folder = self._run.files.evaluation_of(version, spec.name)
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted evaluation
        folder.mkdir(parents=True)
        started = time.monotonic()
        await self._evaluate(spec, version, folder)
        metrics, greedy = _read(folder / "metrics.json")
        line = {"step": version, "version": version, "env": spec.name, "metrics": metrics, "main": main_metric(metrics)}
        append_line(self._path, {**line, "seconds": time.monotonic() - started, "time": time.time()})
        whose = f"{spec.name} " if self._several else ""
        say(f"{whose}{evaluation_text(metrics, greedy)}, version {version}", "eval")
        update_summary(self._run.files.path, heldout_summary(self._run.files.path, self._several))

    async def _evaluate(self, spec: EnvironmentSpec, version: int, folder: Path) -> None:
        """Run the environment's own ``evaluate`` in a separate process, which writes to ``folder``.

        Raises:
            ServiceFailed: it failed, exceeded ``evaluation.timeout``, or the served weights were not ``version``.
        """
        command = environment_command(
            self._run, spec, "evaluate", _NO_API, self._inference.gateway, **{"env.data_dir_to_save_evals": str(folder)}
        )
        service = self._run.start(f"evaluate-{spec.name}", command, **environment_variables(self._run, spec))
        self._run.remove(service)  # its exit must not end the run
        before = after = None
        try:
            async with asyncio.timeout(self._settings.timeout):
                before = await self._inference.served_version()
                while service.poll() is None:
                    await asyncio.sleep(_POLL_SECONDS)
                after = await self._inference.served_version()
        except TimeoutError:
            why = " (no server with the trainer's weights is admitted: see gateway.log)" if before is None else ""
            raise service.failure(f"not done within evaluation.timeout={self._settings.timeout:g} s{why}") from None
        finally:
            service.stop()
        if service.poll() != 0:
            raise service.failure("no evaluation")
        if not before == after == version:
            raise service.failure(f"of version {version}, but the servers held {before} before it and {after} after it")


def _read(path: Path) -> tuple[dict[str, float], bool]:
    """Return the finite numbers of ``metrics.json`` and whether sampling was greedy; ({}, False) if it is missing."""
    if not path.exists():
        return {}, False
    written = json.loads(path.read_text())  # may contain NaN
    numbers = {name: value for name, value in written["results"]["all"].items() if isinstance(value, int | float)}
    sampling = written.get("config_general", {}).get("generation_parameters") or {}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}, sampling.get("temperature") == 0


def heldout_summary(directory: str | Path, several: bool) -> dict[str, Any]:
    """Return ``heldout``: per environment, the displayed metric, its first and latest value, and the number of items.

    A single environment with an accuracy adds ``heldout_accuracy_before``, ``_after`` and ``heldout_problems``.
    """
    found: dict[str, Any] = {"heldout": {}}
    for env, (first, *later) in held_out(read_evaluations(directory)).items():
        *_, items, metric = first
        own = found["heldout"][env] = {"metric": metric, "items": items}
        for when, (version, score, *_) in zip(("before", "after"), (first, *later[-1:]), strict=False):
            own |= {when: score, f"version_{when}": version}
            if not several and is_accuracy(metric):
                found |= {f"heldout_accuracy_{when}": score, "heldout_problems": items}
    return found
