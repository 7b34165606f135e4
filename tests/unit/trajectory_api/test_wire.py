"""The packed format: nothing is lost between a group as it was posted, its record, and what is handed out."""

import json
import math
import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.packed import ODD_MESSAGES
from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.data.scored_group import FLOATS, KEYS, LARGEST, ScoredGroup, read_header, unpack
from recipe.atropos.trajectory_api.parsing import parse_json, parse_packed

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT64 = st.floats(allow_nan=False, allow_infinity=False)
SCORES = st.floats(-LARGEST, LARGEST)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FLOAT64 | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({"role": TEXT, "content": JSON}, optional={"reward": JSON})
MAPPING = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def groups(draw):
    """A group with any of the fields of ``ScoredData``."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))

    def rows(values):
        return [draw(st.lists(values, min_size=length, max_size=length)) for length in lengths]

    tokens = rows(st.integers(0, 200_000) if draw(st.booleans()) else INT64)
    masks = [[draw(st.sampled_from([token, -100])) for token in row] for row in tokens]
    group = {
        "tokens": tokens,
        "masks": masks if draw(st.booleans()) else rows(st.integers(-3, 3) | INT64),
        "scores": draw(st.lists(SCORES, min_size=len(lengths), max_size=len(lengths))),
    }
    for name in FLOATS:
        if draw(st.booleans()):
            values = draw(st.sampled_from([FLOAT32, FLOAT64]))
            group[name] = rows(values.filter(lambda value: abs(value) <= LARGEST) if name == "advantages" else values)
    optional = {
        "messages": st.lists(st.lists(MESSAGE, max_size=2), max_size=2),
        "generation_params": MAPPING,
        "overrides": st.just([]) | st.lists(MAPPING, min_size=len(lengths), max_size=len(lengths)),
        "group_overrides": MAPPING,
        "images": JSON,
        "env_id": INT64,
        "distill_token_ids": st.just([[[1, 2], []]]),
        "distill_logprobs": st.just([[[-0.1, -2.5], []]]),
    }
    return group | {name: draw(values) for name, values in optional.items() if draw(st.booleans())}


def same(one, other):
    """Equal as JSON values, and floats bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return one == other and isinstance(one, bool) == isinstance(other, bool)


@given(groups())
def test_what_was_posted_is_handed_out(group):
    [parsed] = parse_json(json.dumps(group).encode(), several=False)
    handed = json.loads(unpack(parsed.record).to_json())
    assert list(handed) == list(KEYS)
    assert same(
        {key: value for key, value in handed.items() if value is not None},
        {key: value for key, value in group.items() if value is not None},
    )
    assert (len(parsed.lengths), len(parsed.tokens)) == (len(group["tokens"]), sum(map(len, group["tokens"])))
    arrays = unpack(parsed.record)
    for name, column in {"tokens": arrays.tokens, "masks": arrays.masks, **arrays.floats}.items():
        assert [row.tolist() for row in arrays.cut(column)] == handed[name]
    assert arrays.scores.tolist() == handed["scores"] and arrays.field("messages") == handed["messages"]
    record = ScoredGroup.from_mapping(group).pack()  # as a client packs it
    assert parse_packed(record)[0].record == record
    assert same(json.loads(unpack(record).to_json()), handed)


@given(groups(), st.data())
def test_a_damaged_record_is_refused_or_whole(group, data):
    """Any bytes may come: what is accepted can be handed out, everything else is refused by name."""
    message = bytearray(ScoredGroup.from_mapping(group).pack())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(message[: data.draw(st.integers(0, len(message)) | st.just(len(message)))])
    assert_refused_or_readable(cut)


def assert_refused_or_readable(message):
    try:
        accepted = parse_packed(message)
    except RefusedGroup:
        return
    for parsed in accepted:
        group, plain = unpack(parsed.record), json.loads(unpack(parsed.record).to_json())
        for name in FLOATS:
            assert (name in group.floats or name in group.fields) == (plain[name] is not None)
        assert len(group.by_sequence("inference_logprobs")) == len(parsed.lengths)
        for name, column in {"tokens": group.tokens, "masks": group.masks}.items():
            assert [row.tolist() for row in group.cut(column)] == plain[name]
            assert all(type(value) is int for row in plain[name] for value in row)
        assert len(group.scores) == len(plain["scores"]) == len(group.lengths) == len(parsed.lengths)


@settings(max_examples=500)
@given(ODD_MESSAGES)
def test_odd_packed_posts_are_refused_or_readable(message):
    assert_refused_or_readable(message)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lengths", "f8"),
        ("tokens", "f8"),
        ("scores", "bits"),
        ("inference_logprobs", "i4"),
        ("tokens", "x"),
        ("y", "i4"),
    ],
)
def test_a_buffer_of_a_wrong_dtype_is_named(name, dtype):
    group = {"tokens": [[1, 2]] * 8, "masks": [[1, 3]] * 8, "scores": [1.0] * 8, "inference_logprobs": [[-1.0] * 2] * 8}
    record = ScoredGroup.from_mapping(group).pack()
    header, start = read_header(record)
    header.buffers = {key: dtype if key == name else value for key, value in header.buffers.items()}
    header.buffers |= {} if name in header.buffers else {name: dtype}
    encoded = msgspec.json.encode(header)
    changed = b"ATG1" + struct.pack("<I", len(encoded)) + encoded + bytes(-len(encoded) % 8) + record[start:]
    with pytest.raises(RefusedGroup, match=f"a packed group has {name} of dtype {dtype}; it may have: "):
        parse_packed(changed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": np.array([math.nan])}, "nonfinite_scores"),
        ({"floats": {"advantages": np.array([1.0, math.inf])}}, "nonfinite_advantages"),
        ({"lengths": np.array([0, 2]), "scores": np.ones(2)}, "empty_group"),
        ({"lengths": np.array([3])}, "unequal_lengths"),
        ({"fields": {"inference_logprobs": b"[[-1.0]]"}}, "unequal_lengths"),
        ({"fields": {"messages": b'[[{"role": "user"}]]'}}, "malformed"),
        ({"env_id": 2**63}, "malformed"),
    ],
)
def test_packed_posts_are_checked_as_json_is(changes, reason):
    good = ScoredGroup.from_mapping({"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1.0]})
    with pytest.raises(RefusedGroup) as refused:
        parse_packed(replace(good, **changes).pack())
    assert refused.value.reason == reason


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(content):
    with pytest.raises(RefusedGroup):
        parse_packed(content + b"x")


def test_arrays_and_lists_give_one_record():
    tokens = [[5, 6, 7], [8, 9]]
    lists = {"tokens": tokens, "masks": tokens, "scores": [1.0, 0.0], "inference_logprobs": [[-0.5] * 3, [-0.25] * 2]}
    arrays = {
        "tokens": [np.array(row, np.int32) for row in tokens],
        "masks": [np.array(row) for row in tokens],
        "scores": np.array([1, 0], np.float32),
        "inference_logprobs": [np.array(row, np.float32) for row in lists["inference_logprobs"]],
    }
    assert ScoredGroup.from_mapping(arrays).pack() == ScoredGroup.from_mapping(lists).pack()


def test_the_usual_group_takes_eight_bytes_a_token():
    tokens = [[100_000 + i for i in range(1000)]]
    masks = [[-100] * 200 + tokens[0][200:]]
    group = {"tokens": tokens, "masks": masks, "scores": [1.0], "inference_logprobs": [[-0.5] * 1000]}
    assert len(ScoredGroup.from_mapping(group).pack()) < 8.5 * 1000


def test_record_cut_off_is_refused_before_it_joins_another():
    """Also if only bytes of its padding are missing: what follows would begin there."""
    record = ScoredGroup.from_mapping({"tokens": [[1, 2, 3]], "masks": [[1, 2, 3]], "scores": [1.0]}).pack()
    assert [len(group.record) for group in parse_packed(record * 2)] == [len(record)] * 2
    for missing in range(1, 9):
        with pytest.raises(RefusedGroup):
            parse_packed(record[:-missing])
