"""Several environments that run: what becomes of the others when one dies."""

import orjson
import psutil
import pytest

from helpers.environments import item_env
from helpers.interpreter import make_interpreter, write_environment
from helpers.launchers import launched
from helpers.waiting import until
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import read_lines

ITEM_ENV = f"{item_env.__file__}:ItemEnv"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_environments_train_on_when_one_is_killed_for_good(tmp_path, model_path):
    """Both are evaluated before the training, after update 3 and at the end, each time all of it on one version."""
    folder = tmp_path / "run"
    each = {"target": ITEM_ENV, "min_batch_allocation": 0.5, "max_restarts": 0}
    options = [f"environments.{name}.{key}={value}" for name in "ab" for key, value in each.items()]
    options += ["environments.b.args.says=attribute", "evaluation.every=3", "--steps=5", "trainer.save_freq=-1"]
    with launched(folder, model_path, *options) as launcher:
        # it may join after a
        until(lambda: any(line.get("atropos/b/groups") for line in read_metrics(folder)), 240, launcher)
        psutil.Process(orjson.loads((folder / "services.json").read_bytes())["environment-b"]["pid"]).kill()
        assert launcher.process.wait(200) == 0, launcher.tail(40)
        assert "left running" not in launcher.tail()
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    both = [[line.get(f"atropos/{name}/groups", 0) for name in "ab"] for line in lines]  # each may join after the other
    assert all(sum(groups) == 16 for groups in both)
    assert lines[-1]["atropos/num_environments"] == 1 and "atropos/b/groups" not in lines[-1]
    output = launcher.log_path.read_text()
    assert "(a +0.500, b +0.500)" in output
    assert "environment-b ended once more after 0 restarts (environments.b.max_restarts), abandoned" in output

    found = read_evaluations(folder)
    assert sorted((entry["version"], entry["env"]) for entry in found) == [(v, e) for v in (0, 3, 5) for e in "ab"]
    assert all(entry["metrics"]["eval/total"] == 4 for entry in found), "none failed, none met two versions"
    waited = [line["step"] for line in lines if line["phase_s/evaluate"]]
    assert waited == [1, 4], "for the evaluation of the version that its push replaces"
    samples = [read_lines(folder / f"evaluation/{v}/a/samples.jsonl") for v in (0, 3, 5)]
    assert [[sample["item"] for sample in each] for each in samples] == [[0, 1, 2, 3]] * 3, "the same items"
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert summary["environments"]["b"]["abandoned"] and not summary["environments"]["a"]["abandoned"]
    assert summary["heldout"]["a"]["version_after"] == 5 and summary["policy_version"] == 5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_own_interpreter_of_an_environment_trains_and_evaluates(tmp_path, model_path):
    """Beside one in the trainer's; neither could run in the other's."""
    python, target = make_interpreter(tmp_path / "venv"), write_environment(tmp_path / "own.py")
    targets = [f"environments.a.target={ITEM_ENV}", f"environments.b.target={target}"]
    options = [*targets, f"environments.b.python={python}", "--steps=2", "trainer.save_freq=-1"]
    folder = tmp_path / "run"
    with launched(folder, model_path, *options) as launcher:
        assert launcher.process.wait(300) == 0, launcher.tail(40)
    assert all(line["atropos/b/groups"] > 0 for line in read_metrics(folder))
    assert sorted((entry["version"], entry["env"]) for entry in read_evaluations(folder)) == [
        (version, name) for version in (0, 2) for name in "ab"
    ]
