"""Write safetensors files one tensor at a time; the library's ``save_file`` needs all tensors of a file at once."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import orjson
import torch

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
    files, arrived = _divide(like), iter(tensors)
    names = [f"{stem}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = [f"{stem}.safetensors"] if len(files) == 1 else names
    for name, expected in zip(names, files, strict=True):
        with disk_errors(folder / name):
            _write_file(folder / name, {key: like[key] for key in expected}, arrived)
    if (more := next(arrived, None)) is not None:
        raise ValueError(f"{more[0]} is one tensor too many")
    size = sum(tensor.nbytes for tensor in like.values())
    if len(files) > 1:
        where = {key: name for name, expected in zip(names, files, strict=True) for key in expected}
        parameters = sum(tensor.numel() for tensor in like.values())
        index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
    return size


def _divide(like: Mapping[str, torch.Tensor]) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in like.items():
        if files[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    return files


def _write_file(path: Path, like: Mapping[str, torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
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
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for key, expected in like.items():
            name, tensor = next(tensors, ("nothing", expected))
            if (name, tensor.shape, tensor.dtype) != (key, expected.shape, expected.dtype):
                raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype} in the place of {key}")
            file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())
