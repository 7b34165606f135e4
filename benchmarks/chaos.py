"""Kill the processes of a run at random moments: ``python benchmarks/chaos.py [--quick] [--seed N]``

A run of two environments, word problems and a program of two turns, is trained while its Trajectory API,
trainer, gateway, SGLang server, session server and environments, a program, and one of the two guardians of a random
one of them, are killed (SIGKILL), in random order: each while something starts, in the middle of steps, of pushes and
of saves, and while batches have nothing to train on, because the environments say that their groups are older than
``max_staleness`` allows. Then it is stopped, and resumed for its last steps. What must hold:

- every group that the API stored is in exactly one batch, or in none yet; batches have no gaps;
- a session that was rewarded has the turns that its program was answered, each once, and is in one group at most;
- the metrics have every step once, and every batch once or among the empty ones; no row is of a version that was given
  up;
- training on the stored batches again, undisturbed and without servers, gives the same weights, bit for bit.

``--quick`` kills each of them at two of these moments; the whole, once at each, those of sessions twice.
"""

import argparse
import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from recipe.atropos.config.compose import load_config
from recipe.atropos.data.scored_group import unpack
from recipe.atropos.environments.gsm8k import GSM8kEnv
from recipe.atropos.environments.program import ProgramEnv
from recipe.atropos.environments.word_problems import generate, gold_answer
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.trajectory_api.store import DATABASE
from recipe.atropos.utils.files import RunDirError, read_json

SERVICES = ("api", "trainer", "gateway", "sglang", "environment-stale", "environment-program", "sessions")
METHODS = {"push": "update_weights", "checkpoint": "save_checkpoint"}  # of the trainer's rank
EMPTY = "empty"  # moment in which batches have nothing to train on, and file beside the run that makes them so
MOMENTS = ("start", "step", *METHODS, EMPTY)
GUARDIAN = "guardian"  # of a random service
AGENT = "agent"  # a program of a session
PROGRAM = str(Path(__file__).parents[1] / "examples/agents/persistent.py")
KILLED = (*SERVICES, AGENT, GUARDIAN)
OF_SESSIONS = ("environment-program", "sessions", AGENT)
LONGEST_START = 20.0  # s after the last kill; a trainer or server takes about as long to start
LONGEST_PAUSE = 4.0  # s after a step; the next ones take about as long
READY_SECONDS = 300  # until a killed service is there again, or a run's first step
LAST_STEPS = 3  # after the last kill
END_SECONDS = 600
OPTIONS = [
    "--preset=demo",
    "environment.evaluate=false",
    "trainer.save_freq=3",
    "trainer.max_actor_ckpt_to_keep=3",
    "trainer.logger=[console]",
    "trainer.atropos.max_empty_batches=1000",
    *(f"{key}.max_restarts=1000" for key in ("api", "inference", "environment", "trainer.atropos")),
    f"environments.stale.target={__file__}:StaleGSM8kEnv",
    f"environments.program.target={__file__}:StaleProgramEnv",
    "sessions.enabled=true",
]


class StaleGSM8kEnv(GSM8kEnv):
    """Word problems whose groups are too old to be trained on while the file that ``CHAOS_EMPTY`` names exists."""

    name = "stale"

    async def score(self, item: Any, nodes: list[Any]) -> Any:
        group = await super().score(item, nodes)
        if os.path.exists(os.environ["CHAOS_EMPTY"]):
            group["group_overrides"]["policy_version_min"] = [0] * len(nodes)
        return group


class StaleProgramEnv(ProgramEnv):
    """A program of two turns as an environment, likewise."""

    name = "program"

    async def _group(self, outcomes: list[Any]) -> Any:
        group = await super()._group(outcomes)
        if os.path.exists(os.environ["CHAOS_EMPTY"]):
            group["group_overrides"]["policy_version_min"] = [0] * len(group["tokens"])
        return group


def launch(run: Path, steps: int) -> subprocess.Popen:
    args = load_config(["preset=demo"]).environment.args  # which the preset gives to its own environment alone
    items = run.parent / "items.jsonl"
    problems = [{"question": row["question"], "answer": gold_answer(row)} for row in generate("train", 500)]
    items.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    program = {"command": f"{sys.executable} {PROGRAM}", "items": str(items)}
    given = {"stale": args, "program": program | {"max_num_workers": 2, "parallel": 8}}
    options = [
        *OPTIONS,
        *(
            f"environments.{name}.args.{key}={json.dumps(value)}"
            for name in given
            for key, value in given[name].items()
        ),
    ]
    command = [sys.executable, "-m", "recipe.atropos.launch_services", *options, f"--steps={steps}"]
    variables = {**os.environ, "CHAOS_EMPTY": str(run.parent / EMPTY)}
    with open(run.parent / "launcher.log", "ab") as log:
        return subprocess.Popen(
            [*command, f"--run-dir={run}"], stdout=log, stderr=log, start_new_session=True, env=variables
        )


def service_pid(run: Path, prefix: str) -> int | None:
    with contextlib.suppress(RunDirError):
        for name, service in read_json(RunDir(run).services, {}).items():
            if name.startswith(prefix) and psutil.pid_exists(service["pid"]):
                return service["pid"]
    return None


def wait_for(condition: Callable[[], object], launcher: subprocess.Popen, what: str) -> None:
    """Wait until ``condition()`` is true; raise RuntimeError if the launcher ends first, or it takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"waited for {what}; the launcher's status is {launcher.poll()}")
        time.sleep(0.1)


def trained_since(run: Path, moment: float) -> bool:
    lines = read_metrics(run)
    return bool(lines) and lines[-1]["time"] > moment


def find_rank(launcher: subprocess.Popen) -> psutil.Process | None:
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith("ray::AtroposActorWorker"):
                return process
    return None


def find_agent(launcher: subprocess.Popen) -> psutil.Process | None:
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [PROGRAM]:
                return process
    return None


def wait_for_method(launcher: subprocess.Popen, method: str) -> None:
    """Return while the trainer's rank executes ``method``, which Ray writes into its command line."""
    deadline = time.monotonic() + READY_SECONDS
    while launcher.poll() is None and time.monotonic() < deadline:
        rank, until = find_rank(launcher), time.monotonic() + 5
        with contextlib.suppress(psutil.Error):
            while rank is not None and time.monotonic() < until:
                if method in " ".join(rank.cmdline()):
                    return
                time.sleep(0.001)
    raise RuntimeError(f"waited for {method}; the launcher's status is {launcher.poll()}")


def empty_batches(run: Path) -> int:
    """Return how many batches without rows the trainer's processes have logged."""
    with contextlib.suppress(FileNotFoundError):
        return RunDir(run).log("trainer").read_text(errors="replace").count("has nothing to train on")
    return 0


def kill_all(run: Path, launcher: subprocess.Popen, kills: list[tuple[str, str]], rng: random.Random) -> Counter[str]:
    """Kill one process of each (name, moment) in ``kills``; return how many were killed, by name and by moment."""
    killed: Counter[str] = Counter()
    last = time.time()
    for number, (name, moment) in enumerate(kills, 1):
        if moment == "start":  # of what was killed before, or of the trainer that follows it
            time.sleep(rng.uniform(0, LONGEST_START))
        else:
            wait_for(lambda last=last: trained_since(run, last), launcher, "a step after the last kill")
            time.sleep(rng.uniform(0, LONGEST_PAUSE))
        if moment in METHODS:
            wait_for_method(launcher, METHODS[moment])
        if moment == EMPTY:
            before = empty_batches(run)
            (run.parent / EMPTY).touch()
            wait_for(lambda before=before: empty_batches(run) > before, launcher, "a batch with nothing to train on")
            time.sleep(rng.uniform(0, LONGEST_PAUSE))
        if name == AGENT:
            wait_for(lambda: find_agent(launcher), launcher, "a program of a session")
            with contextlib.suppress(psutil.NoSuchProcess, AttributeError):  # it has ended meanwhile
                find_agent(launcher).kill()
                killed.update((name, moment))
        prefix = "environment-program" if name == AGENT else rng.choice(SERVICES) if name == GUARDIAN else name
        wait_for(lambda prefix=prefix: service_pid(run, prefix), launcher, f"a process of {prefix}")
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being started again
            target = psutil.Process(service_pid(run, prefix))
            if name == GUARDIAN:
                target = rng.choice(target.parents()[:2])
            if name != AGENT:
                target.kill()
                killed.update((name, moment))
        last = time.time()
        if moment == EMPTY:
            before = empty_batches(run)  # another one after the kill, of what is queued or begun
            wait_for(lambda before=before: empty_batches(run) > before, launcher, "another such batch")
            (run.parent / EMPTY).unlink()
        step = max((line["step"] for line in read_metrics(run)), default=0)
        print(f"{number:3} of {len(kills)}: {name:<11} {moment:<10} after step {step}", flush=True)
    return killed


def ledger(run: Path) -> dict[str, int]:
    """Return the numbers that say whether anything was lost or doubled; each but the first three must be 0."""
    with contextlib.closing(sqlite3.connect(RunDir(run).trajectories / DATABASE)) as store:
        ids = [id for (id,) in store.execute("SELECT id FROM groups ORDER BY id")]
        batches = [number for (number,) in store.execute("SELECT DISTINCT batch FROM groups WHERE batch > 0")]
    lines = read_metrics(run)
    steps, trained = [line["step"] for line in lines], [int(line["atropos/batch"]) for line in lines]
    empty = sum(int(line["atropos/empty_batches"]) for line in lines)
    groups = read_json(RunDir(run).summary)["groups"]
    return {
        "groups": len(ids),
        "steps": len(steps),
        "empty_batches": empty,
        "group_numbers_missing": max(ids) - len(ids),
        "batches_missing": max(batches) - len(batches),
        "steps_not_once": len(steps) - len(set(steps)) + max(steps) - len(steps),
        "batches_trained_twice": len(trained) - len(set(trained)),
        "batches_passed_over": abs(max(trained) - len(set(trained)) - empty),
        "rows_of_a_future_version": int(sum(line.get("atropos/dropped/future_version", 0) for line in lines)),
        "groups_unaccounted": abs(groups["received"] - len(ids)) + max(0, -groups["left"]),
    }


def session_ledger(run: Path) -> dict[str, int]:
    """Return the number of rewarded sessions, and those that say whether a turn or a session was lost or doubled."""
    with contextlib.closing(sqlite3.connect(RunDir(run).trajectories / DATABASE)) as store:
        groups = [unpack(record) for (record,) in store.execute("SELECT data FROM records")]
    posted: Counter[str] = Counter()
    for group in groups:
        posted.update(set((group.field("group_overrides") or {}).get("sessions", ())))
    with contextlib.closing(sqlite3.connect(RunDir(run).sessions)) as store:
        states = [json.loads(state) for (state,) in store.execute("SELECT state FROM sessions")]
        turns = dict(store.execute("SELECT session, COUNT(*) FROM turns GROUP BY session"))
    rewarded = [state for state in states if state["end"] == "reward"]
    return {
        "sessions": len(rewarded),
        "sessions_in_several_groups": sum(n > 1 for n in posted.values()),
        "sessions_of_nobody": len(posted.keys() - {state["id"] for state in rewarded}),
        "turns_lost_or_doubled": sum(turns.get(state["id"]) != state["metrics"]["turns"] for state in rewarded),
    }


def main() -> int:
    from recipe.atropos.commands.replay import replay  # imports torch, which the environment does without

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two kills of each process instead of five")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the pauses")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    moments = [rng.sample(MOMENTS, 2) if arguments.quick else MOMENTS for _ in KILLED]
    kills = [(prefix, moment) for prefix, each in zip(KILLED, moments, strict=True) for moment in each]
    if not arguments.quick:
        kills += [(prefix, moment) for prefix in OF_SESSIONS for moment in MOMENTS]
    rng.shuffle(kills)
    if arguments.smoke:
        kills = [(GUARDIAN, EMPTY)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        launcher = launch(run, 100_000)
        try:
            wait_for(lambda: read_metrics(run), launcher, "the first step")
            killed = kill_all(run, launcher, kills, rng)
            trained = max(line["step"] for line in read_metrics(run))
            wait_for(lambda: read_metrics(run)[-1]["step"] > trained, launcher, f"a step after step {trained}")
            launcher.terminate()
            launcher.wait(END_SECONDS)
            launcher = launch(run, max(line["step"] for line in read_metrics(run)) + LAST_STEPS)
            status = launcher.wait(END_SECONDS)
        except BaseException:
            print(Path(name, "launcher.log").read_text()[-5000:])
            raise
        finally:
            launcher.kill()
        figures: dict[str, float] = {f"killed_{key}": killed[key] for key in (*KILLED, *MOMENTS)} | ledger(run)
        figures |= session_ledger(run)
        figures["exit_status"] = status
        figures["weights_differ"] = int(not replay(run, []))
    figures["seconds"] = time.monotonic() - started
    counts = ("groups", "steps", "empty_batches", "sessions", "seconds")
    zero = [key for key in figures if key not in counts and not key.startswith("killed_")]
    print(f"\n{'':<24} found  must be")
    for key, value in figures.items():
        print(f"{key:<24} {value:5.0f}  {'0' if key in zero else ''}".rstrip())
    ok = not any(figures[key] for key in zero) and figures["killed_empty"] <= figures["empty_batches"]
    print(json.dumps({"name": "chaos", "figures": figures, "targets": dict.fromkeys(zero, 0), "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
