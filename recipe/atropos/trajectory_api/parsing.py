"""Bodies of ``POST /scored_data`` into packed records, checked.

Guarantees:

- What is accepted can be handed out: no value of a record breaks its JSON form or another group's batch.
- Nothing is repaired by guessing: a group is stored as it came, or refused as a whole with a ``Reason``.
- The fast path and the exact one accept the same groups, with the same values.

``masks`` and ``inference_logprobs`` must have the lengths of ``tokens``. ``advantages`` and ``ref_logprobs`` of another
shape, and rows without logprobs, are stored as JSON and named in ``odd``: stock environments send them, and the
trainer decides. Fields that atroposlib does not know are ignored, as it does.
"""

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import simdjson

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.trajectory_api.wire import FLOATS, RAW, Columns, pack, read_header, split, unpack

_PER_TOKEN = ("tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs")
_OPEN = ord("[")
_INT64 = range(-(2**63), 2**63)
_parser = simdjson.Parser()


@dataclass(frozen=True)
class Parsed:
    """A group to be stored. ``odd`` names fields of an unusual shape, which are counted."""

    record: bytes
    env_id: int | None
    sequences: int
    tokens: int
    odd: tuple[str, ...] = ()


class _Unusual(Exception):  # noqa: N818  (not an error: the exact path decides)
    """The fast path does not handle this body."""


def parse_json(body: bytes, several: bool) -> list[Parsed]:
    """Return the groups of a JSON body; ``several``: it is a list.

    Raises:
        RefusedGroup: with the reason and the place.
    """
    try:
        return [_checked(columns) for columns in _fast(body, several)]
    except _Unusual:
        pass
    groups = _load(body)
    if isinstance(groups, list) != several:
        raise RefusedGroup(Reason.MALFORMED, "the body must be " + ("a list of groups" if several else "one group"))
    return [_checked(_exact(group)) for group in (groups if several else [groups])]


def parse_packed(body: bytes) -> list[Parsed]:
    """Return the groups of a packed message, whose records are stored as they are.

    Raises:
        RefusedGroup: as ``parse_json``.
    """
    found = []
    for record in split(body):
        columns = unpack(record)
        for name, text in columns.raw.items():
            try:
                _check_odd(name, orjson.loads(text), columns.lengths)
            except orjson.JSONDecodeError as error:
                raise RefusedGroup(Reason.MALFORMED, f"{name} is not JSON: {error}") from error
        found.append(_checked(columns, bytes(record)))
    return found


def environments_of(body: bytes, packed: bool) -> list[int | None]:
    """Return the environment of each group of a refused body, None where it has none or cannot be read."""
    try:
        if packed:
            return [read_header(record)[0].env_id for record in split(body)] or [None]
        groups = _load(body)
    except RefusedGroup:
        return [None]
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else [groups]
    ids = [group.get("env_id") if isinstance(group, dict) else None for group in groups]
    return [id if type(id) is int else None for id in ids] or [None]


# ---------------------------------------------------------------------- fast


def _fast(body: bytes, several: bool) -> list[Columns]:
    """Read a body of the usual form by simdjson, whose objects must all be gone before the next call."""
    try:
        document = _parser.parse(body)
    except (ValueError, RuntimeError) as error:
        raise _Unusual from error
    if not isinstance(document, simdjson.Array if several else simdjson.Object):
        raise _Unusual
    brackets = int(several)
    columns = []
    for group in document if several else (document,):
        if not isinstance(group, simdjson.Object):
            raise _Unusual
        found, of_group = _fast_group(group)
        columns.append(found)
        brackets += of_group
    # simdjson flattens nested lists; only their brackets tell [1, [2]] from [1, 2].
    if np.count_nonzero(np.frombuffer(body, np.uint8) == _OPEN) != brackets:
        raise _Unusual
    return columns


def _fast_group(group: Any) -> tuple[Columns, int]:
    """Return a group's columns and the number of opening brackets in it."""
    flat: dict[str, np.ndarray] = {}
    raw: dict[str, bytes] = {}
    lengths: list[int] = []
    scores, env_id, brackets = None, None, 0
    keys = list(group.keys())
    if len(set(keys)) != len(keys):  # the last value counts, as in Python's json
        raise _Unusual
    for key in keys:
        value = group[key]
        if value is None:
            continue
        if key in _PER_TOKEN and isinstance(value, simdjson.Array):
            rows = [len(row) if isinstance(row, simdjson.Array) else -1 for row in value]
            lengths = lengths or rows
            flat[key] = _buffer(value, key in ("tokens", "masks"))
            if rows != lengths or -1 in rows or len(flat[key]) != sum(rows):
                raise _Unusual
            brackets += 1 + len(rows)
        elif key == "scores" and isinstance(value, simdjson.Array):
            scores = _buffer(value, False)
            brackets += 1
        elif key == "env_id" and type(value) is int:
            env_id = value
        elif key in RAW or key not in (*_PER_TOKEN, "scores", "env_id"):
            text = value.mini if isinstance(value, simdjson.Array | simdjson.Object) else orjson.dumps(value)
            brackets += text.count(b"[") + key.count("[")
            if key in RAW:
                raw[key] = text
        else:
            raise _Unusual
    if scores is None or not {"tokens", "masks"} <= flat.keys() or len(scores) != len(lengths):
        raise _Unusual
    floats = {name: flat[name] for name in FLOATS if name in flat}
    return Columns(np.array(lengths, np.int64), flat["tokens"], flat["masks"], scores, floats, raw, env_id), brackets


def _buffer(values: Any, integers: bool) -> np.ndarray:
    try:
        flat = values.as_buffer(of_type="i" if integers else "d")
    except (TypeError, ValueError) as error:
        raise _Unusual from error
    return np.frombuffer(flat, np.int64 if integers else np.float64)


# ---------------------------------------------------------------------- exact


def _load(body: bytes) -> Any:
    """Return a JSON document; NaN and infinities, which are not JSON but which Python writes, are read."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        document = json.loads(body)
        body.decode()  # json.loads takes other encodings too
        return document
    except (ValueError, RecursionError) as error:
        raise RefusedGroup(Reason.MALFORMED, f"the body is not JSON: {str(error)[:200]}") from error


def _exact(group: Any) -> Columns:
    """Return the columns of a decoded group."""
    if not isinstance(group, dict):
        raise RefusedGroup(Reason.MALFORMED, f"a group is {str(group)[:80]!r}, not a mapping of lists over sequences")
    tokens, scores, env_id = group.get("tokens"), group.get("scores"), group.get("env_id")
    if not isinstance(tokens, list) or any(not isinstance(row, list) for row in tokens):
        raise RefusedGroup(Reason.MALFORMED, f"tokens is {str(tokens)[:80]}, not a list of lists of token ids")
    if not isinstance(scores, list):
        raise RefusedGroup(Reason.MALFORMED, f"scores is {str(scores)[:80]}, not a list over sequences")
    if env_id is not None and (type(env_id) is not int or env_id not in _INT64):
        raise RefusedGroup(Reason.MALFORMED, f"env_id={str(env_id)[:80]}: give a whole number, or null")
    lengths = np.array([len(row) for row in tokens], np.int64)
    if len(scores) != len(tokens):
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{len(scores)} scores for {len(tokens)} sequences")
    if any(type(score) not in (int, float, bool) or not _finite(score) for score in scores):
        raise RefusedGroup(Reason.NONFINITE_SCORES, f"scores {str(scores)[:200]}; each must be a finite number")
    columns = Columns(
        lengths,
        _integers("tokens", tokens, lengths),
        _integers("masks", group.get("masks"), lengths),
        np.array([float(score) for score in scores]),
        env_id=env_id,
    )
    for name in FLOATS:
        if group.get(name) is not None and (odd := _floats(columns, name, group[name])) is not None:
            columns.raw[name] = odd
    for name in RAW:
        if group.get(name) is not None:
            columns.raw[name] = _json(name, group[name])
    return columns


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _integers(name: str, rows: Any, lengths: np.ndarray) -> np.ndarray:
    if not isinstance(rows, list) or len(rows) != len(lengths):
        found = len(rows) if isinstance(rows, list) else str(rows)[:80]
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{name}: {found} for {len(lengths)} sequences")
    flat = array("q")
    for i, row in enumerate(rows):
        try:
            # As pydantic did for atroposlib: true is 1, 2.0 is 2.
            flat.extend(int(value) if type(value) is float and value.is_integer() else value for value in row)
        except (TypeError, OverflowError) as error:
            raise RefusedGroup(Reason.MALFORMED, f"{name}[{i}] is not a list of whole numbers ({error})") from error
        if len(row) != lengths[i]:
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{name}[{i}] has length {len(row)}, tokens[{i}] {lengths[i]}")
    return np.frombuffer(flat, np.int64)


def _floats(columns: Columns, name: str, rows: Any) -> bytes | None:
    """Set a field of ``columns``; return its JSON if its shape is odd."""
    flat = array("d")
    try:
        for row in rows:
            if not isinstance(row, list):
                raise TypeError
            flat.extend(row)
        if [len(row) for row in rows] != columns.lengths.tolist():
            raise TypeError
    except (TypeError, OverflowError):
        text = _json(name, rows)
        _check_odd(name, rows, columns.lengths)
        return text
    columns.floats[name] = np.frombuffer(flat, np.float64)
    return None


def _json(name: str, value: Any) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        orjson.loads(text)  # as strict as who reads the batch: no half surrogates, no number beyond double
        return text
    except (ValueError, RecursionError) as error:
        reason = Reason(f"nonfinite_{name}") if name in FLOATS else Reason.MALFORMED
        raise RefusedGroup(reason, f"{name} has no JSON form: {str(error)[:100]}") from error


# ---------------------------------------------------------------------- checks


def _check_odd(name: str, rows: Any, lengths: np.ndarray) -> None:
    """Refuse logprobs of a wrong length; rows without any are legal, and so is any shape of the other fields."""
    if name != "inference_logprobs" or not rows:
        return
    if not isinstance(rows, list) or len(rows) != len(lengths):
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{str(rows)[:80]}: {name} for {len(lengths)} sequences")
    for i, row in enumerate(rows):
        if row and (not isinstance(row, list) or len(row) != lengths[i]):
            found = len(row) if isinstance(row, list) else str(row)[:80]
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{name}[{i}] has length {found}, tokens[{i}] {lengths[i]}")


def _checked(columns: Columns, record: bytes | None = None) -> Parsed:
    """Return the group to store, as ``record`` if it came packed.

    Raises:
        RefusedGroup: it is empty, a number is not finite, or another field cannot be what its name says.
    """
    lengths = columns.lengths
    if not len(lengths) or lengths.min() < 1:
        raise RefusedGroup(Reason.EMPTY_GROUP, f"{len(lengths)} sequences of lengths {lengths.tolist()[:20]}")
    if lengths.sum() != len(columns.tokens):
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"lengths {lengths.tolist()[:20]}, {len(columns.tokens)} tokens")
    if columns.env_id is not None and columns.env_id not in _INT64:
        raise RefusedGroup(Reason.MALFORMED, f"env_id={columns.env_id}: out of range")
    for name, values in {"scores": columns.scores, **columns.floats}.items():
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise RefusedGroup(Reason(f"nonfinite_{name}"), f"{name} has {values[at]} at position {at}")
    for name, text in columns.raw.items():
        if name not in (*RAW, *FLOATS):
            raise RefusedGroup(Reason.MALFORMED, f"a packed group has an unknown field {name!r}")
        if name != "images":
            _check_raw(name, text)
    odd = tuple(name for name in FLOATS if name in columns.raw)
    stored = pack(columns) if record is None else record
    return Parsed(stored, columns.env_id, len(lengths), len(columns.tokens), odd)


def _check_raw(name: str, text: bytes) -> None:
    """Refuse a field that is not a list or mapping where ``ScoredData`` has one, or a message without its keys."""
    expected: type = dict if name in ("generation_params", "group_overrides") else list
    if text[:1] != (b"{" if expected is dict else b"["):
        raise RefusedGroup(
            Reason.MALFORMED, f"{name} is {text[:80].decode(errors='replace')}, not a {expected.__name__}"
        )
    if name not in ("messages", "overrides"):
        return
    value: Sequence[Any] = orjson.loads(text)
    if name == "overrides":
        messages = value
    elif all(isinstance(row, list) for row in value):
        messages = [message for row in value for message in row]
    else:
        raise RefusedGroup(Reason.MALFORMED, "messages is not a list of conversations")
    for message in messages:
        if not isinstance(message, dict) or (name == "messages" and not {"role", "content"} <= message.keys()):
            raise RefusedGroup(
                Reason.MALFORMED,
                f"{name}: {str(message)[:80]}; a message has a role and content, an override is a mapping",
            )
