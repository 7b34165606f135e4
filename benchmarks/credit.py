"""What credit for turns saves: ``python benchmarks/credit.py [--quick] [--only TASK] [--hours H] [--results FILE]``.

Trains first policies of ``tasks/credit.py`` by the launcher, with the real services, until 80% of held-out items are
solved, and compares the tokens that were sampled for it. Settled before the runs:

- Tasks: 1, 4, 8 and 16 keys of a calculator to be found, each checked by itself; an episode has N + 1 turns. With 1 and
  4 the first policy's most likely key is the right one for each letter: where it was a wrong one, that became certain
  (with 1 key it presses eight different ones; of three, neither GRPO nor lam 0 passed 58%). As a task of another kind,
  without a target, a grid on which 6 moves are needed and 12 can be made, 61% of them right at first.
- Methods: outcome GRPO, the reference; progress (``environment.credit``) with lam 0 and 0.5, which the microscope
  prefers (``python -m recipe.atropos credit``), on episodes that are scored by their share of right keys; as rivals two
  epochs on each batch, and a curriculum, by which one more step comes when 80% of the episodes of the last 32 groups
  with the most steps so far are solved (of 1 key nothing is left to order, nor are rivals needed there).
- Each of these methods has the best of three learning rates on seed 0, by tokens to 80%, then by the last accuracy;
  with it five seeds, which are those of the items and of sampling. All begin with the same policy.
- Exploratory, with one seed and one rate, and said to be so in the table, as is what is not complete: the grid; 8 keys
  with GRPO of partial scores (whether denser scores suffice), larger groups, a turn tree with progress, a share of
  outcome GRPO, and VinePPO's values, whose tokens count; 16 keys. All planned runs take about 10 hours on 2 cores.
- A batch is one group of 2 episodes, so that noise limits, rather than the learning rate; on the grid eight of them,
  since of one group nobody learned to 80%; with 1 key eight groups of 8: of eight groups of 2, GRPO missed on all five
  seeds. It is sent and trained on whatever its scores, and all its tokens count.
- Every 20 updates 128 held-out items are sampled at temperature 1. Tokens to 80% are interpolated between the
  evaluations around it. A run ends at 80%, or misses it after 240 updates.
- A task has one budget of tokens, of which a miss counts as all, so that none gains by short episodes: the largest
  count that a run of it ended with. It was chosen after the runs; what ended before it might have come to 80% until
  then, but with keys all misses that count had fallen below 25%. A ratio is a lower or upper bound, ">=" or "<=", where
  only the method's runs or only outcome GRPO's miss. Where both do it is "no bound", but what the budget makes of it,
  and "not comparable" if the same share of both misses.

Targets, of the mean tokens against outcome GRPO's: at most 0.5 at 4 steps, 0.25 at 8, 0.9 to 1.1 at 1. A bound meets
one if no value that it allows misses it.

Every complete run is a line of ``--results``, which is kept: the same command goes on with those that are missing, and
begins none after ``--hours``. A line says of which settings it is; a file with others is refused. ``--quick`` is
outcome GRPO and lam 0 at 4 steps, one learning rate and seed, and 80 updates. A first policy is taught once: those for
4 and 8 keys took 2 and 6 minutes, at once on 2 cores.
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tasks.credit import GridRecipe, KeysRecipe, LongKeysRecipe  # noqa: E402
from recipe.atropos.demo.small_policy import ensure_small_policy  # noqa: E402
from recipe.atropos.run.evaluations import read_evaluations  # noqa: E402
from recipe.atropos.run.record import read_metrics  # noqa: E402
from recipe.atropos.trajectory_api import records  # noqa: E402
from recipe.atropos.utils.files import read_lines  # noqa: E402

RECIPES = {
    "keys 1": KeysRecipe(task_steps=1, right=0.3, spread=0.05, keys="+-*/%^&|"),
    "keys 4": KeysRecipe(task_steps=4, right=0.6, spread=0.05),
    "keys 8": KeysRecipe(task_steps=8, right=0.74),
    "keys 16": LongKeysRecipe(task_steps=16, right=0.88, spread=0.05),
    "grid 6": GridRecipe(),
}
PARTIAL = "environment.args.partial_scores=true"
METHODS = {
    "outcome GRPO": (),
    "outcome GRPO, groups of 4": ("actor_rollout_ref.rollout.n=4",),
    "outcome GRPO, groups of 8": ("actor_rollout_ref.rollout.n=8",),
    "GRPO of partial scores": (PARTIAL,),
    "progress, lam 0": (PARTIAL, "environment.credit={lam: 0}"),
    "progress, lam 0.5": (PARTIAL, "environment.credit={lam: 0.5}"),
    "curriculum": ("environment.args.curriculum_threshold=0.6",),  # of -1 and 1: 80% solved
    "two epochs": ("actor_rollout_ref.actor.ppo_epochs=2",),
    "progress, lam 0, mix 0.5": (PARTIAL, "environment.credit={lam: 0, mix: 0.5}"),
    "turn tree, progress": (
        *(PARTIAL, "environment.credit={lam: 0}"),
        *("actor_rollout_ref.rollout.n=4", "environment.args.tree_roots=2"),
    ),
    "value continuations": ("environment.args.value_continuations=4", "environment.credit={lam: 0}"),
}
REFERENCE = "outcome GRPO"
PROGRESS = ("progress, lam 0", "progress, lam 0.5")
FINAL = (REFERENCE, *PROGRESS, "curriculum", "two epochs")
RATES, SEEDS = (2e-4, 4e-4, 8e-4), range(5)
PLAN = [  # tasks, with their methods, learning rates on the first seed, and seeds
    ("keys 4", FINAL, RATES, SEEDS),
    ("keys 8", FINAL, RATES, SEEDS),
    ("keys 1", (REFERENCE, *PROGRESS), RATES, SEEDS),
    ("grid 6", (REFERENCE, *PROGRESS), RATES[1:2], SEEDS[:1]),
    ("keys 8", tuple(method for method in METHODS if method not in FINAL), RATES[1:2], SEEDS[:1]),
    ("keys 16", (REFERENCE, *PROGRESS), RATES[1:2], SEEDS[:1]),
]
GROUPS = {"keys 1": 8, "keys 4": 1, "keys 8": 1, "keys 16": 1, "grid 6": 8}  # of a batch
GROUP_SIZE = {"keys 1": 8, "keys 4": 2, "keys 8": 2, "keys 16": 2, "grid 6": 2}
UPDATES, EVERY, HELD_OUT, SOLVED = 240, 20, 128, 0.8
QUICK = 80  # updates
TARGETS = {"keys 1": (0.9, 1.1), "keys 4": (0.0, 0.5), "keys 8": (0.0, 0.25)}  # of the best of both lam


class Key(NamedTuple):
    """A run."""

    task: str
    method: str
    rate: float
    seed: int


class Ratio(NamedTuple):
    """Mean tokens against outcome GRPO's. ``kind``: "" where no run misses; else "<=", ">=", "no bound" or, if the same
    share of both misses, "not comparable".
    """

    value: float
    kind: str

    def __str__(self) -> str:
        given = f"{self.value:.2f}"
        return {"": given, "no bound": f"{given}, no bound", "not comparable": self.kind}.get(
            self.kind, f"{self.kind} {given}"
        )

    def within(self, low: float, high: float) -> bool:
        """Return whether every value that the ratio stands for is at least ``low``, if that is above 0, and at most
        ``high``.
        """
        above = low == 0 or (self.kind in ("", ">=") and self.value >= low)
        return above and self.kind in ("", "<=") and self.value <= high


def options(key: Key, folder: Path, policy: Path, updates: int) -> list[str]:
    """Return the launcher's options."""
    recipe = RECIPES[key.task]
    turns = recipe.task_steps + recipe.more_turns
    return [
        *("--preset", "calculator", "--run-dir", str(folder), "--seed", str(key.seed), "--steps", str(updates)),
        f"environment.target={ROOT / 'benchmarks' / 'tasks' / 'credit.py'}:{recipe.env}",
        f"environment.args={{steps: {recipe.task_steps}, max_turns: {turns}, system_prompt: '', seed: {key.seed}}}",
        "environment.args.ensure_scores_are_not_same=false",
        "environment.args.max_answer_tokens=16",
        f"environment.args.eval_size={HELD_OUT}",
        "environment.args.max_eval_workers=64",
        "environment.args.max_num_workers=8",
        "environment.args.steps_per_eval=0",
        f"evaluation.every={EVERY}",
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.actor.optim.lr={key.rate}",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE[key.task]}",
        f"data.train_batch_size={GROUPS[key.task]}",
        "data.max_prompt_length=64",
        f"data.max_response_length={recipe.turn_tokens * turns}",
        "trainer.save_freq=-1",
        "trainer.atropos.max_staleness=0",
        *METHODS[key.method],
    ]


def settings(key: Key) -> str:
    """Return a digest of the policy's recipe, the launcher's options and how a run is evaluated."""
    told = [str(RECIPES[key.task]), *options(key, Path("run"), Path("policy"), UPDATES), f"solved={SOLVED}"]
    return hashlib.sha256("\n".join(told).replace(str(ROOT), "").encode()).hexdigest()[:12]


def read_results(file: Path) -> list[dict[str, Any]]:
    """Return the lines of complete runs. Exits if one is of other settings than this file's."""
    results = list(read_lines(file)) if file.exists() else []
    for number, one in enumerate(results, 1):
        key = Key(*(one[name] for name in Key._fields))
        if key.task not in RECIPES or key.method not in METHODS or one["settings"] != settings(key):
            sys.exit(f"{file}, line {number}: {key} is of other settings; give another file")
    return results


def run(key: Key, folder: Path, updates: int) -> dict[str, Any]:
    """Train until 80% are solved, or to the end; return the run's line. Exits if the run fails."""
    policy = ensure_small_policy(recipe=RECIPES[key.task])
    command = [sys.executable, "-m", "recipe.atropos.launch_services", *options(key, folder, policy, updates)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    log, begun = folder.with_suffix(".log"), time.monotonic()
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None and not solved(folder):
                time.sleep(1.0)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
    if not solved(folder) and process.returncode:
        sys.exit(f"{key}: exit status {process.returncode}\n{log.read_text()[-4000:]}")
    tokens, accuracy = curve(folder)
    reached = tokens_to(SOLVED, tokens, accuracy)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        **key._asdict(),
        "settings": settings(key),
        "tokens": tokens,
        "accuracy": accuracy,
        "to_80": reached if math.isfinite(reached) else None,
        "seconds": round(time.monotonic() - begun),
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def solved(folder: Path) -> bool:
    return any(accuracy >= SOLVED for accuracy in curve(folder)[1])


def curve(folder: Path) -> tuple[list[int], list[float]]:
    """Return the sampled tokens, those for values included, and the share of solved items at each evaluation."""
    steps = read_metrics(folder)
    values = (value_tokens(folder, int(line["atropos/batch"])) for line in steps)
    trained = (line["atropos/trained_tokens"] for line in steps)
    so_far = np.cumsum([0, *map(operator.add, trained, values)])
    lines = [line for line in read_evaluations(folder) if line.get("main") and line["step"] < len(so_far)]
    return [int(so_far[line["step"]]) for line in lines], [line["metrics"][line["main"]] for line in lines]


@functools.cache  # a run is looked at every second
def value_tokens(folder: Path, batch: int) -> int:
    """Return the tokens that were sampled for a batch, but for values alone."""
    groups = records.read(folder / "trajectories", batch)
    return sum(sum((group.field("group_overrides") or {}).get("value_tokens", ())) for group in groups)


def tokens_to(share: float, tokens: list[int], accuracy: list[float]) -> float:
    """Return the tokens at which ``accuracy`` first reaches ``share``, interpolated linearly; infinity if never."""
    for i, value in enumerate(accuracy):
        if value >= share:
            if i == 0:
                return float(tokens[0])
            part = (share - accuracy[i - 1]) / (value - accuracy[i - 1])
            return tokens[i - 1] + part * (tokens[i] - tokens[i - 1])
    return math.inf


def missing(results: list[dict[str, Any]], tasks: list[str]) -> Iterator[Key]:
    """Yield the runs that are still to do; which learning rate is best is known when those of seed 0 are done."""
    done = {Key(*(line[name] for name in Key._fields)) for line in results}
    for task, methods, rates, seeds in PLAN:
        if task not in tasks:
            continue
        searched = [Key(task, method, rate, seeds[0]) for method, rate in itertools.product(methods, rates)]
        yield from (key for key in searched if key not in done)
        if done.issuperset(searched):
            for seed, method in itertools.product(seeds[1:], methods):
                if (key := Key(task, method, best_rate(results, task, method), seed)) not in done:
                    yield key


def best_rate(results: list[dict[str, Any]], task: str, method: str) -> float:
    """Return the learning rate with the fewest tokens to 80% on seed 0, of those there are; NaN if there is none."""
    found = [one for one in results if (one["task"], one["method"], one["seed"]) == (task, method, SEEDS[0])]
    best = min(found, key=lambda one: (one["to_80"] or math.inf, -one["accuracy"][-1]), default={"rate": math.nan})
    return float(best["rate"])


def runs_of(results: list[dict[str, Any]], task: str, method: str) -> list[dict[str, Any]]:
    """Return a method's runs with its best learning rate."""
    rate = best_rate(results, task, method)
    return [one for one in results if (one["task"], one["method"], one["rate"]) == (task, method, rate)]


def is_final(results: list[dict[str, Any]], task: str, method: str) -> bool:
    """Return whether all of a final method's runs are there."""
    rates = {one["rate"] for one in results if (one["task"], one["method"], one["seed"]) == (task, method, SEEDS[0])}
    seeds = {one["seed"] for one in runs_of(results, task, method)}
    return method in FINAL and rates.issuperset(RATES) and seeds.issuperset(SEEDS)


def budget_of(results: list[dict[str, Any]], task: str) -> int:
    """Return the most tokens that a run of a task ended with, of the final methods if there are some."""
    return max((one["method"] in FINAL, one["tokens"][-1]) for one in results if one["task"] == task)[1]


def censored(lines: list[dict[str, Any]], budget: int) -> list[float]:
    """Return the tokens to 80% of each run; of a miss, and of what needed more, the budget."""
    return [min(one["to_80"] or math.inf, budget) for one in lines]


def ratio_of(needed: list[float], reference: list[float], budget: int) -> Ratio:
    """Return the ratio of two methods' mean tokens, each run's censored at the budget."""
    value = statistics.mean(needed) / statistics.mean(reference)
    own, theirs = (sum(n == budget for n in each) / len(each) for each in (needed, reference))
    if own and theirs:
        return Ratio(value, "not comparable" if own == theirs else "no bound")
    return Ratio(value, ">=" if own else "<=" if theirs else "")


def table(results: list[dict[str, Any]], tasks: list[str]) -> dict[str, Ratio]:
    """Print the means and ranges over seeds, and what all runs took; return the ratios to outcome GRPO by row."""
    ratios: dict[str, Ratio] = {}
    print(
        "| task | method | learning rate | seeds | at first | thousand tokens to 80% | ratio |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    for task in tasks:
        reference: list[float] = []
        for method in METHODS:
            lines = runs_of(results, task, method)
            if not lines:
                continue
            label = method if is_final(results, task, method) else f"{method} (exploratory)"
            budget = budget_of(results, task)
            needed = censored(lines, budget)
            missed = sum(n == budget for n in needed)
            first = statistics.mean(one["accuracy"][0] for one in lines)
            spread = f"{statistics.mean(needed) / 1e3:.1f} ({min(needed) / 1e3:.1f} to {max(needed) / 1e3:.1f})"
            late, ratio = f", {missed} missed" * bool(missed), ""
            reference = needed if method == REFERENCE else reference
            if reference and method != REFERENCE:
                ratios[f"{task}, {label}"] = found = ratio_of(needed, reference, budget)
                ratio = str(found)
            print(
                f"| {task} | {label} | {lines[0]['rate']:g} | {len(lines)} | {first:.0%} | {spread}{late} | {ratio} |"
            )
    counted = [one for one in results if one["task"] in tasks]
    tokens, hours = sum(one["tokens"][-1] for one in counted), sum(one["seconds"] for one in counted) / 3600
    print(f"\nAll {len(counted)} runs, with those of other learning rates: {tokens:,} tokens, {hours:.1f} hours")
    return ratios


def plot(results: list[dict[str, Any]], tasks: list[str], path: Path) -> None:
    """Draw the held-out accuracy of every run that the table counts, a panel for each task, a color for each method; a
    cross is the end of a miss.
    """
    tasks = [task for task in tasks if any(line["task"] == task for line in results if line["method"] in PROGRESS)]
    shown = [method for method in METHODS if any(line["method"] == method for line in results)]
    styles = [{"color": f"C{number}", "linestyle": "-:"[number // 10]} for number in range(len(shown))]  # of ten colors
    figure = Figure((4 * len(tasks), 4), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        panel.set(title=task, xlabel="thousand sampled tokens", ylim=(-0.03, 1))
        runs = [(number, line) for number, method in enumerate(shown) for line in runs_of(results, task, method)]
        panel.set_xscale("symlog", linthresh=min(line["tokens"][1] for _, line in runs) / 1e3)
        panel.xaxis.set_major_formatter("{x:g}")
        for number, line in runs:
            end = "x" if line["to_80"] is None else ""
            thousands = [n / 1e3 for n in line["tokens"]]
            panel.plot(thousands, line["accuracy"], **styles[number], marker=end, markevery=[-1], alpha=0.8)
    figure.axes[0].set_ylabel("solved, held out")
    handles = [Line2D([], [], **style, label=method) for style, method in zip(styles, shown, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def met(ratios: dict[str, Ratio], task: str) -> bool:
    found = [ratios[row] for method in PROGRESS if (row := f"{task}, {method}") in ratios]
    return any(ratio.within(*TARGETS[task]) for ratio in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two methods on 4 steps, 10 minutes")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    parser.add_argument("--only", choices=RECIPES, help="this task alone")
    parser.add_argument("--hours", type=float, default=12.0, help="begin no run after this time")
    parser.add_argument("--results", type=Path, help="lines of complete runs, to go on with")
    parser.add_argument("--plot", type=Path, help="draw the accuracy over the sampled tokens into this file")
    arguments = parser.parse_args()
    tasks = [arguments.only] if arguments.only else list(RECIPES)
    updates = EVERY if arguments.smoke else QUICK if arguments.quick else UPDATES
    if arguments.smoke:
        RECIPES["keys 4"] = replace(RECIPES["keys 4"], problems=200, steps=20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the run's launcher too
    with tempfile.TemporaryDirectory() as name:
        file = arguments.results or Path(name) / "results.jsonl"
        results = read_results(file)
        begun = time.monotonic()
        if arguments.quick or arguments.smoke:
            keys = iter([Key("keys 4", method, RATES[1], 0) for method in (REFERENCE, "progress, lam 0")])
        else:
            keys = missing(results, tasks)
        while time.monotonic() - begun < arguments.hours * 3600 and (key := next(keys, None)):
            line = run(key, Path(name) / f"run-{len(results)}", updates)
            results.append(line)
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(json.dumps({**line, "tokens": line["tokens"][-1]}), flush=True)
            if not (arguments.quick or arguments.smoke):
                keys = missing(results, tasks)
        short = arguments.quick or arguments.smoke
        ratios = table(results, tasks)
    if arguments.plot:
        plot(results, tasks, arguments.plot)
    ok = short or all(met(ratios, task) for task in TARGETS if task in tasks)
    figures = {name: str(ratio) for name, ratio in ratios.items()}
    print(json.dumps({"name": "credit", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
