"""A run that begins with the weights that another one trained: ``--resume-from RUN[@STEP]``."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from helpers.export import alone, begun_from, configuration, make_start, saved_run, trained  # noqa: F401
from helpers.families import make_family
from recipe.atropos.checkpoint.resumption import prepare_folder
from recipe.atropos.checkpoint.start_from import forget_start
from recipe.atropos.config.models import check_model
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.main import main
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import update_summary
from recipe.atropos.utils.files import read_json

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("start") / "qwen2", "qwen2")


@pytest.fixture
def source(model, tmp_path):
    """A run with two checkpoints."""
    return saved_run(tmp_path / "first", configuration(model), trained(model), trained(model))


@pytest.fixture
def adapted(model, tmp_path):
    """A LoRA run with one."""
    config = configuration(model, "actor_rollout_ref.model.lora_rank=4")
    return saved_run(tmp_path / "adapted", config, trained(model, 4))


def test_export_starts_a_run_with_another_s_weights(source, model, tmp_path):
    """Also once the other is gone, by the same command; the other's name wins over a preset's model."""
    plan = begun_from(tmp_path, f"{source.path}@1", "--preset", "demo")
    check_config(plan.config)
    check_model(plan.config.actor_rollout_ref.model.path)
    config = make_start(plan)
    settings = config.actor_rollout_ref.model
    assert settings.path == str(tmp_path / "second/start") and not settings.lora_adapter_path
    assert config.run.resume_from == f"{source.path}@1"
    weights = load_file(tmp_path / "second/start/model.safetensors")
    saved = torch.load(source.checkpoints / "global_step_1/actor/model_world_size_1_rank_0.pt")
    assert weights.keys() == saved.keys() and all(torch.equal(weights[name], saved[name]) for name in weights)
    told = {"run": str(source.path), "step": 1, "base": str(model)}
    assert read_json(RunDir(tmp_path / "second").summary) == {"resumed_from": told}

    assert prepare_folder(RunDir(tmp_path / "second"), config, {}) == [], "the run can begin"

    shutil.rmtree(source.path)
    for spec in (f"{source.path}@1", source.path):
        again = begun_from(tmp_path, spec, "--preset", "demo")
        assert again.config == config == make_start(again)
    with pytest.raises(ConfigurationError, match=r"resume_from=.*/first@2: no run there"):
        begun_from(tmp_path, f"{source.path}@2")


def test_export_starts_a_lora_run_with_another_s_adapter(adapted, model, tmp_path):
    lora = "actor_rollout_ref.model.lora_rank="
    plan = begun_from(tmp_path, adapted.path, f"{lora}4")
    settings = plan.config.actor_rollout_ref.model
    assert settings.path == str(model) and settings.lora_adapter_path == str(tmp_path / "second/start")
    assert plan.start.adapter
    assert (settings.lora_alpha, settings.target_modules) == (8, ["q_proj", "v_proj"])  # Engine's, of PEFT's default
    with pytest.raises(ConfigurationError, match=r"lora_rank=8 with .*, whose adapter has rank 4: give that"):
        begun_from(tmp_path, adapted.path, f"{lora}8")
    with pytest.raises(ConfigurationError, match="lora_alpha=64 with run.resume_from=.*, whose adapter has 8: leave"):
        begun_from(tmp_path, adapted.path, f"{lora}4", "actor_rollout_ref.model.lora_alpha=64")
    config = make_start(plan)
    assert begun_from(tmp_path, adapted.path, f"{lora}4").config == config
    prepare_folder(plan.files, plan.complete(), {}, plan.given())
    other = plan_run([f"config={plan.files.config}", f"run.dir={tmp_path / 'other'}"]).config.actor_rollout_ref.model
    assert (other.lora_adapter_path, other.lora_alpha) == (str(tmp_path / "other/start"), 8), "begun in the same way"
    with pytest.raises(ConfigurationError, match=r"lora_rank=8 with .* has begun with that run's adapter, of rank 4"):
        begun_from(tmp_path, adapted.path, f"{lora}8")
    shutil.rmtree(tmp_path / "second")
    plan = begun_from(tmp_path, adapted.path)
    assert not plan.start.adapter and plan.start.base == str(tmp_path / "second/start")


def test_export_start_that_cannot_be_is_refused_by_name(source, model, tmp_path, monkeypatch, capsys):
    for spec, options, told in (
        (source.path, ["--model", str(model)], r"resume_from=.*/first with actor_rollout_ref.model.path \(--model\)"),
        (tmp_path / "second", [], "is the run's own folder: leave it out"),
        (tmp_path / "none", [], r"resume_from=.*/none: no run there .* give RUN or RUN@STEP"),
        (f"{source.path}@7", [], r"resume_from=.*/first@7: step 7: .* has whole checkpoints of steps \[1, 2\]"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            begun_from(tmp_path, spec, *options)
    saved_run(tmp_path / "second", configuration(model), trained(model))
    with pytest.raises(ConfigurationError, match="has begun with the model of .*; give another folder"):
        begun_from(tmp_path, source.path)
    with pytest.raises(SystemExit, match="run.resume_from=x is the launcher's work: export that run"):
        main(["run.resume_from=x", f"run.dir={tmp_path / 'third'}", f"actor_rollout_ref.model.path={model}"])


def test_export_start_is_forgotten_with_another_model(source, model, tmp_path):
    """Of a run that had saved nothing; the weights of one that has are still from there."""
    folder, told = RunDir(tmp_path / "second"), {"resumed_from": {"run": str(source.path), "step": 2}}
    folder.start.mkdir(parents=True)
    update_summary(folder.path, {**told, "seed": 1})
    forget_start(folder)
    assert read_json(folder.summary) == {"seed": 1} and not folder.start.exists()
    update_summary(folder.path, told)
    saved_run(folder.path, configuration(model), trained(model))
    forget_start(folder)
    assert "resumed_from" in read_json(folder.summary)


def test_export_that_fails_leaves_no_start(source, tmp_path):
    start = begun_from(tmp_path, source.path).start
    (source.checkpoints / "global_step_2/actor/tensor_names.json").write_text("[]")  # its size is another now
    with pytest.raises(AtroposError, match=r"first@2: error: step 2: .* has whole checkpoints of steps \[1\]"):
        start.make()
    assert not (tmp_path / "second/start").exists() and not (tmp_path / "second/summary.json").exists()
