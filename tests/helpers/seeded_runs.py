"""Folders of runs with a fault put in, made from ``demo_run.tar.xz``: parts of a real run of the demo preset (seed 0).

``python tests/helpers/seeded_runs.py RUN`` makes that file from a finished run of 60 steps. It has all metrics, the
environment's reports, the evaluations, and of some steps the rows and the batches of a few groups.
"""

import contextlib
import io
import json
import math
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from recipe.atropos.report.alarm_list import _played
from recipe.atropos.report.run_history import read_history
from recipe.atropos.run.folder import RunDir
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.files import append_line, read_json, read_lines, rewrite_lines, write_json
from recipe.atropos.utils.secret import read_config_yaml

ARCHIVE = Path(__file__).with_name("demo_run.tar.xz")
FROM = 21  # the step at which a fault begins
LIMIT = 64  # tokens of a response
_STEPS = (1, 12, 24, 36, 48, 60)  # whose rows and batches are kept
_GROUPS = 3
_ITEMS = 24  # of an evaluation

Lines = list[dict[str, Any]]


class Seeded:
    """A run whose lines can be changed before ``write``."""

    def __init__(self, folder: Path):
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        self.run = RunDir(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            records.import_(self.run.trajectories, self.run.path / "batches.jsonl")
        self.lines = read_lines(self.run.metrics)
        self.reports = read_lines(self.run.environment_report("gsm8k"))
        self.config = self.run.config.read_text()

    @property
    def late(self) -> Lines:
        return [line for line in self.lines if line["step"] >= FROM]

    def set(self, key: str, value: str) -> None:
        """Set a key of ``config.yaml`` by its last name, which must be there once at least."""
        lines = self.config.splitlines()
        places = [at for at, line in enumerate(lines) if line.strip().startswith(f"{key}: ")]
        assert places, key
        for at in places:
            lines[at] = f"{lines[at].partition(key)[0]}{key}: {value}"
        self.config = "\n".join(lines) + "\n"

    def no_gain(self, mean: float = -0.1) -> None:
        """Let the scores wander about a mean from the fault on, and the held-out score stay as it was."""
        for line in self.late:
            score = mean + 0.08 * math.sin(2.3 * line["step"]) + 0.06 * math.sin(0.9 * line["step"])
            line |= {key: score for key in line if key.endswith(("mean_score", "mean_raw_score"))}
        for line in self.reports:
            if line.get("step", 0) >= FROM and "means" in line:
                line["means"]["score"] = mean + 0.05
        evaluations = read_lines(self.run.evaluations)
        for line in evaluations:
            line["metrics"][line["main"]] = (94 + 2 * (line["step"] > 0)) / 256
        rewrite_lines(self.run.evaluations, evaluations)

    @staticmethod
    def set_ages(line: dict[str, Any], rows: dict[int, float], **others: float) -> None:
        """Let a step have so many rows of each age in updates."""
        for key in [key for key in line if key.startswith("atropos/staleness/")]:
            del line[key]
        ages = {"min": min(rows), "max": max(rows), "mean": sum(rows) / len(rows)}
        line |= {f"atropos/staleness/rows_{age}": n for age, n in rows.items()}
        line |= {f"atropos/staleness/{name}": float(age) for name, age in ages.items()}
        line |= {f"atropos/logprob_diff/{name}": value for name, value in others.items()}

    def rewrite_rows(self, change: Callable[[dict[str, Any], int], None]) -> None:
        """Change the recorded rows from the fault on; ``change`` gets a row and its place."""
        for path in self.run.rollouts.glob("*.jsonl"):
            rows = read_lines(path)
            if int(path.stem) >= FROM:
                for place, row in enumerate(rows):
                    change(row, place)
                rewrite_lines(path, rows)

    def blocked(self, outcome: str, score: float | None) -> None:
        """Let every item end with ``outcome`` from the fault on, so that no further step is trained."""
        at = self.late[0]["time"]
        self.lines = [line for line in self.lines if line["step"] < FROM]
        before = [line for line in self.reports if line["time"] < at]
        counts = dict(before[-1]["counts"])
        for n in range(1, 13):
            ended = {"items": counts["items"] + 20 * n, outcome: counts.get(outcome, 0) + 20 * n}
            means = {} if score is None else {"score": score}
            new = {"time": at + 10 * n, "env": "gsm8k", "step": FROM - 1, "in_flight": 8, "means": means}
            before.append(new | {"counts": counts | ended})
        self.reports = before
        for path in self.run.rollouts.glob("*.jsonl"):
            if int(path.stem) >= FROM:
                path.unlink()
        rewrite_lines(self.run.evaluations, read_lines(self.run.evaluations)[:1])
        shutil.rmtree(self.run.evaluation / "60")

    def write(self, recorded: bool, alarms: Lines = ()) -> Path:
        """Write the files; ``recorded``: also the alarms that the watchdog finds in them, and ``alarms``."""
        rewrite_lines(self.run.metrics, self.lines)
        rewrite_lines(self.run.environment_report("gsm8k"), self.reports)
        self.run.config.write_text(self.config)
        if len(self.lines) != 60:  # its totals are of another run
            self.run.summary.unlink()
        if recorded:
            lines, newest = _played(read_history(self.run.path))
            for line in sorted([*lines, *alarms], key=lambda line: line["time"]):
                append_line(self.run.alarms, line)
            seen = {name: {"seen": text} for (name, _), text in newest.items()}
            write_json(self.run.summary, read_json(self.run.summary, {}) | {"alarms": seen})
        return self.run.path


# ---------------------------------------------------------------- faults


def sampling_mismatch(run: Seeded) -> None:
    run.set("sampling_mismatch", "warn")
    run.no_gain()
    for line in run.late:
        wave = 0.03 * math.sin(line["step"])
        line |= {"atropos/rows_with/other_temperature": line["atropos/rows"]}
        line |= {"atropos/alarms/other_temperature": line["atropos/rows"], "atropos/logprob_diff/mean": 0.18 + wave}
        line |= {
            "atropos/gsm8k/rows_with/other_temperature": line["atropos/rows"],
            "atropos/logprob_diff/max": 4.0 + wave,
        }
        line |= {"rollout_corr/kl": 0.2 + wave}


def equal_scores(run: Seeded) -> None:
    run.no_gain()
    run.blocked("not_sent/equal_scores", -1.0)


def environment_raises(run: Seeded) -> None:
    run.blocked("failed/ZeroDivisionError", None)


def truncation(run: Seeded) -> None:
    run.no_gain(-0.85)
    for line in run.late:
        line |= {f"response_length/{name}": float(LIMIT) for name in ("mean", "min", "max")}
        line |= {"atropos/response_length": float(LIMIT), "atropos/rows_with/response_truncated": line["atropos/rows"]}

    def cut(row: dict[str, Any], place: int) -> None:
        text = "Let me think about it step by step. First I look at the numbers of the problem. "
        row |= {"output": (text * 3)[:230], "response_tokens": LIMIT, "score": -1.0, "raw_score": -1.0}

    run.rewrite_rows(cut)


def stale_samples(run: Seeded) -> None:
    run.set("max_staleness", "null")
    run.no_gain()
    for line in run.late:
        age = min(14, 2 + (line["step"] - FROM))
        run.set_ages(line, {age: line["atropos/rows"]}, mean=0.01 * age)

    def aged(row: dict[str, Any], place: int) -> None:
        version = row["step"] - 1 - min(14, 2 + row["step"] - FROM)
        row |= {"policy_version_min": version, "policy_version_max": version}

    run.rewrite_rows(aged)


def server_out_of_sync(run: Seeded) -> None:
    """One of two servers keeps the weights of step 20."""
    run.set("max_staleness", "null")
    run.no_gain()
    for line in run.late:
        age, rows = line["step"] - FROM, line["atropos/rows"]
        ages = {age: rows} if age <= 2 else {2: rows / 2, age: rows / 2}
        run.set_ages(line, ages, mean=0.002 + 0.004 * age, max=0.3 + 0.05 * age)

    def kept(row: dict[str, Any], place: int) -> None:
        version = FROM - 1 if place % 2 else row["step"] - 3
        row |= {"policy_version_min": version, "policy_version_max": version}

    run.rewrite_rows(kept)


OUT_OF_SYNC = {  # as the launcher's watchdog records what the gateway told it
    "environment": None,
    "alarm": "server_out_of_sync",
    "state": "raised",
    "since_step": FROM,
    "seen": "http://127.0.0.1:20512 is without version 27 for 121 s (weight version 20)",
    "advice": "see the trainer's log for the push that failed",
}
FAULTS: dict[str, tuple[Callable[[Seeded], None], str]] = {  # by name: what is put in, and the alarm that names it
    "sampling_mismatch": (sampling_mismatch, "other_temperature"),
    "equal_groups": (equal_scores, "equal_scores"),
    "raising_environment": (environment_raises, "environment_raises"),
    "truncation": (truncation, "all_rows_clipped"),
    "stale_samples": (stale_samples, "stale_samples"),
    "server_out_of_sync": (server_out_of_sync, "server_out_of_sync"),
}


def healthy_run(folder: Path) -> Path:
    """Unpack the demo's run; return its folder."""
    return Seeded(folder).write(recorded=False)


def seeded_run(folder: Path, fault: str, recorded: bool = True) -> Path:
    """Write a run with a fault into ``folder``; ``recorded``: with the alarms that its launcher would have recorded."""
    run = Seeded(folder)
    put_in, name = FAULTS[fault]
    put_in(run)
    own = []
    if name == "server_out_of_sync":
        line = next(line for line in run.lines if line["step"] == 28)
        own = [OUT_OF_SYNC | {"time": line["time"], "since": line["time"] - 121, "step": 28}]
    return run.write(recorded, own)


# ---------------------------------------------------------------- the archive


def pack(source: Path, target: Path = ARCHIVE) -> None:
    """Write the parts of a finished run that ``Seeded`` unpacks, without this machine's folders."""
    run = RunDir(source)
    files: dict[str, bytes] = {}

    def add(name: str, lines: Lines) -> None:
        files[name] = b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for line in lines)

    def rounded(line: dict[str, Any]) -> dict[str, Any]:
        exact = ("time", "step")
        return {
            key: float(f"{value:.4g}") if isinstance(value, float) and key not in exact else value
            for key, value in line.items()
        }

    lines = read_lines(run.metrics)
    add("metrics.jsonl", [rounded(line) for line in lines])
    add("evaluations.jsonl", read_lines(run.evaluations))
    add("environments/gsm8k.jsonl", read_lines(run.environment_report("gsm8k")))
    batches = {line["step"]: int(line["atropos/batch"]) for line in lines}
    stored: Lines = []
    for step in _STEPS:
        groups = [json.loads(group.to_json()) for group in records.read(run.trajectories, batches[step])[:_GROUPS]]
        rows = [row for row in read_lines(run.rollouts / f"{step}.jsonl") if int(row["uid"]) < _GROUPS]
        for row in rows:
            row.setdefault("response_tokens", _response_tokens(row, groups))
        add(f"rollouts/{step}.jsonl", rows)
        stored.append({"number": batches[step], "batch": groups})
    add("batches.jsonl", stored)
    for path in run.evaluation.glob("*/*/samples.jsonl"):
        add(str(path.relative_to(run.path)), read_lines(path)[:_ITEMS])
    config = run.config.read_text()
    config = config.replace(str(read_config_yaml(run.config).run.dir), "runs/demo")
    model = read_json(run.identity)["model"]["path"]
    files["config.yaml"] = config.replace(model, "models/small-policy").encode()
    for name in ("summary.json", "run.json"):
        files[name] = json.dumps(read_json(run.path / name)).replace(model, "models/small-policy").encode()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        files[f"model/{name}"] = (run.model / name).read_bytes()
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _response_tokens(row: dict[str, Any], groups: Lines) -> int:
    """Return how many tokens a row's group has from its first trained one on, by the row of the same score."""
    group = groups[int(row["uid"])]
    lengths = [
        sum(mask != -100 for mask in masks)
        for masks, score in zip(group["masks"], group["scores"], strict=True)
        if score == row["raw_score"]
    ]
    return lengths[0]


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
