"""Step-time breakdown: ``python benchmarks/step_time.py [--quick]``.

Runs the demonstration with the real services and prints the median seconds of each phase. Generation, which runs in
parallel with training, is measured too: as the environment requests it, one batch at a time, on the same kind of server
with nothing else running. The reference is sequential execution of the phases: the sum of all medians, compared with
the measured step.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipe.atropos.demo.small_policy import ensure_small_policy
from recipe.atropos.environments.word_problems import generate
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.server import SGLangLaunch, start_sglang
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import free_port, wait_until_healthy

PHASES = ["wait", "convert", "log_prob", "advantage", "update", "push", "record", "other"]
GROUPS, GROUP_SIZE = 16, 8  # the demonstration's step
TARGETS = {"data_and_push_share": "<= 0.10", "sequential_over_ours": ">= 1.0"}


async def seconds_to_generate(folder: Path, rounds: int) -> float:
    """Return the median seconds for one batch of the demonstration, all groups at once, on a separate server."""
    from transformers import AutoTokenizer

    model = ensure_small_policy(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    launch = SGLangLaunch(str(model), port=free_port(), dtype="float32")
    server = start_sglang(launch, log_path=folder / "sglang.log")
    try:
        client = SGLangClient(server.url)
        await wait_until_healthy(server, client.health, 600)
        times = []
        for number in range(rounds + 1):
            chats = [[{"role": "user", "content": row["question"]}] for row in generate("train", GROUPS, number)]
            texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
            parameters = {"n": GROUP_SIZE, "temperature": 1.0, "max_new_tokens": 32}
            started = time.perf_counter()
            requests = (client.generate(input_ids=tokenizer.encode(t), sampling_params=parameters) for t in texts)
            await asyncio.gather(*requests)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])  # the first one warms up
    finally:
        server.stop()


def run_demo(folder: Path, steps: int) -> list[dict[str, float]]:
    """Return the metrics of every step of a demonstration run."""
    command = [sys.executable, "-m", "recipe.atropos.launch_services", "--preset", "demo", "--steps", str(steps)]
    options = ["--run-dir", str(folder / "run"), "environment.evaluate=false"]
    with open(folder / "launcher.log", "w") as log:
        status = subprocess.run([*command, *options], stdout=log, stderr=subprocess.STDOUT, timeout=720).returncode
    if status:
        sys.exit((folder / "launcher.log").read_text())
    return read_metrics(folder / "run")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    rounds, steps = (1, 3) if arguments.smoke else (3, 8) if arguments.quick else (7, 40)
    with tempfile.TemporaryDirectory() as name:
        generate_s = asyncio.run(seconds_to_generate(Path(name), rounds))
        lines = run_demo(Path(name), steps)
    measured = lines[2:]  # the first steps wait for the environment and warm up
    phases = {phase: statistics.median(line[f"phase_s/{phase}"] for line in measured) for phase in PHASES}
    step = statistics.median(line["timing_s/step"] for line in measured)
    sequential = generate_s + sum(seconds for phase, seconds in phases.items() if phase != "wait")
    data_and_push = (phases["convert"] + phases["push"]) / step

    print(f"{GROUPS} groups of {GROUP_SIZE}, medians of {len(measured)} steps\n")
    print(f"{'phase':<22}{'seconds':>9}{'share of the step':>20}")
    print(f"{'generate (beside it)':<22}{generate_s:>9.3f}")
    for phase, seconds in phases.items():
        print(f"{phase:<22}{seconds:>9.3f}{seconds / step:>19.1%}")
    print(f"{'step, ours':<22}{step:>9.3f}")
    print(f"{'step, one by one':<22}{sequential:>9.3f}{f'{sequential / step:.2f} x ours':>20}\n")

    figures = {
        "generate_s": round(generate_s, 4),
        **{f"{phase}_s": round(seconds, 4) for phase, seconds in phases.items()},
        "step_s": round(step, 4),
        "sequential_s": round(sequential, 4),
        "sequential_over_ours": round(sequential / step, 3),
        "data_and_push_share": round(data_and_push, 4),
    }
    ok = data_and_push <= 0.10 and sequential / step >= 1.0
    print(json.dumps({"name": "step_time", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
