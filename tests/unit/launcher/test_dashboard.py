"""What a terminal shows of a run's state."""

import io
import re
import subprocess
import sys
import time
from dataclasses import replace

import orjson
import pytest
from rich.console import Console

from helpers.runs import make_run, metrics_line, write_lines
from recipe.atropos.run.status import Memory, RunReader, ServiceStatus
from recipe.atropos.terminal.dashboard import Activity, Dashboard, clock, phases, sparkline
from recipe.atropos.terminal.status import show_summary


@pytest.fixture
def status(tmp_path):
    """Of a run in the middle, with an alarm and a service that is down."""
    found = RunReader(make_run(tmp_path / "demo").path).read()
    return replace(
        found,
        last=found.last | {"time": time.time()},
        state="running",
        heldout={0: 0.25, 10: 0.75},
        heldout_share=True,
        services=(
            ServiceStatus("api", "ok"),
            ServiceStatus("sglang", "ok", "12 requests"),
            ServiceStatus("environment", "down", "ended"),
        ),
        diagnosis={"queue": {"groups": 3, "sequences": 24, "open_tickets": 13}, "batch_size": 128, "why": "no batch 2"},
        memory=Memory(5 << 30, 12 << 30, 23 << 30, ((40 << 30, 80 << 30),)),
        alarms=({"alarm": "equal_scores", "environment": "gsm8k", "since_step": 7, "seen": "equal", "advice": "wait"},),
    )


def shown(dashboard, width=80, height=24, **options):
    console = Console(width=width, height=height, highlight=False, force_terminal=True, color_system=None, **options)
    with console.capture() as capture:
        console.print(dashboard)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_dashboard_fits_the_width_and_24_lines(status, width):
    log = status.directory / "sglang.log"
    log.write_text("loading\r50%\r\x1b[31m100%\x1b[0m, done " + 50 * "and more " + "\n\n")
    lines = shown(Dashboard(status, [Activity("the servers start", 0.0, log)], "a hint"), width)
    assert "sglang.log: 100%" in lines[2]
    assert {len(line) for line in lines} == {width} and len(lines) <= 23


def test_dashboard_of_80_columns_shows_all_of_a_run(status):
    text = "\n".join(shown(Dashboard(status, hint="Ctrl-C stops the run")))
    for words in (
        "demo  running",
        "10 of 20",
        "50%",
        "0:20 left",
        "+1.000",
        "first +0.100, best +1.000",
        "75.0%",
        "first 25.0%",
        "▓ log_prob 0.5",
        "█ update 1.5",
        "2,000 tokens/s, 500 of them trained on",
        "mean 1.0, most 2 updates  bound 2",
        "3 groups, 24 of 128 sequences",
        "13 in flight",
        "5.0 GiB in this run's processes  12 of 23 free  GPU 0: 40 of 80",
        "● sglang (12 requests)",
        "✗ environment (ended)",
        "equal_scores (gsm8k) since step 7: equal; try: wait",
        "Ctrl-C stops the run",
    ):
        assert words in text, words


def test_output_to_a_full_disk_ends_no_run():
    program = "from recipe.atropos.terminal.progress import say\nfor _ in range(3): say('a line' * 9999)"
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", program], stdout=full, check=True, timeout=60)


def test_dashboard_of_few_lines_keeps_the_first(status):
    lines = shown(Dashboard(status), height=9)
    assert len(lines) <= 8 and "10 of 20" in lines[1] and "equal_scores" in "".join(lines)
    advice = " ".join(f"advice{number}" for number in range(45))
    one = replace(status, alarms=(status.alarms[0] | {"advice": advice},))
    lines = shown(Dashboard(one, [Activity("the servers start", 0.0)]))
    assert "advice44" in "".join(lines) and "environment" in lines[-2] and len(lines) <= 23


def test_dashboard_that_is_printed_once_leaves_nothing_out(status):
    services = tuple(ServiceStatus(f"environment-{number}", "ok") for number in range(60))
    alarm = status.alarms[0] | {"advice": 40 * "wait " + "."}
    alarms = tuple(alarm | {"environment": f"env-{number}"} for number in range(5))
    full = replace(status, services=services, alarms=alarms)
    text = " ".join("".join(line.strip("│╭╰╮╯─") for line in shown(Dashboard(full, whole=True))).split())
    assert all(f" environment-{number} " in f"{text} " for number in range(60))
    assert all(f"(env-{number})" in text for number in range(5)) and text.count("wait .") == 5
    assert len(shown(Dashboard(full))) <= 23


def test_dashboard_without_unicode_is_ascii(status):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # which refuses anything else
    Console(file=file, width=80, height=24, color_system=None).print(Dashboard(status))
    shown = file.buffer.getvalue()
    assert b"+ sglang" in shown and b"#" in shown


def test_dashboard_of_a_run_that_begins(tmp_path):
    """There is no step yet, and nothing to divide by; or its values are not finite."""
    found = RunReader(make_run(tmp_path / "demo", steps=0).path).read()
    text = "\n".join(shown(Dashboard(found, [Activity("the servers start", 0.0)])))
    assert "demo  starting" in text and "the servers start" in text and "score" not in text
    # JSON has null for what is not finite.
    nothing = {"atropos/mean_score": None, "timing_s/step": None, "perf/total_num_tokens": None}
    nothing |= {"phase_s/update": None, "atropos/trained_tokens": None, "atropos/staleness/mean": None}
    files = make_run(tmp_path / "run")
    write_lines(files.metrics, [metrics_line(1, 0.25), metrics_line(2, **nothing)])
    text = "\n".join(shown(Dashboard(RunReader(files.path).read())))
    assert "2 of 20" in text and "first +0.250" in text and "log_prob 0.5" in text


def test_parts_of_the_dashboard_show_numbers():
    """A sparkline from the lowest to the highest value; phases by their seconds; hours only where there are any."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(16)), 8) == "▁▂▃▄▅▆▇█" == sparkline([*range(8)], 20)
    assert sparkline([3.0, 3.0], 5) == "▁▁" and sparkline([], 5) == ""
    bar, legend = phases({"phase_s/wait": 1.0, "phase_s/update": 3.0}, 49)
    assert bar.plain.startswith("4.0 s") and bar.plain.count("░") == 10 and bar.plain.count("█") == 30
    assert legend.plain.split() == ["░", "wait", "1.0", "█", "update", "3.0"]
    assert [clock(seconds) for seconds in (5, 65.9, 3600)] == ["0:05", "1:05", "1:00:00"]


def test_summary_table_of_a_run(tmp_path):
    files = make_run(tmp_path / "demo")
    raw = {1: -0.25, 2: 0.75, 3: 0.5}  # before reward shaping, as the live view shows it
    lines = [metrics_line(step, 9.0, **{"atropos/mean_raw_score": score}) for step, score in raw.items()]
    write_lines(files.metrics, lines)
    summary = {
        "heldout": {"gsm8k": {"metric": "eval/percent_correct", "items": 256, "before": 0.25, "after": 0.996}},
        "steps": 20,
        "seconds_in_all": 125,
        "tokens_trained": 12345,
        "sequences_trained": 678,
        "groups": {"received": 9, "trained": 5, "dropped": 1, "left": 3},
        "dropped": {"too_long": 8},
        "alarms": {"too_long": {}},
    }
    files.summary.write_bytes(orjson.dumps(summary))
    files.model.mkdir()
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        show_summary(files, console)
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capture.get().splitlines() if "  " in line)
    assert rows["score"] == "-0.250 -> +0.500 (mean of a step's samples)"
    assert rows["held-out"] == "25.0% -> 99.6% (256 items)"
    assert rows["steps"] == "20 in 2:05"
    assert rows["tokens"] == "12,345 trained on, in 678 sequences"
    assert rows["groups"] == "9 received, 5 trained, 1 dropped, 3 left"
    assert rows["dropped"] == "8 too_long" and rows["alarms"] == "too_long"
    assert {"model", "metrics", "summary"} < rows.keys() and "plot" not in rows and "report" not in rows
