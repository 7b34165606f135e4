"""Does anything grow in a long run? ``python benchmarks/long_run.py [--quick]``

500 steps (``--quick``: 300) of the demonstration, whose rewards are made noisy, so that groups keep a signal after the
policy has learned the task: one answer in eight gets the opposite score. On the way the trainer, the SGLang server and
the environment are killed once each, and restarted by the launcher. All processes of the run are measured every few
seconds. Compared with the reference, in the last 50 steps:

- memory (proportional set size) grows by less than 5%;
- open files, threads, and files in shared memory do not grow;
- the seconds of a step stay as they were (15% are allowed for other work on the machine).

The reference of memory and seconds is what was measured between steps 100 and 150; that of the counts the larger of
this and of what was measured between steps 200 and 250, after the restarts: a new process has other connections.

The whole takes about 21 minutes on two idle cores, ``--quick`` 12.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from recipe.atropos.config.compose import load_config
from recipe.atropos.environments.gsm8k import GSM8kEnv
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import RunDirError, read_json
from recipe.atropos.utils.private_process import SCRATCH

NOISE = 1 / 8  # of the answers get the opposite score
EVERY = 3.0  # s between two measurements
FIRST, SECOND, WIDTH = 100, 200, 50  # steps: where the windows of the reference begin, and the width of each
STEP_SECONDS = 300.0  # the longest that a step, or a restart, may take on a busy machine
COUNTS = ("files", "threads", "shared_memory")
TARGETS = {"memory": 1.05, "files": 1.0, "threads": 1.0, "shared_memory": 1.0, "step_seconds": 1.15}


class NoisyGSM8kEnv(GSM8kEnv):
    """Word problems of which some answers get the opposite score."""

    name = "noisy"

    async def scores(self, problem: Any, answers: list[str], nodes: list[Any]) -> list[float]:
        scores = await super().scores(problem, answers, nodes)
        return [-score if random.random() < NOISE else score for score in scores]


def measure(launcher: psutil.Process, run: Path) -> dict[str, float]:
    """Return totals over all processes of the run, and the open files and threads of each service's processes."""
    found: dict[str, float] = defaultdict(float)
    services = {service["pid"]: name for name, service in read_json(RunDir(run).services, {}).items()}
    scratch = None
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            scratch = scratch or process.environ().get(SCRATCH)
            service = next((services[each.pid] for each in [process, *process.parents()] if each.pid in services), "")
            _add(found, process, f"{service}/{process.name().partition('.')[0]}")
    _add(found, launcher, "launcher")
    shared = Path("/dev/shm").iterdir() if scratch else ()
    found["shared_memory"] = sum(1 for path in shared if Path(scratch or "").name in path.name)
    return found


def _add(found: dict[str, float], process: psutil.Process, label: str) -> None:
    with contextlib.suppress(psutil.Error):
        counted = {
            "memory": process.memory_full_info().pss / 2**20,
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "processes": 1,
        }
        for key, value in counted.items():
            found[key] += value
        for key in ("files", "threads"):
            found[f"{key} of {label}"] += counted[key]


def kill(run: Path, prefix: str) -> None:
    services = read_json(RunDir(run).services, {})
    for name, service in services.items():
        if name.startswith(prefix):
            psutil.Process(service["pid"]).kill()
            print(f"{name} killed", flush=True)
            return
    raise RuntimeError(f"no {prefix} among {list(services)}")


def train(run: Path, steps: int, shrink: int) -> list[tuple[int, dict[str, float]]]:
    """Train; return (step, totals) of each measurement. ``shrink``: measure and kill so many times sooner."""
    args = load_config(["preset=demo"]).environment.args  # which the preset gives to its own environment alone
    options = [
        *("--preset=demo", f"--steps={steps}", f"--run-dir={run}", f"environment.target={__file__}:NoisyGSM8kEnv"),
        *(f"environment.args.{key}={json.dumps(value)}" for key, value in args.items()),
        *("trainer.logger=[console,tensorboard]", "environment.evaluate=false", "trainer.save_freq=25"),
        "trainer.max_actor_ckpt_to_keep=2",
    ]
    killed = ("trainer", "sglang", "environment")
    kills = {(FIRST + WIDTH + 10 * i) // shrink: prefix for i, prefix in enumerate(killed, 1)}
    measured = []
    with open(run.parent / "launcher.log", "ab") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "recipe.atropos.launch_services", *options], stdout=log, stderr=log
        )
    try:
        last, changed = 0, time.monotonic() + 240  # the start takes longer
        while launcher.poll() is None:
            with contextlib.suppress(RunDirError, psutil.NoSuchProcess):
                step = max((line["step"] for line in read_metrics(run)), default=0)
                if step != last:
                    last, changed = step, max(changed, time.monotonic())
                if time.monotonic() - changed > STEP_SECONDS:
                    raise RuntimeError(f"no step after step {last} for {STEP_SECONDS:g} s")
                for at in [at for at in kills if at <= step]:
                    kill(run, kills.pop(at))
                measured.append((step, measure(psutil.Process(launcher.pid), run)))
            time.sleep(EVERY / shrink)
        if launcher.returncode:
            raise RuntimeError(f"the launcher's status is {launcher.returncode}")
    except BaseException:
        launcher.terminate()
        launcher.wait(60)
        print((run.parent / "launcher.log").read_text()[-5000:])
        raise
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="300 steps")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    shrink = 20 if arguments.smoke else 1
    first, second, width = FIRST // shrink, SECOND // shrink, WIDTH // shrink
    steps = 300 // shrink if arguments.quick or arguments.smoke else 500
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        measured = train(run, steps, shrink)
        lines = read_metrics(run)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        raise RuntimeError(f"{len(lines)} lines of metrics for {steps} steps")

    def window(first: int) -> dict[str, float]:
        inside = [totals for step, totals in measured if first <= step < first + width]
        names = {name for totals in inside for name in totals}
        values = {key: statistics.median(totals.get(key, 0.0) for totals in inside) for key in names}
        seconds = [line["timing_s/step"] for line in lines[first - 1 : first - 1 + width]]
        return values | {"step_seconds": statistics.median(seconds)}

    reference, restarted, end = window(first), window(second), window(steps + 1 - width)
    for key in COUNTS:
        reference[key] = max(reference[key], restarted[key])
    signal = statistics.mean(line["atropos/groups"] for line in lines[-width:])
    print(f"{'':<16}{'reference':>16}{f'last {width} steps':>16}{'ratio':>8}{'target':>10}")
    ratios = {}
    for key, target in TARGETS.items():
        ratios[key] = end[key] / reference[key] if reference[key] else 1.0
        print(f"{key:<16}{reference[key]:>16.2f}{end[key]:>16.2f}{ratios[key]:>8.3f}{f'<= {target:g}':>10}")
    for key in sorted(reference.keys() | end.keys()):
        before, between, after = (found.get(key, 0.0) for found in (reference, restarted, end))
        if " of " in key and not before == between == after:
            print(f"    {key}: {before:g}, after the restarts {between:g}, at the end {after:g}")
    minutes = (time.monotonic() - began) / 60
    print(f"{signal:.1f} groups a step at the end; {minutes:.0f} minutes; MiB, numbers, seconds")
    ok = all(ratios[key] <= target for key, target in TARGETS.items())
    figures = {f"{key}_ratio": round(ratios[key], 4) for key in TARGETS} | {"memory_mib": round(end["memory"])}
    print(json.dumps({"name": "long_run", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
