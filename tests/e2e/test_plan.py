"""The memory that is planned, against what torch and FSDP really hold."""

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from helpers.export import alone  # noqa: F401
from helpers.qwen import PARAMETERS, write_qwen_config
from helpers.sglang import make_tiny_model
from recipe.atropos.commands import plan
from recipe.atropos.commands.plan import GIB, activations, decoder_layers, plan_memory, show
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.compose import presets as all_presets
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils import debug
from recipe.atropos.verl_ext.device import PrecisionType
from recipe.atropos.verl_ext.driver import omega_conf_to_dataclass

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Folders with Qwen2.5's configurations alone."""

    def folder(size):
        return write_qwen_config(tmp_path_factory.mktemp(f"qwen{size}"), size)

    return folder


def planned(path, *overrides, memory=80):
    options = [f"actor_rollout_ref.model.path={path}", "trainer.device=cuda", "inference.colocated=false"]
    return plan_memory(load_config([*options, *overrides]), memory * GIB)


@pytest.mark.slow
def test_plan_of_published_models_has_their_parameters(qwen):
    for size, parameters in PARAMETERS.items():
        for ranks in (1, 4):
            plan = planned(qwen(size), f"trainer.n_gpus_per_node={ranks}")
            parts = plan.trainer.parts
            assert parts["parameters"] == parts["gradients"] == 4 * parameters // ranks
            assert parts["optimizer"] == 8 * parameters // ranks and parts["reference"] == 0
            assert plan.server.weights == 2 * parameters


def test_plan_of_replicas_is_of_each_models_own_ranks(qwen):
    """``fsdp_size`` of the actor and of the reference; verl takes all ranks where it is not below."""
    options = ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.n_gpus_per_node=4"]
    for sizes, ranks in (((8, -1), [4, 4]), ((2, 8), [2, 4]), ((-1, 1), [4, 1])):
        given = zip(("actor", "ref"), sizes, strict=True)
        own = [f"actor_rollout_ref.{role}.fsdp_config.fsdp_size={size}" for role, size in given]
        parts = planned(qwen("7b"), *options, *own).trainer.parts
        assert [parts[name] for name in ("parameters", "reference")] == [4 * PARAMETERS["7b"] // n for n in ranks]


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_plan_of_the_reference_has_the_dtype_of_verl(qwen, dtype):
    """verl loads the weights of either model in its engine's ``model_dtype``, which is float32 in both."""
    kl, ranks = "actor_rollout_ref.actor.use_kl_loss=true", "trainer.n_gpus_per_node=4"
    options = [kl, ranks] + [f"actor_rollout_ref.ref.fsdp_config.model_dtype={dtype}"] * bool(dtype)
    models = load_config([f"actor_rollout_ref.model.path={qwen('7b')}", *options]).actor_rollout_ref
    actor, reference = (omega_conf_to_dataclass(part.fsdp_config) for part in (models.actor, models.ref))
    sizes = [PrecisionType.to_dtype(engine.model_dtype).itemsize for engine in (actor, reference)]
    assert sizes == [4, 2 if dtype else 4] and (actor.forward_only, reference.forward_only) == (False, True)
    found = planned(qwen("7b"), *options).trainer
    assert [found.parts["parameters"], found.parts["reference"]] == [size * PARAMETERS["7b"] // 4 for size in sizes]


def test_plan_of_a_micro_batch_is_by_attention(qwen, monkeypatch):
    smaller = planned(qwen("1.5b")).trainer
    monkeypatch.setattr(plan, "flash_is_installed", lambda: True)
    larger = planned(qwen("1.5b")).trainer
    assert larger.parts["activations"] == pytest.approx(4 * smaller.parts["activations"], rel=0.01)
    assert larger == planned(qwen("1.5b"), TOKENS).trainer


def test_plan_of_parameters_and_moments_is_what_fsdp_holds(tmp_path, alone):  # noqa: F811
    """Of one rank, after a step; float32."""
    folder = make_tiny_model(tmp_path / "model", seed=0, hidden_size=256, tie_word_embeddings=True)
    plan = planned(folder).trainer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in [*decoder_layers(model), model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(40)[None]).logits.sum().backward()
    optimizer.step()

    def held(tensors):
        return sum(tensor.to_local().nbytes for tensor in tensors)

    assert plan.parts["parameters"] == pytest.approx(held(model.parameters()), rel=0.02)
    assert plan.parts["gradients"] == pytest.approx(held(parameter.grad for parameter in model.parameters()), rel=0.02)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert plan.parts["optimizer"] == pytest.approx(held(moments), rel=0.02)


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral", "qwen3"])
def test_plan_of_activations_is_what_a_forward_pass_keeps(tmp_path, model_type):
    """In bfloat16, with torch's own attention for a CPU, which keeps what FlashAttention does."""
    tokens, kept, seen = 512, 0, set()
    folder = make_tiny_model(tmp_path / "model", 0, model_type, hidden_size=256, intermediate_size=1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def count(tensor):
        nonlocal kept
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters | seen:
            seen.add(place)
            kept += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = model.base_model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).last_hidden_state
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert hidden.requires_grad and activations(meta, tokens, checkpointed=False) == pytest.approx(kept, rel=0.25)
    layers = len(decoder_layers(model))
    inputs = layers * tokens * model.config.hidden_size * 2
    with_checkpoints = activations(meta, tokens, checkpointed=True)
    assert with_checkpoints == pytest.approx(inputs + kept / layers, rel=0.25)
    assert model.config._attn_implementation == "sdpa"


def test_plan_says_what_does_not_fit_and_what_to_change(qwen):
    big, small = qwen("7b"), qwen("0.5b")
    [problem] = planned(big).problems
    assert "an update takes" in problem and "most of it optimizer" in problem and "LoRA" in problem
    assert not planned(big, "trainer.n_gpus_per_node=4").problems
    lora = ["actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=all-linear"]
    adapted = planned(big, *lora)
    assert not adapted.problems and adapted.trainer.parts["optimizer"] < GIB
    without = planned(big, *lora, "actor_rollout_ref.model.exclude_modules=[gate_proj,up_proj,down_proj]")
    assert without.trainer.parts["optimizer"] < 0.7 * adapted.trainer.parts["optimizer"]
    kept = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    [problem] = planned(qwen("1.5b"), kept, TOKENS, memory=60).problems
    assert "most of it activations" in problem and "enable_gradient_checkpointing=true" in problem
    [problem] = planned(small, TOKENS, memory=16).problems
    assert "most of it logits" in problem and "ppo_max_token_len_per_gpu" in problem
    shared = planned(qwen("1.5b"), "inference.colocated=true", "inference.mem_fraction_static=0.8")
    assert "while the colocated servers generate" in shared.problems[0] and "param_offload=true" in shared.problems[0]
    assert "KV cache has room for 0 tokens" in planned(big, "trainer.n_gpus_per_node=8", memory=16).problems[-1]


@pytest.mark.slow
def test_plan_counts_the_buckets_that_a_push_keeps(qwen):
    """The distributed transport keeps them; for a server of several ranks each bucket of a tensor push is another."""
    ranks, shared = "trainer.n_gpus_per_node=4", "inference.colocated=true"
    apart, together = planned(qwen("7b"), ranks).trainer, planned(qwen("7b"), ranks, shared).trainer
    assert apart.parts["buckets"] == together.parts["buckets"] == 4 * GIB and not together.buckets_stay
    assert apart.peak - together.peak == 4 * GIB
    split = planned(qwen("7b"), ranks, shared, "inference.args.tp_size=2").trainer
    assert split.parts["buckets"] == 2 * PARAMETERS["7b"]
    adapter = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=false"]
    assert planned(qwen("7b"), ranks, "inference.args.tp_size=2", *adapter).trainer.parts["buckets"] == 0
    elsewhere = load_config([f"actor_rollout_ref.model.path={qwen('7b')}", ranks, "trainer.device=auto"])
    assert plan_memory(elsewhere, 80 * GIB).trainer.buckets_stay, "no GPU here: each is taken to have its own"


def test_plan_separates_servers_that_the_launcher_separates(qwen, monkeypatch):
    """On the head of a cluster, whose own GPUs are too few for both."""
    monkeypatch.setattr("recipe.atropos.commands.plan.visible_gpus", lambda: 8)
    for overrides, colocated in (([], True), (["trainer.nnodes=2"], False), (["inference.placement=ray"], False)):
        given = [f"actor_rollout_ref.model.path={qwen('7b')}", "trainer.n_gpus_per_node=8", *overrides]
        assert plan_memory(load_config(given), 80 * GIB).colocated is colocated


SHARED, APART = ["inference.colocated=true"], ["inference.colocated=false"]


@pytest.mark.parametrize(
    ("preset", "size", "memory", "options"),
    [
        ("qwen2.5-0.5b-1gpu", "0.5b", 24, SHARED),
        ("qwen2.5-1.5b-lora-1gpu", "1.5b", 24, SHARED),
        ("qwen2.5-7b-8gpu", "7b", 80, []),
        ("qwen3-30b-a3b-32gpu", "30b-a3b", 80, ["ray_kwargs.ray_init.address=head:6379"]),
        ("gsm8k", "1.5b", 80, SHARED),
        ("gsm8k-lora", "1.5b", 80, SHARED),
        ("golden", "0.5b", 24, SHARED),
        ("golden", "0.5b", 24, APART),
        ("golden", "0.5b", 24, ["--gpus", "2", *SHARED]),
    ],
)
def test_plan_of_each_preset_for_gpus_fits(qwen, capsys, preset, size, memory, options):
    assert preset in all_presets()
    given = ["plan", "--preset", preset, "--model", str(qwen(size)), "--gpu-memory", str(memory), *options]
    assert debug.main(given) == 0, capsys.readouterr().out
    assert "fits" in capsys.readouterr().out


def test_plan_needs_a_model_and_a_gpu_or_its_size(qwen, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "gpu_memory", lambda: None)
    with pytest.raises(ConfigurationError, match="there is no GPU here: give --gpu-memory GIB"):
        plan_memory(load_config([f"actor_rollout_ref.model.path={qwen('0.5b')}"]))
    with pytest.raises(ConfigurationError, match="no model there"):
        planned(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="its configuration cannot be read"):
        planned(tmp_path)
    with pytest.raises(ConfigurationError, match="the hub"):  # without transformers' minute of retries
        planned("no-such-organization-of-the-hub/no-such-model")
    adapter = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_prj]"]
    with pytest.raises(ConfigurationError, match=r"target_modules=\['q_prj'\]: .*not found"):
        planned(qwen("0.5b"), *adapter)
    show(planned(qwen("0.5b")), Console(quiet=True))
