"""Benefit of overlapping generation and training: ``python benchmarks/staleness.py [--quick]``.

Runs the demonstration with the real services: with ``trainer.atropos.max_staleness=0``, where generation and training
alternate, and with 2, where generation continues during training, in the order 0, 2, 2, 0, so that a machine whose load
changes in one direction favors neither (``--quick``: 0, 2). All train the same number of steps on the same problems.
The reference is 0; seconds are means over the runs with a bound.

Generation and training cannot overlap on shared cores, so each has its own core: the trainer one; SGLang, environment
and API the other. Generation is slowed to take about as long as training, as it does with long answers (those of the
demonstration are short): the environment works on ``WORKERS`` problems at a time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from recipe.atropos.demo.small_policy import ensure_small_policy
from recipe.atropos.run.record import read_metrics

WORKERS = 2
BOUNDS = (0, 2)
WARM_UP = (
    3  # steps that are not counted: the environment starts, and under a bound of 2 it begins three batches at once
)
TARGETS = {"time_2_over_0": "<= 0.80", "max_staleness_of_0": "== 0", "max_staleness_of_2": "<= 2", "dropped": "== 0"}


def run_demo(folder: Path, max_staleness: int, steps: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the metrics of every step, and what was dropped."""
    cores = sorted(os.sched_getaffinity(0))
    generating, training = cores[0], cores[-1]
    options = [
        *("--preset", "demo", "--steps", str(steps), "--run-dir", str(folder / "run")),
        f"trainer.atropos.max_staleness={max_staleness}",
        f"environment.args.max_num_workers={WORKERS}",
        "environment.evaluate=false",
        "trainer.save_freq=-1",
    ]
    command = [sys.executable, "-m", "recipe.atropos.launch_services", *options]
    folder.mkdir()
    with open(folder / "launcher.log", "w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            psutil.Process(launcher.pid).cpu_affinity([generating])  # all that it starts inherits it
            deadline, trainer = time.monotonic() + 400, None
            while launcher.poll() is None and time.monotonic() < deadline:
                if trainer is None and (trainer := trainer_pid(folder / "run")) is not None:
                    psutil.Process(trainer).cpu_affinity([training])  # long before it starts its workers
                time.sleep(0.1)
        finally:
            launcher.terminate()
            status = launcher.wait(60)
    if status:
        sys.exit((folder / "launcher.log").read_text())
    return read_metrics(folder / "run"), json.loads((folder / "run/summary.json").read_bytes())["dropped"]


def trainer_pid(run: Path) -> int | None:
    try:
        return json.loads((run / "services.json").read_bytes())["trainer"]["pid"]
    except (OSError, KeyError, json.JSONDecodeError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    steps, order = (30, (0, 2, 2, 0)) if not (arguments.quick or arguments.smoke) else (10, BOUNDS)
    steps = WARM_UP + 1 if arguments.smoke else steps
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two cores: on one, nothing can overlap")
    ensure_small_policy(seed=0)
    runs: dict[int, list[list[dict[str, Any]]]] = {bound: [] for bound in BOUNDS}
    lost = dict.fromkeys(BOUNDS, 0)
    with tempfile.TemporaryDirectory() as name:
        for number, bound in enumerate(order):
            lines, dropped = run_demo(Path(name) / str(number), bound, steps)
            runs[bound].append(lines)
            lost[bound] += sum(dropped.values())

    def column(bound: int, key: str) -> list[float]:
        return [line.get(key, 0.0) for lines in runs[bound] for line in lines[WARM_UP:]]

    seconds = {b: statistics.mean(lines[-1]["time"] - lines[WARM_UP - 1]["time"] for lines in runs[b]) for b in BOUNDS}
    every = {bound: [line for lines in runs[bound] for line in lines] for bound in BOUNDS}
    staleness = {bound: max(line["atropos/staleness/max"] for line in every[bound]) for bound in BOUNDS}
    unknown = sum(line.get("atropos/rows_with/unknown_version", 0) for bound in BOUNDS for line in every[bound])
    rows = {
        f"seconds for {steps - WARM_UP} steps": seconds,
        "seconds a step, median": {b: statistics.median(column(b, "timing_s/step")) for b in BOUNDS},
        "of them waiting for a batch, median": {b: statistics.median(column(b, "phase_s/wait")) for b in BOUNDS},
        "staleness, greatest": staleness,
        "staleness, mean": {b: statistics.mean(column(b, "atropos/staleness/mean")) for b in BOUNDS},
        "sequences dropped": lost,
    }
    print(f"16 groups of 8 a step, {WORKERS} problems at a time; the trainer on one core, generation on the other\n")
    print(f"{'max_staleness':<40}{BOUNDS[0]:>10}{BOUNDS[1]:>10}{'ratio':>10}")
    for label, values in rows.items():
        ratio = f"{values[2] / values[0]:.2f}" if "seconds" in label and values[0] else ""
        print(f"{label:<40}{values[0]:>10.2f}{values[2]:>10.2f}{ratio:>10}")
    ratio = seconds[2] / seconds[0]
    figures = {
        "seconds_0": round(seconds[0], 2),
        "seconds_2": round(seconds[2], 2),
        "time_2_over_0": round(ratio, 3),
        "max_staleness_of_0": staleness[0],
        "max_staleness_of_2": staleness[2],
        "dropped": sum(lost.values()),
        "unknown_version": unknown,
    }
    ok = ratio <= 0.8 and staleness[0] == 0 and staleness[2] <= 2 and not sum(lost.values()) and not unknown
    print()
    print(json.dumps({"name": "staleness", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
