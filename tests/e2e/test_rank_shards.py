"""What several ranks that hold shards stream and save, without Ray, is the checkpoint."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.workers.config import FSDPEngineConfig

from helpers.export import alone, configuration, saved_run, trained  # noqa: F401
from helpers.families import make_family
from recipe.atropos.checkpoint.export import export_checkpoint
from recipe.atropos.run.folder import RunDir
from recipe.atropos.tensors.format import CheckpointFormat

pytestmark = pytest.mark.timeout(900)


def stream_of_a_rank(rank, world, model, folder):
    """What a rank streams, for each strategy, in full and with a merged adapter; as FOLDER/RANK-STRATEGY-LORA."""
    torch.set_num_threads(1)
    options = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=600)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, **options)
    from recipe.atropos.verl_ext.engines import CPUFSDPEngine

    class Rank(CPUFSDPEngine):
        """As verl makes it, with the model's weights on rank 0 alone, but without an optimizer."""

        def __init__(self, strategy, lora_rank):
            self.engine_config = FSDPEngineConfig(strategy=strategy)
            self.model_config = SimpleNamespace(lora_rank=lora_rank, lora={"merge": True})
            self.device_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=["fsdp"])
            self._uses_fsdp2_cpu_offload_policy = False
            with get_init_weight_context_manager(mesh=self.device_mesh)():
                module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            assert next(module.parameters()).is_meta == bool(rank)
            self.checkpoint_format = CheckpointFormat(module)
            if lora_rank:
                module = get_peft_model(module, LoraConfig(r=lora_rank, target_modules=["q_proj", "v_proj"]))
            self.module = self._build_fsdp_module(module)

    for strategy in ("fsdp", "fsdp2"):
        for lora_rank in (0, 4):
            with torch.no_grad():
                pairs = [(name, tensor.clone()) for name, tensor in Rank(strategy, lora_rank).get_per_tensor_param()[0]]
            torch.save(pairs, f"{folder}/{rank}-{strategy}-{lora_rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_names_of_every_rank_are_those_of_the_checkpoint(tmp_path, monkeypatch):
    """FSDP1 and FSDP2 over two ranks: gathering is a collective, so both go through the same names in one order."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "recipe.atropos.verl_ext.cpu_platform")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    model = make_family(tmp_path / "model", "mixtral")
    ranks = torch.multiprocessing.spawn(stream_of_a_rank, (2, model, tmp_path), nprocs=2, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            process.kill()
    saved = load_file(model / "model.safetensors")
    for streamed in (f"{strategy}-{lora_rank}" for strategy in ("fsdp", "fsdp2") for lora_rank in (0, 4)):
        first, second = (torch.load(tmp_path / f"{rank}-{streamed}") for rank in (0, 1))
        assert [name for name, _ in first] == [name for name, _ in second]
        assert dict(first).keys() == saved.keys() and all(torch.equal(tensor, saved[name]) for name, tensor in first)


def save_by_a_rank(rank, world, fsdp_sizes, model, folder):
    """Each layout in FOLDER/STRATEGY-FSDP_SIZE-LORA, and by rank 0 what it streams, as a dict in FOLDER/NAME.pt."""
    torch.set_num_threads(1)
    options = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=600)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, **options)
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.workers.engine.fsdp.utils import create_device_mesh

    from recipe.atropos.verl_ext.engines import CPUFSDPEngine

    class Rank(CPUFSDPEngine):
        """As verl makes it, with the model's weights on rank 0 alone, but without an optimizer."""

        def __init__(self, strategy, fsdp_size, lora_rank):
            self.engine_config = FSDPEngineConfig(strategy=strategy)
            self.model_config = SimpleNamespace(lora_rank=lora_rank, lora={"merge": True})
            self.device_mesh = create_device_mesh(world, fsdp_size)
            self._uses_fsdp2_cpu_offload_policy = False
            with get_init_weight_context_manager(mesh=self.device_mesh)():
                module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            self.checkpoint_format = CheckpointFormat(module)
            if lora_rank:
                settings = LoraConfig(r=lora_rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
                module = get_peft_model(module, settings)
            self.module = self._build_fsdp_module(module)
            contents = {"save_contents": ["model"], "load_contents": ["model"]}
            tokenizer = AutoTokenizer.from_pretrained(model)
            self.checkpoint_manager = FSDPCheckpointManager(
                self.module, processing_class=tokenizer, checkpoint_config=contents
            )

    for strategy in ("fsdp", "fsdp2"):
        for fsdp_size in fsdp_sizes:
            for lora_rank in (0, 4):
                engine, name = Rank(strategy, fsdp_size, lora_rank), f"{strategy}-{fsdp_size}-{lora_rank}"
                engine.save_checkpoint(f"{folder}/{name}/checkpoints/global_step_1/actor")
                with torch.no_grad():
                    weights = {key: tensor.clone() for key, tensor in engine.get_per_tensor_param()[0]}
                if rank == 0:
                    torch.save(weights, f"{folder}/{name}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "fsdp_sizes"), [(4, (-1, 2)), (3, (-1,))], ids=["four", "three"])
def test_export_of_several_ranks_is_what_they_push(tmp_path, monkeypatch, world, fsdp_sizes):
    """FSDP1 and FSDP2, in full and with an adapter; over four, and over two with replicas; over three, unevenly."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "recipe.atropos.verl_ext.cpu_platform")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    model = make_family(tmp_path / "model", "mixtral")
    ranks = torch.multiprocessing.spawn(save_by_a_rank, (world, fsdp_sizes, model, tmp_path), nprocs=world, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:  # none is left
            process.kill()
    cases = [f"{strategy}-{size}-{lora}" for strategy in ("fsdp", "fsdp2") for size in fsdp_sizes for lora in (0, 4)]
    for name in cases:
        run = RunDir(tmp_path / name)
        run.config.write_bytes(configuration(model))
        export_checkpoint(run, run.checkpoints / "global_step_1", run.model)
        exported, pushed = load_file(run.model / "model.safetensors"), torch.load(tmp_path / f"{name}.pt")
        assert exported.keys() == pushed.keys(), name
        assert all(torch.equal(tensor, pushed[key]) for key, tensor in exported.items()), name
        saved = run.checkpoints / "global_step_1/actor"
        assert len(list(saved.glob(f"model_world_size_{world}_rank_*.pt"))) == world
