"""Answers per second in the sandbox: ``python benchmarks/sandbox.py [--quick] [--dataset NAME_OR_FILE]``.

Runs programs for generated problems, half of them wrong, with one worker per core. The reference has no isolation: a
new Python process for each answer, which runs program and tests together, and whose exit status is the verdict. Figures
are medians of several alternating runs.

With ``--dataset``, also reports how many of the dataset's own solutions pass, as in ``environments/code.py``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from recipe.atropos.environments.code_problems import SYNTHETIC, job, load_problems
from recipe.atropos.environments.sandbox.runner import Job, Sandbox, SandboxLimits

TARGETS = {"right_verdicts": "== 1", "ratio": ">= 1"}


def plain(one: Job) -> bool:
    """Return the verdict of a new process, which an answer could forge."""
    program = "\n".join([one["program"], one["setup"], one["tests"]])
    return subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True).returncode == 0


def speed(check: Callable[[Job], bool], jobs: list[tuple[Job, bool]], workers: int) -> tuple[float, float]:
    """Return (answers per second, share of right verdicts)."""
    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda one: check(one[0]) == one[1], jobs))
    return len(jobs) / (time.monotonic() - started), sum(found) / len(found)


def solutions(dataset: str) -> None:
    """Print how many of a dataset's own solutions pass, and which do not."""
    problems = [p for s in ("train", "test") for p in load_problems(dataset, s, None, None, 0)]
    with Sandbox(SandboxLimits()) as sandbox, ThreadPoolExecutor(sandbox.workers) as pool:
        verdicts = list(pool.map(lambda problem: sandbox.check(job(problem, problem["gold"])), problems))
    print(f"{dataset}: {dict(Counter(verdict.why for verdict in verdicts))} of {len(problems)} solutions")
    for problem, verdict in zip(problems, verdicts, strict=True):
        if not verdict.passed:
            print(f"  {problem['task']}: {verdict.why} {verdict.detail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer answers")
    parser.add_argument("--dataset", help="in HumanEval's or MBPP's format: check its own solutions too")
    arguments = parser.parse_args()
    workers, repeats = len(os.sched_getaffinity(0)), 3
    problems = load_problems(SYNTHETIC, "test", None, 100 if arguments.quick else 400, 0)
    jobs = [
        (job(p, p["gold"] if i % 2 else p["gold"].replace("xs", "ys", 1)), i % 2 == 1) for i, p in enumerate(problems)
    ]
    sandbox = Sandbox(workers=workers)
    sandbox.start()
    ways: dict[str, Callable[[Job], bool]] = {
        "a new process": plain,
        "seccomp": lambda one: sandbox.check(one).passed,
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, check in ways.items():
            measured[name].append(speed(check, jobs, workers))
    sandbox.close()
    reference = statistics.median(rate for rate, _ in measured["a new process"])
    print(f"{len(jobs)} answers, {workers} at a time, medians of {repeats} runs")
    print(f"{'':16}{'answers/s':>12}{'ratio':>8}{'right':>8}")
    figures = {}
    for name, runs in measured.items():
        rate, right = statistics.median(rate for rate, _ in runs), min(right for _, right in runs)
        print(f"{name:16}{rate:12.1f}{rate / reference:8.2f}{right:8.1%}")
        figures[name] = {"answers_per_second": rate, "ratio": rate / reference, "right_verdicts": right}
    if arguments.dataset:
        solutions(arguments.dataset)
    ok = figures["seccomp"]["right_verdicts"] == 1 and figures["seccomp"]["ratio"] >= 1
    print(json.dumps({"name": "sandbox", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
