"""The reward bridge in front of a real BaseEnv."""

import asyncio
import json
import math
import time

import numpy as np
import orjson
import pytest

from helpers.environments.answer_env import BARE, ITEMS, RIGHT, AnswerEnv, AnswerEnvConfig
from helpers.loss import in_the_loss
from helpers.sglang import make_tiny_model
from helpers.trainer import random_group
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.adapter.validate import as_groups
from recipe.atropos.algorithm.reward_bridge import RewardBridgeError, parse_bridge
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.utils import patterns

V = 40  # tokens of random groups
BLOCK = {
    "format_markers": [{"pattern": "<think>", "weight": 0.1}],
    "answer_present": {"pattern": r"\\boxed\{(.*?)\}", "regex": True, "weight": 0.4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


def composed(bridge=None, settings=None):
    """What ``adapt`` makes; it keeps what it would post, and does not look for servers that sampled these answers."""

    async def keep(self, scored_data):
        self.sent += as_groups(scored_data)

    body = {"_restore": lambda self, group: None, "_send_scored_data_to_api": keep}
    return type("Composed", (adapt(AnswerEnv, bridge, settings),), body)


async def make(folder, environment, **options):
    config = AnswerEnvConfig(tokenizer_name=folder, group_size=4, use_wandb=False, wandb_name="answers", **options)
    servers = [server.model_copy(update={"model_name": folder}) for server in AnswerEnv.config_init()[1]]
    env = environment(config, servers)
    await env.setup()
    return env


async def posted(env, group, item=None):
    """What would be sent of a group, or of the groups of a list."""
    env.sent = []
    await env.handle_send_to_api(group, item)
    return env.sent


async def send(env, *items):
    """(item, group) of those that would be sent; each item goes all the way from its answers to the API's door."""
    found = []
    for item in items:
        group, _ = await env.collect_trajectories(item)
        found += [(item, each) for each in ([] if group is None else await posted(env, group, item))]
    return found


async def shaped_env(folder, block=BLOCK, settings=None, **options):
    return await make(folder, composed(parse_bridge(block), settings), **options)


async def test_reward_bridge_sends_shaped_scores_beside_raw_ones(folder):
    env = await shaped_env(folder)
    [(_, group)] = await send(env, ITEMS[0])
    assert group["scores"] == [1.5, 0.4, 0.0, 0.0]
    assert group["group_overrides"]["raw_scores"] == [1.0, 0.0, 0.0, 0.0]
    metrics = env.report.metrics()
    assert metrics["env/score/raw"] == 0.25 and metrics["env/score/shaped"] == pytest.approx(1.9 / 4)
    assert metrics["env/shaping/marker_0"] == 0.025 and metrics["env/shaping/answer_present"] == pytest.approx(0.2)
    assert metrics["env/shaping/weight"] == 1 and "env/shaping/rank_inversions" not in metrics
    group = env.score(ITEMS[0])
    group["scores"] = [0.0, 0.0, 0.3, 0.0]  # an environment with steps between right and wrong
    await posted(env, group)
    assert env.report.counts["shaping/rank_inversions"] == 1


async def test_reward_bridge_recovers_dropped_groups_of_equal_scores(folder):
    env = await shaped_env(folder)
    assert [(item, group["scores"]) for item, group in await send(env, *ITEMS)] == [
        (ITEMS[0], [1.5, 0.4, 0.0, 0.0]),
        (ITEMS[1], [0.4, 0.0, 0.0, 0.0]),
    ]
    assert env.report.counts["shaping/recovered"] == env.report.counts["shaping/equal_raw"] == 2


async def test_reward_bridge_without_equal_raw_refuses_and_counts(folder):
    env = await shaped_env(folder, BLOCK | {"send_equal_raw": False})
    assert [item for item, _ in await send(env, *ITEMS)] == [ITEMS[0]]
    env.report.counts.clear()
    group = {"tokens": [[5, 6]] * 4, "masks": [[-100, 6]] * 4, "scores": [1] * 4}
    await posted(env, group)
    assert env.report.counts["not_sent/equal_scores"] == 1
    env.config.ensure_scores_are_not_same = False
    await posted(env, group)
    assert env.report.counts["not_sent/equal_scores"] == 1, "an environment that wants them sent has its way"


@pytest.mark.parametrize("raw", [[1.0] * 4, [1.0, 1.0, 0.0, 0.0]], ids=["equal", "different"])
async def test_outcome_gate_holds_under_shaped_scores(folder, raw):
    """Equal outcomes give no gradient, whatever the shaping: by the bridge's key, and by the gate of credit."""
    group = random_group(np.random.default_rng(0), V, turns=2) | {"scores": raw}
    block = {"length_bounty": {"target": 0, "slope": 0.01, "cap": 0.4}}
    gated = AdapterSettings(credit=json.dumps({"outcome_gate": True}))
    for own, settings in ((block | {"send_equal_raw": False}, None), (block, gated), (block, None)):
        env = await shaped_env(folder, own, settings=settings, ensure_scores_are_not_same=False)
        [sent] = await posted(env, group)
        gates = own is not block or settings is not None
        assert any(map(any, in_the_loss([sent], V).advantages)) is (raw[0] != raw[-1] or not gates)
        assert sent["group_overrides"]["raw_scores"] == raw


async def test_soft_overlong_reaches_the_advantages(folder):
    """Of four trajectories, the first in two rows: 6, 5, 4 and 9 tokens, where 4 are free and 8 the most."""
    lengths, numbers = [2, 5, 4, 4, 9], [0, 1, 0, 2, 3]
    tokens = [[5, *range(6, 6 + length)] for length in lengths]
    group = {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "inference_logprobs": [[1.0] + [-0.5] * length for length in lengths],
        "scores": [1.0, 1.0, 1.0, -1.0, 1.0],
        "group_overrides": {"trajectory": numbers},
    }
    block = {"soft_overlong": {"max_length": 8, "cache": 4}, "right_margin": 2.0}
    env = await shaped_env(folder, block)
    [sent] = await posted(env, group)
    shaped = [0.5, 0.75, -1.0, 0.0]  # of the trajectories: 1 - 2/4, 1 - 1/4, -1 - 0, 1 - 1
    assert sent["scores"] == [shaped[number] for number in numbers]
    wanted = (np.array(shaped) - np.mean(shaped)) / (np.std(shaped, ddof=1) + 1e-6)
    found = in_the_loss([sent], V, "actor_rollout_ref.actor.loss_agg_mode=token-mean").advantages
    for row, number in zip(found, numbers, strict=True):
        assert row[0] == 0.0 and row[1:] == pytest.approx([wanted[number]] * (len(row) - 1), abs=1e-4)


async def test_reward_bridge_leaves_other_environments_alone(folder):
    await shaped_env(folder)
    plain = await make(folder, composed())
    sent = await send(plain, *ITEMS)
    assert [group["scores"] for _, group in sent] == [[1.0, 0.0, 0.0, 0.0]]
    assert "raw_scores" not in (sent[0][1].get("group_overrides") or {})


async def test_reward_bridge_judges_all_turns_of_the_policy(folder):
    """The environment's turn has the marker; the policy's second one has half of it at its end."""
    block = {
        "format_markers": [{"pattern": "abc", "weight": 0.25, "count": "each"}],
        "length_bounty": {"target": 0, "slope": 0.01, "cap": 0.2},
        "clip": [0, 0.75],
    }
    env = await shaped_env(folder, block)
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
    [sent] = await posted(env, group)
    assert sent["scores"] == pytest.approx([0.25 + 0.09, 0.25 + 0.04, 0.04, 0.01])


async def test_reward_bridge_follows_the_trainers_step(folder):
    env = await shaped_env(folder, BLOCK | {"fade": {"from_step": 10, "to_step": 20}})
    expected = {10: [1.5, 0.4, 0, 0], 15: [1.25, 0.2, 0, 0], 20: [1.0, 0.0, 0.0, 0.0]}
    for env.curr_step, scores in expected.items():
        sent = await send(env, *ITEMS)
        assert sent[0][1]["scores"] == pytest.approx(scores)
        assert len(sent) == (2 if env.curr_step < 20 else 1), "faded, equal raw scores are equal"
    assert sent[0][1]["scores"] == [1.0, 0.0, 0.0, 0.0]


async def test_reward_bridge_refuses_advantages_of_the_environment(folder):
    env = await shaped_env(folder, own_advantages=True)
    message = "environment answers sends advantages of its own.*reward_bridge has no effect there; leave it out"
    with pytest.raises(RewardBridgeError, match=message):
        await send(env, ITEMS[0])

    async def work():  # BaseEnv logs the first and goes on
        await asyncio.sleep(60)

    env.setup = work
    with pytest.raises(EnvironmentFailure, match=message):
        await env.env_manager()


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
async def test_a_score_that_is_no_number_is_not_shaped_into_one(folder, score):
    env = await shaped_env(folder)
    group = env.score(ITEMS[0])
    group["scores"][1] = score
    assert len(await posted(env, [group, None, env.score(ITEMS[0])])) == 1, "the other group of the item"
    assert env.report.counts["not_sent/nonfinite_scores"] == 1


async def test_reward_bridge_limits_the_time_of_a_pattern(folder, monkeypatch):
    """A regular expression that would never end costs its group and is counted."""
    monkeypatch.setattr(patterns, "_SECONDS", 0.1)
    env = await shaped_env(folder, {"answer_present": {"pattern": "(a|aa|b?a)+$", "regex": True, "weight": 0.1}})
    began = time.monotonic()
    assert await send(env, [RIGHT, "a" * 200 + "c", BARE, BARE]) == []
    assert env.report.counts["not_sent/marker_timeout"] == 1 and time.monotonic() - began < 5
    assert len(await send(env, [RIGHT, "aaa", BARE, BARE])) == 1


async def test_a_literal_that_the_judged_text_cannot_hold_is_refused(folder):
    with pytest.raises(RewardBridgeError, match=r"pattern '<\|im_end\|>' can never match"):
        await shaped_env(folder, {"format_markers": [{"pattern": "<|im_end|>", "weight": 0.1}]})


async def test_evaluation_is_the_same_with_and_without_the_bridge(folder, tmp_path):
    results = []
    for name in ("plain", "shaped"):
        environment = adapt(AnswerEnv, parse_bridge(BLOCK) if name == "shaped" else None)
        env = await make(folder, environment, data_dir_to_save_evals=str(tmp_path / name))
        await env.evaluate()
        metrics = orjson.loads((tmp_path / name / "metrics.json").read_bytes())["results"]["all"]
        results.append((metrics, (tmp_path / name / "samples.jsonl").read_bytes()))
        assert not env.report.metrics()
    assert results[0] == results[1] and results[0][0] == {"eval/accuracy": 0.25}


async def test_trajectories_of_several_rows_are_sent_whole(folder):
    """A group of four trajectories has the size that the environment is configured for, with five rows too."""
    env = await make(folder, composed())
    group = {"tokens": [[5, 6]] * 5, "masks": [[-100, 6]] * 5, "scores": [1, 0, 0, 1, 0]}
    sent = []
    for numbers in ([0, 1, 2, 0, 3], [0, 1, 1, 0, 2]):  # the second has three
        sent += await posted(env, group | {"group_overrides": {"trajectory": numbers}})
    [sent] = sent
    assert sent["group_overrides"]["trajectory"] == [0, 1, 2, 0, 3] and len(sent["tokens"]) == 5
    assert env.report.counts["not_sent/wrong_size"] == 1
    assert env.report.metrics()["env/score"] == pytest.approx(2 / 7), "of four and three trajectories"
