"""Read full tensors from a checkpoint of verl's FSDP engines, of any number of ranks, one at a time.

The files are memory-mapped, so data is read only on access. No process group or GPU is needed.

Guarantees:

- no code that a checkpoint holds is run: only tensors and plain values are unpickled, by verl's loads too
  (``tensors_only``).
"""

import contextlib
import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor  # importing it also lets torch.load create them

from recipe.atropos.checkpoint.store import verify
from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.files import write_atomic


class ShardsError(AtroposError, RuntimeError):
    """The files of a checkpoint do not form a model; the message names the folder."""


class Shards(Mapping[str, torch.Tensor]):
    """Full CPU tensors of the checkpoint ``folder``, by their names in the state dict of the engine's module.

    FSDP1 and FSDP2, also with replicas (``fsdp_size``): verl saves DTensors, or plain tensors if they are not sharded.
    ``like`` has the same names, with tensors on the meta device.

    Raises:
        ShardsError: a rank's file is missing, or holds something other than tensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._ranks = [load_tensors(path) for path in _files(folder)]
        self.like = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self._ranks[0].items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, name: str) -> torch.Tensor:
        first = self._ranks[0][name]
        if not isinstance(first, DTensor):
            return first  # every rank has the full tensor
        sharded = [placement.is_shard() for placement in first.placements]
        # Ranks of the first replica; the mesh holds rank numbers.
        ranks = first.device_mesh.mesh[tuple(slice(None) if shard else 0 for shard in sharded)].flatten().tolist()
        parts = [self._ranks[rank][name]._local_tensor for rank in ranks]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, first.placements[sharded.index(True)].dim)
        if whole.shape != first.shape:
            raise ShardsError(f"{self.folder}: the ranks' parts of {name} make {list(whole.shape)}, not {first.shape}")
        return whole


def _files(folder: Path) -> list[Path]:
    """Return the files of ranks 0, 1, ..."""
    pattern = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
    found = {tuple(map(int, match.groups())) for path in folder.glob("*.pt") if (match := pattern.fullmatch(path.name))}
    worlds = {world for world, _ in found}
    if len(worlds) != 1:
        raise ShardsError(
            f"{folder} holds {'models of several numbers of ranks' if worlds else 'no model'}; "
            "actor_rollout_ref.actor.checkpoint.save_contents must hold model"
        )
    [world] = worlds
    if missing := sorted(set(range(world)) - {rank for _, rank in found}):
        raise ShardsError(
            f"{folder} holds {len(found)} of {world} ranks' files, rank {missing[0]} is missing: copy those of the "
            "other machines into it, or keep runs on a file system that all share"
        )
    return [folder / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)]


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a small state with ``torch.save``, as a whole; raise DiskFull if there is no room for it."""
    content = io.BytesIO()
    torch.save(state, content)
    write_atomic(path, content.getvalue())


def load_verified(checkpoint: Path, name: str) -> dict[str, Any]:
    """Return what ``torch.save`` wrote to a file of a checkpoint. Raises as ``load_tensors`` and ``store.verify``."""
    verify(checkpoint, name)
    return load_tensors(checkpoint / name)


def load_tensors(path: Path) -> dict[str, Any]:
    """Return what ``torch.save`` wrote, memory-mapped; raise ShardsError if that is not tensors and plain values."""
    with tensors_only(path):
        try:
            return torch.load(path, map_location="cpu", mmap=True)
        except RuntimeError as error:  # not an archive, or not whole
            raise ShardsError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def tensors_only(path: Path) -> Iterator[None]:
    """While the block runs, ``torch.load`` runs no code that a file holds, even with ``weights_only=False``.

    Raises:
        ShardsError: the block loads a file that holds something else; names ``path``.
    """
    # numpy's part of the random state that verl saves
    numpy_state = [np.ndarray, np.dtype, np.dtypes.UInt32DType, np._core.multiarray._reconstruct]
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(numpy_state):
            yield
    except (pickle.UnpicklingError, EOFError) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds {code[1]}, and would run code" if code else str(error)
        raise ShardsError(f"{path} cannot be read: {why}") from error
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
