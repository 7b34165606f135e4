"""Replicas of the demo's environment in a run, of which one is killed: they are one environment beside another."""

import orjson
import psutil
import pytest

from helpers.launchers import launched
from helpers.waiting import until
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import read_lines

STEPS = 8
ARGS = (
    "dataset_name: synthetic, system_prompt: '', max_answer_tokens: 32, eval_size: 8, ensure_scores_are_not_same: false"
)


def registrations(folder, name):
    return [
        line["registered"] for line in read_lines(folder / "environments" / f"{name}.jsonl") if "registered" in line
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_are_one_environment_with_disjoint_items(tmp_path, model_path):
    """Also once one was killed and started again, from its own checkpoint; beside them is one of equal weight."""
    folder = tmp_path / "run"
    options = [
        f"--steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.atropos.max_staleness=0",
        "environments.a.replicas=2",
    ]
    options += [f"environments.{name}.args={{{ARGS}, seed: {seed}}}" for seed, name in enumerate("ab")]
    with launched(folder, model_path, *options) as launcher:
        until(lambda: all(registrations(folder, name) for name in ("a", "a.1", "b")), 400, launcher)
        until(lambda: len(read_metrics(folder)) >= 2, 200, launcher)
        services = orjson.loads((folder / "services.json").read_bytes())
        other = psutil.Process(services["environment-a"]["pid"])
        other.suspend()  # so that training waits for its groups, until the killed one is there again
        psutil.Process(services["environment-a.1"]["pid"]).kill()
        until(lambda: len(registrations(folder, "a.1")) == 2, 200, launcher)
        other.resume()
        assert launcher.process.wait(400) == 0, launcher.tail(40)

    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert {key.split("/")[1] for line in lines for key in line if key.endswith("/groups") and key.count("/") == 2} == {
        *"ab"
    }
    of_a = sum(line["atropos/a/groups"] for line in lines[-3:])
    assert abs(of_a - 24) <= 4, "half of three batches of 16 groups, not two thirds"
    summary = orjson.loads((folder / "summary.json").read_bytes())["environments"]
    assert [(name, one["restarts"], one["abandoned"]) for name, one in summary.items()] == [
        ("a", 1, False),
        ("b", 0, False),
    ]
    found = [(line["version"], line["env"], line["metrics"]["eval/total"]) for line in read_evaluations(folder)]
    assert sorted(found) == [(version, name, 8) for version in (0, STEPS) for name in "ab"]

    rows = [row for step in range(1, STEPS + 1) for row in read_lines(folder / f"rollouts/{step}.jsonl")]
    first, second = (
        {row["input"] for row in rows if row["env_id"] in registrations(folder, name)} for name in ("a", "a.1")
    )
    assert first and second and not first & second
    again = {row["input"] for row in rows if row["env_id"] == registrations(folder, "a.1")[1]}
    assert again and again <= second
    assert (folder / "checkpoints/env_checkpoints/a_1_of_2").is_dir()
    assert "items begin anew" not in (folder / "logs/environment-a.1.log").read_text()
