"""The trained model as a folder in Hugging Face format, from checkpoints that verl's own manager has saved."""

# ruff: noqa: F811  (fixtures that are imported)

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, dynamic_module_utils

from helpers.disk import fill
from helpers.export import alone, arguments, configuration, saved_run, small_run, trained  # noqa: F401
from helpers.families import FAMILIES, WITHOUT_LORA, Engine, make_model  # noqa: F401
from helpers.runs import run_of
from helpers.trainer import compose_config
from recipe.atropos.checkpoint import safetensors_writer, store
from recipe.atropos.checkpoint.export import export, export_checkpoint
from recipe.atropos.checkpoint.safetensors_writer import write_safetensors
from recipe.atropos.checkpoint.shards import Shards, ShardsError
from recipe.atropos.checkpoint.store import Checkpoints, choose_checkpoint
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.launcher.launch import report_model
from recipe.atropos.main import export_model
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import update_summary
from recipe.atropos.tensors.format import read_shapes
from recipe.atropos.utils import debug
from recipe.atropos.utils.files import DiskFull, append_line
from recipe.atropos.weight_sync.names import PushedNames

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("alone")]

PROMPT = "What is 2 + 2?"


# ---------------------------------------------------------------- what is written


ADAPTED = ("llama", "qwen2-tied", "mixtral")
CASES = [(family, 0) for family in FAMILIES] + [(family, 4) for family in ADAPTED]
CASES += [pytest.param(each, 4, marks=pytest.mark.slow) for each in FAMILIES if each not in WITHOUT_LORA + ADAPTED]


@pytest.mark.parametrize(("family", "lora_rank"), CASES)
def test_export_is_what_save_pretrained_writes(make_model, tmp_path, family, lora_rank):
    """Names and values, bit for bit, as those of a push, whose names are known without the data."""
    engine = trained(make_model(family), lora_rank)
    run = saved_run(tmp_path / "run", configuration(make_model(family)), engine)
    export_checkpoint(run, choose_checkpoint(run), tmp_path / "out")
    exported = load_file(tmp_path / "out/model.safetensors")

    pushed = list(engine.get_per_tensor_param()[0])
    shapes, checkpoint = engine.checkpoint_format.shapes, read_shapes(make_model(family))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in pushed} and len(shapes) == len(pushed)
    assert [*PushedNames(engine.checkpoint_format, checkpoint, "it").checked(iter(pushed))] == pushed
    pushed, tied = dict(pushed), {"lm_head.weight"} if "tied" in family else set()
    assert pushed.keys() - tied == checkpoint.keys()
    plain = engine.module.merge_and_unload() if lora_rank else engine.module
    plain.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert exported.keys() == saved.keys() == checkpoint.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, pushed[name]), name
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=1e-6 if lora_rank else 0)

    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True, attn_implementation="eager"
    )
    assert model.dtype == torch.float32 and not (loading["missing_keys"] or loading["unexpected_keys"])
    ours, theirs = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "saved"))
    assert ours == theirs


def test_export_has_tokenizer_templates_and_generation_config(small_run, make_model, tmp_path):
    """And no weights but its own, wherever they are."""
    run, _ = small_run
    templates = run.checkpoints / "global_step_3/actor/huggingface/additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("tools")
    (templates / "model.safetensors").touch()
    export(arguments(run.path, "--out", tmp_path / "out"))
    shutil.rmtree(templates)
    assert [path.read_text() for path in (tmp_path / "out/additional_chat_templates").iterdir()] == ["tools"]
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", make_model("qwen2")))
    chat = [{"role": "user", "content": PROMPT}]
    assert ours.chat_template and ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6


def test_export_loads_without_the_attention_of_the_training(make_model, tmp_path):
    """Neither the export nor who loads it has flash attention, as here; verl's override leaves it in the checkpoint."""
    engine = trained(make_model("qwen2"))
    engine.module.config.attn_implementation = "flash_attention_2"
    run = saved_run(tmp_path / "run", configuration(make_model("qwen2")), engine)
    saved = run.checkpoints / "global_step_1/actor/huggingface/config.json"
    assert json.loads(saved.read_text())["attn_implementation"] == "flash_attention_2"
    export(arguments(run.path, "--out", tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config._attn_implementation == "sdpa"


@pytest.mark.parametrize("when", ["before", "as_it_is_read"])
def test_export_of_a_checkpoint_that_is_removed_meanwhile(small_run, tmp_path, monkeypatch, when):
    """By the run's trainer, which keeps the newest."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(small_run[0].path, run.path)
    chosen, digest = choose_checkpoint(run, step=1), store._digest

    def removed(path=None):
        monkeypatch.setattr(store, "_digest", digest)
        Checkpoints(run.checkpoints)._prune(1, {})
        return ""

    monkeypatch.setattr(store, "_digest", removed) if when == "as_it_is_read" else removed()
    with pytest.raises(ConfigurationError, match="global_step_1 was removed meanwhile, .* choose another"):
        export_checkpoint(run, chosen, tmp_path / "out")


def test_export_refuses_a_dtype_without_room(make_model, tmp_path):
    """A value that would become infinite; one that was infinite is not hidden."""
    engine = trained(make_model("qwen2"))
    with torch.no_grad():
        engine.module.lm_head.weight[0, 0] = 1e5
    run = saved_run(tmp_path / "run", configuration(make_model("qwen2")), engine)
    with pytest.raises(ConfigurationError, match=r"--dtype=float16: lm_head.weight holds values up to 1e\+05"):
        export(arguments(run.path, "--dtype", "float16"))
    assert not run.model.exists()
    export(arguments(run.path, "--dtype", "bfloat16"))


def test_export_rounds_only_when_asked(small_run, tmp_path):
    run, engine = small_run
    exact = engine.module.state_dict()["lm_head.weight"].full_tensor()
    for dtype, expected in ((None, exact), ("bfloat16", exact.bfloat16())):
        given = ["--dtype", dtype] if dtype else []
        told = str(export(arguments(run.path, "--out", tmp_path / "out", *given)))
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["lm_head.weight"], expected)
        name = dtype or "float32"
        assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == name and f"step 3, {name}" in told


def test_export_at_the_end_never_ends_a_run(make_model, tmp_path, capsys, caplog):
    """Whatever is wrong, the run is complete; the launcher names what is there, or why nothing is."""

    def told():
        return " ".join(capsys.readouterr().out.split())

    run = saved_run(tmp_path / "run", configuration(make_model("qwen2")), trained(make_model("qwen2")))
    options = [f"actor_rollout_ref.model.path={make_model('qwen2')}", "trainer.total_training_steps=1"]
    launched = run_of(compose_config(*options), run.path)
    export_model(run)
    assert f"model exported to {run.model}: step 1, float32" in told() and not run.adapter.exists()
    card = (run.model / "README.md").read_text()
    append_line(run.evaluations, {"step": 1, "env": "e", "metrics": {"accuracy": 0.5}, "main": "accuracy"})
    report_model(launched)
    assert "| e | accuracy |" not in card and "| e | accuracy |" in (run.model / "README.md").read_text()
    assert "run/model: step 1, float32" in told()

    (run.model / "export.json").unlink()
    export_model(run)
    assert f"model not exported: {run.model}: holds other files" in told() and run.model.exists()
    shutil.rmtree(run.model)
    [config] = run.checkpoints.glob("*/actor/huggingface/config.json")
    config.write_text(config.read_text().replace('"qwen2"', '"qwenX"'))  # an unknown type of model
    complete = config.parents[2] / "complete.json"  # as saved by a version without digests
    complete.write_text(json.dumps(json.loads(complete.read_text()) | {"digests": {}}))
    export_model(run)
    [line] = capsys.readouterr().out.splitlines()
    assert "model not exported: ValueError: " in line and "qwenX" in line
    report_model(launched)
    assert "Traceback" in caplog.text and not run.model.exists() and "none is exported: see" in told()

    config = configuration(make_model("qwen2"), "trainer.save_freq=-1")
    export_model(saved_run(run.path, config, trained(make_model("qwen2"))))  # by a preemption, at an earlier step
    assert not run.model.exists()
    report_model(run_of(compose_config(*options, "trainer.save_freq=-1"), run.path))
    assert "none is exported: trainer.save_freq saves no checkpoint" in told()


def test_export_of_an_adapter_is_peft_s(make_model, tmp_path):
    """Loaded over the base it computes what the merged model does; a checkpoint of the adapter alone gives it too."""
    model, lora = make_model("llama"), "actor_rollout_ref.model.lora_rank=4"
    engine = trained(model, 4)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_" not in name:
                parameter.copy_(Engine(model, 4).module.get_parameter(name))
    run = saved_run(tmp_path / "run", configuration(model, lora), engine)
    export(arguments(run.path, "--adapter"))
    export(arguments(run.path))
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, run.path / "adapter")
    merged, ids = AutoModelForCausalLM.from_pretrained(run.model), torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, AutoModelForCausalLM.from_pretrained(model)(ids).logits)
    names = sorted(path.name for path in (run.path / "adapter").iterdir())
    assert "config.json" not in names and {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {*names}

    assert json.loads((run.adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)

    bare = saved_run(tmp_path / "bare", configuration(model, lora), engine, save_lora_only=True)
    with pytest.raises(ConfigurationError, match="holds the adapter alone .* give --adapter"):
        export(arguments(bare.path))
    export(arguments(bare.path, "--adapter"))
    one, other = (load_file(folder.path / "adapter/adapter_model.safetensors") for folder in (run, bare))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_export_divides_large_models_into_files(small_run, tmp_path, monkeypatch):
    """As transformers reads them: an index, and no file above the limit but of one tensor."""
    monkeypatch.setattr(safetensors_writer, "MAX_FILE_BYTES", 30_000)
    run, engine = small_run
    export(arguments(run.path, "--out", tmp_path / "out"))
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(len(load_file(path)) == 1 for path in files if path.stat().st_size > 31_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.full_tensor())


def test_export_writes_every_dtype_and_shape(tmp_path):
    tensors = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(0.5),
        "none": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "yes": torch.tensor([True, False]),
        "double": torch.rand(2, 2, dtype=torch.float64),
        "long": torch.arange(5),
    }
    size = write_safetensors(tmp_path, "m", tensors, tensors.items())
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    read = load_file(tmp_path / "m.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert all(read[name].dtype == tensors[name].dtype for name in tensors)
    for others in ([*tensors.items()][:-1], [*tensors.items(), ("more", torch.ones(1))], reversed(tensors.items())):
        with pytest.raises(ValueError):
            write_safetensors(tmp_path, "m", tensors, others)


def test_export_names_what_the_run_was(small_run, tmp_path):
    """The card: figures of the run, the score of that step, no secret and no path."""
    run, _ = small_run
    before = {"run": "/home/me/before", "step": 7, "base": "org/Base-1B"}
    update_summary(run.path, {"steps": 3, "tokens_trained": 1234, "resumed_from": before})
    for step, accuracy in ((0, 0.25), (2, 0.5)):
        metrics = {"eval/percent_correct": accuracy, "eval/total": 64}
        append_line(run.evaluations, {"step": step, "env": "Mine", "metrics": metrics, "main": "eval/percent_correct"})
    for step, score in ((2, "0.5"), (3, "not evaluated")):
        export(arguments(run.path, "--step", step, "--out", tmp_path / "out"))
        card = (tmp_path / "out/README.md").read_text()
        assert f"| Mine | eval/percent_correct | 64 | 0.25 (step 0) | {score} |" in card
        for line in ("library_name: transformers", "| groups a step | 5 |", "| tokens trained on, whole run | 1234 |"):
            assert line in card
        assert f"| steps | {step} of 3 |" in card and f"torch {torch.__version__.split('+')[0]}" in card
        assert "| weights at step 0 | run before, step 7 |" in card and "my_env.py:Mine" in card
        assert "base_model: org/Base-1B" in card and "| base model | org/Base-1B |" in card
        assert "s3cret" not in card and "/home/me" not in card and str(tmp_path.parent) not in card
    run.evaluations.unlink()


OWN_CODE = """
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM

Path({marker!r}).touch()

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_export_runs_code_of_a_model_only_when_told(make_model, tmp_path, monkeypatch):
    """Whatever the run's configuration says: it may be somebody else's."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, trusted = make_model("qwen2"), "actor_rollout_ref.model.trust_remote_code=true"
    run = saved_run(tmp_path / "run", configuration(model, trusted))
    with Checkpoints(run.checkpoints).saving(1, None) as checkpoint:
        trained(model).save_checkpoint(checkpoint / "actor")
        folder = checkpoint / "actor/huggingface"
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        settings = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "auto_map": own}
        (folder / "config.json").write_text(json.dumps(settings))
        (folder / "own.py").write_text(OWN_CODE.format(marker=str(tmp_path / "ran")))
    with pytest.raises(ConfigurationError, match="code of its own, which would be run; give --trust-remote-code if"):
        export(arguments(run.path))
    assert not (tmp_path / "ran").exists() and not run.model.exists()
    export(arguments(run.path, "--trust-remote-code"))
    assert (tmp_path / "ran").exists() and (run.model / "own.py").exists()


# ---------------------------------------------------------------- from where, and to where


def test_export_takes_the_newest_a_step_or_the_best(small_run, capsys):
    run, _ = small_run
    told = [export(arguments(run.path)), export(arguments(run.path, "--step", 1))]
    assert [line.partition(": step ")[0] for line in told] == [str(run.model), str(run.path / "model-1")]
    with pytest.raises(ConfigurationError, match="--best: no checkpoint of .* was evaluated, .* steps .1, 2, 3."):
        export(arguments(run.path, "--best"))
    for step, accuracy in ((0, 0.9), (1, 0.3), (2, 0.3), (3, 0.1)):
        line = {"step": step, "env": "e", "metrics": {"accuracy": accuracy}, "main": "accuracy"}
        append_line(run.evaluations, line)
    assert debug.main(["export", str(run.path), "--best"]) == 0
    assert f"{run.path}/model-2: step 2, float32" in capsys.readouterr().out
    exported, saved = load_file(run.path / "model-2/model.safetensors"), Shards(choose_checkpoint(run, 2) / "actor")
    assert all(torch.equal(exported[name], saved[name]) for name in exported)
    run.evaluations.unlink()


def test_export_refuses_by_name(small_run, make_model, tmp_path):
    run, _ = small_run
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").touch()
    for given, told in (
        (["--step", "9"], r"step 9: .* has whole checkpoints of steps \[1, 2, 3\]"),
        (["--adapter"], "--adapter: .* was trained without LoRA"),
        (["--out", tmp_path / "other"], f"{tmp_path}/other: holds other files"),
        (["--out", "/proc"], "/proc: a mount point cannot be replaced"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            export(arguments(run.path, *given))
    assert (tmp_path / "other/thesis.txt").exists()
    with pytest.raises(ConfigurationError, match="no config.yaml there"):
        export(arguments(tmp_path))
    empty = saved_run(tmp_path / "empty", configuration(make_model("qwen2")))
    with pytest.raises(ConfigurationError, match="holds no whole checkpoint"):
        export(arguments(empty.path))
    actor = run.checkpoints / "global_step_3/actor"
    shutil.copytree(actor, tmp_path / "actor")
    weights = tmp_path / "actor/model_world_size_1_rank_0.pt"
    weights.rename(tmp_path / "actor/model_world_size_2_rank_1.pt")
    with pytest.raises(ShardsError, match="1 of 2 ranks' files, rank 0 is missing"):
        Shards(tmp_path / "actor")
    (tmp_path / "actor/model_world_size_1_rank_0.pt").write_bytes(b"PK\x03\x04 not a model")
    (tmp_path / "actor/model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ShardsError, match="rank_0.pt cannot be read"):
        Shards(tmp_path / "actor")


def test_export_of_other_tensors_than_the_model_s_is_refused(make_model, tmp_path):
    """Missing, and tied ones that are not the same: nothing is written."""
    engine = trained(make_model("qwen2-tied"))
    run = saved_run(tmp_path / "run", configuration(make_model("qwen2-tied")), engine)
    path = run.checkpoints / "global_step_1/actor/model_world_size_1_rank_0.pt"
    state = torch.load(path)
    (path.parents[1] / "complete.json").unlink()  # it has digests
    for change, told in (
        (
            {"lm_head.weight": state["lm_head.weight"] + 1},
            "lm_head.weight and model.embed_tokens.weight are one tensor",
        ),
        ({"model.norm.weight": None}, r"1 tensors too many or too few: \['model.norm.weight'\]"),
    ):
        torch.save({name: t for name, t in (state | change).items() if t is not None}, path)
        with pytest.raises(AtroposError, match=told):
            export_checkpoint(run, path.parents[1], run.model)
    assert not run.model.exists() and not list(run.path.glob(".*.partial"))


def test_export_on_a_full_disk_leaves_the_former(small_run, full_disk):
    run, _ = small_run
    out = full_disk / "out"
    out.mkdir()
    fill(full_disk)
    with pytest.raises(DiskFull, match=f"no space left on device: {out}"):
        export_checkpoint(run, choose_checkpoint(run), out)
    assert list(full_disk.glob("*out*")) == [out] and list(out.iterdir()) == []
