"""Which posts are refused, by which reason; and that the fast and the exact path agree."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.data.scored_group import FLOATS, KEYS, ScoredGroup, unpack
from recipe.atropos.trajectory_api import parsing, wire
from recipe.atropos.trajectory_api.parsing import parse_json, parse_packed

GOOD = {"tokens": [[1, 2, 3], [4, 5]], "masks": [[-100, 2, 3], [-100, 5]], "scores": [1.0, 0.5]}
NAN = float("nan")
BAD = {
    "no tokens": ({"tokens": None}, "empty_group"),
    "flat tokens": ({"tokens": [1, 2]}, "malformed"),
    "a nested token": ({"tokens": [[1, [2], 3], [4, 5]]}, "malformed"),
    "nested and empty": ({"tokens": [[[], [1, 2], 3], [4, 5]]}, "malformed"),
    "a fraction": ({"tokens": [[1, 2.5, 3], [4, 5]]}, "malformed"),
    "a token beyond 64 bits": ({"tokens": [[1, 2**63, 3], [4, 5]]}, "malformed"),
    "a string": ({"tokens": [["1", 2, 3], [4, 5]]}, "malformed"),
    "a missing token": ({"tokens": [[1, None, 3], [4, 5]]}, "malformed"),
    "no sequence": ({"tokens": [], "masks": [], "scores": []}, "empty_group"),
    "no token": ({"tokens": [[1], []], "masks": [[1], []]}, "empty_group"),
    "no masks": ({"masks": None}, "unequal_lengths"),
    "few masks": ({"masks": [[1, 2, 3]]}, "unequal_lengths"),
    "short masks": ({"masks": [[1, 2, 3], [4]]}, "unequal_lengths"),
    "other lengths of one sum": ({"masks": [[1, 2], [3, 4, 5]]}, "unequal_lengths"),
    "few scores": ({"scores": [1.0]}, "unequal_lengths"),
    "no scores": ({"scores": None}, "unequal_lengths"),
    "a NaN score": ({"scores": [1.0, NAN]}, "nonfinite_scores"),
    "an infinite score": ({"scores": [float("inf"), 0]}, "nonfinite_scores"),
    "a missing score": ({"scores": [None, 0]}, "nonfinite_scores"),
    "a huge score": ({"scores": [10**400, 0]}, "nonfinite_scores"),
    "short logprobs": ({"inference_logprobs": [[-1.0, -1.0, -1.0], [-1.0]]}, "unequal_lengths"),
    "few logprobs": ({"inference_logprobs": [[-1.0, -1.0, -1.0]]}, "unequal_lengths"),
    "NaN logprobs": ({"inference_logprobs": [[NAN, -1.0, -1.0], [-1.0, -1.0]]}, "nonfinite_inference_logprobs"),
    "NaN advantages": ({"advantages": [[NAN, 1, 1], [1, 1]]}, "nonfinite_advantages"),
    "NaN in odd advantages": ({"advantages": [NAN]}, "nonfinite_advantages"),
    "infinite ref_logprobs": ({"ref_logprobs": [[1, 1, -float("inf")], [1, 1]]}, "nonfinite_ref_logprobs"),
    "logprobs of another type": ({"inference_logprobs": 3}, "malformed"),
    "logprobs that are not numbers": ({"inference_logprobs": [["x", 1, 1], [1, 1]]}, "malformed"),
    "a message without role": ({"messages": [[{"content": "x"}]]}, "malformed"),
    "a message without content": ({"messages": [[{"role": "x"}]]}, "malformed"),
    "a message that is none": ({"messages": [["x"]]}, "malformed"),
    "NaN in a message": ({"messages": [[{"role": "x", "content": NAN}]]}, "malformed"),
    "half a surrogate": ({"messages": [[{"role": "x", "content": "\ud800"}]]}, "malformed"),
    "few overrides": ({"overrides": [{}]}, "unequal_lengths"),
    "overrides of no mapping": ({"overrides": [1, {}]}, "malformed"),
    "group_overrides of no mapping": ({"group_overrides": []}, "malformed"),
    "few trajectories": ({"group_overrides": {"trajectory": [1]}}, "malformed"),
    "no trajectories": ({"group_overrides": {"trajectory": []}}, "malformed"),
    "a trajectory of a fraction": ({"group_overrides": {"trajectory": [1, 1.0]}}, "malformed"),
    "a trajectory that is a truth": ({"group_overrides": {"trajectory": [1, True]}}, "malformed"),
    "two scores of a trajectory": ({"group_overrides": {"trajectory": [1, 1]}}, "malformed"),
    "two raw scores of a trajectory": (
        {"scores": [1.0, 1.0], "group_overrides": {"trajectory": [1, 1], "raw_scores": [1.0, 0.0]}},
        "malformed",
    ),
    "few raw scores": ({"group_overrides": {"raw_scores": [1.0]}}, "malformed"),
    "a raw score beyond float32": ({"group_overrides": {"raw_scores": [1.0, 1e39]}}, "malformed"),
    "a version that is a truth": ({"group_overrides": {"policy_version_min": [True, 1]}}, "malformed"),
    "a version beyond 64 bits": ({"group_overrides": {"policy_version_min": [2**64, 1]}}, "malformed"),
    "versions in no list": ({"group_overrides": {"policy_version_max": 3}}, "malformed"),
    "versions in the wrong order": (
        {"group_overrides": {"policy_version_min": [1, 3], "policy_version_max": [1, 2]}},
        "malformed",
    ),
    "sampling of few sequences": ({"group_overrides": {"sampling_params": [None]}}, "malformed"),
    "sampling without temperature": ({"group_overrides": {"sampling_params": [[{"top_p": 1}], None]}}, "malformed"),
    "declared sampling": ({"generation_params": {"temperature": "hot"}}, "malformed"),
    "a group's advantage": ({"group_overrides": {"set_advantage_to_zero": "yes"}}, "malformed"),
    "a sequence's advantage": ({"overrides": [{"set_advantage_to_zero": 2}, {}]}, "malformed"),
    "an environment of no name": ({"group_overrides": {"env_name": ["e"]}}, "malformed"),
    "a named environment": ({"env_id": "x"}, "malformed"),
    "an environment beyond 64 bits": ({"env_id": 2**64}, "malformed"),
}


@pytest.mark.parametrize(("fields", "reason"), BAD.values(), ids=BAD)
def test_bad_groups_are_refused_with_their_reason(fields, reason):
    """By the API, and by a trainer that has them from an API that checks nothing."""
    body = json.dumps(GOOD | fields).encode()
    with pytest.raises(RefusedGroup) as refused:
        parse_json(body, several=False)
    assert refused.value.reason == reason
    with pytest.raises(RefusedGroup):
        parse_json(b"[" + json.dumps(GOOD).encode() + b"," + body + b"]", several=True)
    _, report = read_groups([GOOD | fields], RowLimits(9, pad_token_id=0))
    assert [*report.dropped] == [reason]


READ = {"overrides", "group_overrides", "generation_params"}


@pytest.mark.parametrize("case", [name for name, (fields, _) in BAD.items() if fields.keys() <= READ])
def test_what_an_earlier_version_stored_is_refused_in_training(case):
    """It checked hardly any of it at the post."""
    fields, reason = BAD[case]
    stored = {name: json.dumps(value).encode() for name, value in fields.items()}
    good = ScoredGroup.from_mapping(GOOD)
    rows, report = read_groups([unpack(replace(good, fields=stored).pack()), good], RowLimits(9, pad_token_id=0))
    assert (report.dropped, len(rows)) == ({reason: 2}, 2) and report.messages[0].startswith("group 0 of env ")


def test_keys_of_overrides_that_nobody_reads_pass():
    fields = {"group_overrides": {"mine": [2**60, None], "raw_scores": [True, 2]}, "overrides": [{"mine": {}}, {}]}
    [parsed] = parse_json(json.dumps(GOOD | fields).encode(), several=False)
    assert {name: json.loads(unpack(parsed.record).to_json())[name] for name in fields} == fields
    rows, _ = read_groups([unpack(parsed.record)], RowLimits(9, pad_token_id=0))
    assert [row.raw_score for row in rows] == [1.0, 2.0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"tokens": 1e999}', b"[" * 5000])
def test_what_is_not_a_group_is_refused(body):
    with pytest.raises(RefusedGroup, match=".") as refused:
        parse_json(body, several=False)
    assert refused.value.reason == "malformed"


ODD = {
    "four advantages for three tokens": {"advantages": [[1, 1, 1, 1], [1, 1]]},
    "one advantage a sequence": {"advantages": [0.5, -0.5]},
    "ref_logprobs of another shape": {"ref_logprobs": [[0.0]]},
    "a sequence without logprobs": {"inference_logprobs": [[-1.0, -1.0, -1.0], []]},
    "missing advantages": {"advantages": [None, [1, 1]]},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_odd_fields_are_stored_as_they_came(fields):
    [parsed] = parse_json(json.dumps(GOOD | fields).encode(), several=False)
    assert parsed.irregular == tuple(fields)
    assert {name: json.loads(unpack(parsed.record).to_json())[name] for name in fields} == fields
    assert parse_packed(wire.join([parsed.record]))[0].record == parsed.record


def test_empty_lists_are_not_odd_and_come_back():
    """BaseEnv sends them for what single trajectories do not give."""
    empty = dict.fromkeys(FLOATS, [])
    [parsed] = parse_json(json.dumps(GOOD | empty).encode(), several=False)
    handed = json.loads(unpack(parsed.record).to_json())
    assert parsed.irregular == () and {name: handed[name] for name in FLOATS} == empty


def test_unknown_fields_are_ignored_and_truths_are_numbers():
    group = GOOD | {"masks": [[True, 1.0, 0], [1, 1]], "a[": ["[", {"b": []}], "env_id": 3}
    [parsed] = parse_json(json.dumps(group).encode(), several=False)
    handed = json.loads(unpack(parsed.record).to_json())
    assert handed["masks"] == [[1, 1, 0], [1, 1]] and "a[" not in handed and parsed.env_id == 3


def test_the_last_of_two_equal_keys_counts():
    [parsed] = parse_json(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"scores":[2]}', several=False)
    assert json.loads(unpack(parsed.record).to_json())["scores"] == [2.0]


VALUES = st.one_of(
    st.sampled_from([None, 1, 2.5, True, "x", NAN, 2**70, [], [[]], [1, 2], {}, {"role": 1}]),
    st.lists(st.lists(st.one_of(st.integers(-2, 9), st.floats(-1, 1), st.none()), max_size=3), max_size=3),
    st.lists(st.integers(-3, 3) | st.floats(-1, 1), max_size=3),
)


@given(st.dictionaries(st.sampled_from([*KEYS, "other"]), VALUES), st.booleans())
def test_the_fast_path_agrees_with_the_exact_one(fields, from_good):
    body = json.dumps((GOOD if from_good else {}) | fields).encode()

    def outcome(call):
        try:
            return json.loads(call().to_json())
        except RefusedGroup as error:
            return error.reason

    exact = outcome(lambda: ScoredGroup.from_mapping(parsing._load(body)))
    assert outcome(lambda: unpack(parse_json(body, several=False)[0].record)) == exact


def test_the_usual_body_takes_the_fast_path():
    body = json.dumps(
        GOOD | {"messages": [[{"role": "user", "content": "[x]"}]], "group_overrides": {"a": [1]}}
    ).encode()
    assert parsing._fast(body, several=False)
    assert parsing._fast(b"[" + body + b"," + body + b"]", several=True)
