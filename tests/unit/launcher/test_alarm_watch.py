"""Alarms in the launcher: what is printed, what the files say, and which of them end the run."""

import asyncio
import contextlib
import time
from functools import partial
from types import SimpleNamespace

import orjson
import pytest

from helpers import ROOT
from helpers.runs import run_of
from helpers.trainer import compose_config
from recipe.atropos.errors import AtroposError
from recipe.atropos.launcher import alarm_watch as module
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.sglang import InferenceServices
from recipe.atropos.run.folder import ELSEWHERE
from recipe.atropos.terminal.progress import console
from recipe.atropos.utils.files import append_line, read_lines
from recipe.atropos.watchdog import alarms as alarms_module
from recipe.atropos.watchdog.alarms import ALARMS, describe, table
from recipe.atropos.watchdog.history import PREFIX

NOWHERE = "http://127.0.0.1:9"  # nothing answers: neither API nor gateway are needed for what steps show


def watch_run(run, scene, version=0):
    """Run a scene, of which the argument is the run's alarm watch."""

    async def watch():
        inference = InferenceServices({}, NOWHERE, "")
        async with contextlib.aclosing(AlarmWatch(run, version, NOWHERE, inference)) as alarm_watch:
            await scene(alarm_watch)

    try:
        asyncio.run(watch())
    finally:
        run.stop()


def watch(folder, *steps, options=(), version=0):
    """Look at these steps, one after the other; return what was printed."""

    async def look(alarm_watch):
        for step in steps:
            await alarm_watch.poll([step])

    with console.capture() as captured:
        watch_run(run_of(compose_config("actor_rollout_ref.model.path=m", *options), folder), look, version)
    return captured.get()


def step(number, **alarms):
    return {"step": number, "time": time.time(), **{PREFIX + name: value for name, value in alarms.items()}}


def summary(folder):
    return orjson.loads((folder / "summary.json").read_bytes())["alarms"]


def test_alarm_watch_prints_and_records_an_alarm_once(tmp_path, monkeypatch):
    monkeypatch.setattr(alarms_module, "CLEAR_SECONDS", 0.0)
    steps = [step(1), *(step(number, truncated_sampling=4.0) for number in (2, 3)), *map(step, range(4, 10))]
    shown = watch(tmp_path, *steps)
    assert shown.splitlines()[:3] == [
        "alarm   truncated_sampling, since step 2: 4 rows, at step 2",
        f"        meaning: {ALARMS['truncated_sampling'].means}",
        "        to try:  let the environment sample without",
    ]
    assert len(shown.splitlines()) == 4 and "\nalarm   truncated_sampling is over, after 0." in shown
    raised, cleared = read_lines(tmp_path / "alarms.jsonl")
    assert (raised["state"], raised["step"], raised["since_step"]) == ("raised", 2, 2)
    assert (cleared["state"], cleared["step"], cleared["since_step"]) == ("cleared", 8, 2)
    assert set(raised) == {*("time", "step", "alarm", "environment", "state", "since_step", "since", "seen", "advice")}
    entry = summary(tmp_path)["truncated_sampling"]
    assert (entry["raised"], entry["now"], entry["first_step"], entry["last_step"]) == (1, False, 2, 8)


def test_alarm_watch_ends_the_run_with_a_chosen_alarm(tmp_path):
    options = ["watchdog.stop_on=[gradient_not_finite, queue_full]"]
    told = "watchdog.stop_on: gradient_not_finite, since step 2: actor/grad_norm=nan, .*learning rate"
    with pytest.raises(AtroposError, match=told):
        watch(tmp_path, step(1, unknown_sampling=3.0), step(2, gradient_not_finite=None), options=options)
    alarms = ["unknown_sampling", "gradient_not_finite"]
    assert [line["alarm"] for line in read_lines(tmp_path / "alarms.jsonl")] == alarms
    assert set(summary(tmp_path)) == {"unknown_sampling", "gradient_not_finite"}, "which is known of an ended run too"


def test_alarm_watch_begins_a_resumed_run_without_alarms(tmp_path):
    watch(tmp_path, step(1, unknown_sampling=3.0))
    assert summary(tmp_path)["unknown_sampling"]["now"]
    assert watch(tmp_path, version=1) == ""
    assert [line["state"] for line in read_lines(tmp_path / "alarms.jsonl")] == ["raised", "cleared"]
    entry = summary(tmp_path)["unknown_sampling"]
    assert not entry["now"] and (entry["first_step"], entry["last_step"], entry["steps"]) == (1, 1, 1)
    assert watch(tmp_path, step(1, unknown_sampling=3.0), version=1) == "", "a step of the earlier start"
    assert "since step 2" in watch(tmp_path, step(2, unknown_sampling=3.0), version=1)
    assert summary(tmp_path)["unknown_sampling"]["raised"] == 2


def test_alarm_watch_reads_reports_of_this_start_alone(tmp_path):
    """The counts of an earlier one were judged in its time."""
    counts = {"items": 40, "failed/KeyError": 40}
    report = {"env": "gsm8k", "step": 1, "in_flight": 1, "means": {}, "counts": counts}
    path = tmp_path / "environments/gsm8k.jsonl"
    path.parent.mkdir()
    append_line(path, {"time": time.time() - 9, "env": "gsm8k", "started": True})
    append_line(path, report | {"time": time.time() - 9})
    assert watch(tmp_path, step(1)) == "" and summary(tmp_path) == {}
    append_line(path, {"time": time.time() + 9, "env": "gsm8k", "started": True})
    append_line(path, report | {"time": time.time() + 9})
    shown = watch(tmp_path, step(1))
    assert "environment_raises (gsm8k), since step 1: no group; 40 of 40 items raised: KeyError (40)" in shown
    assert f"see {tmp_path}/logs/environment.log" in shown


@pytest.mark.parametrize(("suspended", "alarms"), [(0.0, ["environment_silent"]), (1000.0, [])])
def test_alarm_watch_counts_no_silence_of_a_suspension(tmp_path, monkeypatch, suspended, alarms):
    """Of a laptop, for example: the time of day goes on, and nothing else."""
    begun = time.time()
    clock = SimpleNamespace(time=partial(float, begun), monotonic=partial(float, begun))
    monkeypatch.setattr(module, "time", clock)
    run = run_of(compose_config("actor_rollout_ref.model.path=m"), tmp_path)

    async def look(alarm_watch):
        alarm_watch.watchdog.history.add_gateway({"version": 0, "held": 0, "servers": []}, begun)
        path = run.files.environment_report("gsm8k")
        path.parent.mkdir()
        append_line(path, {"time": begun + 1, "env": "gsm8k", "started": True})
        for passed, slept in ((2.0, 0.0), (1002.0, suspended)):
            clock.time = partial(float, begun + passed)
            clock.monotonic = partial(float, begun + passed - slept)
            await alarm_watch.poll()
            append_line(path, {"time": begun + 1, "in_flight": 1, "means": {}, "counts": {"items": 1}})

    watch_run(run, look)
    assert [line["alarm"] for line in read_lines(run.files.alarms)] == alarms


def test_alarm_watch_reads_what_the_session_server_reports(tmp_path):
    """Of environments that the run does not start."""
    run = run_of(compose_config("actor_rollout_ref.model.path=m"), tmp_path)
    counts = {"sessions/ended": 64, "sessions/failed/seconds": 64}

    async def look(alarm_watch):
        path = run.files.environment_report("mine", ELSEWHERE)
        path.parent.mkdir()
        for given in ({}, counts):
            line = {"replica": ELSEWHERE, "in_flight": 0, "means": {}, "counts": given}
            append_line(path, {"time": time.time(), "env": "mine", **line})
            await alarm_watch.poll()

    watch_run(run, look)
    [line] = read_lines(run.files.alarms)
    assert (line["alarm"], line["environment"]) == ("agent_does_not_end", "mine")


def test_alarm_watch_says_that_the_api_waits_for_room(tmp_path):
    """Nothing goes on meanwhile, and nothing else tells: the trainer waits, the environments too."""
    run = run_of(compose_config("actor_rollout_ref.model.path=m", "trainer.atropos.max_wait_time=120"), tmp_path)

    async def look(alarm_watch):
        for trouble in ("", "t.db: disk is full; make room there", "t.db: disk I/O error; make room there", ""):
            alarm_watch.watchdog.history.api = {"warnings": {"store": trouble} if trouble else {}}
            await alarm_watch.poll()

    with console.capture() as captured:
        watch_run(run, look)
    assert captured.get().splitlines() == [
        "api     t.db: disk is full; make room there; the run waits for it, at most 120 s "
        "(trainer.atropos.max_wait_time)",
        "api     stores again",
    ]


def test_alarms_have_a_text_each_and_a_row_in_the_docs():
    assert table() in (ROOT / "docs/alarms.md").read_text(), "paste what watchdog.alarms.table() returns"
    for name in [name for name, alarm in ALARMS.items() if alarm.in_step]:
        text = describe(name, 3.0, 1e-4)
        assert ALARMS[name].means in text and ALARMS[name].advice in text and "3" in text
