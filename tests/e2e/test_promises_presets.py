"""The presets for real models train, made small for two CPU cores."""

import orjson
import pytest

from helpers.launchers import trained
from helpers.promises import PRESETS, SMALL, code, listed, rows_of
from recipe.atropos.config.models import resolve_model
from recipe.atropos.environments.word_problems import generate
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import free_port


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", PRESETS)
def test_promises_of_presets_train_a_small_model(tmp_path, preset):
    for split, size in (("train", 256), ("test", 64)):
        lines = b"\n".join(orjson.dumps(row) for row in generate(split, size))
        (tmp_path / f"{split}.jsonl").write_bytes(lines)
    options = [f"--preset={preset}", f"--model={resolve_model('small-policy', seed=0)}", "--steps=2", "--run-dir=run"]
    options += [*SMALL, f"environment.args.dataset_name={tmp_path}", "trainer.logger=[console,wandb]"]
    options += [f"api.port={free_port()}", f"inference.gateway_port={free_port()}"]  # another test needs the defaults
    trained(tmp_path, *options, timeout=1700, WANDB_MODE="offline")
    first, last = read_metrics(tmp_path / "run")
    assert last["step"] == 2 and last["atropos/rows"] == 32 and last["atropos/staleness/max"] == 0
    assert list(tmp_path.glob("run/wandb/offline-run-*"))
    evaluations = read_evaluations(tmp_path / "run")
    assert [line["version"] for line in evaluations] == [0, 2]
    promised = [*listed("Metrics", "The same:"), *(metric for _, here in rows_of("Metrics") for metric in code(here))]
    for metric in (metric.replace("{env_name}", "gsm8k") for metric in promised):
        assert metric in (evaluations[0]["metrics"] if metric.startswith("eval/") else last), metric
