"""Alarms and verdict of runs with a fault put in, with and without the alarms that their launcher recorded."""

import pytest

from helpers.seeded_runs import FAULTS, healthy_run, seeded_run
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.report.alarm_list import all_alarms
from recipe.atropos.report.run_history import read_history
from recipe.atropos.report.verdict import verdict
from recipe.atropos.utils.files import append_line


def of(folder):
    history = read_history(folder)
    alarms = all_alarms(history)
    return verdict(history, alarms), alarms


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_names_the_cause_first(tmp_path, fault, recorded):
    said, alarms = of(seeded_run(tmp_path, fault, recorded))
    assert alarms[0]["alarm"] == FAULTS[fault][1] and alarms[0]["recorded"] == recorded
    assert f"Alarm {FAULTS[fault][1]} " in said.text and said.level == "bad", said


def test_a_healthy_run_learned_and_has_no_alarm(tmp_path):
    said, alarms = of(healthy_run(tmp_path))
    assert alarms == [] and said.level == "good"
    assert said.text == (
        "Learned: held-out score 0.367 → 0.996, mean training score −0.115 → 0.318 over 60 steps; no alarm."
    )


def test_a_run_without_a_step_names_what_keeps_it_from_one(tmp_path):
    for n in range(1, 5):
        line = {"time": 10.0 * n, "env": "mine", "step": 0, "in_flight": 4, "means": {}}
        append_line(tmp_path / "mine.jsonl", line | {"counts": {"items": 20 * n, "failed/KeyError": 20 * n}})
    (tmp_path / "run/environments").mkdir(parents=True)
    (tmp_path / "mine.jsonl").rename(tmp_path / "run/environments/mine.jsonl")
    said, _ = of(tmp_path / "run")
    assert said.text.startswith("No step was trained. Alarm environment_raises in mine: ") and "KeyError" in said.text


def test_a_cleared_alarm_is_listed_but_no_longer_blamed(tmp_path):
    run = healthy_run(tmp_path)
    line = {"time": 1.0, "step": 9, "alarm": "queue_full", "environment": None, "since_step": 5, "since": 0.0}
    line |= {"seen": "much", "advice": "less"}
    append_line(run / "alarms.jsonl", line | {"state": "raised"})
    append_line(run / "alarms.jsonl", line | {"state": "cleared", "step": 12})
    said, [alarm] = of(run)
    assert (alarm["state"], alarm["since_step"], alarm["until_step"]) == ("cleared", 5, 12)
    assert said.level == "good" and said.text.endswith("no alarm now, 1 earlier.")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no run is in this folder; give a run's folder"):
        read_history(tmp_path)
