"""Two runs of the launcher: one leaves its model, the other begins with it."""

import pytest
import yaml
from safetensors.torch import load_file

from helpers.launchers import trained
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LORA = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=all-linear"]


@pytest.mark.parametrize("lora", [[], LORA], ids=["full", "lora"])
def test_export_of_a_run_is_what_the_next_begins_with(tmp_path, lora):
    """The best checkpoint stays; held-out answers of the first run's end are those of the second's beginning."""
    keep = ["trainer.save_freq=1", "evaluation.every=1", "trainer.max_actor_ckpt_to_keep=1", "data.train_batch_size=4"]
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    begin = ["--preset", "demo", "--run-dir", "first", "--steps", "4"]
    output = trained(tmp_path, *begin, *keep, *lora, "actor_rollout_ref.actor.optim.lr=3e-4")
    assert "model first/model: step 4, float32" in output
    scores = {line["step"]: line["metrics"][line["main"]] for line in read_evaluations(first.path)}
    saved = sorted(int(path.name.split("_")[-1]) for path in first.checkpoints.glob("global_step_*"))
    best = max((1, 2, 3), key=lambda step: (scores[step], step))
    assert saved == sorted({best, 4}), scores

    begin = ["--preset", "demo", "--run-dir", "second", "--steps", "1", "--resume-from", "first"]
    output = trained(tmp_path, *begin, *keep, *lora)
    assert "model second/model: step 1, float32" in output
    config, summary = yaml.safe_load(second.config.read_text()), read_json(second.summary)
    assert config["run"]["resume_from"] == f"{first.path}@4" and summary["steps"] == summary["policy_version"] == 1
    base = yaml.safe_load(first.config.read_text())["actor_rollout_ref"]["model"]["path"]
    assert summary["resumed_from"] == {"run": str(first.path), "step": 4, "base": base}
    assert summary["heldout_accuracy_before"] == read_json(first.summary)["heldout_accuracy_after"]
    [line] = read_metrics(second.path)
    assert line["atropos/logprob_diff/max"] < 1e-4 and line["atropos/staleness/max"] == 0
    assert "| weights at step 0 | run first, step 4 |" in (second.model / "README.md").read_text()
    weights, start = (load_file(folder / "model.safetensors") for folder in (second.model, first.model))
    assert weights.keys() == start.keys()
    moved = max((weights[name] - start[name]).abs().max().item() for name in weights)
    assert 0 < moved < 0.01, "one step of the optimizer"
    assert (second.start / ("adapter_config.json" if lora else "config.json")).exists()
