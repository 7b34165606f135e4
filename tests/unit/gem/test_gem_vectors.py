"""gem's own vectors and wrappers over Atropos environments."""

import os
import threading

import pytest
from gem.envs.registration import make_vec
from gem.tools.tool_env_wrapper import ToolEnvWrapper
from gem.wrappers.wrapper_factory import get_wrapper_fns

from helpers.gem import FIRST, GUESS, tasks, threads, until
from recipe.atropos.gem.env import register


def bisect(observation, state):
    """A policy that finds any number of 1 to 15 in four turns; ``state`` is its own."""
    low, high = (1, 15) if observation.endswith(FIRST) else state[:2]
    if observation.strip().endswith("higher"):
        low = state[2] + 1
    if observation.strip().endswith("lower"):
        high = state[2] - 1
    state[:] = [low, high, (low + high) // 2]
    return str(state[2])


@pytest.mark.parametrize("async_mode", [False, True])
def test_gem_vectorized_environments_run_48_at_once(tokenizer, async_mode):
    """They leave no thread, task or open file."""
    assert until(lambda: not threads())
    register(GUESS, timeout=7.0)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    vector = make_vec([f"atropos:{GUESS}"] * 48, async_mode=async_mode, tokenizer=tokenizer.name_or_path)
    observations, _ = vector.reset()
    states, rewards, ends = [[] for _ in range(48)], [], 0
    numbers = [env._environment.base.number for env in vector.envs]
    assert numbers == [48] * 48
    for _ in range(24):
        actions = [bisect(observation, state) for observation, state in zip(observations, states, strict=True)]
        observations, reward, terminated, truncated, infos = vector.step(actions)
        rewards += list(reward[terminated])
        ends += terminated.sum()
        assert not truncated.any()
        for info, ended, value in zip(infos, terminated, reward, strict=True):
            assert not ended or info["last_episode"]["reward"] == value
    # The first 15 of the numbers are found in at most four turns, the others never.
    assert ends == len(rewards) >= 48 * 6 and sorted(set(rewards)) == [-1.0, 1.0] and rewards.count(1.0) == 15
    assert tasks(vector.envs[0]) == 2 * 48
    assert len(os.listdir("/proc/self/fd")) - before[0] <= 6 and len(threads()) == 1
    del vector, info, infos
    assert until(lambda: not threads() and threading.active_count() <= before[1])
    assert len(os.listdir("/proc/self/fd")) <= before[0]


def test_gems_wrappers_see_a_conversation(tokenizer):
    register(GUESS, timeout=7.0)
    wrappers = get_wrapper_fns("concat_chat,episode_tracking", tokenizer=tokenizer)
    vector = make_vec([f"atropos:{GUESS}"] * 2, wrappers=wrappers, tokenizer=tokenizer.name_or_path)
    observations, _ = vector.reset()
    vector.step(["9", "9"])
    observations, _, _, _, infos = vector.step(["0", "0"])
    turns = [("user", FIRST), ("assistant", "9"), ("tool", "lower"), ("assistant", "0"), ("tool", "higher")]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert observations == [expected] * 2 and [info["step_counter"] for info in infos] == [2, 2]
    _, rewards, terminated, _, infos = vector.step(["1", "2"])
    assert rewards.tolist() == [1.0, 1.0] and terminated.all()
    assert [info["prev_ep_cumulative_rewards"] for info in infos] == [1.0, 1.0]


def test_a_tool_of_gems_answers_in_the_place_of_the_environment(make):
    class Hint:
        tool_type, name = "hint", "hint"

        def instruction_string(self):
            return "Write hint for a hint."

        def execute_action(self, action):
            return action == "hint", False, "it is small", action

    env = ToolEnvWrapper(make(), [Hint()])
    assert env.reset()[0] == f"{FIRST}\nWrite hint for a hint."
    assert env.step("hint")[0] == "it is small"
    assert env.step("9")[0] == "lower" and env.step("1")[1] == 1.0
