"""Which tensors an export has, and of what type: ranks' parts in order, float32 where the model keeps it, tied ones."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from recipe.atropos.checkpoint import export, safetensors_writer
from recipe.atropos.checkpoint.safetensors_writer import write_safetensors
from recipe.atropos.checkpoint.shards import Shards
from recipe.atropos.errors import AtroposError


def test_shards_survivors_are_joined_in_the_order_of_ranks(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    mesh = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("fsdp",), _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    for rank, part in enumerate(whole.chunk(3)):
        state = {"weight": DTensor(part.clone(), spec, requires_grad=False)}
        torch.save(state, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    assert torch.equal(Shards(tmp_path)["weight"], whole)


def test_export_survivors_stay_float32_where_the_model_keeps_it():
    """Router biases, for example: rounded, they would choose other experts."""
    source = SimpleNamespace(model=SimpleNamespace(_keep_in_fp32_modules_strict={"correction_bias"}))
    kept = export._Checkpoint._dtype_of(source, "layers.0.mlp.gate.correction_bias", torch.bfloat16)
    rounded = export._Checkpoint._dtype_of(source, "layers.0.mlp.gate.weight", torch.bfloat16)
    assert (kept, rounded) == (None, torch.bfloat16)


def test_export_survivors_that_are_tied_have_one_value():
    tied, like = {"lm_head.weight": "embed.weight"}, {"embed.weight": torch.empty(2, 2, device="meta")}

    def written(head):
        tensors = {"embed.weight": torch.ones(2, 2), "lm_head.weight": head}
        return list(export._without_tied(iter(tensors.items()), like, tied))

    [(name, _)] = written(torch.ones(2, 2))
    assert name == "embed.weight"
    with pytest.raises(AtroposError, match="lm_head.weight and embed.weight are one tensor"):
        written(torch.zeros(2, 2))


def test_export_of_packed_experts_has_no_file_for_each(tmp_path, monkeypatch):
    """They are views of one tensor, whose whole size is not theirs."""
    like, packed = torch.ones(8, 4, 4, device="meta"), torch.ones(8, 4, 4)
    monkeypatch.setattr(safetensors_writer, "MAX_FILE_BYTES", packed.nbytes)
    experts, expected = ({f"experts.{i}.weight": each[i] for i in range(8)} for each in (packed, like))
    assert write_safetensors(tmp_path, "model", expected, experts.items()) == packed.nbytes
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
