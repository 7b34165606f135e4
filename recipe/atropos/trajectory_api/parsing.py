"""Bodies of ``POST /scored_data`` into groups to store.

Guarantees:

- What is accepted can be handed out: no value of a record breaks its JSON form or another group's batch.
- The fast path and ``ScoredGroup.from_mapping`` accept the same groups, with the same values.
"""

import contextlib
import json
from typing import Any

import numpy as np
import orjson
import simdjson

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.scored_group import FIELDS, FLOATS, ScoredGroup, read_header, unpack_all

_PER_TOKEN = ("tokens", "masks", *FLOATS)
_OPEN = ord("[")
_parser = simdjson.Parser()


def parse_json(body: bytes, several: bool) -> list[ScoredGroup]:
    """Return the groups of a JSON body; ``several``: it is a list.

    Raises:
        RefusedGroup: with the reason and the place.
    """
    try:
        fast = _fast(body, several)
    except (TypeError, ValueError, RuntimeError):  # its form is unusual: ``from_mapping`` decides
        groups = _load(body)
    else:
        return [group.checked() for group in fast]
    if isinstance(groups, list) != several:
        raise RefusedGroup(Reason.MALFORMED, "the body must be " + ("a list of groups" if several else "one group"))
    return [ScoredGroup.from_mapping(group) for group in (groups if several else [groups])]


def parse_packed(body: bytes) -> list[ScoredGroup]:
    """Return the groups of a packed message, whose records are stored as they are.

    Raises:
        RefusedGroup: as ``parse_json``.
    """
    return [group.checked() for group in unpack_all(body)]


def environments_of(body: bytes, packed: bool) -> list[int | None]:
    """Return the environment of each group of a refused body, None where it has none or cannot be read."""
    try:
        if packed:  # of the first, if it was refused for what follows its header
            with contextlib.suppress(RefusedGroup):
                return [group.env_id for group in unpack_all(body)]
            return [read_header(body)[0].env_id]
        groups = _load(body)
    except RefusedGroup:
        return [None]
    groups = groups if isinstance(groups, list) else [groups]
    ids = [group.get("env_id") for group in groups if isinstance(group, dict)]
    return [id if type(id) is int else None for id in ids] or [None]


# ---------------------------------------------------------------------- fast


def _fast(body: bytes, several: bool) -> list[ScoredGroup]:
    """Read a body of the usual form by simdjson, whose objects must all be gone before the next call.

    Raises:
        TypeError, ValueError, RuntimeError: it has another form.
    """
    document = _parser.parse(body)
    if not isinstance(document, simdjson.Array if several else simdjson.Object):
        raise ValueError
    brackets = int(several)
    groups = []
    for group in document if several else (document,):
        if not isinstance(group, simdjson.Object):
            raise ValueError
        found, of_group = _fast_group(group)
        groups.append(found)
        brackets += of_group
    # simdjson flattens nested lists; only their brackets tell [1, [2]] from [1, 2].
    if np.count_nonzero(np.frombuffer(body, np.uint8) == _OPEN) != brackets:
        raise ValueError
    return groups


def _fast_group(group: Any) -> tuple[ScoredGroup, int]:
    """Return a group's arrays and the number of opening brackets in it."""
    flat: dict[str, np.ndarray] = {}
    raw: dict[str, bytes] = {}
    lengths: list[int] | None = None
    scores, env_id, brackets = None, None, 0
    keys = list(group.keys())
    if len(set(keys)) != len(keys):  # the last value counts, as in Python's json
        raise ValueError
    for key in keys:
        value = group[key]
        if value is None:
            continue
        if key in _PER_TOKEN and isinstance(value, simdjson.Array):
            rows = [len(row) if isinstance(row, simdjson.Array) else -1 for row in value]
            lengths = rows if lengths is None else lengths
            kind, dtype = ("d", np.float64) if key in FLOATS else ("i", np.int64)
            flat[key] = np.frombuffer(value.as_buffer(of_type=kind), dtype)
            if rows != lengths or -1 in rows or len(flat[key]) != sum(rows):
                raise ValueError
            brackets += 1 + len(rows)
        elif key == "scores" and isinstance(value, simdjson.Array):
            scores = np.frombuffer(value.as_buffer(of_type="d"), np.float64)
            brackets += 1
        elif key == "env_id" and type(value) is int:
            env_id = value
        elif key in FIELDS or key not in (*_PER_TOKEN, "scores", "env_id"):
            text = value.mini if isinstance(value, simdjson.Array | simdjson.Object) else orjson.dumps(value)
            brackets += text.count(b"[") + key.count("[")
            if key in FIELDS:
                raw[key] = text
        else:
            raise ValueError
    if scores is None or not {"tokens", "masks"} <= flat.keys() or len(scores) != len(lengths or ()):
        raise ValueError
    floats = {name: flat[name] for name in FLOATS if name in flat}
    return ScoredGroup(
        np.array(lengths, np.int64), flat["tokens"], flat["masks"], scores, floats, raw, env_id
    ), brackets


def _load(body: bytes) -> Any:
    """Return a JSON document; NaN and infinities, which are not JSON but which Python writes, are read."""
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(body)
    try:
        document = json.loads(body)
        body.decode()  # json.loads takes other encodings too
        return document
    except (ValueError, RecursionError) as error:
        raise RefusedGroup(Reason.MALFORMED, f"the body is not JSON: {str(error)[:200]}") from error
