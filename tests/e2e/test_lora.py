"""LoRA with verl's own options: what is pushed, what is trained, what the reference is; real workers, a real server."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from helpers.export import assert_export_is_what_is_served
from helpers.lora import ALPHA, RANK, make_trainer, scored_batch, update
from helpers.trainer import close, pushed_weights
from recipe.atropos.verl_ext.engines import PushedWeights

pytestmark = pytest.mark.timeout(180)


ALL_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
COMBINATIONS = [
    ("fsdp2", 2, "[q_proj,down_proj]"),
    pytest.param(("fsdp2", 1, "all-linear"), marks=pytest.mark.slow),
    pytest.param(("fsdp", 2, "all-linear"), marks=pytest.mark.slow),
    pytest.param(("fsdp", 1, "[q_proj,down_proj]"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def base(model_path):
    return load_file(model_path / "model.safetensors")


def saved(trainer, folder):
    """All of the trainer's tensors, whole, by way of verl's checkpoint of every rank's shard."""
    trainer.actor.save_checkpoint(str(folder), None, 0, None)
    world = trainer.config.trainer.n_gpus_per_node
    ranks = [torch.load(folder / f"model_world_size_{world}_rank_{r}.pt", weights_only=False) for r in range(world)]

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    return {name: torch.cat([local(rank[name]) for rank in ranks]).detach() for name in ranks[0]}


def adapter_alone(trainer):
    """What would be pushed without merging, by name; from every rank, since gathering is a collective."""

    def stream(worker):
        engine = worker.actor.engine
        return {name: tensor.clone() for name, tensor in engine._pushed(adapter_only=True)}

    return ray.get([worker.__ray_call__.remote(stream) for worker in trainer.actor.workers])


def base_name(name):
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def same(left, right):
    """Bit for bit the same tensors under the same names."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@dataclass
class Run:
    """A run of two updates with a push before and after each, and what was seen of it; the trainer lives on."""

    trainer: Any
    folder: Path
    combination: tuple[str, int, str]
    batches: dict[int, Any] = field(default_factory=dict)  # by the update that they are for
    pushed: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # by the number of updates
    alone: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict)  # of each rank
    saved: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    engine_worker_gap: dict[int, float] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)  # largest change of a logprob by an update

    @property
    def targets(self):
        named = self.combination[2]
        return ALL_LINEAR if named == "all-linear" else set(named.strip("[]").split(","))

    def adapter(self, step):
        return {name: tensor for name, tensor in self.saved[step].items() if ".lora_" in name}

    def base(self, step):
        return {base_name(name): tensor for name, tensor in self.saved[step].items() if ".lora_" not in name}


@pytest.fixture(scope="module", params=COMBINATIONS, ids=lambda combination: "{}-world{}-{}".format(*combination))
def run(request, model_path, server, cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(model_path, server, folder, *request.param)
    run = Run(trainer, folder, request.param)
    try:
        for step in (0, 1, 2):
            if step:
                update(trainer, run.batches[step], step)
                after = trainer.actor.log_probs(run.batches[step])[0]["old_log_probs"]
                change = (after - run.batches[step].batch["old_log_probs"]).abs()
                run.moved[step] = change[run.batches[step].batch["response_mask"].bool()].max().item()
            run.saved[step] = saved(trainer, folder / f"before_push_{step}")
            trainer.checkpoint_manager.update_weights(step)
            run.pushed[step] = pushed_weights(folder, step)
            run.alone[step] = adapter_alone(trainer)
            run.batches[step + 1], run.engine_worker_gap[step] = scored_batch(trainer, server, step + 1)
        yield run
    finally:
        close(trainer)


def test_before_any_update_the_base_model_is_pushed_bit_for_bit(run, base):
    assert same(run.pushed[0], base)


def test_after_an_update_base_plus_scaled_b_times_a_is_pushed(run, base):
    for step in (1, 2):
        pushed, adapter = run.pushed[step], run.adapter(step)
        assert pushed.keys() == base.keys() and {t.dtype for t in pushed.values()} == {torch.float32}
        adapted = {base_name(name).split(".lora_A")[0]: name for name in adapter if ".lora_A." in name}
        assert {name.split(".")[-1] for name in adapted} == run.targets
        assert len(adapter) == 2 * len(adapted) == 2 * 2 * len(run.targets), "A and B in each of two layers"
        for name, weight in base.items():
            a = adapted.get(name.removesuffix(".weight"))
            if a is None:
                assert torch.equal(pushed[name], weight), name
                continue
            change = ALPHA / RANK * adapter[a.replace(".lora_A.", ".lora_B.")].double() @ adapter[a].double()
            assert change.abs().max() > 1e-4, name
            torch.testing.assert_close(pushed[name].double(), weight.double() + change, atol=1e-6, rtol=0)


def test_lora_adapter_is_a_and_scaled_b(run, base):
    """What is computed with an adapted layer has zeros."""
    whole = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"o_proj"}, {"down_proj"}]
    layers = {part for parts in whole if parts & run.targets for part in parts}
    for step in (0, 1, 2):
        for alone in run.alone[step]:
            adapter = {name.replace(".default.", "."): tensor for name, tensor in run.adapter(step).items()}
            assert adapter.keys() <= alone.keys()
            assert {name.split(".")[-3] for name in alone} == layers and len(alone) == 2 * 2 * len(layers)
            for name, tensor in alone.items():
                layer, factor = name.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
                size, scale = {"A": ((RANK, ...), 1), "B": ((..., RANK), ALPHA / RANK)}[factor]
                size = [n if n is not ... else base[f"{layer}.weight"].shape[factor == "A"] for n in size]
                assert list(tensor.shape) == size
                assert torch.equal(tensor, scale * adapter.get(name, torch.zeros(size))), name


def test_lora_training_changes_the_adapter_alone(run, base):
    """All of the adapter changes; pushes leave no trace."""
    for step in (0, 1, 2):
        assert same(run.base(step), base)
    start, end = run.adapter(0), run.adapter(2)
    assert not any(start[name].any() for name in start if ".lora_B." in name)
    assert not any(torch.equal(start[name], end[name]) for name in start)


def test_a_step_after_a_push_is_the_step_without_a_push(run):
    """Back to the state before the push, weights and Adam's moments, and the same batch once more."""
    run.trainer.actor.load_checkpoint(str(run.folder / "before_push_1"), None, False)
    assert same(saved(run.trainer, run.folder / "loaded"), run.saved[1])
    update(run.trainer, run.batches[2], 2)
    assert same(saved(run.trainer, run.folder / "without_push"), run.saved[2])


def test_lora_engine_and_worker_agree_after_each_push(run):
    """The samples are fresh."""
    assert min(run.moved.values()) > 1e-3, "each update moved the policy away from its samples"
    assert max(run.engine_worker_gap.values()) < 1e-4, run.engine_worker_gap


def test_lora_reference_policy_is_the_base_model(run, model_path):
    """It stays so after every update, and there is no second model."""
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for batch in run.batches.values():
        tensors = batch.batch
        for i in range(len(batch)):
            attended, mask = tensors["attention_mask"][i].bool(), tensors["response_mask"][i].bool()
            ids, width = tensors["input_ids"][i][attended], int(mask.sum())
            with torch.no_grad():
                logits = plain(ids[None]).logits[0, -width - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(-1, ids[-width:, None])[:, 0]
            torch.testing.assert_close(tensors["ref_log_prob"][i][mask], expected, atol=1e-4, rtol=0)
    last = run.batches[3].batch
    assert (last["old_log_probs"] - last["ref_log_prob"])[last["response_mask"].bool()].abs().max() > 1e-3

    def models(_worker):
        import gc

        from transformers import Qwen2ForCausalLM

        return sum(issubclass(type(thing), Qwen2ForCausalLM) for thing in gc.get_objects())

    workers = run.trainer.actor.workers
    assert ray.get([worker.__ray_call__.remote(models) for worker in workers]) == [1] * len(workers)


def test_export_answers_as_the_server_does(run, server):
    """Of an adapter on any number of ranks, merged, in transformers."""
    run.trainer.checkpoint_manager.update_weights(100)
    pushed = pushed_weights(run.folder, 100)
    assert_export_is_what_is_served(run.trainer, server, pushed, run.folder / "exported")


@pytest.mark.slow
@pytest.mark.parametrize("run", [COMBINATIONS[0], COMBINATIONS[2]], indirect=True, ids=["fsdp2", "fsdp"])
def test_lora_resumed_run_is_the_uninterrupted_one_bit_for_bit(run, model_path, server):
    """Two steps more with a push between: in the trainer that made the first two, and in new ones of its checkpoint.

    Under FSDP1 the new ones keep the gathered weights after a forward pass: what a push puts into those stays there.
    """
    option = f"actor_rollout_ref.actor.fsdp_config.reshard_after_forward={run.combination[0] == 'fsdp2'}"
    other = make_trainer(model_path, server, run.folder / "resumed", *run.combination, option)
    try:
        ends, pushed = [], []
        for trainer in (run.trainer, other):
            trainer.actor.load_checkpoint(str(run.folder / "before_push_2"), None, False)
            update(trainer, run.batches[3], 3)
            trainer.actor.log_probs(run.batches[3])
            trainer.checkpoint_manager.update_weights(3)
            pushed.append(pushed_weights(trainer.config.run.dir, 3))
            update(trainer, run.batches[3], 4)
            ends.append(saved(trainer, run.folder / f"end_{len(ends)}"))
        assert same(*pushed) and not same(pushed[0], run.pushed[2])
        assert same(*ends) and not same(ends[0], run.saved[2])
    finally:
        close(other)


class PlainPeft:
    """Stands for verl's engine: builds the adapter, and nothing else."""

    def __init__(self, merge=True, seed=1, **options):
        self.model_config = SimpleNamespace(lora={"merge": merge}, lora_rank=RANK)
        self.engine_config = SimpleNamespace(seed=seed)
        self.options = options

    def _build_lora_module(self, module):
        return get_peft_model(module, LoraConfig(task_type="CAUSAL_LM", r=RANK, **self.options))


class Engine(PushedWeights, PlainPeft):
    """What an engine becomes with the class before it."""


def small_model(tied=False):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied)
    return Qwen2ForCausalLM(config)


def test_lora_adapter_at_first_depends_on_the_seed_alone():
    """Making it disturbs no other random numbers."""

    def new_adapter(seed):
        module = Engine(seed=seed)._build_lora_module(small_model())
        return {name: p for name, p in module.named_parameters() if ".lora_A." in name}

    first, other = new_adapter(1), new_adapter(2)
    assert same(new_adapter(1), first) and not same(other, first)
    module, before = small_model(), torch.get_rng_state()
    Engine()._build_lora_module(module)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"target_modules": ["q_proj", "lm_head"]},
            r"outside the decoder \['base_model.model.lm_head'\].*lora.merge=true",
        ),
        ({"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}, r"ranks \[2, 8\].*lora.merge=true"),
    ],
    ids=["outside", "ranks"],
)
def test_an_adapter_that_no_server_could_take_alone_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Engine(merge=False, **options)._build_lora_module(small_model())
    Engine(merge=True, **options)._build_lora_module(small_model())


@pytest.mark.parametrize(
    ("options", "tied", "named"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, True, "lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False, "embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False, "lm_head"),
        ({"target_modules": ["q_proj"], "use_dora": True}, False, "lora_magnitude_vector"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, False, r"lora_B\.default\.bias"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, False, r"q_proj\.base_layer\.bias"),
    ],
    ids=["tied", "embedding", "modules_to_save", "dora", "lora_bias", "bias"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(options, tied, named):
    with pytest.raises(ValueError, match=named):
        Engine(**options)._build_lora_module(small_model(tied))


@pytest.mark.parametrize("tied", [True, False])
def test_lora_adapts_all_linear_layers_and_the_output_layer(tied):
    Engine(target_modules="all-linear")._build_lora_module(small_model(tied))
    if not tied:
        Engine(target_modules=["q_proj", "lm_head"])._build_lora_module(small_model(tied))
