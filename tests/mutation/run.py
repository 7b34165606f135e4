"""Which faults in the code would no test see? Mutates the modules below and runs the fast tests that cover them.

    python tests/mutation/run.py [--quick] [--files NAME ...] [--n 400] [--seed 0] [--workers 2]

Two kinds of mutants: a seeded sample of Cosmic Ray's default ones (``generate.py``), and those of ``named.toml``:
faults that reviews found and that no test caught, and one for each fix, which undoes it. The tests must catch every
named one, and ``_TARGET`` of the others. What survives is printed with its diff; it is either caught by a new test or
listed in ``accepted.toml`` with the reason why it makes no difference.

Torch and verl are imported once; each mutant is tested in a fork of that process, which loads the mutated module in the
place of the real one. Nothing is written to the sources.
"""

import argparse
import contextlib
import difflib
import importlib
import importlib.machinery
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = {path.name: str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/**/test_*.py")}
_TARGET = 0.95
_MEMORY = 12 << 30  # bytes of data that a mutant may allocate
_SAMPLED = [
    *("test_completion_cache.py", "test_merged_replies.py", "test_restore.py", "test_recorded_calls.py"),
    "test_weight_versions.py",
]
_ROWS = [
    *("test_rows.py", "test_data_proto.py", "test_estimators.py", "test_losses.py", "test_distillation.py"),
    *("test_sampling.py", "test_reward_bridge.py"),
]
_PUSH = ["test_push.py", "test_weight_manager.py"]

# Each module, under recipe/atropos, and the test files that cover it, those that are most likely to fail first.
TESTS = {
    "data/rows.py": _ROWS,
    "data/reading.py": _ROWS,
    "data/data_proto.py": _ROWS,
    "algorithm/advantages.py": ["test_estimators.py", "test_advantages.py"],
    "algorithm/estimators.py": ["test_estimators.py"],
    "algorithm/losses.py": ["test_losses.py", "test_distillation.py"],
    "algorithm/mini_batches.py": ["test_mini_batches.py"],
    "algorithm/off_policy.py": ["test_advantages.py", "test_sampling.py"],
    "data/sampling.py": ["test_sampling.py", "test_parsing.py"],
    "algorithm/metrics.py": ["test_metrics.py", "test_weight_versions.py", "test_estimators.py"],
    "adapter/restore.py": [*_SAMPLED, "test_sampling.py"],
    "adapter/completion_cache.py": _SAMPLED,
    "data/token_keys.py": _SAMPLED,
    "adapter/recorded_calls.py": _SAMPLED,
    "weight_sync/push.py": _PUSH,
    "weight_sync/manager.py": _PUSH,
    "weight_sync/transports/bucket.py": ["test_push.py", "test_transports_alone.py"],
}

# What the tests import that is not ours, so that a fork need not.
_PRELOADED = (
    "aiohttp aiohttp.web atroposlib.envs.base cachetools hydra hypothesis numpy omegaconf orjson psutil ray "
    "safetensors.torch tokenizers torch transformers verl verl.trainer.ppo.metric_utils verl.trainer.ppo.core_algos "
    "verl.trainer.ppo.rollout_corr_helper verl.utils.config verl.workers.utils.losses verl.workers.utils.padding "
    "verl.workers.config torch.utils.checkpoint torch._dynamo hypothesis.strategies openai.types.chat "
    "atroposlib.envs.server_handling.managed_server atroposlib.utils.tokenize_for_trainer"
).split()


@dataclass(frozen=True)
class Mutant:
    """``name`` is for people and, with ``line``, what ``accepted.toml`` knows it by; ``source`` the whole module."""

    file: str  # under recipe/atropos
    name: str
    line: str
    source: str
    tests: list[str]
    keywords: str = ""  # of the tests that must fail
    processes: bool = False  # the tests start processes that import the module


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    outcome: str  # "killed", "survived", "timeout", "accepted", "crashed"
    seconds: float
    output: str = ""

    @property
    def caught(self) -> bool:
        return self.outcome in ("killed", "timeout", "crashed")


class Broken(Exception):
    """The mutants cannot be made, or the tests fail without them."""


# -- mutants ---------------------------------------------------------------------------------------------------------


def named_mutants(files: list[str]) -> list[Mutant]:
    """Those of ``named.toml``; raises Broken for a text that is not in its file exactly once."""
    mutants = []
    for file, entries in tomllib.loads((HERE / "named.toml").read_text()).items():
        source = (ROOT / "recipe/atropos" / file).read_text()
        for name, entry in entries.items():
            if source.count(entry["old"]) != 1:
                raise Broken(
                    f"named.toml: {name}: its old text is {source.count(entry['old'])} times in {file}, expected once; "
                    "the code has changed: write the same fault for the code of today"
                )
            mutated = source.replace(entry["old"], entry["new"])
            compile(mutated, file, "exec")
            test, _, keywords = entry["tests"].partition(" -k ")
            if file in files or not files:
                mutants.append(Mutant(file, name, "", mutated, [test], keywords, entry.get("processes", False)))
    return mutants


def sampled_mutants(files: list[str], seed: int, n: int, python: str) -> tuple[list[Mutant], str]:
    """A sample of the default mutants, and how it was drawn, in words."""
    paths = [f"recipe/atropos/{file}" for file in files]
    command = [python, str(HERE / "generate.py"), str(seed), str(n), *paths]
    drawn = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    mutants = []
    for one in drawn["mutants"]:
        file = one["file"].removeprefix("recipe/atropos/")
        name = f"{file}::{one['function']}::{one['operator']}"
        mutants.append(Mutant(file, name, one["line"], one["source"], TESTS[file]))
    return mutants, f"{len(mutants)} of {drawn['total']} mutations at {drawn['places']} places, seed {seed}"


def accepted() -> dict[tuple[str, str], str]:
    """Reasons by (name, line); see the head of ``accepted.toml``."""
    reasons = {}
    for file, functions in tomllib.loads((HERE / "accepted.toml").read_text()).items():
        lines = [line.strip() for line in (ROOT / "recipe/atropos" / file).read_text().splitlines()]
        for function, entry in ((name, entry) for name, entries in functions.items() for entry in entries):
            if entry["line"] not in lines:
                raise Broken(f"accepted.toml: {file} has no line {entry['line']!r} any more: delete the entry")
            for operator in entry["operators"]:
                reasons[f"{file}::{function}::{operator}", entry["line"]] = entry["reason"]
    return reasons


# -- running ---------------------------------------------------------------------------------------------------------


class _Mutated(importlib.machinery.SourceFileLoader):
    """Loads ``source`` as the module in the file."""

    def __init__(self, name: str, path: str, source: str):
        super().__init__(name, path)
        self.mutated = source

    def get_code(self, fullname: str):
        return compile(self.mutated, self.path, "exec")


class _Finder:
    def __init__(self, file: str, source: str):
        self.name = "recipe.atropos." + file.removesuffix(".py").replace("/", ".")
        self.path, self.source = str(ROOT / "recipe/atropos" / file), source

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname != self.name:
            return None
        loader = _Mutated(fullname, self.path, self.source)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


def preload() -> None:
    """Import what is slow, and let hypothesis draw the same examples for each mutant, without making them small."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import hypothesis
    import pytest
    import torch

    torch.set_num_threads(1)
    assert pytest and not any(name.startswith("recipe.atropos.data.rows") for name in sys.modules)
    for file in TESTS:
        module = "recipe.atropos." + file.removesuffix(".py").replace("/", ".")
        if module in sys.modules:
            raise Broken(f"{module} was loaded before it could be mutated")
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    settings = {"derandomize": True, "database": None, "phases": phases, "report_multiple_bugs": False}
    hypothesis.settings.register_profile("mutation", deadline=None, **settings)
    hypothesis.settings.load_profile("mutation")


def start(mutant: Mutant, output: Path) -> int:
    """Fork a process that tests the mutant; returns its pid. It exits with pytest's status."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        os.setsid()
        os.chdir(ROOT)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        arguments = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        arguments += ["-m", "not slow" if mutant.processes else "not e2e and not slow", f"--basetemp={output}.tmp"]
        arguments += ["-k", mutant.keywords] if mutant.keywords else []
        arguments += [PATHS[name] for name in mutant.tests]
        if mutant.processes:
            status = _in_a_copy(mutant, Path(f"{output}.tree"), arguments)
        else:
            if mutant.source:
                sys.meta_path.insert(0, _Finder(mutant.file, mutant.source))
            import pytest

            status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _in_a_copy(mutant: Mutant, tree: Path, arguments: list[str]) -> int:
    """Status of pytest in a copy of the sources that has the mutation."""
    for part in ("recipe", "scripts", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    if mutant.source:
        (tree / "recipe/atropos" / mutant.file).write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}).returncode


@dataclass
class _Running:
    mutant: Mutant
    output: Path
    begun: float
    limit: float


def run_all(mutants: list[Mutant], limits: dict[str, float], workers: int, folder: Path) -> Iterator[Result]:
    """Test all mutants, ``workers`` at a time; ``limits`` are seconds by file."""
    waiting, running = list(enumerate(mutants))[::-1], {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, mutant = waiting.pop()
            output = folder / f"{number}.log"
            pid = start(mutant, output)
            running[pid] = _Running(mutant, output, time.monotonic(), limits.get(mutant.file, 900))
        time.sleep(0.05)
        for pid, one in list(running.items()):
            seconds = time.monotonic() - one.begun
            late = seconds > one.limit
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if not done:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what its tests may have left
            del running[pid]
            outcome = "timeout" if late else "crashed"
            if not late and os.WIFEXITED(status):
                # 5: no test has the keywords; 2: a test module could not be imported
                outcome = {0: "survived", 1: "killed", 2: "killed", 5: "no tests"}.get(
                    os.WEXITSTATUS(status), "crashed"
                )
            yield Result(one.mutant, outcome, seconds, one.output.read_text(errors="replace"))
            for left in (f"{one.output}.tmp", f"{one.output}.tree"):
                shutil.rmtree(left, ignore_errors=True)


def baseline(mutants: list[Mutant], workers: int, folder: Path) -> dict[str, float]:
    """Run the tests of all mutants without a mutation; returns limits in seconds by file, generous multiples.

    Raises Broken: some fail.
    """
    unchanged = {(m.processes, m.keywords, *m.tests): replace(m, source="") for m in mutants}
    seconds = {}
    for result in run_all(list(unchanged.values()), {}, workers, folder):
        if result.outcome != "survived":
            raise Broken(
                f"no mutant's doing: the tests do not pass without any ({result.outcome}); fix them first: "
                f"{' '.join(result.mutant.tests)}\n{result.output[-4000:]}"
            )
        seconds[tuple(result.mutant.tests)] = result.seconds
        print(f"  {' '.join(result.mutant.tests)}: {result.seconds:.1f} s", flush=True)
    return {m.file: 20 + 4 * seconds[tuple(m.tests)] for m in mutants}


# -- the report ------------------------------------------------------------------------------------------------------


def diff(mutant: Mutant) -> str:
    original = (ROOT / "recipe/atropos" / mutant.file).read_text().splitlines()
    lines = difflib.unified_diff(original, mutant.source.splitlines(), mutant.file, mutant.file, n=0, lineterm="")
    return "\n".join("    " + line for line in list(lines)[2:])


def table(results: list[Result]) -> str:
    """Markdown: mutants, caught, accepted and survived, by file."""
    by_file = defaultdict(Counter)
    for result in results:
        kind = "caught" if result.caught else result.outcome
        by_file[result.mutant.file][kind] += 1
        by_file["all"][kind] += 1
    lines = ["| module | mutants | caught | accepted | survived | kill rate |", "|---|---|---|---|---|---|"]
    for file in [*sorted(by_file.keys() - {"all"}), "all"]:
        counts = by_file[file]
        total, missed = sum(counts.values()), counts["survived"] + counts["no tests"]
        rate = counts["caught"] / max(1, counts["caught"] + missed)
        cells = (
            f"`{file}`" if file != "all" else "all",
            total,
            counts["caught"],
            counts["accepted"],
            missed,
            f"{rate:.1%}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=400, help="mutants in the sample (400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the named ones and a sample of 40")
    parser.add_argument(
        "--named", nargs="?", const="", help="the named ones alone, or those whose name fits this expression"
    )
    parser.add_argument("--sampled", action="store_true", help="the sample alone")
    parser.add_argument(
        "--files", nargs="+", default=[], help="these modules alone, e.g. data/rows.py weight_sync/push.py"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--python", default=str(ROOT / ".venv-mutation/bin/python"), help="one with Cosmic Ray")
    options = parser.parse_args()
    if unknown := set(options.files) - set(TESTS):
        parser.error(f"--files {' '.join(sorted(unknown))}: choose of {' '.join(TESTS)}")

    begun = time.monotonic()
    files = options.files or list(TESTS)
    named = (
        [] if options.sampled else [m for m in named_mutants(options.files) if re.search(options.named or "", m.name)]
    )
    sampled, how, reasons = [], "", accepted()
    if options.named is None:
        sampled, how = sampled_mutants(files, options.seed, 40 if options.quick else options.n, options.python)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        preload()
        print("seconds of the tests without a mutation:", flush=True)
        limits = baseline([*named, *sampled], options.workers, Path(folder))
        results = {"named": [], "sampled": []}
        for kind, mutants in (("named", named), ("sampled", sampled)):
            tested = [mutant for mutant in mutants if (mutant.name, mutant.line) not in reasons]
            results[kind] = [Result(m, "accepted", 0) for m in mutants if (m.name, m.line) in reasons]
            for done, result in enumerate(run_all(tested, limits, options.workers, Path(folder)), 1):
                results[kind].append(result)
                if not result.caught:
                    print(f"{result.outcome}: {result.mutant.name}\n{diff(result.mutant)}", flush=True)
                if done % 20 == 0:
                    print(f"  {done} of {len(tested)} {kind}, {time.monotonic() - begun:.0f} s", flush=True)

    missed = [result for result in results["named"] if not result.caught]
    if named:
        print(f"\nnamed: {len(named) - len(missed)} of {len(named)} caught")
    rate = 1.0
    if sampled:
        counts = Counter("caught" if result.caught else result.outcome for result in results["sampled"])
        rate = counts["caught"] / max(1, len(sampled) - counts["accepted"])
        print(f"\n{how}; {dict(counts)}\n\n{table(results['sampled'])}")
    print(f"\nkill rate {rate:.1%} (target {_TARGET:.0%}), {time.monotonic() - begun:.0f} s")
    return 0 if not missed and rate >= _TARGET else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(str(error))
