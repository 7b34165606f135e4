"""Run a few real training steps through the launcher, as users do, to check that a model or a machine can train.

It runs the Trajectory API, SGLang, gateway, trainer and ``environments.even_tokens``. Every step trains on samples of
the previous version, and after each push SGLang's logprobs of its samples must match the trainer's
(``weight_sync.verify=probe``).
"""

import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.process import run_command

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # nats, mean over trained tokens; for bfloat16 see docs/gpu.md
_END_SECONDS = 120.0  # for the launcher to stop what it started
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
    """Result of a short run: ``metrics`` by step; ``error``: why it failed, None if it passed; ``folder``: its own."""

    folder: Path
    seconds: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Medians over the steps (seconds, GB/s of 10^9 bytes, tokens/s) and the largest differences (nats).

        ``before`` and ``after``: between SGLang's and the trainer's logprobs of the trained tokens, at step 1 (the
        initial weights) and at later steps (updated weights). Values that were not measured are left out.
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
            # With max_staleness=0 a batch is generated while the trainer waits for it.
            speeds = [line["atropos/trained_tokens"] / line["timing_s/wait"] for line in self.metrics]
            found |= {
                "push_s": statistics.median(pushes),
                "push_gb_per_s": values("weight_sync/bytes")[-1] / 1e9 / statistics.median(pushes),
                "pause_s": statistics.median(values("weight_sync/pause_s")),
                "generated_tokens_per_s": statistics.median(speeds[1:] or speeds),
            }
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
    """Train ``model`` for ``steps`` steps on ``gpus`` ranks, in at most ``limit`` seconds; leave nothing running.

    ``overrides`` go to the launcher, after this module's own; ``dtype`` is the servers'. ``folder`` receives the run
    and the launcher's log. ``watch`` returns a context manager that is held during the run; its argument is a function
    that returns the current process ids of "server" and "trainer".
    """
    command = [sys.executable, "-m", "recipe.atropos.launch_services", f"--model={model}", f"--steps={steps}"]
    command += [f"--gpus={gpus}", f"--run-dir={folder / 'run'}", *_OPTIONS, f"inference.dtype={dtype}", *overrides]
    result, started = ShortRun(folder), time.monotonic()
    files, log = RunDir(folder / "run"), folder / "launcher.log"
    shutil.rmtree(folder / "run", ignore_errors=True)  # an earlier call's run would be resumed
    log.unlink(missing_ok=True)
    status, output = None, ""
    with watch(lambda: _pids(files)) if watch else nullcontext(), suppress(TimeoutError):
        status, output = run_command("launcher", command, timeout=limit, log_path=log, grace=_END_SECONDS)
    result.seconds, result.metrics = time.monotonic() - started, read_metrics(folder / "run")
    if status is None:
        result.error = f"not done in {limit:g} s; {log} has how far it came"
    elif status:
        result.error = _error_in(output) or f"the launcher ended with status {status}: {log}"
    else:
        result.error = _difference(result, steps, TOLERANCE[dtype])
    return result


def _error_in(log: str) -> str:
    """Return the launcher's error and, if a service's log follows it, the last exception there."""
    _, found, text = log.partition("\nerror")
    first, *more = text.lstrip(": ").splitlines() or [""]
    exceptions = [line for line in more if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ": ".join([first.partition(" Last lines of ")[0], *exceptions[-1:]]) if found else ""


def _pids(files: RunDir) -> dict[str, int]:
    listing = read_json(files.services, {})
    found = {"server": "sglang", "trainer": "trainer"}
    return {name: listing[service]["pid"] for name, service in found.items() if service in listing}


def _difference(run: ShortRun, steps: int, tolerance: float) -> str | None:
    """Return what is wrong with a run that exited normally, or None."""
    if [line["step"] for line in run.metrics] != list(range(1, steps + 1)):
        return f"the steps {[line['step'] for line in run.metrics]} were trained, not 1 to {steps}"
    if not run.figures.get("gradient"):
        return "the gradient is zero"
    names = ("before", "after", "probe") if steps > 1 else ("before", "probe")
    wrong = [f"{name} {run.figures[name]:.2g}" for name in names if not run.figures[name] <= tolerance]
    return f"trainer and SGLang differ by more than {tolerance:g} nats: {', '.join(wrong)}" if wrong else None
