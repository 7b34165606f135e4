"""A new alarm is one function: here one of this file's own, in the watchdog, the table, the console and the report."""

import pytest

from helpers.runs import make_run, metrics_line, write_lines
from recipe.atropos.launcher.alarm_watch import described
from recipe.atropos.report.page import describe
from recipe.atropos.report.run_history import read_history
from recipe.atropos.watchdog.alarms import ALARMS, Name, Watchdog, raised_by, table
from recipe.atropos.watchdog.history import PREFIX, AlarmLimits, History
from recipe.atropos.watchdog.registry import RULES, Finding, InStep, alarm


@pytest.fixture
def too_green():
    @alarm(
        "too_green",
        means="the policy is green",
        advice="paint it",
        settings=("data.train_batch_size",),
        chart="entropy",
        cause=5,
        in_step=InStep("atropos/green", "{value:.0f} shades"),
    )
    def found(history, now):
        for step in history.recent(1):
            if step.get(PREFIX + "too_green"):
                yield Finding("too_green", f"green at step {step['step']}", now, step["step"], of_steps=True)

    yield "too_green"
    del ALARMS["too_green"], RULES["too_green"]


def test_a_new_alarm_is_raised_and_described(too_green):
    assert raised_by({"atropos/green": 3.0}, 1e-4, "error") == {too_green: 3.0}
    watchdog = Watchdog(History(AlarmLimits()))
    watchdog.history.add_step({"step": 1, "time": 10.0, PREFIX + too_green: 3.0})
    [line] = watchdog.changes(10.0)
    assert (line["alarm"], line["state"], line["since_step"]) == (too_green, "raised", 1)
    assert (
        described(line) == "too_green, since step 1: green at step 1. It means: the policy is green. To try: paint it"
    )
    assert "| `too_green` | the policy is green | paint it |\n" in table()


def test_a_new_alarm_is_in_the_report_before_its_symptoms(too_green, tmp_path):
    run = make_run(tmp_path / "run", steps=6)
    lines = [metrics_line(step) for step in range(1, 7)]
    alarms = {PREFIX + "unknown_sampling": 4.0, PREFIX + too_green: 3.0, "actor/entropy": 0.5}
    write_lines(run.metrics, [line | alarms for line in lines])
    page = describe(read_history(run.path), tokens=False)
    first, second = page["alarms"]
    assert (first["alarm"], first["means"], first["where"]) == (too_green, "the policy is green", "entropy")
    assert second["alarm"] == "unknown_sampling" and f"Alarm {too_green} " in page["verdict"]["text"]
    [chart] = [chart for chart in page["curves"] if chart["id"] == "entropy"]
    assert chart["marks"] == [{"x": first["since_step"], "alarm": too_green}]


def test_every_alarm_may_end_a_run():
    assert {*Name.__args__} == {*ALARMS}
