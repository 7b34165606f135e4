"""Write safetensors files one tensor at a time; the library's ``save_file`` needs all tensors of a file at once."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import orjson
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.files import disk_errors

MAX_FILE_BYTES = 5 * 10**9
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class UnsupportedDtype(AtroposError, TypeError):
    """A tensor has a dtype that cannot be written; the message names it."""


def write_safetensors(
    folder: Path, stem: str, like: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> int:
    """Write ``tensors``, which match ``like`` in name, shape, dtype and order; return their size in bytes.

    Files are named as in transformers: ``STEM.safetensors``, or several files of at most MAX_FILE_BYTES (a larger
    tensor has its own file) and ``STEM.safetensors.index.json``.

    Raises:
        ValueError: ``tensors`` do not match ``like``.
        UnsupportedDtype, DiskFull.
    """
    pattern = f"{stem}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(dict(like), filename_pattern=pattern, max_shard_size=MAX_FILE_BYTES)
    with disk_errors(folder / f"{stem}.safetensors"), contextlib.ExitStack() as stack:
        starts: dict[str, int] = {}
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in split.filename_to_tensors}
        for name, file in files.items():
            starts |= _write_header(file, {key: like[key] for key in split.filename_to_tensors[name]})
        arrived = iter(tensors)
        for key, expected in like.items():
            if (found := next(arrived, None)) is None:
                raise ValueError(f"the tensors end before {key}")
            name, tensor = found
            if (name, tensor.shape, tensor.dtype) != (key, expected.shape, expected.dtype):
                raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype} in the place of {key}")
            file = files[split.tensor_to_filename[key]]
            file.seek(starts[key])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        if (more := next(arrived, None)) is not None:
            raise ValueError(f"{more[0]} is one tensor too many")
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in like.values()), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
    return split.metadata["total_size"]


def _write_header(file: BinaryIO, like: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write the header of a file with the tensors of ``like``; return where in it each begins, in bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(like, key=lambda name: -like[name].element_size()):  # aligns each tensor to its element size
        tensor = like[name]
        if tensor.dtype not in _NAMES:
            raise UnsupportedDtype(f"{name} is {tensor.dtype}, and {', '.join(_NAMES.values())} are written")
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = orjson.dumps(header)
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    return {name: 8 + len(encoded) + header[name]["data_offsets"][0] for name in like}
