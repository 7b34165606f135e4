"""Every tensor of the served checkpoint is pushed under its name there: tiny models of many architectures."""

# ruff: noqa: F811  (a fixture that is imported)

import asyncio
import contextlib
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from helpers.families import Engine, make_model  # noqa: F401
from helpers.trainer import compose_config
from random_models import SIZES
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.fsdp_workers import AtroposActorWorker
from recipe.atropos.inference.client import Capabilities
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.tensors.format import CheckpointError, CheckpointFormat, read_shapes
from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine
from recipe.atropos.weight_sync.names import PushedNames, WeightNamesError
from recipe.atropos.weight_sync.served_model import check_model
from recipe.atropos.weight_sync.servers import WeightPushError

pytestmark = pytest.mark.timeout(900)


def streamed(engine):
    pairs = list(engine.get_per_tensor_param()[0])
    assert len(pairs) == len(dict(pairs)), "each name once"
    return dict(pairs)


def test_names_of_qwen3_moe_are_those_that_verl_makes(make_model):
    engine = Engine(make_model("qwen3_moe"))
    by_verl = dict(unfuse_moe_params(engine.module.state_dict().items(), "qwen3_moe"))
    pushed = streamed(engine)
    assert pushed.keys() == by_verl.keys() and all(torch.equal(pushed[name], by_verl[name]) for name in by_verl)


def test_names_are_made_of_one_tensor_at_a_time(make_model):
    """A push holds the tensors of one module, not of the model."""
    engine, read = Engine(make_model("mixtral")), []

    def weights():
        for name, tensor in engine.module.state_dict().items():
            read.append(name)
            yield name, tensor

    stream = engine.checkpoint_format.stream(weights())
    for first in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert next(stream)[0] == first == read[-1]
    assert len(read) == 2


def test_names_that_one_tensor_is_made_from_wait_for_each_other():
    """A checkpoint may hold packed what the model holds apart: here, gate and up projection of an HRM."""
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "head_dim")}
    config = AutoConfig.for_model(
        "hrm_text", vocab_size=32, num_attention_heads=4, num_hidden_layers=2, num_layers_per_stack=1, **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    state = model.state_dict()
    pushed = dict(CheckpointFormat(model).stream(state.items()))
    whole = revert_weight_conversion(model, state)
    assert pushed.keys() == whole.keys() != state.keys()
    assert all(torch.equal(pushed[name], whole[name]) for name in whole)


class Stream(SimpleNamespace):
    """What a trainer would push: by default two tensors, one of them a buffer."""

    def __init__(self, **fields):
        shapes = {"embed.weight": (8, 4), "layers.0.proj.weight": (4, 4), "layers.0.bias": (4,)}
        none = {"buffers": frozenset(), "fp32": frozenset(), "tied": {}, "ignored": []}
        super().__init__(**{"shapes": shapes, **none} | fields)


def without(shapes, *names):
    return {name: shape for name, shape in shapes.items() if name not in names}


def test_names_and_shapes_that_differ_are_listed_before_any_push():
    shapes = Stream().shapes
    PushedNames(Stream(), shapes, "it")
    with pytest.raises(WeightNamesError, match=r"checkpoint it .*1 tensors of the checkpoint would not be pushed: b\."):
        PushedNames(Stream(), shapes | {"b": (1,)}, "it")
    with pytest.raises(WeightNamesError, match=r"1 tensors .* pushed that the checkpoint does not have: layers\.0\.b"):
        PushedNames(Stream(), without(shapes, "layers.0.bias"), "it")
    with pytest.raises(WeightNamesError, match=r"in another shape: layers\.0\.bias \[4\], there \[1, 4\]"):
        PushedNames(Stream(), shapes | {"layers.0.bias": (1, 4)}, "it")
    many = {f"layers.0.experts.{i:02}.weight": (4, 4) for i in range(40)}
    with pytest.raises(WeightNamesError, match=r"40 tensors of .*: layers\.0\.experts\.00\.weight, .* and 35 more"):
        PushedNames(Stream(), shapes | many, "it")


@pytest.mark.parametrize("absent", ["embed.weight", "lm_head.weight"])
def test_names_of_tied_embeddings_may_be_missing_on_one_side(absent):
    shapes = Stream().shapes | {"lm_head.weight": (8, 4)}
    tied = {"lm_head.weight": "embed.weight"}
    PushedNames(Stream(shapes=shapes, tied=tied), without(shapes, absent), "it")
    PushedNames(Stream(shapes=without(shapes, absent), tied=tied), shapes, "it")
    for stream, checkpoint in ((shapes, without(shapes, absent)), (without(shapes, absent), shapes)):
        with pytest.raises(WeightNamesError, match=absent):  # not tied, it is another tensor
            PushedNames(Stream(shapes=stream), checkpoint, "it")
    neither = without(shapes, *tied, *tied.values())
    for stream, checkpoint in ((shapes, neither), (neither, shapes)):
        with pytest.raises(WeightNamesError, match="2 tensors"):
            PushedNames(Stream(shapes=stream, tied=tied), checkpoint, "it")


def test_names_of_buffers_beyond_the_checkpoint_are_not_pushed():
    buffer = {"layers.0.decay": (4,)}
    shapes = Stream().shapes
    pushed = Stream(shapes=shapes | buffer, buffers=frozenset(buffer))
    names = PushedNames(pushed, shapes, "it")
    assert names.shapes == shapes
    assert dict(names.checked(tensors(pushed.shapes))).keys() == shapes.keys()
    assert PushedNames(pushed, pushed.shapes, "it").shapes == pushed.shapes, "one that is there is pushed"


def test_names_that_minimax_derives_are_left_out(make_model, tmp_path):
    """Its own checkpoints have no decays: remote code and servers compute them."""
    model = make_model("minimax")
    decays = [name for name in read_shapes(model) if re.search("decay|slope_rate", name)]
    assert len(decays) == 4
    names = PushedNames(CheckpointFormat(loaded(model)), without(read_shapes(model), *decays), "it")
    assert names.shapes == without(read_shapes(model), *decays)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq"),  # of checkpoints before transformers 4.32
        ("lfm2_moe", "model.pos_emb.inv_freq"),  # the model has it, and no longer saves it
        ("ernie4_5_moe", "model.mtp_block.0.mlp.down_proj.weight"),  # speculates; this class doesn't load it
    ],
)
def test_names_may_be_in_the_checkpoint_but_not_in_the_class(make_model, family, name):
    shapes = read_shapes(make_model(family))
    format = CheckpointFormat(loaded(make_model(family)))
    PushedNames(format, shapes | {name: (8,)}, "it")
    with pytest.raises(WeightNamesError, match=r"1 tensors of .*: model\.layers\.1\.self_attn\.q_norm"):
        PushedNames(format, shapes | {name: (8,), "model.layers.1.self_attn.q_norm": (8,)}, "it")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda pairs: pairs[:1] + pairs[2:], r"ended without 1 of 3 tensors: layers\.0\.proj\.weight"),
        (lambda pairs: pairs[:-1], r"ended without 1 of 3 tensors: layers\.0\.bias"),
        (lambda pairs: [*pairs, ("other", torch.zeros(1))], r"holds other \[1\], the checkpoint it has no such tensor"),
        (lambda pairs: [*pairs, pairs[0]], r"holds embed\.weight \[8, 4\], the checkpoint it has it once"),
        (lambda pairs: [(name, t.flatten()) for name, t in pairs], r"embed\.weight \[32\], the checkpoint it has \[8"),
    ],
    ids=["middle", "last", "unknown", "twice", "shape"],
)
def test_names_of_a_push_that_differ_end_it_before_its_version(tmp_path, change, told):
    """By the engine that verl calls, without servers: nothing is left of the version."""
    engine = AtroposCheckpointEngine(1 << 20, True, urls=[], transport="disk", directory=tmp_path, dtype="float32")
    engine._names = PushedNames(Stream(), Stream().shapes, "it")
    pairs = list(tensors(Stream().shapes))
    assert asyncio.run(engine.send_weights(iter(pairs), 1, []))["weight_sync/version"] == 1
    with pytest.raises(WeightNamesError, match=told):
        asyncio.run(engine.send_weights(iter(change(pairs)), 2, []))
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["version_1"]


def tensors(shapes):
    return ((name, torch.zeros(shape)) for name, shape in shapes.items())


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_names_are_read_from_every_form_of_a_checkpoint(make_model, tmp_path, monkeypatch):
    model = make_model("llama")
    shapes = read_shapes(model)
    assert shapes["model.embed_tokens.weight"] == (259, 64)
    plain = loaded(model)
    plain.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert read_shapes(tmp_path / "shards") == shapes
    (tmp_path / "pickled").mkdir()
    torch.save(plain.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    assert read_shapes(tmp_path / "pickled") == shapes

    cache = tmp_path / "hub" / "models--some--llama"
    shutil.copytree(model, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_shapes("some/llama") == shapes

    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"shards/.*: the names of its tensors cannot be read: No such file"):
        read_shapes(tmp_path / "shards")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=r"broken/model\.safetensors: the names of its tensors cannot be read"):
        read_shapes(tmp_path / "broken")
    for nothing in (tmp_path, "no/such-model"):
        with pytest.raises(CheckpointError, match=rf"{nothing}: no model\.safetensors or pytorch_model\.bin there"):
            read_shapes(nothing)


@pytest.mark.parametrize(
    ("family", "kept"),
    [("lfm2_moe", ["expert_bias"]), ("ernie4_5_moe", ["mlp.gate.weight", "moe_statics"]), ("mixtral", [])],
)
def test_names_that_servers_hold_in_float32_are_not_rounded(make_model, family, kept):
    model = loaded(make_model(family))
    format = CheckpointFormat(model)
    engine = AtroposCheckpointEngine(1, True, urls=[], model_path=str(make_model(family)), dtype="bfloat16")
    engine.expect(format)
    sent = dict(engine._served(format.stream(model.state_dict().items())))
    whole = {name for name, tensor in sent.items() if tensor.dtype == torch.float32}
    assert whole == {name for name in sent if any(part in name for part in kept)} and len(whole) >= len(kept)


@pytest.mark.parametrize("adapter_only", [False, True])
def test_names_are_compared_before_anything_is_trained(make_model, monkeypatch, adapter_only):
    """By the trainer's start, with the worker's own comparison, on rank 0; the ranks are not started here.

    A folder with another model's tensors: what a wrong path, or a family without a conversion, would look like."""
    format = CheckpointFormat(loaded(make_model("qwen2")))
    AtroposCheckpointEngine(1, False, urls=[], model_path=str(make_model("llama"))).expect(format)
    engine = SimpleNamespace(adapter_only=adapter_only, checkpoint_format=format)
    pushes = AtroposCheckpointEngine(1, True, urls=[], model_path=str(make_model("llama")))
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine), checkpoint_engine=pushes)
    monkeypatch.setattr("recipe.atropos.ray_trainer.build_manager", lambda *_: "the manager")
    trainer = RayGRPOAtroposTrainer.__new__(RayGRPOAtroposTrainer)
    trainer.config, trainer.limits = compose_config(), SimpleNamespace(vocab_size=259)
    actor = SimpleNamespace(
        check_weight_names=lambda: AtroposActorWorker.check_weight_names(worker),
        check_shared=lambda _: None,
        world_size=1,
    )
    monkeypatch.setattr("recipe.atropos.ray_trainer.ActorGroup", lambda *_: actor)
    with contextlib.nullcontext() if adapter_only else pytest.raises(WeightNamesError, match="q_proj.bias"):
        trainer.init_workers()
        assert trainer.checkpoint_manager == "the manager", "an adapter has no names of the checkpoint"


class Server:
    """What a server says of itself."""

    url = "http://server"

    def __init__(self, path, **arguments):
        self.path, self.arguments = str(path), arguments

    async def model_info(self):
        return {"tokenizer_path": self.path}

    async def capabilities(self):
        return Capabilities("0.5.23", frozenset(), frozenset(), arguments=self.arguments)


def test_names_of_another_path_are_compared_before_a_push(make_model, tmp_path, caplog):
    model = make_model("llama")
    engine = AtroposCheckpointEngine(1, True, urls=[], model_path=str(model))
    engine.expect(CheckpointFormat(loaded(model)))
    other = shutil.copytree(model, tmp_path / "other")
    asyncio.run(engine._check_names(Server(other)))
    save_file(dict(tensors(without(read_shapes(model), "lm_head.weight"))), other / "model.safetensors")
    with pytest.raises(WeightNamesError, match=r"other of http://server .*does not have: lm_head\.weight"):
        asyncio.run(engine._check_names(Server(other)))
    assert not caplog.text
    asyncio.run(engine._check_names(Server("/no/such/folder")))
    assert "cannot be compared: /no/such/folder: no model.safetensors" in caplog.text


def test_names_of_quantized_servers_are_said_and_refused(make_model, tmp_path):
    """Of unquantized weights a server computes with other ones than the trainer; before the start too."""
    model = make_model("llama")
    trained = AutoConfig.from_pretrained(model)
    trained.architectures = None
    asyncio.run(check_model(Server(model, quantization=None, torchao_config=""), trained, "float32"))
    quantized = shutil.copytree(model, tmp_path / "fp8")
    settings = json.loads((quantized / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (quantized / "config.json").write_text(json.dumps(settings))
    for server, how in (
        (Server(model, quantization="fp8"), "--quantization fp8"),
        (Server(model, torchao_config="int8wo"), "--torchao-config int8wo"),
        (Server(quantized), f"{quantized}, a checkpoint with quantization_config fp8"),
    ):
        with pytest.raises(WeightPushError, match=rf"http://server serves quantized weights \({how}\).* bfloat16"):
            asyncio.run(check_model(server, trained, "float32"))
    long = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"  # else the shipped lengths have no room
    for path, flag, told in (
        (model, "null", None),
        (quantized, "null", rf"actor_rollout_ref\.model\.path={quantized} is quantized \(fp8\)"),
        (model, "fp8", r"inference\.args\.quantization=fp8: a quantized server cannot"),
    ):
        config = compose_config(long, f"actor_rollout_ref.model.path={path}", f"+inference.args.quantization={flag}")
        with pytest.raises(ConfigurationError, match=told) if told else contextlib.nullcontext():
            check_config(config)
