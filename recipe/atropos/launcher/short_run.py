"""A few steps of the real loop, to see whether a model or a machine can do them: the launcher, as users start it.

Trajectory API, SGLang, gateway, trainer and ``environments.even_tokens``; every step is trained on samples of the
weights before it, and after each push SGLang must have the trainer's logprobs of what it samples
(``weight_sync.verify=probe``).
"""

import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.atropos.run_dir import RunDir
from recipe.atropos.run_record import read_metrics
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.process import start_service

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # nats, mean difference of trained tokens; docs/gpu.md on bfloat16
_END_SECONDS = 120.0  # for the launcher to end what it started
_OPTIONS = (
    "environment.target=recipe.atropos.environments.even_tokens",
    "environment.evaluate=false",
    "inference.max_restarts=0",
    "trainer.logger=[console]",
    "trainer.save_freq=-1",
    "trainer.atropos.max_staleness=0",
    "trainer.atropos.weight_sync.verify=probe",
)


@dataclass
class ShortRun:
    """``metrics`` by step; ``error``: what ended the run or did not hold, None where it passed; ``folder``: its own."""

    folder: Path
    seconds: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Medians over the steps (seconds, GB/s of 10^9 bytes, tokens/s) and the largest differences (nats).

        ``before`` and ``after``: of SGLang's logprobs of the trained tokens to the trainer's, at step 1 (the weights
        that the server loaded itself) and later (pushed ones). What was not measured is left out.
        """

        def values(key: str, first: int = 0, last: int | None = None) -> list[float]:
            return [line[key] for line in self.metrics[first:last] if key in line]

        found = {
            "before": max(values("atropos/logprob_diff/mean", last=1), default=None),
            "after": max(values("atropos/logprob_diff/mean", first=1), default=None),
            "probe": max(values("weight_sync/probe_gap"), default=None),
            "gradient": max(values("actor/grad_norm"), default=None),
            "trainer_gib": max(values("actor/perf/max_memory_allocated_gb"), default=None),
        }
        if pushes := values("weight_sync/total_s"):
            found["push_s"] = statistics.median(pushes)
            found["push_gb_per_s"] = values("weight_sync/bytes")[-1] / 1e9 / found["push_s"]
            found["pause_s"] = statistics.median(values("weight_sync/pause_s"))
            # With max_staleness=0 a batch is generated while the trainer waits for it.
            speeds = [line["atropos/trained_tokens"] / line["timing_s/wait"] for line in self.metrics]
            found["generated_tokens_per_s"] = statistics.median(speeds[1:] or speeds)
        return {key: value for key, value in found.items() if value is not None}


def short_run(
    model: Path,
    folder: Path,
    overrides: Sequence[str],
    *,
    steps: int = 3,
    gpus: int = 1,
    dtype: str = "float32",
    limit: float,
    watch: Callable[[Callable[[], dict[str, int]]], AbstractContextManager[object]] | None = None,
) -> ShortRun:
    """Train ``steps`` steps of ``model`` on ``gpus`` ranks; at most ``limit`` seconds, and nothing is left running.

    ``overrides`` are the launcher's, after this module's own; ``dtype`` is the servers'. ``folder`` gets the run and
    what the launcher said. ``watch`` is held meanwhile; it is given what tells the processes of the moment, by name,
    "server" and "trainer".
    """
    command = [sys.executable, "-m", "recipe.atropos.launch_services", f"--model={model}", f"--steps={steps}"]
    command += [f"--gpus={gpus}", f"--run-dir={folder / 'run'}", *_OPTIONS, f"inference.dtype={dtype}", *overrides]
    result, started = ShortRun(folder), time.monotonic()
    files, log = RunDir(folder / "run"), folder / "launcher.log"
    shutil.rmtree(folder / "run", ignore_errors=True)  # of a call before, which would be resumed
    log.unlink(missing_ok=True)
    with watch(lambda: _pids(files)) if watch else nullcontext():
        launcher = start_service("launcher", command, log_path=log)
        try:
            while (status := launcher.poll()) is None and time.monotonic() - started < limit:
                time.sleep(0.2)
        finally:
            launcher.stop(grace=_END_SECONDS)
    result.seconds, result.metrics = time.monotonic() - started, read_metrics(folder / "run")
    if status is None:
        result.error = f"not done in {limit:g} s; {log} has how far it came"
    elif status:
        result.error = _said(log.read_text(errors="replace")) or f"the launcher ended with status {status}: {log}"
    else:
        result.error = _difference(result, steps, TOLERANCE[dtype])
    return result


def _said(log: str) -> str:
    """The launcher's error and, where a service's log follows it, the last exception there."""
    _, found, text = log.partition("\nerror")
    first, *more = text.lstrip(": ").splitlines() or [""]
    exceptions = [line for line in more if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ": ".join([first.partition(" Last lines of ")[0], *exceptions[-1:]]) if found else ""


def _pids(files: RunDir) -> dict[str, int]:
    listing = read_json(files.services, {})
    found = {"server": "sglang", "trainer": "trainer"}
    return {name: listing[service]["pid"] for name, service in found.items() if service in listing}


def _difference(run: ShortRun, steps: int, tolerance: float) -> str | None:
    """What does not hold of a run that ended in order."""
    if [line["step"] for line in run.metrics] != list(range(1, steps + 1)):
        return f"the steps {[line['step'] for line in run.metrics]} were trained, not 1 to {steps}"
    if not run.figures.get("gradient"):
        return "the gradient is zero"
    names = ("before", "after", "probe") if steps > 1 else ("before", "probe")
    wrong = [f"{name} {run.figures[name]:.2g}" for name in names if not run.figures[name] <= tolerance]
    return f"trainer and SGLang differ by more than {tolerance:g} nats: {', '.join(wrong)}" if wrong else None
