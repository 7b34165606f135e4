"""The packed format of groups, for client, server and store: typed buffers behind a small JSON header.

Guarantees:

- Lossless: ``to_json(pack(columns))`` has the values that were packed. Floats are stored as float32 only where that
  changes none of them, integers in the narrowest type that holds them.
- ``unpack`` and ``split`` copy no token: their arrays are views of the bytes they were given.
- A record depends on its columns only, so the same group always has the same bytes.

A record is ``ATG1``, the header's length (uint32), the header and the buffers, each padded to 8 bytes; all numbers are
little-endian. The header names each buffer's dtype, one of ``_STORED``; its length follows from ``sequences`` or
``tokens``. A message of several records is ``ATB1``, their number (uint32), their lengths (uint64 each) and they.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import orjson

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import IGNORED

PACKED = "application/x-atropos-groups"  # content type of a message of records
BATCH_HEADER = "Atropos-Batch"  # number of the batch in a packed answer
EPOCH_HEADER = "Atropos-Epoch"  # of a trainer's registration, in its later requests
TICKET_HEADER = "Atropos-Ticket"  # that a post of groups closes
KEY_HEADER = "Atropos-Key"  # idempotency key of a post

FLOATS = ("inference_logprobs", "advantages", "ref_logprobs")  # one value per token
RAW = (
    *("messages", "generation_params", "overrides", "group_overrides", "images"),
    *("distill_token_ids", "distill_logprobs"),
)
KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
)  # in the order of atroposlib's ScoredData
_DTYPES = {"i1": np.int8, "i4": np.int32, "i8": np.int64, "f4": np.float32, "f8": np.float64}
_STORED = {
    **{"lengths": ("i4",), "tokens": ("i4", "i8"), "masks": ("bits", "i1", "i4", "i8"), "scores": ("f8",)},
    **dict.fromkeys(FLOATS, ("f4", "f8")),
}  # the dtypes of each buffer, narrowest first
_GROUP, _MESSAGE = b"ATG1", b"ATB1"
_PREFIX = struct.Struct("<4sI")
_PADDING = tuple(bytes(n) for n in range(8))
MAX_GROUPS = 1 << 16  # in one message


class Header(msgspec.Struct):
    """What a record holds. ``buffers`` maps names to dtype codes in stored order; ``raw`` has other fields as JSON."""

    sequences: int
    tokens: int
    env_id: int | None
    buffers: dict[str, str]
    raw: dict[str, msgspec.Raw]


_decode_header = msgspec.json.Decoder(Header).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class Columns:
    """A group as flat arrays. ``tokens``, ``masks`` and ``floats`` are concatenated over sequences of ``lengths``."""

    lengths: np.ndarray  # (sequences,) int64
    tokens: np.ndarray  # (sum of lengths,) int64
    masks: np.ndarray  # (sum of lengths,) int64
    scores: np.ndarray  # (sequences,) float64
    floats: dict[str, np.ndarray] = field(default_factory=dict)  # each (sum of lengths,) float64
    raw: dict[str, bytes] = field(default_factory=dict)  # other fields, as JSON
    env_id: int | None = None


def pack(columns: Columns) -> bytes:
    """Return the record of a group."""
    masks: tuple[str, np.ndarray] = ("bits", np.packbits(columns.masks != IGNORED))
    if not ((columns.masks == IGNORED) | (columns.masks == columns.tokens)).all():
        masks = _narrow(columns.masks, _STORED["masks"][1:])
    buffers = {
        "lengths": ("i4", columns.lengths.astype(np.int32)),
        "tokens": _narrow(columns.tokens, _STORED["tokens"]),
        "masks": masks,
        "scores": ("f8", columns.scores.astype(np.float64, copy=False)),
    } | {name: _narrow(columns.floats[name], _STORED[name]) for name in FLOATS if name in columns.floats}
    header = _encode(
        Header(
            len(columns.lengths),
            len(columns.tokens),
            columns.env_id,
            {name: dtype for name, (dtype, _) in buffers.items()},
            {name: msgspec.Raw(columns.raw[name]) for name in (*FLOATS, *RAW) if name in columns.raw},
        )
    )
    parts = [_PREFIX.pack(_GROUP, len(header)), header, _PADDING[-len(header) % 8]]
    for _, values in buffers.values():
        parts += [values.tobytes(), _PADDING[-values.nbytes % 8]]
    return b"".join(parts)


def _narrow(values: np.ndarray, dtypes: Sequence[str]) -> tuple[str, np.ndarray]:
    """Return the first of ``dtypes`` that changes no value, and the values in it."""
    for dtype in dtypes[:-1]:
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = values.astype(_DTYPES[dtype])
        if np.array_equal(narrow, values) and not (dtype == "f4" and np.signbit(values[values == 0]).any()):
            return dtype, narrow
    return dtypes[-1], values


def read_header(record: bytes | memoryview) -> tuple[Header, int]:
    """Return a record's header and the offset of its first buffer.

    Raises:
        RefusedGroup: it is not a record.
    """
    try:
        magic, length = _PREFIX.unpack_from(record)
        if magic != _GROUP or length > len(record) - _PREFIX.size:
            raise ValueError(f"it begins with {bytes(record[:8])!r}")
        return _decode_header(record[_PREFIX.size : _PREFIX.size + length]), _PREFIX.size + length + -length % 8
    except (struct.error, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RefusedGroup(Reason.MALFORMED, f"a packed group cannot be read: {error}") from error


def unpack(record: bytes | memoryview) -> Columns:
    """Return a record's columns, in the stored dtypes; ``masks`` is computed if it is stored as bits.

    Raises:
        RefusedGroup: it is not a record, a buffer has another dtype than it may have, or sizes contradict each other.
    """
    header, offset = read_header(record)
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in header.buffers.items():
        if dtype not in _STORED.get(name, ()):
            known = ", ".join(_STORED.get(name, ())) or "there is no such buffer"
            raise RefusedGroup(
                Reason.MALFORMED, f"a packed group has {name[:40]} of dtype {dtype[:40]}; it may have: {known}"
            )
        count = header.sequences if name in ("lengths", "scores") else header.tokens
        kind, size = (np.uint8, (count + 7) // 8) if dtype == "bits" else (_DTYPES[dtype], count)
        if count < 0 or offset + size * np.dtype(kind).itemsize > len(record):
            raise RefusedGroup(Reason.MALFORMED, f"a packed group has {len(record)} bytes, too few for its {name}")
        arrays[name] = np.frombuffer(record, kind, size, offset)
        offset += arrays[name].nbytes + -arrays[name].nbytes % 8
    required = _STORED.keys() - set(FLOATS)
    if offset != len(record) or not required <= arrays.keys() or arrays.keys() & header.raw.keys():
        raise RefusedGroup(
            Reason.MALFORMED,
            f"a packed group of {len(record)} bytes has buffers {[*header.buffers]} and fields {[*header.raw][:20]}",
        )
    if header.buffers["masks"] == "bits":
        chosen = np.unpackbits(arrays["masks"], count=header.tokens).view(bool)
        arrays["masks"] = np.where(chosen, arrays["tokens"], arrays["tokens"].dtype.type(IGNORED))
    return Columns(
        arrays["lengths"],
        arrays["tokens"],
        arrays["masks"],
        arrays["scores"],
        {name: arrays[name] for name in FLOATS if name in arrays},
        {name: bytes(value) for name, value in header.raw.items()},
        header.env_id,
    )


def to_group(record: bytes | memoryview) -> dict[str, Any]:
    """Return a group with all keys of ``ScoredData``: per-token fields as lists of arrays, absent ones as None."""
    columns = unpack(record)
    ends = np.cumsum(columns.lengths)
    bounds = list(zip((ends - columns.lengths).tolist(), ends.tolist(), strict=True))
    group: dict[str, Any] = dict.fromkeys(KEYS)
    group |= {name: orjson.loads(value) for name, value in columns.raw.items()}
    for name, values in {"tokens": columns.tokens, "masks": columns.masks, **columns.floats}.items():
        group[name] = [values[start:end] for start, end in bounds]
    group["scores"], group["env_id"] = columns.scores.tolist(), columns.env_id
    return group


def to_json(record: bytes | memoryview) -> bytes:
    """Return a group as JSON, with all keys of ``ScoredData``."""
    columns = unpack(record)
    ends = np.cumsum(columns.lengths)
    bounds = list(zip((ends - columns.lengths).tolist(), ends.tolist(), strict=True))
    # As doubles: the shortest form of a float32 names another double.
    floats = {name: values.astype(np.float64, copy=False) for name, values in columns.floats.items()}
    group: dict[str, Any] = dict.fromkeys(KEYS)
    group |= {name: orjson.Fragment(value) for name, value in columns.raw.items()}
    for name, values in {"tokens": columns.tokens, "masks": columns.masks, **floats}.items():
        group[name] = [values[start:end] for start, end in bounds]
    group["scores"], group["env_id"] = columns.scores, columns.env_id
    return orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY)


def join(records: Sequence[bytes | memoryview]) -> bytes:
    """Return a message of records."""
    return b"".join((prefix([len(record) for record in records]), *records))


def prefix(sizes: Sequence[int]) -> bytes:
    """Return what precedes records of these sizes, in bytes, in their message."""
    return _PREFIX.pack(_MESSAGE, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)


def split(message: bytes | memoryview) -> list[memoryview]:
    """Return the records of a message.

    Raises:
        RefusedGroup: it is not a message of records.
    """
    view = memoryview(message)
    try:
        magic, count = _PREFIX.unpack_from(view)
        start = _PREFIX.size + count * 8
        if magic != _MESSAGE or count > MAX_GROUPS or start > len(view):
            raise ValueError(f"it begins with {bytes(view[:8])!r}")
        lengths = struct.unpack_from(f"<{count}Q", view, _PREFIX.size)
        if start + sum(lengths) != len(view):
            raise ValueError(f"it has {len(view)} bytes instead of {start + sum(lengths)}")
    except (struct.error, ValueError) as error:
        raise RefusedGroup(Reason.MALFORMED, f"a message of packed groups cannot be read: {error}") from error
    records = []
    for length in lengths:
        records.append(view[start : start + length])
        start += length
    return records


def from_group(group: Mapping[str, Any]) -> Columns:
    """Return the columns of a group as an environment made it: lists, or arrays, of numbers.

    Optional per-token fields of another shape are kept as JSON, for the server to judge.

    Raises:
        RefusedGroup: tokens, masks or scores are missing, no lists of numbers, or of unequal lengths.
    """
    try:
        lengths = np.array([len(row) for row in group["tokens"]], np.int64)
        columns = Columns(
            lengths,
            _flat(group["tokens"], np.int64),
            _flat(group["masks"], np.int64),
            _flat([group["scores"]], np.float64),
            env_id=group.get("env_id"),
        )
        if [len(row) for row in group["masks"]] != lengths.tolist() or len(columns.scores) != len(lengths):
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{len(lengths)} sequences of lengths {lengths.tolist()[:20]}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, RefusedGroup):
            raise
        raise RefusedGroup(Reason.MALFORMED, f"tokens, masks or scores: {error!r}") from error
    for name in FLOATS:
        rows = group.get(name)
        if rows is None:
            continue
        try:
            if [len(row) for row in rows] != lengths.tolist():
                raise ValueError
            columns.floats[name] = _flat(rows, np.float64)
        except (TypeError, ValueError):
            columns.raw[name] = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
    for name in RAW:
        if group.get(name) is not None:
            columns.raw[name] = orjson.dumps(group[name], option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return columns


def _flat(rows: Sequence[Any], dtype: type) -> np.ndarray:
    """Return rows of numbers as one flat array; raise TypeError or ValueError for anything else."""
    code, parts = "q" if dtype is np.int64 else "d", []
    for row in rows:
        if isinstance(row, np.ndarray):
            if row.ndim != 1 or row.dtype.kind not in ("iub" if code == "q" else "iubf"):
                raise ValueError(f"an array of {row.dtype} with shape {row.shape}")
            parts.append(np.ascontiguousarray(row, dtype).tobytes())
        else:
            try:
                parts.append(struct.pack(f"{len(row)}{code}", *row))  # the fastest way from a list
            except (struct.error, OverflowError) as error:
                raise ValueError(str(error)) from error
    return np.frombuffer(b"".join(parts), dtype)
