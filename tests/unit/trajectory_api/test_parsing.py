"""Which posts are refused, by which reason and in which words; and that the fast and the exact path agree."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.data.scored_group import FLOATS, KEYS, ScoredGroup, unpack
from recipe.atropos.trajectory_api import parsing
from recipe.atropos.trajectory_api.parsing import parse_json, parse_packed

GOOD = {"tokens": [[1, 2, 3], [4, 5]], "masks": [[-100, 2, 3], [-100, 5]], "scores": [1.0, 0.5]}
NAN = float("nan")


def said(**overrides):
    return {"group_overrides": overrides}


def sampled(**params):
    """Of the first sequence; of the other it is not known."""
    return said(sampling_params=[[params], None])


BAD = {  # fields, the reason, and what the message says
    "no tokens": ({"tokens": None}, "empty_group", "0 sequences"),
    "flat tokens": ({"tokens": [1, 2]}, "malformed", "tokens[0]"),
    "a sequence that is none": ({"tokens": [None, [4, 5]]}, "malformed", "not a flat list of whole numbers: None"),
    "a nested token": ({"tokens": [[1, [2], 3], [4, 5]]}, "malformed", "tokens[0]"),
    "nested and empty": ({"tokens": [[[], [1, 2], 3], [4, 5]]}, "malformed", "tokens[0]"),
    "a fraction": ({"tokens": [[1, 2.5, 3], [4, 5]]}, "malformed", "tokens[0]"),
    "a token beyond 64 bits": ({"tokens": [[1, 2**63, 3], [4, 5]]}, "malformed", "tokens[0]"),
    "a string": ({"tokens": [["1", 2, 3], [4, 5]]}, "malformed", "tokens[0]"),
    "a missing token": ({"tokens": [[1, None, 3], [4, 5]]}, "malformed", "tokens[0]"),
    "no sequence": ({"tokens": [], "masks": [], "scores": []}, "empty_group", "0 sequences"),
    "no token": ({"tokens": [[1], []], "masks": [[1], []]}, "empty_group", "2 sequences of lengths [1, 0]"),
    "no masks": ({"masks": None}, "unequal_lengths", "0 masks for 2 sequences"),
    "masks in no list": ({"masks": {"0": [1]}}, "malformed", "masks is a dict"),
    "few masks": ({"masks": [[1, 2, 3]]}, "unequal_lengths", "1 masks for 2 sequences"),
    "short masks": ({"masks": [[1, 2, 3], [4]]}, "unequal_lengths", "masks[1] has length 1, tokens[1] has 2"),
    "other lengths of one sum": ({"masks": [[1, 2], [3, 4, 5]]}, "unequal_lengths", "masks[0] has length 2"),
    "few scores": ({"scores": [1.0]}, "unequal_lengths", "1 scores for 2 sequences"),
    "no scores": ({"scores": None}, "unequal_lengths", "0 scores for 2 sequences"),
    "scores in no list": ({"scores": 1.0}, "malformed", "scores is a float"),
    "a NaN score": ({"scores": [1.0, NAN]}, "nonfinite_scores", "score 1 is nan"),
    "an infinite score": ({"scores": [float("inf"), 0]}, "nonfinite_scores", "score 0 is inf"),
    "a missing score": ({"scores": [None, 0]}, "nonfinite_scores", "score 0 is None"),
    "a score beyond float32": ({"scores": [1e155, 0]}, "nonfinite_scores", "score 0 is 1e+155; it must be"),
    "a score of text": ({"scores": ["1", 0]}, "nonfinite_scores", "score 0 is '1'"),
    "a huge score": ({"scores": [10**400, 0]}, "nonfinite_scores", "score 0 is 1000"),
    "short logprobs": ({"inference_logprobs": [[-1.0] * 3, [-1.0]]}, "unequal_lengths", "[1] has length 1"),
    "few logprobs": ({"inference_logprobs": [[-1.0] * 3]}, "unequal_lengths", "1 inference_logprobs for 2"),
    "NaN logprobs": ({"inference_logprobs": [[NAN] * 3, [-1.0] * 2]}, "nonfinite_inference_logprobs", "at position 0"),
    "NaN advantages": ({"advantages": [[1, 1, NAN], [1, 1]]}, "nonfinite_advantages", "nan at position 2"),
    "NaN in odd advantages": ({"advantages": [NAN]}, "nonfinite_advantages", "advantages has no JSON form"),
    "infinite ref_logprobs": ({"ref_logprobs": [[1, 1, -float("inf")], [1, 1]]}, "nonfinite_ref_logprobs", "-inf"),
    "logprobs of another type": ({"inference_logprobs": 3}, "malformed", "inference_logprobs is a int"),
    "logprobs of text": ({"inference_logprobs": [["x", 1, 1], [1, 1]]}, "malformed", "inference_logprobs[0] is not a"),
    "a message without role": ({"messages": [[{"content": "x"}]]}, "malformed", "field `role`"),
    "a message without content": ({"messages": [[{"role": "x"}]]}, "malformed", "messages[0][0] is {'role': 'x'}: Obj"),
    "a message that is none": ({"messages": [["x"]]}, "malformed", "messages[0][0] is 'x'"),
    "NaN in a message": ({"messages": [[{"role": "x", "content": NAN}]]}, "malformed", "messages has no JSON form"),
    "half a surrogate": ({"messages": [[{"role": "x", "content": "\ud800"}]]}, "malformed", "messages"),
    "few overrides": ({"overrides": [{}]}, "unequal_lengths", "1 overrides for 2 sequences"),
    "overrides of no mapping": ({"overrides": [1, {}]}, "malformed", "overrides[0] is 1: Expected `object`"),
    "group_overrides of no mapping": ({"group_overrides": []}, "malformed", "group_overrides is []"),
    "few trajectories": (said(trajectory=[1]), "malformed", "trajectory is [1], not a list over 2 sequences"),
    "no trajectories": (said(trajectory=[]), "malformed", "trajectory is [], not a list"),
    "trajectories in no list": (said(trajectory=1), "malformed", "trajectory is 1: Expected `array"),
    "a trajectory of a fraction": (said(trajectory=[1, 1.0]), "malformed", "trajectory[1] is 1.0: Expected `int`"),
    "a trajectory that is a truth": (said(trajectory=[1, True]), "malformed", "trajectory[1] is True: Expected `int`"),
    "a trajectory of text": (said(trajectory=["a", "b"]), "malformed", "trajectory[0] is 'a': Expected `int`"),
    "two scores of a trajectory": (said(trajectory=[4, 4]), "malformed", "trajectory 4 has scores 1.0 and 0.5"),
    "two raw scores": (
        {"scores": [1.0, 1.0], **said(trajectory=[4, 4], raw_scores=[1.0, 0.0])},
        "malformed",
        "trajectory 4 has raw_scores 1.0 and 0.0",
    ),
    "few raw scores": (said(raw_scores=[1.0]), "malformed", "raw_scores is [1.0], not a list over 2 sequences"),
    "raw scores of text": (said(raw_scores="10"), "malformed", "raw_scores is '10'"),
    "a missing raw score": (said(raw_scores=[1.0, None]), "malformed", "raw_scores[1] is None"),
    "a raw score beyond float32": (said(raw_scores=[1.0, 1e39]), "malformed", "raw_scores[1] is 1e+39"),
    "a version that is a truth": (said(policy_version_min=[True, 1]), "malformed", "policy_version_min[0] is True"),
    "a version beyond 64 bits": (said(policy_version_min=[2**64, 1]), "malformed", "group_overrides"),
    "versions in no list": (said(policy_version_max=3), "malformed", "policy_version_max is 3"),
    "versions in the wrong order": (
        said(policy_version_min=[1, 3], policy_version_max=[1, 2]),
        "malformed",
        "policy_version_min[1] is 3, policy_version_max[1] only 2",
    ),
    "sampling of few sequences": (said(sampling_params=[None]), "malformed", "not a list over 2 sequences"),
    "sampling in no list": (said(sampling_params={"a": 1}), "malformed", "_params is {'a': 1}: Expected `array"),
    "sampling of no list": (said(sampling_params=["hot"] * 2), "malformed", "_params[0] is 'hot': Expected `array"),
    "sampling of nothing": (said(sampling_params=[[]] * 2), "malformed", "[0] is []: Expected `array` of length >= 1"),
    "sampling without temperature": (sampled(top_p=1), "malformed", "[0][0] is {'top_p': 1}: Object missing required"),
    "a temperature of text": (sampled(temperature="hot"), "malformed", "[0].temperature is 'hot': Expected `float`"),
    "a temperature below 0": (sampled(temperature=-1), "malformed", "[0].temperature is -1: Expected `float` >= 0.0"),
    "a temperature that is a truth": (sampled(temperature=True), "malformed", "Expected `float`, got `bool`"),
    "an unknown parameter": (sampled(temperature=1, topp=1), "malformed", "Object contains unknown field `topp`"),
    "a bias in no mapping": (sampled(temperature=1, logit_bias=3), "malformed", "logit_bias is 3: Expected `object`"),
    "a bias of text": (sampled(temperature=1, logit_bias={"x": 1}), "malformed", "Expected `int`, got `str`"),
    "constraints in no list": (sampled(temperature=1, constraints="a"), "malformed", "is 'a': Expected `array"),
    "a top_k of a fraction": (sampled(temperature=1, top_k=5.5), "malformed", "that's a multiple of 1.0"),
    "a top_k that is a truth": (sampled(temperature=1, top_k=True), "malformed", "Expected `int | float`, got `bool`"),
    "declared sampling": ({"generation_params": {"temperature": "hot"}}, "malformed", "generation_params: "),
    "a group's advantage": (said(set_advantage_to_zero="yes"), "malformed", "set_advantage_to_zero is 'yes'"),
    "a sequence's advantage": ({"overrides": [{"set_advantage_to_zero": 2}, {}]}, "malformed", "overrides[0].set_adv"),
    "an environment of no name": (said(env_name=["e"]), "malformed", "env_name is ['e']"),
    "a named environment": ({"env_id": "x"}, "malformed", "env_id=x: give a whole number"),
    "an environment beyond 64 bits": ({"env_id": 2**64}, "malformed", "give a whole number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_groups_are_refused_with_their_reason(name):
    """By the API, and by a trainer that has them from an API that checks nothing, where the message names the group."""
    fields, reason, words = BAD[name]
    body = json.dumps(GOOD | fields).encode()
    with pytest.raises(RefusedGroup, match=re.escape(words)) as refused:
        parse_json(body, several=False)
    assert refused.value.reason == reason
    with pytest.raises(RefusedGroup):
        parse_json(b"[" + json.dumps(GOOD).encode() + b"," + body + b"]", several=True)
    rows, report = read_groups([GOOD, GOOD | fields], RowLimits(9, pad_token_id=0))
    assert [row.uid for row in rows] == ["0", "0"], "the good group stays"
    assert report.dropped == {reason: 1 if name in ("no tokens", "no sequence") else 2}
    assert report.messages[0].startswith("group 1 of env ") and words in report.messages[0]


READ = {"overrides", "group_overrides", "generation_params"}


@pytest.mark.parametrize("case", [name for name, (fields, *_) in BAD.items() if fields.keys() <= READ])
def test_what_an_earlier_version_stored_is_refused_in_training(case):
    """It checked hardly any of it at the post."""
    fields, reason, _ = BAD[case]
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
    "nothing, as BaseEnv sends of single trajectories": dict.fromkeys(FLOATS, []),
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_odd_fields_are_stored_as_they_came(fields):
    [parsed] = parse_json(json.dumps(GOOD | fields).encode(), several=False)
    assert parsed.irregular == tuple(name for name, rows in fields.items() if rows), "empty lists are not odd"
    assert {name: json.loads(unpack(parsed.record).to_json())[name] for name in fields} == fields
    assert parse_packed(parsed.record)[0].record == parsed.record


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
