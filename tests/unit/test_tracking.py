"""Trackers: what they are sent, and that none of them can end or delay a run."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.trainer import compose_config
from recipe.atropos.run import trackers as tracking
from recipe.atropos.run.trackers import Trackers, overview

ROLLOUTS = [
    {
        **{"env_name": "sums", "input": "1 + 1 = ?", "output": f"2\nanswer {number}", "score": 1.0},
        **{"policy_version_min": 0, "policy_version_max": None},
    }
    for number in range(20)
]


@pytest.fixture
def config(no_wandb_login, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))

    def make(*names):
        model = "actor_rollout_ref.model.path=/nowhere"
        return compose_config(f"run.dir={tmp_path / 'run'}", model, f"trainer.logger=[{','.join(names)}]")

    (tmp_path / "run").mkdir()
    return make


def tracked(tmp_path):
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    return events


def log(trackers, *steps):
    for step in steps:
        trackers.log({"atropos/mean_score": step / 10, "actor/entropy": 1.0}, step, {0: 0.25, step: 0.5}, ROLLOUTS)


def test_overview_metrics_and_samples_are_tracked(config, tmp_path):
    with Trackers(config("tensorboard"), done=0) as trackers:
        log(trackers, 1, 2)
    events = tracked(tmp_path)
    assert [event.value for event in events.Scalars("a_overview/score")] == pytest.approx([0.1, 0.2])
    assert [event.step for event in events.Scalars("actor/entropy")] == [1, 2]
    (text,) = events.Tensors("a_overview/samples/text_summary")[0].tensor_proto.string_val
    assert text.decode().count("1 + 1 = ?") == 8 and "answer 17" in text.decode(), "evenly spread over the batch"
    # The overview has the newest held-out score.
    metrics = {"atropos/mean_score": 0.5, "actor/lr": 1e-6, "critic/score/mean": 0.5}
    expected = {"a_overview/score": 0.5, "a_overview/learning_rate": 1e-6, "a_overview/held_out_score": 0.75}
    assert overview(metrics, {4: 0.75, 2: 0.9}) == expected


def test_tensorboard_has_a_step_that_is_trained_again_once(config, tmp_path):
    for done, last, score in ((0, 5, 0.1), (3, 7, 0.2)):
        with Trackers(config("tensorboard"), done) as trackers:
            for step in range(done + 1, last + 1):
                trackers.log({"atropos/mean_score": score}, step, {}, ROLLOUTS)
    scores = [(event.step, round(event.value, 3)) for event in tracked(tmp_path).Scalars("a_overview/score")]
    assert scores == [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.2), (5, 0.2), (6, 0.2), (7, 0.2)]


def test_a_tracker_that_cannot_start_is_left_out(config, tmp_path, caplog):
    with Trackers(config("swanlab", "tensorboard"), done=0) as trackers:
        log(trackers, 1, 2, 3)
    assert "trainer.logger=swanlab is left out from now on: ModuleNotFoundError" in caplog.text
    assert len(tracked(tmp_path).Scalars("atropos/mean_score")) == 3


def test_a_resumed_run_keeps_its_wandb_run(config, tmp_path, monkeypatch):
    path = tmp_path / "run/wandb_run"
    tracking._name_wandb_run(tracking.RunDir(path.parent), resumed=False)
    first = path.read_text()
    tracking._name_wandb_run(tracking.RunDir(path.parent), resumed=True)
    assert path.read_text() == first
    tracking._name_wandb_run(tracking.RunDir(path.parent), resumed=False)
    assert path.read_text() != first, "a run that starts from scratch"
