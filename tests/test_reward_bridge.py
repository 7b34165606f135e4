"""The reward bridge: its arithmetic, and what it makes of the groups of a real BaseEnv on their way to a real API."""

import asyncio
import math
import re
import sys
import time
from itertools import permutations
from pathlib import Path

import helpers_answer_env
import numpy as np
import orjson
import pytest
import yaml
from helpers_answer_env import BARE, ITEMS, RIGHT, AnswerEnv, AnswerEnvConfig
from helpers_services import get, post, running_api
from helpers_sglang import make_tiny_model
from helpers_trainer import compose_config
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.data_proto import groups_to_data_proto
from recipe.atropos.environments.checked import Checked
from recipe.atropos.environments.errors import EnvironmentFailure
from recipe.atropos.environments.reporting import VARIABLE, Reporting
from recipe.atropos.environments.shaping import shaped_by
from recipe.atropos.launch_services import Run, compose_overrides, environment_command, load_config, parse_arguments
from recipe.atropos.metrics import batch_metrics
from recipe.atropos.preflight import ConfigurationError, check_config
from recipe.atropos.rows import RowLimits
from recipe.atropos.services.process import start_service
from recipe.atropos.utils import env_adapter, reward_bridge
from recipe.atropos.utils.env_adapter import adapt
from recipe.atropos.utils.reward_bridge import (
    AnswerPresent,
    Fade,
    LengthBounty,
    RewardBridgeError,
    parse_bridge,
    read_bridge,
)

BLOCK = {
    "format_markers": [{"pattern": "<think>", "weight": 0.1}],
    "answer_present": {"pattern": r"\\boxed\{(.*?)\}", "regex": True, "weight": 0.4},
}

# ---------------------------------------------------------------------- the arithmetic

scores = st.floats(-10, 10, allow_nan=False)
positive = st.floats(0.01, 2)
bounties = st.builds(
    LengthBounty, target=st.integers(0, 500), slope=positive | positive.map(lambda x: -x), cap=positive
)


@given(bounty=bounties, lengths=st.lists(st.integers(0, 2000), min_size=2))
def test_a_bounty_is_monotone_in_the_length_nothing_at_the_target_and_never_more_than_its_cap(bounty, lengths):
    earned = [bounty.earned(length) for length in sorted(lengths)]
    assert earned == sorted(earned, reverse=bounty.slope < 0)
    assert bounty.earned(bounty.target) == 0
    assert all(abs(value) <= bounty.cap for value in earned)
    low, high = bounty.bounds
    assert low <= min(earned) and max(earned) <= high


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
        "clip": st.tuples(st.floats(-0.5, 0), st.floats(0.01, 0.4)),
        "fade": st.just({"from_step": 10, "to_step": 20}),
    },
)


@given(block=blocks, pair=st.tuples(texts, texts), lengths=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_a_block_that_is_accepted_never_lifts_a_wrong_answer_to_a_right_one(block, pair, lengths):
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
def test_the_sum_of_the_terms_is_cut_to_the_clip_and_the_score_is_not(raw, low, high, text):
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


@pytest.mark.parametrize("order", permutations(range(3)))
def test_ordered_markers_count_up_to_the_first_that_is_out_of_order(order):
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
def test_an_answer_is_present_where_something_stands_in_its_place(answer, text, expected):
    assert AnswerPresent(weight=0.5, **answer).earned(text) == 0.5 * expected


# ---------------------------------------------------------------------- the block

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
        ("format_markers: [{pattern: a, weight: 0}]", r"weight=0: Input should be greater than 0"),
        ("format_markers: [{pattern: '(a', weight: 0.1, regex: true}]", r"pattern='\(a' does not compile: missing \)"),
        ("answer_present: {pattern: '[', weight: 0.1, regex: true}", r"answer_present: pattern='\[' does not compile"),
        ("length_bounty: {target: 9, slope: 0, cap: 0.1}", "length_bounty: slope=0 does nothing"),
        ("length_bounty: {target: 9, slope: 0.1}", "length_bounty.cap is missing"),
        ("length_bounty: {target: -1, slope: 0.1, cap: 0.1}", "target=-1: Input should be greater than or equal to 0"),
        ("length_bounty: {target: 9, slope: .inf, cap: 0.1}", "slope=inf: Input should be a finite number"),
        (MARKER % "" + "\nclip: [0.2, 0.1]", r"clip=\[0.2, 0.1\]: the first must be below the second"),
        (MARKER % "" + "\nclip: [0.2, 0.4]", "shapes nothing"),
        (MARKER % "" + "\nfade: {from_step: 5, to_step: 5}", "to_step=5 must be above from_step=5"),
        ("format_markers: [{pattern: a, weight: 1}]", "difference of 1 between two answers.*right_margin=1: lower the"),
        ("length_bounty: {target: 99, slope: 0.1, cap: 0.5}", "difference of 1 between two answers"),
        (MARKER % "" + "\nright_margin: 0.1", "difference of 0.1 between two answers"),
    ],
)
def test_a_block_that_cannot_be_right_is_refused_by_key_value_and_mend(block, expected, tmp_path):
    with pytest.raises(RewardBridgeError, match=f"(?s){expected}"):
        parse_bridge(yaml.safe_load(block))
    path = tmp_path / "bridge.yaml"
    path.write_text(f"reward_bridge:\n  {block.replace(chr(10), chr(10) + '  ')}")
    with pytest.raises(RewardBridgeError, match=f"(?s)^{re.escape(str(path))}: .*{expected}"):
        read_bridge(path)


def test_the_documented_block_is_read_with_and_without_its_key(tmp_path):
    documented = re.search(r"\n(    reward_bridge:.*?\n)\n", reward_bridge.__doc__, re.DOTALL)[1]
    (tmp_path / "key.yaml").write_text(documented)
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(yaml.safe_load(documented)["reward_bridge"]))
    bridge = read_bridge(tmp_path / "key.yaml")
    assert bridge == read_bridge(tmp_path / "bare.yaml")
    assert bridge.largest_difference == pytest.approx(0.8), "the clip's"
    assert sum(bridge.terms("<think> x </think> \\boxed{7}", 200).values()) == pytest.approx(0.5)


def test_a_margin_that_is_declared_gives_room_and_a_bounty_from_zero_on_only_gives():
    assert parse_bridge({"format_markers": [{"pattern": "a", "weight": 1.5}], "right_margin": 2.0})
    assert parse_bridge({"length_bounty": {"target": 0, "slope": 0.1, "cap": 0.9}}).largest_difference == 0.9


@pytest.mark.parametrize("text", ["no/such.yaml", "[a: b: c"])
def test_a_file_that_cannot_be_read_is_named_on_the_command_line(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "bridge.yaml"
    if text.startswith("["):
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["env_adapter", "serve", "--env", "nothing", "--reward-bridge", str(path)])
    with pytest.raises(SystemExit, match="2"):
        env_adapter.main()
    assert f"--reward-bridge {path}" in capsys.readouterr().err


def test_the_launcher_runs_the_environment_through_the_adapter_with_the_block_and_evaluates_without(tmp_path):
    options = ["--preset", "demo", "--model", "m", "environment.reward_bridge.length_bounty.target=5"]
    options += ["environment.reward_bridge.length_bounty.slope=0.01", "environment.reward_bridge.length_bounty.cap=1"]
    overrides = compose_overrides(parse_arguments(options))
    run = Run(load_config(overrides), overrides, tmp_path)
    serve = environment_command(run, "serve", "http://api", "http://server")
    assert serve[1:4] == ["-m", "recipe.atropos.utils.env_adapter", "serve"]
    adapted = ["--env", "recipe.atropos.environments.gsm8k"]
    assert serve[-4:] == [*adapted, "--reward-bridge", f"{tmp_path}/reward_bridge.yaml"]
    assert "--reward-bridge" not in environment_command(run, "evaluate", "http://api", "http://server")
    with pytest.raises(ConfigurationError, match="environment.reward_bridge: can make a difference of 1.05"):
        sizes = ["data.max_prompt_length=64", "data.max_response_length=64"]
        check_config(compose_config("actor_rollout_ref.model.path=a/b", *sizes, *overrides[2:]))


# ---------------------------------------------------------------------- in front of an environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


def composed(bridge=None):
    """What ``adapt`` makes, without the mixin that sends only what a server sampled: none samples these answers."""
    shaped = () if bridge is None else (shaped_by(bridge),)
    return type("Composed", (Reporting, Checked, *shaped, AnswerEnv), {})


def make(folder, environment=AnswerEnv, **options):
    """An environment that writes what it would send into ``sent.jsonl`` of its working folder."""
    config = AnswerEnvConfig(tokenizer_name=folder, group_size=4, use_wandb=False, wandb_name="answers", **options)
    servers = [server.model_copy(update={"model_name": folder}) for server in AnswerEnv.config_init()[1]]
    env = environment(config, servers)
    asyncio.run(env.setup())
    return env


def written(env):
    """The groups that would have been sent since the last call."""
    env.jsonl_writer._fp.flush()
    with Path(env.config.data_path_to_save_groups).open("rb") as file:
        file.seek(getattr(env, "seen", 0))
        lines = file.readlines()
        env.seen = file.tell()
    return [orjson.loads(line) for line in lines]


def send(env, *items):
    """(item, group) of those that would be sent; each item goes all the way from its answers to the API's door."""

    async def through(item):
        group, _ = await env.collect_trajectories(item)
        if group is not None:
            await env.handle_send_to_api(group, item, do_send_to_api=False)
        return [(item, group) for group in written(env)]

    return [pair for item in items for pair in asyncio.run(through(item))]


def shaped_env(folder, tmp_path, block=BLOCK, **options):
    options = {"data_path_to_save_groups": str(tmp_path / "sent.jsonl")} | options
    return make(folder, composed(parse_bridge(block)), **options)


def test_shaped_scores_are_sent_and_the_raw_ones_stay_beside_them(folder, tmp_path):
    env = shaped_env(folder, tmp_path)
    [(_, group)] = send(env, ITEMS[0])
    assert group["scores"] == [1.5, 0.4, 0.0, 0.0]
    assert group["group_overrides"]["raw_scores"] == [1.0, 0.0, 0.0, 0.0]
    metrics = env.report.metrics()
    assert metrics["env/score/raw"] == 0.25 and metrics["env/score/shaped"] == pytest.approx(1.9 / 4)
    assert metrics["env/shaping/marker_0"] == 0.025 and metrics["env/shaping/answer_present"] == pytest.approx(0.2)
    assert metrics["env/shaping/weight"] == 1 and "env/shaping/overtaken" not in metrics


def test_a_group_of_equal_raw_scores_that_the_environment_dropped_is_sent_if_the_shaped_ones_differ(folder, tmp_path):
    env = shaped_env(folder, tmp_path)
    assert [(item, group["scores"]) for item, group in send(env, *ITEMS)] == [
        (ITEMS[0], [1.5, 0.4, 0.0, 0.0]),
        (ITEMS[1], [0.4, 0.0, 0.0, 0.0]),
    ]
    assert env.report.counts["shaping/recovered"] == env.report.counts["shaping/equal_raw"] == 2

    env = shaped_env(folder, tmp_path, BLOCK | {"send_equal_raw": False})
    assert [item for item, _ in send(env, *ITEMS)] == [ITEMS[0]]


def test_without_equal_raw_groups_those_that_an_environment_does_not_drop_itself_are_refused_and_counted(
    folder, tmp_path
):
    env = shaped_env(folder, tmp_path, BLOCK | {"send_equal_raw": False})
    group = {"tokens": [[5, 6]] * 4, "masks": [[-100, 6]] * 4, "scores": [1] * 4}
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    assert env.report.counts["not_sent/equal_scores"] == 1
    env.config.ensure_scores_are_not_same = False
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    assert env.report.counts["not_sent/equal_scores"] == 1, "an environment that wants them sent has its way"


def test_an_environment_without_the_bridge_beside_one_with_it_still_drops_its_groups(folder, tmp_path):
    shaped_env(folder, tmp_path)
    plain = make(folder, composed(), data_path_to_save_groups=str(tmp_path / "plain.jsonl"))
    sent = send(plain, *ITEMS)
    assert [group["scores"] for _, group in sent] == [[1.0, 0.0, 0.0, 0.0]]
    assert "raw_scores" not in (sent[0][1].get("group_overrides") or {})


def test_judged_is_what_the_policy_said_in_all_its_turns_without_special_tokens(folder, tmp_path):
    """The environment's turn has the marker; the policy's second one has half of it at its end."""
    block = {
        "format_markers": [{"pattern": "abc", "weight": 0.25, "count": "each"}],
        "length_bounty": {"target": 0, "slope": 0.01, "cap": 0.2},
        "clip": [0, 0.75],
    }
    env = shaped_env(folder, tmp_path, block)
    encode, end = env.tokenizer.encode, env.tokenizer.eos_token_id
    turns = [("abc?", False), ("abc", True), ("abc", False), ("ab", True), ("abc", False), ("c", True)]
    tokens, masks = [], []
    for text, trained in turns:
        ids = encode(text) + [end]
        tokens += ids
        masks += ids if trained else [-100] * len(ids)
    split = encode("ab") + [end] + encode("c")  # a special token inside: the text is without it
    group = {
        "tokens": [tokens, encode("p") + split, encode("p") + encode("ab\nc"), encode("p") + encode("x")],
        "masks": [masks, [-100] + split, [-100] + encode("ab\nc"), [-100] + encode("x")],
        "scores": [0.0] * 4,
        "group_overrides": None,
    }
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    [sent] = written(env)
    assert sent["scores"] == pytest.approx([0.25 + 0.09, 0.25 + 0.04, 0.04, 0.01])


def test_the_shaping_follows_the_trainers_step_until_only_raw_scores_are_left(folder, tmp_path):
    env = shaped_env(folder, tmp_path, BLOCK | {"fade": {"from_step": 10, "to_step": 20}})
    expected = {10: [1.5, 0.4, 0, 0], 15: [1.25, 0.2, 0, 0], 20: [1.0, 0.0, 0.0, 0.0]}
    for env.curr_step, scores in expected.items():
        sent = send(env, *ITEMS)
        assert sent[0][1]["scores"] == pytest.approx(scores)
        assert len(sent) == (2 if env.curr_step < 20 else 1), "faded, equal raw scores are equal"
    assert sent[0][1]["scores"] == [1.0, 0.0, 0.0, 0.0]


def test_groups_in_which_shaping_put_a_lower_score_level_with_a_higher_are_counted(folder, tmp_path):
    env = shaped_env(folder, tmp_path)
    group = env.score(ITEMS[0])
    group["scores"] = [0.0, 0.0, 0.3, 0.0]  # an environment with steps between right and wrong
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    assert env.report.counts["shaping/overtaken"] == 1


def test_advantages_of_the_environments_own_end_it_with_a_message(folder, tmp_path):
    env = shaped_env(folder, tmp_path, own_advantages=True)
    message = "environment answers sends advantages of its own.*reward_bridge has no effect there; leave it out"
    with pytest.raises(RewardBridgeError, match=message):
        send(env, ITEMS[0])
    with pytest.raises(EnvironmentFailure, match=message):  # BaseEnv logs the first and goes on; its loop ends at this
        asyncio.run(env.get_status())


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_a_score_that_is_no_number_is_not_shaped_into_one(folder, tmp_path, score):
    env = shaped_env(folder, tmp_path)
    group = env.score(ITEMS[0])
    group["scores"][1] = score
    asyncio.run(env.handle_send_to_api([group, None, env.score(ITEMS[0])], do_send_to_api=False))
    assert len(written(env)) == 1, "the other group of the item"
    assert sum(env.report.counts[f"not_sent/{reason}"] for reason in ("nan_score", "nonfinite_score")) == 1


def test_a_regular_expression_that_would_never_end_costs_its_group_and_is_counted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_bridge, "_MATCH_SECONDS", 0.1)
    env = shaped_env(folder, tmp_path, {"answer_present": {"pattern": "(a|aa|b?a)+$", "regex": True, "weight": 0.1}})
    began = time.monotonic()
    assert send(env, [RIGHT, "a" * 200 + "c", BARE, BARE]) == []
    assert env.report.counts["not_sent/marker_timeout"] == 1 and time.monotonic() - began < 5
    assert len(send(env, [RIGHT, "aaa", BARE, BARE])) == 1


def test_a_literal_that_the_judged_text_cannot_hold_is_refused(folder, tmp_path):
    with pytest.raises(RewardBridgeError, match=r"pattern '<\|im_end\|>' can never match"):
        shaped_env(folder, tmp_path, {"format_markers": [{"pattern": "<|im_end|>", "weight": 0.1}]})


def test_evaluation_is_the_same_with_and_without_the_bridge(folder, tmp_path):
    results = []
    for name in ("plain", "shaped"):
        environment = adapt(AnswerEnv, parse_bridge(BLOCK) if name == "shaped" else None)
        env = make(folder, environment, data_dir_to_save_evals=str(tmp_path / name))
        asyncio.run(env.evaluate())
        metrics = orjson.loads((tmp_path / name / "metrics.json").read_bytes())["results"]["all"]
        results.append((metrics, (tmp_path / name / "samples.jsonl").read_bytes()))
        assert not env.report.metrics()
    assert results[0] == results[1] and results[0][0] == {"eval/accuracy": 0.25}


# ---------------------------------------------------------------------- the trainer's side


def with_raw(name, scores, raw=None):
    overrides = {"env_name": name} | ({"raw_scores": raw} if raw is not None else {})
    return {
        "tokens": [[1, 2, 3]] * len(scores),
        "masks": [[-100, 2, 3]] * len(scores),
        "scores": scores,
        "group_overrides": overrides,
    }


def test_the_raw_score_is_a_metric_of_its_environment_beside_the_shaped_one():
    groups = [with_raw("a", [1.5, 0.5], [1.0, 0.0]), with_raw("b", [1.0, 0.0])]
    rows, _ = groups_to_data_proto(groups, RowLimits(10, 10, 0), 3)
    assert rows.non_tensor_batch["raw_score"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    rows = rows.select_idxs(np.flatnonzero(~rows.non_tensor_batch["is_padding"]))
    rows.batch["advantages"] = rows.batch["token_level_scores"]
    rows.non_tensor_batch["has_signal"] = np.ones(len(rows), dtype=bool)
    metrics = batch_metrics(rows)
    names = ("mean_score", "mean_raw_score", "a/mean_score", "a/mean_raw_score", "b/mean_score", "b/mean_raw_score")
    assert [metrics[f"atropos/{name}"] for name in names] == [0.75, 0.5, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("raw", [[1.0], "10", 7, [1.0, None], [1.0, math.nan]])
def test_raw_scores_that_do_not_fit_their_group_refuse_it(raw):
    _, report = groups_to_data_proto([with_raw("a", [1.5, 0.5], raw)], RowLimits(10, 10, 0), 1)
    assert report.dropped == {"malformed": 2} and "raw_scores" in report.messages[0]


# ---------------------------------------------------------------------- the whole way


def serve(folder, tmp_path, api_url, *flags):
    (tmp_path / "bridge.yaml").write_text(yaml.safe_dump({"reward_bridge": BLOCK}))
    program = helpers_answer_env.__file__
    command = [sys.executable, "-m", "recipe.atropos.utils.env_adapter", "serve", "--env", program]
    command += ["--reward-bridge", str(tmp_path / "bridge.yaml"), "--env.group_size=4", "--slurm=false"]
    command += [f"--env.rollout_server_url={api_url}", f"--env.tokenizer_name={folder}", "--env.total_steps=1000000"]
    command += [f"--openai.model_name={folder}"]
    env = {VARIABLE: str(tmp_path / "report.jsonl"), "PYTHONPATH": str(Path(program).parents[1])}
    return start_service("environment", [*command, *flags], log_path=tmp_path / "environment.log", env=env)


def register(api_url):
    settings = {"wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 512, "checkpoint_dir": ""}
    post(f"{api_url}/register", settings | {"save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 10})


@pytest.mark.skip(reason="the adapter sends only what a server sampled: this environment must ask a real one first")
@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_shaped_groups_reach_the_api_with_their_raw_scores_and_a_bridge_that_cannot_act_ends_the_environment(
    folder, tmp_path
):
    with running_api(tmp_path) as api:
        register(api.url)
        environment = serve(folder, tmp_path, api.url)
        try:
            batch, deadline = None, time.monotonic() + 90
            while batch is None:
                assert environment.poll() is None and time.monotonic() < deadline, environment.tail(40)
                batch = get(f"{api.url}/batch")["batch"]
                time.sleep(0.2)
        finally:
            environment.stop()
        found = {tuple(group["scores"]): group["group_overrides"]["raw_scores"] for group in batch}
        assert found.items() <= {(1.5, 0.4, 0.0, 0.0): [1.0, 0, 0, 0], (0.4, 0.0, 0.0, 0.0): [0.0] * 4}.items()
        last = orjson.loads((tmp_path / "report.jsonl").read_bytes().splitlines()[-1])
        assert last["counts"]["shaping/recovered"] > 0 and last["means"]["score/shaped"] > last["means"]["score/raw"]

        environment = serve(folder, tmp_path, api.url, "--env.own_advantages=true")
        try:
            while environment.poll() is None:
                assert time.monotonic() < deadline + 60, environment.tail(40)
                get(f"{api.url}/batch")  # with a full queue nothing would begin
                time.sleep(0.2)
            assert environment.poll() != 0
        finally:
            environment.stop()
        assert "environment answers sends advantages of its own for each token" in environment.tail(40)
