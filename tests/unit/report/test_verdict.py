"""Alarms and verdict of runs with a fault put in, with and without the alarms that their launcher recorded."""

import pytest
from omegaconf import OmegaConf

from helpers.runs import make_run, metrics_line, write_lines
from helpers.seeded_runs import FAULTS, healthy_run, seeded_run
from helpers.trainer import compose_config
from recipe.atropos.config.compose import leaves
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.report.alarm_list import all_alarms
from recipe.atropos.report.run_history import from_to, read_history
from recipe.atropos.report.verdict import verdict
from recipe.atropos.utils.files import append_line
from recipe.atropos.watchdog.alarms import ALARMS


def of(folder):
    """The verdict on a run, and its alarms."""
    history = read_history(folder)
    alarms = all_alarms(history)
    return verdict(history, alarms), alarms


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_names_the_cause_first(tmp_path, fault, recorded):
    said, alarms = of(seeded_run(tmp_path, fault, recorded))
    assert alarms[0]["alarm"] == FAULTS[fault][1] and alarms[0]["recorded"] == recorded
    assert f"Alarm {FAULTS[fault][1]} " in said.text and said.level == "bad", said
    settings = alarms[0]["settings"]  # with their defaults
    assert list(settings) == list(ALARMS[FAULTS[fault][1]].settings)
    assert settings.get("trainer.atropos.max_staleness", "null") == "null"
    assert settings.get("actor_rollout_ref.actor.optim.lr", "3e-05") == "3e-05"


def test_a_healthy_run_learned_and_has_no_alarm(tmp_path):
    said, alarms = of(healthy_run(tmp_path))
    assert alarms == [] and said.level == "good"
    assert said.text == (
        "Learned: held-out score 0.367 → 0.996, mean training score −0.115 → 0.318 over 60 steps; no alarm."
    )


def with_scores(folder, training, *held_out, items=256):
    """The verdict on 20 steps with these mean scores, and evaluations of these numbers of right answers of each env."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("trainer: {total_training_steps: 20}\n")
    for step in range(1, 21):
        mean = training[step > 10] + 0.01 * (step % 2)
        append_line(folder / "metrics.jsonl", {"step": step, "time": 2.0 * step, "atropos/mean_score": mean})
    for env, counts in enumerate(held_out):
        for step, right in zip((0, 20), counts, strict=True):
            metrics = {"eval/score": right / 256, "eval/total": items}
            line = {"step": step, "version": step, "env": f"e{env}", "main": "eval/score", "metrics": metrics}
            append_line(folder / "evaluations.jsonl", line | {"time": 1.0})
    return of(folder)[0]


@pytest.mark.parametrize(
    ("training", "held_out", "says", "level"),
    [
        ((0.5, 0.2), [(94, 96)], "Got worse in training, unchanged on held-out items: held-out score 0.367", "bad"),
        ((0.5, 0.5), [(96, 94)], "Learned nothing: held-out score 0.375 → 0.367 (within the noise of 256", "warn"),
        ((0.5, 0.8), [(94, 94)], "Learned in training, but not on held-out items: ", "warn"),
        ((0.5, 0.2), [(94, 140)], "Learned: held-out score 0.367 → 0.547, mean", "good"),
        ((0.5, 0.8), [(140, 94)], "Got worse: held-out score 0.547 → 0.367, mean", "bad"),
        ((0.5, 0.8), [(140, 94), (94, 140)], "Better on some held-out items, worse on others: ", "bad"),
        ((0.5, 0.2), [], "Got worse: mean training score 0.505 → 0.205", "bad"),
    ],
)
def test_the_verdict_fits_its_numbers(tmp_path, training, held_out, says, level):
    said = with_scores(tmp_path, training, *held_out)
    assert said.text.startswith(says) and said.level == level, said


@pytest.mark.parametrize("steps", [3, 4, 10, 19, 20])
def test_nothing_is_said_of_a_run_that_has_just_begun(tmp_path, steps):
    """A score that has not risen yet is no reason to look closer."""
    make_run(tmp_path, total=60)
    write_lines(tmp_path / "metrics.jsonl", [metrics_line(n, 0.5 + 0.1 * (n % 3)) for n in range(1, steps + 1)])
    said, _ = of(tmp_path)
    expected = ("Learned nothing so far", "warn") if steps == 20 else ("Too early to tell", "neutral")
    assert (said.text.partition(":")[0], said.level) == expected


def test_a_change_is_judged_by_the_number_of_items(tmp_path):
    few = with_scores(tmp_path / "few", (0.5, 0.5), (94, 120), items=64)
    many = with_scores(tmp_path / "many", (0.5, 0.5), (94, 120), items=2560)
    assert few.text.startswith("Learned nothing") and many.text.startswith("Learned:"), (few, many)
    # Different scores look different.
    assert from_to(0.3671875, 0.375) == "0.367 → 0.375" and from_to(-0.5, -0.5) == "−0.500 → −0.500"
    assert from_to(0.00012, 0.00034) == "0.0001 → 0.0003"


def test_a_run_that_ended_without_a_step_is_not_healthy(tmp_path):
    """While it goes on there is nothing to say yet; what keeps it from one is named. A folder without a run is none."""
    going, _ = of(make_run(tmp_path / "going", steps=0).path)
    ended, _ = of(make_run(tmp_path / "ended", steps=0, started=1.0).path)
    assert (going.level, going.text) == ("neutral", "No step was trained yet.")
    assert (ended.level, ended.text) == ("bad", "Stopped before its first step.")
    counts = [{"items": 20 * n, "failed/KeyError": 20 * n} for n in range(1, 5)]
    lines = [{"time": 10.0 * n, "env": "mine", "step": 0, "in_flight": 4, "means": {}} for n in range(1, 5)]
    (tmp_path / "run/environments").mkdir(parents=True)
    lines = [line | {"counts": each} for line, each in zip(lines, counts, strict=True)]
    write_lines(tmp_path / "run/environments/mine.jsonl", lines)
    raises, _ = of(tmp_path / "run")
    assert raises.text.startswith("Stopped before its first step. Alarm environment_raises in mine: ")
    assert "KeyError" in raises.text
    with pytest.raises(ConfigurationError, match="no run is in this folder; give a run's folder"):
        read_history(tmp_path)


def test_a_run_is_played_with_its_own_silent_after(tmp_path):
    """Answers of a long maximum length may take so long; a faster environment tells the time."""
    run = make_run(tmp_path, steps=0)
    run.config.write_text("data: {max_response_length: 16000}\ntrainer: {atropos: {max_wait_time: null}}\n")
    run.environments.mkdir()
    for name, items in (("slow", 0), ("fast", 8)):
        lines = [{"counts": {"items": items * n, "groups_sent": items * n}, "in_flight": 8} for n in range(80)]
        lines = [line | {"time": 10.0 * n, "env": name, "step": 0, "means": {}} for n, line in enumerate(lines)]
        write_lines(run.environment_report(name), lines[:2] if name == "slow" else lines)
    assert of(tmp_path)[1] == []
    run.config.write_text("trainer: {atropos: {max_wait_time: 600.0}}\n")
    assert [(alarm["alarm"], alarm["environment"]) for alarm in of(tmp_path)[1]] == [("environment_silent", "slow")]


def test_a_cleared_alarm_is_listed_but_no_longer_blamed(tmp_path):
    run = healthy_run(tmp_path)
    line = {"time": 1.0, "step": 9, "alarm": "queue_full", "environment": None, "since_step": 5, "since": 0.0}
    line |= {"seen": "much", "advice": "less"}
    append_line(run / "alarms.jsonl", line | {"state": "raised"})
    append_line(run / "alarms.jsonl", line | {"state": "cleared", "step": 12, "seen": "more"})
    said, [alarm] = of(run)
    assert (alarm["state"], alarm["since_step"], alarm["raised_step"], alarm["until_step"]) == ("cleared", 5, 9, 12)
    assert (alarm["seen"], alarm["seen_last"]) == ("much", "more")
    append_line(run / "alarms.jsonl", line | {"state": "raised"})
    append_line(run / "alarms.jsonl", line | {"state": "cleared", "step": 4, "seen": "more"})
    assert of(run)[1][0]["until_step"] == 5, "not before its onset, which a start from step 4 has undone"
    assert said.level == "good" and said.text.endswith("no alarm now, 1 earlier.")


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
def test_an_alarm_has_its_onset_its_raise_and_newest_value(tmp_path, recorded):
    said, [alarm] = of(seeded_run(tmp_path, "stale_samples", recorded))
    assert (alarm["since_step"], alarm["raised_step"]) == (27, 31)  # 8 updates old from step 27 on, in five steps
    assert alarm["seen"].startswith("samples are 10.0 updates old")
    assert alarm["seen_last"].startswith("samples are 14.0 updates old") and alarm["seen_last"] in said.text
    assert "Alarm stale_samples since step 27: " in said.text


def test_the_settings_of_alarms_exist():
    config = OmegaConf.to_container(compose_config("actor_rollout_ref.model.path=m"), resolve=False)
    assert {key for alarm in ALARMS.values() for key in alarm.settings} <= {key for key, _ in leaves(config)}
