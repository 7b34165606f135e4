"""Benefit of an environment's own token advantages: ``python benchmarks/token_advantages.py [--quick] [--runs DIR]``.

Trains the small policies of the word problems and of the calculator, each with outcome GRPO (presets ``demo``,
``calculator``) and with per-token advantages from the environment (``advantages``, ``calculator_advantages``), three
seeds each, with the real services. Policy, problems, groups and updates are the same; only the advantages differ. The
reference is outcome GRPO.

The methods are compared at equal numbers of trained tokens: for each seed at half and at all of the tokens that both
trained on in ``STEPS`` updates. The metric is the greedy accuracy on 256 held-out problems, interpolated linearly
between the evaluations before, in the middle and at the end.
``--quick`` runs the word problems with one seed. ``--runs DIR`` keeps the runs, and reuses complete ones.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from recipe.atropos.run.record import read_evaluations, read_metrics

TASKS = {"word problems": ("demo", "advantages"), "calculator": ("calculator", "calculator_advantages")}
METHODS = ("outcome GRPO", "token advantages")
SEEDS = (0, 1, 2)
STEPS = 30
SHARES = (0.5, 1.0)  # of the tokens that both methods trained on
TARGETS = {"dropped": "== 0", "own_advantages": "== 1.0", "mean_advantage": "<= 1e-3"}


def run(preset: str, seed: int, folder: Path, steps: int, smoke: bool) -> Path:
    """Return the folder of a complete run; train it unless it exists."""
    if not is_complete(folder, steps):
        command = [sys.executable, "-m", "recipe.atropos.launch_services", "--preset", preset, "--seed", str(seed)]
        options = ["--run-dir", str(folder), "--steps", str(steps), f"evaluation.every={steps // 2}"]
        options += ["trainer.save_freq=-1", *(["environment.args.eval_size=16"] if smoke else [])]
        log_path = folder.with_suffix(".log")
        with open(log_path, "w") as log:
            status = subprocess.run([*command, *options], stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            sys.exit(f"{preset}, seed {seed}: exit status {status}\n{log_path.read_text()[-4000:]}")
    return folder


def is_complete(folder: Path, steps: int) -> bool:
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_bytes()).get("finished_steps") == steps


def curve(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (trained tokens so far, greedy held-out accuracy) at each evaluation."""
    so_far = np.cumsum([0.0, *(line["atropos/trained_tokens"] for line in read_metrics(folder))])
    lines = read_evaluations(folder)
    accuracy = np.array([line["metrics"][line["main"]] for line in lines])
    return np.array([so_far[line["step"]] for line in lines]), accuracy


def checks(folder: Path, own: bool) -> dict[str, float]:
    """Return dropped sequences, share of rows with (``own``) or without own advantages, largest mean of a step."""
    lines = read_metrics(folder)
    rows = sum(line["atropos/rows"] for line in lines)
    brought = sum(line.get("atropos/rows_with/own_advantages", 0.0) for line in lines) / rows
    return {
        "dropped": sum(json.loads((folder / "summary.json").read_bytes())["dropped"].values()),
        "own_advantages": brought if own else 1.0 - brought,
        "mean_advantage": max(abs(line["atropos/mean_advantage"]) for line in lines) if own else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of the word problems")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and go on where some are complete")
    arguments = parser.parse_args()
    small = arguments.quick or arguments.smoke
    tasks, seeds = (["word problems"], SEEDS[:1]) if small else (list(TASKS), SEEDS)
    steps = 2 if arguments.smoke else STEPS
    with tempfile.TemporaryDirectory() as name:
        root = arguments.runs or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        found, checked = {}, []
        head = "".join(f"{f'at {share:.0%}':>9}" for share in SHARES)
        print(f"{'':<15}{'seed':>5}  {'method':<18}{'before':>9}{head}{'tokens':>10}", flush=True)
        for task, seed in itertools.product(tasks, seeds):
            presets = {preset: root / f"{preset}-{seed}" for preset in TASKS[task]}
            folders = [run(preset, seed, folder, steps, arguments.smoke) for preset, folder in presets.items()]
            curves = [curve(folder) for folder in folders]
            checked += [checks(folder, own) for folder, own in zip(folders, (False, True), strict=True)]
            budget = min(tokens[-1] for tokens, _ in curves)
            for method, (tokens, accuracy) in zip(METHODS, curves, strict=True):
                values = [accuracy[0], *np.interp([share * budget for share in SHARES], tokens, accuracy)]
                found[task, method, seed] = [float(value) for value in values]
                shown = "".join(f"{value:>9.1%}" for value in values)
                print(f"{task:<15}{seed:>5}  {method:<18}{shown}{budget:>10.0f}", flush=True)
    figures = {}
    for task, method in itertools.product(tasks, METHODS):
        means = [statistics.mean(values) for values in zip(*(found[task, method, s] for s in seeds), strict=True)]
        print(f"{task:<15}{'mean':>5}  {method:<18}" + "".join(f"{value:>9.1%}" for value in means))
        name = f"{task} {method}".lower().replace(" ", "_")
        figures |= {f"{name}_at_{share:.0%}": round(v, 4) for share, v in zip(SHARES, means[1:], strict=True)}
    figures |= {
        "runs": len(checked),
        "dropped": sum(each["dropped"] for each in checked),
        "own_advantages": min(each["own_advantages"] for each in checked),
        "mean_advantage": max(each["mean_advantage"] for each in checked),
    }
    ok = not figures["dropped"] and figures["own_advantages"] == 1.0 and figures["mean_advantage"] <= 1e-3
    print(json.dumps({"name": "token_advantages", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
