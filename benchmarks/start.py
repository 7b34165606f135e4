"""How long a user waits: ``python benchmarks/start.py [--quick]``

Seconds from the command to: the answer of ``--help``; the answer to a mistyped key; the first line of a demo's output;
its first trained step. The demo's policy is in the cache before, as in every start but the first. The seconds at which
the demo reached each line of its output show where the time goes; the CPU time is that of all its processes.

The figures are medians: 5 runs of the commands, 3 of the demo (``--quick``: 3 and 1). It takes about 5 minutes on 2
idle cores; other programs' work shows in the figures.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from recipe.atropos.config.models import resolve_model
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics

TARGETS = {"help_s": 2.0, "typo_s": 2.0, "first_line_s": 3.0, "first_step_s": 45.0}
COMMAND = [sys.executable, "-m", "recipe.atropos", "train"]
DEMO = [*COMMAND, "--preset", "demo", "--plain"]
TYPO = [*COMMAND, "--preset", "demo", "trainer.total_training_step=3"]
LIMIT = 400.0  # s for a demo's first step


def seconds_of(command: list[str], status: int, words: str) -> float:
    """Return the seconds that a command takes, which must end with ``status`` and print ``words``."""
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    took, printed = time.monotonic() - begun, done.stdout + done.stderr
    if done.returncode != status or words not in printed:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode} and said: {printed[-2000:]}")
    return took


def demo_start() -> tuple[list[tuple[float, str]], float]:
    """Start a demo, and end it after its first step: return (second, line) of its output, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as name:
        run, begun, lines = RunDir(Path(name, "run")), time.monotonic(), []
        command = [*DEMO, "--steps=1000", f"--run-dir={run.path}"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            for line in process.stdout or ():
                lines.append((time.monotonic() - begun, line.strip()))
                if line.startswith("step") or time.monotonic() - begun > LIMIT:
                    break
            cpu = cpu_seconds(process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=120)
        if not read_metrics(run.path):
            raise RuntimeError(f"no step within {LIMIT:g} s: {lines}")
        return lines, cpu


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants, those that have ended included."""
    parent = psutil.Process(pid)
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # with those of children that it has waited for
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 runs of the commands and 1 of the demo")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    resolve_model("small-policy", 0)
    few, demos = (1, 1) if arguments.smoke else (3, 1) if arguments.quick else (5, 3)
    helps = [seconds_of([*COMMAND, "--help"], 0, "--dry-run") for _ in range(few)]
    typos = [seconds_of(TYPO, 1, "did you mean trainer.total_training_steps") for _ in range(few)]
    starts = []
    for number in range(1, demos + 1):
        lines, cpu = demo_start()
        starts.append((lines[0][0], lines[-1][0], cpu))
        print(f"demo {number} of {demos}: {cpu:.0f} s of CPU time", flush=True)
        for second, line in lines:
            print(f"{second:8.1f} s  {line[:100]}", flush=True)
    found = {
        "help_s": statistics.median(helps),
        "typo_s": statistics.median(typos),
        "first_line_s": statistics.median(first for first, _, _ in starts),
        "first_step_s": statistics.median(step for _, step, _ in starts),
    }
    print(f"\n{'seconds to':<22}{'median':>8}{'target':>8}")
    for (name, target), what in zip(
        TARGETS.items(), ("--help", "a mistyped key", "the first line", "the first step"), strict=True
    ):
        print(f"{what:<22}{found[name]:8.2f}{target:8.0f}")
    figures = found | {"first_step_cpu_s": statistics.median(cpu for _, _, cpu in starts)}
    ok = all(found[name] <= target for name, target in TARGETS.items())
    print(json.dumps({"name": "start", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
