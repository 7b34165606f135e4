"""The reward bridge: its arithmetic, and its configuration."""

import re
import sys
from itertools import permutations

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from helpers.trainer import compose_config
from recipe.atropos.adapter import cli as env_adapter
from recipe.atropos.algorithm import reward_bridge
from recipe.atropos.algorithm.reward_bridge import (
    AnswerPresent,
    Fade,
    LengthBounty,
    RewardBridgeError,
    parse_bridge,
    read_bridge,
)
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.preflight import check_config

# ---------------------------------------------------------------------- the arithmetic

scores = st.floats(-10, 10, allow_nan=False)
positive = st.floats(0.01, 2)
bounties = st.builds(
    LengthBounty, target=st.integers(0, 500), slope=positive | positive.map(lambda x: -x), cap=positive
)


@given(bounty=bounties, lengths=st.lists(st.integers(0, 2000), min_size=2))
def test_bounty_falls_with_the_length_within_its_cap(bounty, lengths):
    """It is monotone in the length, nothing at the target, and never more than its cap."""
    earned = [bounty.earned(length) for length in sorted(lengths)]
    assert earned == sorted(earned, reverse=bounty.slope < 0)
    assert bounty.earned(bounty.target) == 0
    assert all(abs(value) <= bounty.cap for value in earned)
    low, high = bounty.bounds
    assert low <= min(earned) and max(earned) <= high


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (16383, 0), (16384, 0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20479, -4095 / 4096)]
    + [(20480, -1), (20481, -1), (100_000, -1)],
)
def test_soft_overlong_is_equation_13_of_dapo(length, expected):
    """With the paper's numbers: L_max of 20,480 and L_cache of 4,096 tokens; scores are -1 and 1."""
    bridge = parse_bridge({"soft_overlong": {"max_length": 20480, "cache": 4096}, "right_margin": 2.0})
    assert bridge.terms("", length) == {"soft_overlong": expected}
    assert [bridge.shaped(raw, bridge.terms("", length), 0) for raw in (1.0, -1.0)] == [1 + expected, expected - 1]
    assert bridge.largest_difference == 1


@given(first=st.integers(0, 100), length=st.integers(1, 100), step=st.integers(0, 300))
def test_the_shaping_fades_from_one_to_nothing_in_a_line(first, length, step):
    fade = Fade(first, first + length)
    assert fade.weight(step) == pytest.approx(np.interp(step, [first, first + length], [1, 0]))


parts = st.sampled_from(["<think>", "</think>", "wait", r"\boxed{7}", "\n", "7"])
texts = st.lists(parts, max_size=8).map(" ".join)
markers = st.fixed_dictionaries(
    {
        "pattern": st.sampled_from(["<think>", "</think>", r"\boxed{", "wait"]),
        "weight": st.floats(0.01, 0.5),
        "presence": st.sampled_from(["required", "forbidden"]),
        "count": st.sampled_from(["any", "each"]),
    }
)
blocks = st.fixed_dictionaries(
    {"format_markers": st.lists(markers, min_size=1, max_size=4)},
    optional={
        "answer_present": st.just({"pattern": "boxed{", "weight": 0.2}),
        "length_bounty": st.just({"target": 20, "slope": -0.01, "cap": 0.2}),
        "soft_overlong": st.just({"max_length": 60, "cache": 20, "weight": 0.3}),
        "clip": st.tuples(st.floats(-0.5, 0), st.floats(0.01, 0.4)),
        "fade": st.just({"from_step": 10, "to_step": 20}),
    },
)


@given(block=blocks, pair=st.tuples(texts, texts), lengths=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_bridge_never_lifts_a_wrong_answer_to_a_right_one(block, pair, lengths):
    """With any block that is accepted."""
    try:
        bridge = parse_bridge(block)
    except RewardBridgeError as error:
        assert re.search("right_margin=1:|give clip|shapes nothing", str(error))
        return
    right, wrong = (
        [bridge.shaped(raw, bridge.terms(text, length), step) for step in (0, 12, 20)]
        for raw, text, length in zip((1.0, 0.0), pair, lengths, strict=True)
    )
    assert all(r > w for r, w in zip(right, wrong, strict=True))
    assert abs((right[0] - 1) - wrong[0]) <= bridge.largest_difference + 1e-9 < 1
    if bridge.fade is not None:
        assert (right[2], wrong[2]) == (1.0, 0.0), "what has faded is the environment's own score, exactly"


@given(raw=scores, low=st.floats(-0.4, 0), high=st.floats(0.01, 0.4), text=texts)
def test_bridge_clips_the_sum_of_its_terms_not_the_score(raw, low, high, text):
    markers = [{"pattern": pattern, "weight": 9.0, "count": "each"} for pattern in ("7", "wait")]
    markers[1]["presence"] = "forbidden"
    bridge = parse_bridge({"format_markers": markers, "clip": [low, high]})
    total = 9 * (text.count("7") - text.count("wait"))
    assert bridge.shaped(raw, bridge.terms(text, 1), 0) == raw + min(high, max(low, total))


def earned(text, *markers):
    block = {"format_markers": [{"weight": 0.125} | marker for marker in markers], "clip": [-0.4, 0.5]}
    return [value / 0.125 for value in parse_bridge(block).terms(text, 1).values()]


@pytest.mark.parametrize(
    ("marker", "text", "expected"),
    [
        ({"pattern": r"\boxed{"}, r"so \boxed{7}", 1),
        ({"pattern": r"\boxed{"}, r"\boxed{7} \boxed{8}", 1),
        ({"pattern": r"\boxed{"}, "7", 0),
        ({"pattern": "a.c"}, "abc", 0),
        ({"pattern": "a.c", "regex": True}, "abc", 1),
        ({"pattern": "ab", "count": "once"}, "ab", 1),
        ({"pattern": "ab", "count": "once"}, "ab ab", 0),
        ({"pattern": "ab", "count": "each"}, "ab ab", 2),
        ({"pattern": "aa", "count": "each"}, "aaaa", 2),
        ({"pattern": "ab", "count": "each"}, "", 0),
        ({"pattern": "ab", "presence": "forbidden"}, "ab ab", -1),
        ({"pattern": "ab", "presence": "forbidden"}, "ba", 0),
        ({"pattern": "ab", "presence": "forbidden", "count": "each"}, "ab ab", -2),
    ],
)
def test_a_marker_counts_as_its_rule_says(marker, text, expected):
    assert earned(text, marker) == [expected]


CHAIN = ["<think>", "</think>", r"\boxed{"]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_ordered_markers_count_up_to_the_first_out_of_order(order):
    text = " ".join(CHAIN[i] for i in order)
    expected, position = [], -1
    for i in range(3):  # the slow and obvious way
        position = order.index(i) if position is not None and order.index(i) > position else None
        expected.append(position is not None)
    assert earned(text, *({"pattern": pattern, "ordered": True} for pattern in CHAIN)) == expected


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        ("b a b", [{}, {}], [1, 1]),  # the b that counts is the one behind
        ("b a b", [{}, {"count": "each"}], [1, 1]),
        ("b a b b", [{"count": "each"}, {"count": "each"}], [1, 2]),
        ("b a b", [{}, {"count": "once"}], [1, 0]),
        ("a a b", [{"count": "once"}, {}], [0, 0]),
        ("b a", [{"ordered": False}, {}], [1, 1]),  # no chain with one that is not ordered
    ],
)
def test_ordered_goes_with_once_and_each(text, rules, expected):
    rules = [{"pattern": pattern, "ordered": True} | rule for pattern, rule in zip("ab", rules, strict=True)]
    assert earned(text, *rules) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ({"pattern": r"\\boxed\{(.*?)\}", "regex": True}, r"so \boxed{7}", True),
        ({"pattern": r"\\boxed\{(.*?)\}", "regex": True}, r"so \boxed{ }", False),
        ({"pattern": r"\\boxed\{(.*?)\}", "regex": True}, r"\boxed{}, that is \boxed{7}", True),
        ({"pattern": r"\\boxed\{(.*?)\}", "regex": True}, "7", False),
        ({"pattern": r"(?m)^#### (\d+)?$", "regex": True}, "####  ", False),
        ({"pattern": r"####\s*\d+", "regex": True}, "#### 7", True),
        ({"pattern": "####"}, "#### 7", True),
        ({"pattern": "####"}, "#### 7\n####\n", False),
        ({"pattern": "####"}, "7", False),
    ],
)
def test_answer_is_present_where_something_stands_there(answer, text, expected):
    assert AnswerPresent(weight=0.5, **answer).earned(text) == 0.5 * expected


# ---------------------------------------------------------------------- the block


def test_bridge_takes_markers_as_text():
    given = ['environment.reward_bridge={format_markers: ["<think>", "\\boxed{"]}', "actor_rollout_ref.model.path=m"]
    bridge = parse_bridge(OmegaConf.to_container(load_config(given).environment.reward_bridge))
    assert bridge == parse_bridge({"format_markers": [{"pattern": p, "weight": 0.1} for p in ("<think>", "\\boxed{")]})


MARKER = "format_markers: [{pattern: a, weight: 0.1%s}]"


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("{}", "shapes nothing; give format_markers"),
        ("7", "reward_bridge=7: give a mapping of format_markers"),
        ("{clipp: 3}", "reward_bridge.clipp=3: no such key; there are format_markers, answer_present"),
        (MARKER % ", wieght: 3", r"reward_bridge.format_markers\[0\].wieght=3: no such key; there are pattern, weight"),
        (MARKER % ", regex: 1", r"format_markers\[0\].regex=1: Input should be a valid boolean"),
        (MARKER % ", count: twice", r"format_markers\[0\].count='twice': Input should be 'any', 'once' or 'each'"),
        (MARKER % ", presence: forbidden, ordered: true", "ordered: true means nothing where pattern 'a' is forbidden"),
        (MARKER % ", presence: forbidden, count: once", "count: once means nothing where pattern 'a' is forbidden"),
        (MARKER % ", count: each", r"count: each has no bound; give clip: \[lowest, highest\]"),
        ("format_markers: [{weight: 0.1}]", r"reward_bridge.format_markers\[0\].pattern is missing"),
        ("format_markers: [{pattern: '', weight: 0.1}]", r"format_markers\[0\].pattern='': .*at least 1 character"),
        ("format_markers: [{pattern: a, weight: '0.1'}]", r"weight='0.1': Input should be a valid number"),
        ("format_markers: [{pattern: '(a', weight: 0.1, regex: true}]", r"pattern='\(a' does not compile: missing \)"),
        ("answer_present: {pattern: '[', weight: 0.1, regex: true}", r"answer_present: pattern='\[' does not compile"),
        ("format_markers: <think>", r"format_markers='<think>': give a list, \[...\]"),
        ("length_bounty: 0.1", "length_bounty=0.1: give a mapping of target, slope, cap"),
        ("length_bounty: {target: 9, slope: 0, cap: 0.1}", "length_bounty: slope=0 does nothing"),
        ("length_bounty: {target: -1, slope: 0.1, cap: 0.1}", "target=-1: Input should be greater than or equal to 0"),
        ("format_markers: [{pattern: a, weight: -0.1}]", "weight=-0.1: Input should be greater than 0"),
        ("length_bounty: {target: 9, slope: .inf, cap: 0.1}", "slope=inf: Input should be a finite number"),
        ("soft_overlong: {max_length: 9, cache: 10}", "soft_overlong: cache=10 is more than max_length=9"),
        ("soft_overlong: {max_length: 9}", "soft_overlong.cache is missing"),
        ("soft_overlong: {max_length: 9, cache: 3}", "difference of 1 between two answers.*right_margin=1: lower the"),
        (MARKER % "" + "\nclip: [0.2, 0.1]", r"clip=\[0.2, 0.1\]: the first must be below the second"),
        (MARKER % "" + "\nclip: [0.2, 0.4]", "shapes nothing"),
        (MARKER % "" + "\nfade: {from_step: 5, to_step: 5}", "to_step=5 must be above from_step=5"),
        ("format_markers: [{pattern: a, weight: 1}]", "difference of 1 between two answers.*right_margin=1: lower the"),
        ("length_bounty: {target: 99, slope: 0.1, cap: 0.5}", "difference of 1 between two answers"),
        (MARKER % "" + "\nright_margin: 0.1", "difference of 0.1 between two answers"),
    ],
)
def test_bridge_refuses_a_wrong_block_by_key_value_and_fix(block, expected, tmp_path):
    with pytest.raises(RewardBridgeError, match=f"(?s){expected}"):
        parse_bridge(yaml.safe_load(block))
    path = tmp_path / "bridge.yaml"
    path.write_text(f"reward_bridge:\n  {block.replace(chr(10), chr(10) + '  ')}")
    with pytest.raises(RewardBridgeError, match=f"(?s)^{re.escape(str(path))}: .*{expected}"):
        read_bridge(path)


def test_the_documented_block_is_read_however_it_is_given(tmp_path):
    documented = re.search(r"\n(    reward_bridge:.*?\n)\n", reward_bridge.__doc__, re.DOTALL)[1]
    (tmp_path / "key.yaml").write_text(documented)
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(yaml.safe_load(documented)["reward_bridge"]))
    bridge = read_bridge(tmp_path / "key.yaml")
    block = yaml.safe_dump(yaml.safe_load(documented), default_flow_style=True)
    assert bridge == read_bridge(tmp_path / "bare.yaml") == read_bridge(block)
    assert bridge.largest_difference == pytest.approx(0.8), "the clip's"
    assert sum(bridge.terms("<think> x </think> \\boxed{7}", 200).values()) == pytest.approx(0.5)


def test_bridge_margin_that_is_declared_gives_room():
    """A bounty that begins at zero only adds."""
    assert parse_bridge({"format_markers": [{"pattern": "a", "weight": 1.5}], "right_margin": 2.0})
    assert parse_bridge({"length_bounty": {"target": 0, "slope": 0.1, "cap": 0.9}}).largest_difference == 0.9


@pytest.mark.parametrize("text", [None, "[a: b: c", ""], ids=["missing", "no_yaml", "no_name"])
def test_a_file_that_cannot_be_read_is_named_on_the_command_line(tmp_path, monkeypatch, capsys, text):
    """One without a name is not taken for no bridge."""
    path = tmp_path / "bridge.yaml" if text != "" else ""
    if text:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["env_adapter", "serve", "--env", "nothing", f"--reward-bridge={path}"])
    with pytest.raises(SystemExit, match="2"):
        env_adapter.main()
    assert f"--reward-bridge {path}" in capsys.readouterr().err


def test_bridge_that_lifts_wrong_answers_is_refused_before_a_run():
    options = [f"environment.reward_bridge.length_bounty.{part}" for part in ("target=5", "slope=0.01", "cap=1")]
    options += ["data.max_prompt_length=64", "data.max_response_length=64", "actor_rollout_ref.model.path=a/b"]
    with pytest.raises(RewardBridgeError, match="environment.reward_bridge: can make a difference of 1.05"):
        check_config(compose_config(*options))
