"""The reward bridge in the gem environment: what ``step`` returns is shaped, the environment's own score beside it."""

import math

import gem
import pytest
import yaml

from helpers.gem import GSM8K, GUESS, SUMS
from recipe.atropos.algorithm.reward_bridge import RewardBridgeError, parse_bridge
from recipe.atropos.gem.env import register
from recipe.atropos.utils import patterns

MARKERS = {"format_markers": [{"pattern": "so", "weight": 0.25}], "answer_present": {"pattern": "####", "weight": 0.5}}
RIGHT, WRONG = "1", "0"  # of the first number of GuessEnv


@pytest.fixture
def bridged(make):
    return lambda bridge, target=GUESS, **config: make(target, config=config, reward_bridge=bridge)


def played(env, *actions):
    """Reward and info of an episode's last step."""
    env.reset()
    for action in actions:
        _, reward, ended, truncated, info = env.step(action)
    assert ended or truncated
    return reward, info


def test_gem_reward_bridge_shapes_the_reward_of_a_step(bridged):
    block = {"format_markers": [{"pattern": RIGHT, "weight": 0.25}], "length_bounty": _bounty()}
    reward, info = played(bridged(block), RIGHT)
    assert info["raw_scores"] == [1.0] and info["unscored"] is None
    assert reward == info["scores"][0] == 1.0 + 0.25 + 0.02, "two tokens: the number and the end of the turn"
    env = bridged(block)
    reward, info = played(env, WRONG, WRONG, WRONG, WRONG)
    assert (reward, info["raw_scores"]) == (pytest.approx(-1.0 + 0.08), [-1.0]), (
        "of all turns, without the tool's words"
    )
    assert env.reset()[1]["last_episode"]["raw_scores"] == [-1.0]


def _bounty():
    return {"target": 0, "slope": 0.01, "cap": 0.2}


@pytest.mark.parametrize("way", ["file", "mapping", "parsed"])
def test_gem_reward_bridge_is_a_file_a_mapping_or_parsed(tokenizer, tmp_path, way):
    path = tmp_path / "bridge.yaml"
    path.write_text(yaml.safe_dump({"reward_bridge": MARKERS}))
    bridge = {"file": path, "mapping": MARKERS, "parsed": parse_bridge(MARKERS)}[way]
    config = {**SUMS, "wandb_name": way}
    env = gem.make(register(GSM8K), tokenizer=tokenizer.name_or_path, config=config, reward_bridge=bridge)
    assert played(env, "so #### 7")[0] == -1.0 + 0.75
    assert played(env.spawn(), "it is #### 7")[0] == -1.0 + 0.5, "one that is made alike has it too"
    env.close()


def test_gem_reward_bridge_of_a_group_shapes_each_score(bridged):
    env = bridged(MARKERS, GSM8K, group_size=2, **SUMS)
    reward, info = played(env, "so", "no")
    assert info["scores"] == [-0.75, -1.0] and info["raw_scores"] == [-1.0, -1.0] and reward == -0.875
    assert info["groups"][0]["scores"] == [-1.0, -1.0], "the environment's own"


def test_gem_reward_bridge_shapes_dropped_but_no_missing_scores(bridged):
    reward, info = played(bridged({"length_bounty": _bounty()}, mood="drops equal"), RIGHT)
    assert info["dropped"] and (reward, info["raw_scores"]) == (1.02, [1.0])
    reward, info = played(bridged({"length_bounty": _bounty()}, mood="never scores"), *[WRONG] * 4)
    assert math.isnan(reward) and info["scores"] == info["raw_scores"] == [] and "no scores" in info["unscored"]


def test_gem_reward_bridge_fades_by_the_trainers_step(bridged):
    env = bridged({"length_bounty": _bounty(), "fade": {"from_step": 10, "to_step": 20}}, mood="drops equal")
    env.reset()
    with pytest.raises(RewardBridgeError, match="fade counts .*set env.unwrapped.training_step"):
        env.step(RIGHT)
    rewards = []
    for number, step in enumerate((10, 15, 20), 2):
        env.training_step = step
        rewards.append(played(env, str(number))[0])
    assert rewards == pytest.approx([1.02, 1.01, 1.0])


def test_gem_reward_bridge_that_takes_too_long_gives_no_reward(bridged, monkeypatch):
    monkeypatch.setattr(patterns, "_SECONDS", 0.1)
    pattern = {"pattern": "(a|aa|b?a)+$", "regex": True, "weight": 0.1}
    env = bridged({"answer_present": pattern}, GSM8K, **SUMS)
    reward, info = played(env, "a" * 200 + "c")
    assert math.isnan(reward) and "took more than" in info["unscored"] and info["raw_scores"] == [-1.0]


@pytest.mark.parametrize(
    ("bridge", "expected"),
    [
        ({"clipp": 1}, "reward_bridge.clipp=1: no such key"),
        ("no/such.yaml", "no/such.yaml: No such file or directory; give a YAML file"),
        ({"format_markers": [{"pattern": "<|im_end|>", "weight": 0.1}]}, r"never match: '<\|im_end\|>' is a special"),
    ],
)
def test_gem_reward_bridge_that_cannot_be_right_is_refused(bridged, bridge, expected):
    with pytest.raises(RewardBridgeError, match=expected):
        bridged(bridge).reset()


def test_gem_reward_bridge_excludes_advantages_of_tokens(bridged):
    env = bridged({"length_bounty": _bounty()}, mood="own advantages")
    env.reset()
    with pytest.raises(RewardBridgeError, match="GuessEnv sends advantages of its own for each token"):
        env.step(RIGHT)
