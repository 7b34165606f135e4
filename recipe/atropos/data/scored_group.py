"""A scored group: sequences of one prompt with their scores, as an environment posts them and the trainer reads them.

Guarantees:

- One function decides what a group is, ``checked``. Every way in calls it: ``from_mapping`` for groups of lists (what
  the adapter posts, what ``run-api`` serves, and imports), ``trajectory_api.parsing`` for posts. After it, the
  group is trusted: ``unpack`` reads a stored record without checking its values again.
- Nothing is repaired by guessing: a group is kept as it came, or refused as a whole with a ``Reason`` and the place.
- Lossless: a packed group has the values that it was made of. Floats are stored as float32 only where that changes none
  of them, integers in the narrowest type that holds them. The same group always has the same bytes.

``tokens``, ``masks`` and ``scores`` are required; a missing one counts as an empty list. Each optional per-token field
(``FLOATS``) is an array if it has a number for every token. Otherwise it is *irregular* and kept as JSON: stock
environments send ``advantages`` and ``ref_logprobs`` of other shapes, rows without logprobs, and null for a missing
logprob; the trainer decides. The other fields (``FIELDS``) are JSON; unknown ones are ignored, as atroposlib does, and
so are keys of ``overrides`` and ``group_overrides`` that ``Overrides`` and ``GroupOverrides`` do not have.

A record is ``ATG1``, the header's length (uint32), the header and the buffers, each padded to 8 bytes; all numbers are
little-endian. The header names each buffer's dtype, one of ``_STORED``; its length follows from ``sequences`` or
``tokens``. A message of several groups is their records, one after the other (``unpack_all``).

Sequences are rows of one trajectory if they have the same number in ``group_overrides["trajectory"]``, a list over
sequences; without it, each is a trajectory of its own. A group's size is its number of trajectories.
"""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import IGNORED
from recipe.atropos.data.sampling import Sampled, SamplingParams

FLOATS = ("inference_logprobs", "advantages", "ref_logprobs")  # one value per token
FIELDS = (
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
_MAGIC = b"ATG1"
_PREFIX = struct.Struct("<4sI")
_PADDING = tuple(bytes(n) for n in range(8))
_INT64 = range(-(2**63), 2**63)
LARGEST = 1e15
"""Of scores and advantages: their squares, and sums of these, are float32 numbers."""


class Header(msgspec.Struct):
    """What a record holds. ``buffers`` maps names to dtype codes in stored order; ``raw`` has other fields as JSON."""

    sequences: int
    tokens: int
    env_id: int | None
    buffers: dict[str, str]
    raw: dict[str, msgspec.Raw]


class Message(msgspec.Struct):
    """What every message has."""

    role: Any
    content: Any


class Overrides(msgspec.Struct):
    """What the recipe reads of a sequence's ``overrides``."""

    set_advantage_to_zero: bool | Literal[0, 1] | None = None


class GroupOverrides(Overrides):
    """What the recipe reads of ``group_overrides``.

    The lists have a value for each sequence, None for those that were not given: ``trajectory``, as the module says;
    the oldest and the newest weight version among the trained tokens, unknown also where these lists are shorter; the
    score before a reward bridge shaped it; the distinct parameters that sampled the trained tokens.
    """

    env_name: str | None = None
    credit: str | None = None  # the rule that made the advantages
    trajectory: list[int] | None = None
    policy_version_min: list[int | None] | None = None
    policy_version_max: list[int | None] | None = None
    raw_scores: list[Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)] | bool] | None = None
    sampling_params: list[Annotated[list[SamplingParams], msgspec.Meta(min_length=1)] | None] | None = None


_TYPES = {
    **dict.fromkeys((*FLOATS, *FIELDS), list),
    **{"messages": list[list[Message]], "generation_params": dict, "images": Any},
    **{"overrides": list[Overrides], "group_overrides": GroupOverrides},
}
_decode_header = msgspec.json.Decoder(Header).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class ScoredGroup:
    """A group as flat arrays. ``tokens``, ``masks`` and ``floats`` are concatenated over sequences of ``lengths``."""

    lengths: np.ndarray  # (sequences,) int64
    tokens: np.ndarray  # (sum of lengths,) int64
    masks: np.ndarray  # (sum of lengths,) int64
    scores: np.ndarray  # (sequences,) float64
    floats: dict[str, np.ndarray] = field(default_factory=dict)  # each (sum of lengths,) float64
    fields: dict[str, bytes] = field(default_factory=dict)  # other fields, and irregular ones, as JSON
    env_id: int | None = None

    @classmethod
    def from_mapping(cls, group: Any) -> "ScoredGroup":
        """Return a group of lists, tuples or arrays, checked.

        Raises:
            RefusedGroup: with the reason and the place.
        """
        if not isinstance(group, Mapping):
            raise RefusedGroup(Reason.MALFORMED, f"it is {str(group)[:80]!r}, not a mapping of lists over sequences")
        tokens = [flat_numbers(f"tokens[{i}]", row, np.int64) for i, row in enumerate(_listed(group, "tokens"))]
        lengths = np.array([len(row) for row in tokens], np.int64)
        _require_tokens(lengths)
        scores = _listed(group, "scores")
        require_count("scores", scores, len(lengths))
        _require_finite_scores(scores)
        made = cls(
            lengths,
            np.concatenate(tokens),
            _parallel("masks", _listed(group, "masks"), lengths, np.int64),
            np.array([float(score) for score in scores]),
            env_id=group.get("env_id"),
        )
        for name in FLOATS:
            if group.get(name) is not None:
                rows = _listed(group, name)
                try:
                    made.floats[name] = _parallel(name, rows, lengths, np.float64)
                except RefusedGroup:
                    made.fields[name] = _json(name, rows)
        made.fields |= {name: _json(name, group[name]) for name in FIELDS if group.get(name) is not None}
        return made.checked()

    def checked(self) -> "ScoredGroup":
        """Return the group itself.

        Raises:
            RefusedGroup: it is empty, a number is not finite, or another field cannot be what its name says.
        """
        lengths, env_id = self.lengths, self.env_id
        _require_tokens(lengths)
        if lengths.sum() != len(self.tokens):
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"lengths {lengths.tolist()[:20]}, {len(self.tokens)} tokens")
        if env_id is not None and (type(env_id) is not int or env_id not in _INT64):
            raise RefusedGroup(Reason.MALFORMED, f"env_id={str(env_id)[:80]}: give a whole number, or null")
        _require_finite_scores(self.scores.tolist())
        for name, column in self.floats.items():
            largest = LARGEST if name == "advantages" else math.inf
            fits = -largest < column.min() and column.max() < largest  # without a copy, as of np.abs
            for i, values in enumerate(() if fits else self.cut(column)):
                require_finite(f"{name}[{i}]", values, Reason(f"nonfinite_{name}"), largest)
        for name in sorted(self.fields.keys() - {"overrides", "group_overrides"}):
            self._decoded(name)
        if "inference_logprobs" in self.fields:
            self.by_sequence("inference_logprobs")
        require_count("overrides", self.overrides, len(lengths))
        self.declared_sampling()
        return self

    def _decoded(self, name: str) -> Any:
        """Return one of the other fields, which is given, as its type in ``_TYPES``."""
        if name not in _TYPES:
            raise RefusedGroup(Reason.MALFORMED, f"a packed group has an unknown field {name!r}")
        try:
            value = self.field(name)
            return msgspec.convert(value, _TYPES[name], str_keys=True)
        except orjson.JSONDecodeError as error:
            raise RefusedGroup(Reason.MALFORMED, f"{name} is not JSON: {error}") from error
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at ")
            path = path.rpartition("$")[2].rstrip("`")
            for key in re.findall(r"\w+", path):
                value = value[int(key) if isinstance(value, list) else key]
            raise RefusedGroup(Reason.MALFORMED, f"{name}{path} is {str([value])[1:-1]:.80}: {what}") from error

    @cached_property
    def overrides(self) -> list[Overrides]:
        """What the recipe reads of ``overrides``, for each sequence.

        Raises:
            RefusedGroup: it has another type.
        """
        return (self._decoded("overrides") if "overrides" in self.fields else []) or [Overrides()] * len(self.lengths)

    @cached_property
    def group_overrides(self) -> GroupOverrides:
        """What the recipe reads of ``group_overrides``. A group of an earlier version's store is checked here, too.

        Raises:
            RefusedGroup: it has another type, lists of other lengths, or values that contradict each other.
        """
        found = self._decoded("group_overrides") if "group_overrides" in self.fields else GroupOverrides()
        numbers, sequences, unknown = found.trajectory or (), len(self.lengths), [None] * len(self.lengths)
        for name in ("trajectory", "raw_scores", "sampling_params", "policy_version_min", "policy_version_max"):
            values = getattr(found, name)
            if values is None:
                setattr(found, name, unknown)
            elif name.startswith("policy_version"):
                values += unknown[len(values) :]
            elif len(values) != sequences:
                raise RefusedGroup(
                    Reason.MALFORMED, f"{name} is {str(values)[:80]}, not a list over {sequences} sequences"
                )
        for i, (oldest, newest) in enumerate(zip(found.policy_version_min, found.policy_version_max, strict=False)):
            if None not in (oldest, newest) and oldest > newest:
                raise RefusedGroup(
                    Reason.MALFORMED, f"policy_version_min[{i}] is {oldest}, policy_version_max[{i}] only {newest}"
                )
        for name, scores in (("scores", self.scores.tolist()), ("raw_scores", found.raw_scores)):
            first: dict[int, float] = {}
            for number, score in zip(numbers, scores, strict=False):
                if first.setdefault(number, score) != score:
                    raise RefusedGroup(
                        Reason.MALFORMED, f"trajectory {number} has {name} {first[number]} and {score}; give all one"
                    )
        return found

    def declared_sampling(self) -> Sampled:
        """Return the parameters of sequences without ``sampling_params``: what ``generation_params`` declares, if that
        has a temperature.

        Raises:
            RefusedGroup: there is such a sequence, and ``generation_params`` is malformed.
        """
        declared = self.field("generation_params") if None in self.group_overrides.sampling_params else None
        try:
            known = declared is not None and declared.get("temperature") is not None
            return (SamplingParams.from_declaration(declared),) if known else None
        except (TypeError, ValueError) as error:
            raise RefusedGroup(Reason.MALFORMED, f"generation_params: {error}") from error

    @property
    def trajectories(self) -> int:
        """The group's size: its number of trajectories."""
        numbers = self.group_overrides.trajectory
        return len(numbers) if None in numbers else len(set(numbers))

    @cached_property
    def record(self) -> bytes | memoryview:
        """The packed group; what an unpacked one was read from, as it is."""
        return self.pack()

    @property
    def irregular(self) -> tuple[str, ...]:
        """The per-token fields that lack a number for some token; an empty list is a field that is not given."""
        return tuple(name for name in FLOATS if self.fields.get(name, b"[]") != b"[]")

    def field(self, name: str) -> Any:
        """Return one of the other fields, None if it is not given."""
        return orjson.loads(self.fields[name]) if name in self.fields else None

    def cut(self, column: np.ndarray) -> list[np.ndarray]:
        """Return the views of a per-token column, (length,) for each sequence."""
        return np.split(column, np.cumsum(self.lengths)[:-1])

    def by_sequence(self, name: str) -> list[np.ndarray | None]:
        """Return one of ``FLOATS``, (length,) for each sequence, NaN for null; None for a sequence without any.

        Raises:
            RefusedGroup: it is irregular, and something else than a flat list of a number or null for each token.
        """
        if name in self.floats:
            return list(self.cut(self.floats[name]))
        rows = self.field(name) or [None] * len(self.lengths)
        require_count(name, rows, len(self.lengths))
        found = []
        for i, row in enumerate(rows):
            if isinstance(row, list):
                row = [math.nan if value is None else value for value in row]
            found.append(None if row in (None, []) else _row(name, i, row, self.lengths, np.float64))
        return found

    def pack(self) -> bytes:
        """Return the record of the group."""
        plain = ((self.masks == IGNORED) | (self.masks == self.tokens)).all()
        masks = ("bits", np.packbits(self.masks != IGNORED)) if plain else _narrow(self.masks, _STORED["masks"][1:])
        buffers = {
            "lengths": ("i4", self.lengths.astype(np.int32)),
            "tokens": _narrow(self.tokens, _STORED["tokens"]),
            "masks": masks,
            "scores": ("f8", self.scores.astype(np.float64, copy=False)),
        } | {name: _narrow(self.floats[name], _STORED[name]) for name in FLOATS if name in self.floats}
        header = _encode(
            Header(
                len(self.lengths),
                len(self.tokens),
                self.env_id,
                {name: dtype for name, (dtype, _) in buffers.items()},
                {name: msgspec.Raw(self.fields[name]) for name in (*FLOATS, *FIELDS) if name in self.fields},
            )
        )
        parts = [_PREFIX.pack(_MAGIC, len(header)), header, _PADDING[-len(header) % 8]]
        for _, values in buffers.values():
            parts += [values.tobytes(), _PADDING[-values.nbytes % 8]]
        return b"".join(parts)

    def to_json(self) -> bytes:
        """Return the group as JSON, with all keys of ``ScoredData``, null for those not given."""
        # As doubles: the shortest form of a float32 names another double.
        floats = {name: values.astype(np.float64, copy=False) for name, values in self.floats.items()}
        columns = {"tokens": self.tokens, "masks": self.masks, **floats}
        group = {
            **dict.fromkeys(KEYS),
            **{name: orjson.Fragment(value) for name, value in self.fields.items()},
            **{name: self.cut(values) for name, values in columns.items()},
            "scores": self.scores,
            "env_id": self.env_id,
        }
        return orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY)


Group = ScoredGroup | Mapping[str, Any]  # a mapping is one that nobody has checked yet


# ---------------------------------------------------------------------- groups of lists


def flat_numbers(name: str, values: Any, dtype: type) -> np.ndarray:
    """Return a flat list, tuple or array of numbers as (length,) ``dtype``: np.int64 or np.float64.

    As atroposlib's pydantic models, it takes true for 1, and 2.0 for the integer 2; strings and fractions are refused.

    Raises:
        RefusedGroup: it is anything else; the message begins with ``name``.
    """
    what, code, kinds = ("whole numbers", "q", "iub") if dtype is np.int64 else ("numbers", "d", "iubf")
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds:
        return values.astype(dtype)
    try:
        if not isinstance(values, list | tuple):
            raise TypeError(str(values)[:80])
        try:
            packed = struct.pack(f"{len(values)}{code}", *values)  # the fastest way from a list
        except struct.error:
            whole = [int(value) if type(value) is float and value.is_integer() else value for value in values]
            packed = struct.pack(f"{len(values)}{code}", *whole)
    except (TypeError, OverflowError, struct.error) as error:
        raise RefusedGroup(Reason.MALFORMED, f"{name} is not a flat list of {what}: {error}") from error
    return np.frombuffer(packed, dtype)


def require_count(name: str, rows: Sequence[Any], sequences: int) -> None:
    """Raise RefusedGroup unless a field over sequences has one value for each."""
    if len(rows) != sequences:
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{len(rows)} {name} for {sequences} sequences")


def require_finite(name: str, values: np.ndarray, reason: Reason, largest: float = math.inf) -> None:
    """Raise RefusedGroup, with ``reason`` and the position, unless all of a sequence's values are finite."""
    for at in np.flatnonzero(~np.isfinite(values) | (np.abs(values) > largest)):
        limit = f", at most {largest:g}" if math.isfinite(largest) else ""
        raise RefusedGroup(reason, f"{name} is {values[at]} at position {at}; it must be finite{limit}")


def _listed(group: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a field over sequences; an empty list if it is not given."""
    values = group.get(name)
    if values is None:
        return []
    if not isinstance(values, list | tuple | np.ndarray):
        raise RefusedGroup(Reason.MALFORMED, f"{name} is a {type(values).__name__}, not a list over sequences")
    return values


def _parallel(name: str, rows: Sequence[Any], lengths: np.ndarray, dtype: type) -> np.ndarray:
    require_count(name, rows, len(lengths))
    return np.concatenate([_row(name, i, row, lengths, dtype) for i, row in enumerate(rows)])


def _row(name: str, i: int, row: Any, lengths: np.ndarray, dtype: type) -> np.ndarray:
    values = flat_numbers(f"{name}[{i}]", row, dtype)
    if len(values) != lengths[i]:
        raise RefusedGroup(
            Reason.UNEQUAL_LENGTHS, f"{name}[{i}] has length {len(values)}, tokens[{i}] has {lengths[i]}"
        )
    return values


def _json(name: str, value: Any) -> bytes:
    """Return a field as JSON that every reader takes: no NaN, no half surrogates, no number beyond 64 bits."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        if b"null" in text:  # which orjson writes for NaN, too
            json.dumps(value, allow_nan=False, default=lambda other: getattr(other, "tolist", other.__str__)())
        return text
    except (TypeError, ValueError, RecursionError) as error:
        reasons = {f: Reason(f"nonfinite_{f}") for f in FLOATS} | {"distill_logprobs": Reason.INVALID_DISTILL_LOGPROBS}
        raise RefusedGroup(
            reasons.get(name, Reason.MALFORMED), f"{name} has no JSON form: {str(error)[:100]}"
        ) from error


# ---------------------------------------------------------------------- checks


def _require_tokens(lengths: np.ndarray) -> None:
    if not len(lengths) or lengths.min() < 1:
        raise RefusedGroup(
            Reason.EMPTY_GROUP, f"{len(lengths)} sequences of lengths {lengths.tolist()[:20]}; each must have a token"
        )


def trajectory_numbers(group_overrides: Mapping[str, Any], sequences: int) -> list[int]:
    """Return the number of each sequence's trajectory in a group."""
    return group_overrides.get("trajectory") or list(range(sequences))


def _require_finite_scores(scores: Sequence[Any]) -> None:
    for i, score in enumerate(scores):
        if not isinstance(score, Real) or not abs(score) <= LARGEST:
            raise RefusedGroup(Reason.NONFINITE_SCORES, f"score {i} is {score!r:.80}; it must be at most {LARGEST:g}")


# ---------------------------------------------------------------------- records


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
        if magic != _MAGIC or length > len(record) - _PREFIX.size:
            raise ValueError(f"it begins with {bytes(record[:8])!r}")
        return _decode_header(record[_PREFIX.size : _PREFIX.size + length]), _PREFIX.size + length + -length % 8
    except (struct.error, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RefusedGroup(Reason.MALFORMED, f"a packed group cannot be read: {error}") from error


def unpack(record: bytes | memoryview) -> ScoredGroup:
    """Return a record's group, in the stored dtypes, not checked; its arrays are views of the record, but for ``masks``
    where these are stored as bits.

    Raises:
        RefusedGroup: it is not a record, a buffer has another dtype than it may have, or sizes contradict each other.
    """
    group = _unpack_first(record)
    if len(group.record) != len(record):
        raise RefusedGroup(
            Reason.MALFORMED, f"a packed group has {len(record)} bytes, {len(group.record)} of them in its buffers"
        )
    return group


def unpack_all(message: bytes) -> list[ScoredGroup]:
    """Return the groups of a message of records, as ``unpack``."""
    rest, groups = memoryview(message), []
    while rest or not groups:
        groups.append(_unpack_first(rest))
        rest = rest[len(groups[-1].record) :]
    return groups


def _unpack_first(record: bytes | memoryview) -> ScoredGroup:
    """Return the group of a record that others may follow."""
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
    if offset > len(record) or not required <= arrays.keys() or arrays.keys() & header.raw.keys():
        raise RefusedGroup(
            Reason.MALFORMED,
            f"a packed group of {offset} bytes has {len(record)}, buffers {[*header.buffers]} and fields "
            f"{[*header.raw][:20]}",
        )
    if header.buffers["masks"] == "bits":
        chosen = np.unpackbits(arrays["masks"], count=header.tokens).view(bool)
        arrays["masks"] = np.where(chosen, arrays["tokens"], arrays["tokens"].dtype.type(IGNORED))
    group = ScoredGroup(
        arrays["lengths"],
        arrays["tokens"],
        arrays["masks"],
        arrays["scores"],
        {name: arrays[name] for name in FLOATS if name in arrays},
        {name: bytes(value) for name, value in header.raw.items()},
        header.env_id,
    )
    group.record = record[:offset]
    return group
