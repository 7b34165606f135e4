"""What several ranks that hold shards stream and save, without Ray, is the checkpoint."""

import itertools
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.workers.config import FSDPEngineConfig

from helpers.export import alone, configuration, saved_run, trained  # noqa: F401
from helpers.families import make_family
from recipe.atropos.checkpoint.export import export_checkpoint
from recipe.atropos.run.folder import RunDir
from recipe.atropos.tensors.format import CheckpointFormat

pytestmark = pytest.mark.timeout(900)


def joined(rank, world, folder):
    """Join the other ranks of this machine. Return the class of a rank's engine, which only then can be imported."""
    torch.set_num_threads(1)
    options = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=600)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, **options)
    from recipe.atropos.verl_ext.engines import CPUFSDPEngine

    class Rank(CPUFSDPEngine):
        """As verl makes it, with the model's weights on rank 0 alone, but without an optimizer."""

        def __init__(self, model, strategy, mesh, lora_rank):
            self.engine_config = FSDPEngineConfig(strategy=strategy)
            self.model_config = SimpleNamespace(lora_rank=lora_rank, lora={"merge": True})
            self.device_mesh = mesh
            self._uses_fsdp2_cpu_offload_policy = False
            with get_init_weight_context_manager(mesh=mesh)():
                module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            self.starts_on_meta = next(module.parameters()).is_meta
            self.checkpoint_format = CheckpointFormat(module)
            if lora_rank:
                settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
                module = get_peft_model(module, LoraConfig(r=lora_rank, **settings))
            self.module = self._build_fsdp_module(module)

        def streamed(self):
            with torch.no_grad():
                return [(name, tensor.clone()) for name, tensor in self.get_per_tensor_param()[0]]

    return Rank


def run_ranks(monkeypatch, function, world, *arguments):
    """Run ``function(rank, world, *arguments)`` in a process for each rank; none is left."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "recipe.atropos.verl_ext.cpu_platform")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    ranks = torch.multiprocessing.spawn(function, (world, *arguments), nprocs=world, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            process.kill()


def save_by_a_rank(rank, world, fsdp_sizes, model, folder):
    """Each layout in FOLDER/STRATEGY-FSDP_SIZE-LORA, and what a rank streams in FOLDER/NAME-RANK.pt."""
    make = joined(rank, world, folder)
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.workers.engine.fsdp.utils import create_device_mesh

    tokenizer = AutoTokenizer.from_pretrained(model)
    contents = {"save_contents": ["model"], "load_contents": ["model"]}
    for strategy, fsdp_size, lora_rank in itertools.product(("fsdp", "fsdp2"), fsdp_sizes, (0, 4)):
        name = f"{strategy}-{fsdp_size}-{lora_rank}"
        engine = make(model, strategy, create_device_mesh(world, fsdp_size), lora_rank)
        engine.checkpoint_manager = FSDPCheckpointManager(
            engine.module, processing_class=tokenizer, checkpoint_config=contents
        )
        engine.save_checkpoint(f"{folder}/{name}/checkpoints/global_step_1/actor")
        assert engine.starts_on_meta == bool(rank) or fsdp_size > 0
        torch.save(engine.streamed(), f"{folder}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "fsdp_sizes"), [(4, (-1, 2)), (3, (-1,))], ids=["four", "three"])
def test_export_of_several_ranks_is_what_they_push(tmp_path, monkeypatch, world, fsdp_sizes):
    """FSDP1 and FSDP2, in full and with an adapter; over four, and over two with replicas; over three, unevenly.

    Gathering is a collective, so all ranks go through the names of the model's checkpoint in one order.
    """
    model = make_family(tmp_path / "model", "mixtral")
    run_ranks(monkeypatch, save_by_a_rank, world, fsdp_sizes, model, tmp_path)
    base = load_file(model / "model.safetensors")
    cases = [f"{strategy}-{size}-{lora}" for strategy in ("fsdp", "fsdp2") for size in fsdp_sizes for lora in (0, 4)]
    for name in cases:
        run = RunDir(tmp_path / name)
        run.config.write_bytes(configuration(model))
        export_checkpoint(run, run.checkpoints / "global_step_1", run.model)
        streams = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(world)]
        assert all([key for key, _ in each] == [key for key, _ in streams[0]] for each in streams), name
        exported, pushed = load_file(run.model / "model.safetensors"), dict(streams[0])
        assert exported.keys() == pushed.keys() == base.keys(), name
        assert name.endswith("-4") or all(torch.equal(tensor, base[key]) for key, tensor in pushed.items()), name
        assert all(torch.equal(tensor, pushed[key]) for key, tensor in exported.items()), name
        saved = run.checkpoints / "global_step_1/actor"
        assert len(list(saved.glob(f"model_world_size_{world}_rank_*.pt"))) == world
