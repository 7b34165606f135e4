"""Write safetensors files one tensor at a time; the library's ``save_file`` needs all tensors of a file at once."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson
import torch
from huggingface_hub import split_state_dict_into_shards_factory

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.files import sync

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


def write_safetensors(
    folder: Path, stem: str, like: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> int:
    """Write ``tensors``, which match ``like`` in name, shape, dtype and order; return their size in bytes.

    Files are named as in transformers: ``STEM.safetensors``, or several files of at most MAX_FILE_BYTES (a larger
    tensor has its own file) and ``STEM.safetensors.index.json``.

    Raises:
        ValueError: ``tensors`` do not match ``like``.
        AtroposError: a tensor has a dtype that cannot be written.
    """
    split = split_state_dict_into_shards_factory(
        like,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    places: dict[str, int] = {}
    for name, keys in split.filename_to_tensors.items():
        places |= _write_header(folder / name, {key: like[key] for key in keys})
    for (key, expected), (name, tensor) in zip(like.items(), tensors, strict=True):
        if (name, tensor.shape, tensor.dtype) != (key, expected.shape, expected.dtype):
            raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype} in the place of {key}")
        with (folder / split.tensor_to_filename[key]).open("r+b") as file:
            file.seek(places[key])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    for name in split.filename_to_tensors:
        sync(folder / name)
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in like.values()), **split.metadata}
        index = orjson.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, option=orjson.OPT_INDENT_2)
        (folder / f"{stem}.safetensors.index.json").write_bytes(index)
    return split.metadata["total_size"]


def _write_header(path: Path, like: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Begin a file of tensors such as ``like``; return at which byte of it each begins."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(like, key=lambda name: -like[name].element_size()):  # aligns each tensor to its element size
        tensor, begin = like[name], end
        if tensor.dtype not in _NAMES:
            raise AtroposError(f"{name} is {tensor.dtype}, and {', '.join(_NAMES.values())} are written")
        end += tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = orjson.dumps(header)
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    return {name: 8 + len(encoded) + header[name]["data_offsets"][0] for name in like}
