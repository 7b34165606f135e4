"""Every benchmark runs, in its smallest size, and ends with its JSON line; its figures mean nothing in that size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.gsm8k_checkout import make_checkout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALLEST = {  # where it is not --smoke
    "environments": ["--only=gsm8k_server", "--atropos-dir={checkout}"],
    "faults": ["--only=gateway KILL generation"],
    "models": ["--only=qwen2"],
    "sandbox": ["--quick"],
    "sessions": ["--quick"],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_benchmark_runs_in_its_smallest_size(name, tmp_path):
    options = [option.format(checkout=tmp_path) for option in SMALLEST.get(name, ["--smoke"])]
    make_checkout(tmp_path)
    command = [sys.executable, BENCHMARKS / f"{name}.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode in (0, 1), done.stderr[-5000:]  # 1: a target is missed
    assert done.stdout and done.stdout.splitlines()[-1].startswith("{"), done.stdout[-5000:] + done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["name"] == name and report["figures"] and report["targets"] and report["ok"] == (not done.returncode)
