"""Atropos environments stepped through by gem: real environments and gem's own wrappers; the test is the policy."""

import asyncio
import math
import random
import threading

import gem
import numpy as np
import pytest
from atroposlib.envs.base import BaseEnvConfig
from gem.utils.constants import TERMINAL_STATE

from helpers.environments import guess_env
from helpers.gem import FIRST, GSM8K, GUESS, SEEDED, SUMS, count_tasks, tasks, threads, until
from recipe.atropos.adapter.loading import EnvironmentTargetError
from recipe.atropos.environments.word_problems import SYNTHETIC, gold_answer, load_problems
from recipe.atropos.gem import env as gem_env
from recipe.atropos.gem import stepped_env
from recipe.atropos.gem.env import AtroposEnv, NeverScored, register
from recipe.atropos.gem.outer_policy import OuterPolicyServer

# ---------------------------------------------------------------------- one environment


def answers():
    return {row["question"]: gold_answer(row) for row in load_problems(SYNTHETIC, "train", "main", 20, seed=0)}


def test_gem_makes_gsm8k_by_its_id(tokenizer):
    """Its own scoring is the reward."""
    assert register(GSM8K) == register(GSM8K) == f"atropos:{GSM8K}"
    env = gem.make(f"atropos:{GSM8K}", tokenizer=tokenizer.name_or_path, config=SUMS)
    assert isinstance(env, gem.Env) and env.unwrapped is env
    scores = []
    for right in (True, False, True):
        observation, info = env.reset()
        system, question = (message["content"] for message in info["messages"])
        assert observation == f"{system}\n\n{question}" and info["max_tokens"] > 100
        assert info["prompt"] == tokenizer.apply_chat_template(
            info["messages"], tokenize=False, add_generation_prompt=True
        )
        assert info["prompt_ids"] == tokenizer.encode(info["prompt"])
        action = rf"so \boxed{{{answers()[question] if right else 10**6}}}"
        observation, reward, terminated, truncated, info = env.step(action)
        assert (observation, terminated, truncated) == (TERMINAL_STATE, True, False)
        [group] = info["groups"]
        trained = [mask for mask in group["masks"][0] if mask != -100]
        assert trained == [*tokenizer.encode(action), tokenizer.eos_token_id]
        scores.append(reward)
    env.close()
    assert scores == [1.0, -1.0, 1.0]


def test_an_id_is_not_registered_twice_with_other_defaults():
    assert gem.make(register(f"{GUESS}2"[:-1], timeout=7.0))._timeout == 7.0
    with pytest.raises(ValueError, match="is registered with"):
        register(GUESS, timeout=8.0)


@pytest.mark.parametrize("way", ["managed", "chat", "completion", "tokens"])
def test_gem_each_turn_is_a_step(make, tokenizer, way):
    """Whatever way the environment calls its server."""
    env = make(config={"way": way, "stop": ["!"]})
    observation, info = env.reset()
    has_messages = way in ("managed", "chat")
    assert observation == (FIRST if has_messages else info["prompt"])
    assert info["sampling"] == {"temperature": 0.7} and (info["max_tokens"], info["stop"]) == (16, ("!",))
    observation, reward, terminated, truncated, info = env.step("7")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert observation == ("lower" if has_messages else info["prompt"]) and info["use_tool"] is has_messages
    assert info["prompt"].endswith("7<|im_end|>\n<|im_start|>tool\nlower<|im_end|>\n<|im_start|>assistant\n")
    assert (info["messages"] is None) is not has_messages
    assert info["prompt_ids"] == tokenizer.encode(info["prompt"])
    observation, *_, info = env.step("0")
    assert "higher" in observation and info["prompt_ids"] == tokenizer.encode(info["prompt"])
    before = info["prompt_ids"]
    _, reward, terminated, truncated, info = env.step("1")
    assert (reward, terminated, truncated) == (1.0, True, False)
    [tokens], [masks] = info["groups"][0]["tokens"], info["groups"][0]["masks"]
    assert [mask for mask in masks if mask > 2] == tokenizer.encode("701")
    if way == "managed":
        assert tokens == [*before, *tokenizer.encode("1<|im_end|>")] and masks.count(tokenizer.eos_token_id) == 3


def test_the_words_that_end_an_answer_may_be_given_as_tokens_too(make, tokenizer):
    server = OuterPolicyServer.__new__(OuterPolicyServer)
    server.tokenizer = tokenizer
    [exclamation] = tokenizer.encode("!")
    assert server._stop([tokenizer.eos_token_id, exclamation, "", "stop"]) == ("!", "stop")
    assert server._stop("!") == ("!",) and server._stop(None) == ()


def test_gem_each_answer_of_a_group_is_a_step(make, tokenizer):
    """The reward is the mean of its scores."""
    env = make(GSM8K, config=SUMS | {"group_size": 4}, seed=0)
    observation, info = env.reset()
    seen = [(info["call"], info["choice"], info["choices"])]
    for answer in (answers()[info["messages"][-1]["content"]], "no", "no"):
        again, reward, terminated, _, info = env.step(rf"\boxed{{{answer}}}")
        assert again == observation and not terminated and reward == 0.0
        seen.append((info["call"], info["choice"], info["choices"]))
    _, reward, terminated, _, info = env.step("no")
    assert seen == [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4)]
    assert terminated and reward == -0.5 and info["scores"] == [1.0, -1.0, -1.0, -1.0]


def test_gem_answers_calls_that_wait_together_in_their_order(make):
    env = make(config={"group_size": 3})
    env.reset()
    for action in ("1", "0", "0"):
        observation, *_, info = env.step(action)
    assert observation == "higher" and [m["content"] for m in info["messages"][2:]] == ["0", "higher"]
    env.step("1")
    *_, info = env.step("1")
    assert info["scores"] == [1.0, 1.0, 1.0]


def test_gem_keeps_postprocessing_backlog_and_cleanup(make):
    """They are the environment's own."""
    env = make(config={"mood": "scores later"})
    env.reset()
    assert env.step("1")[1] == 10.0 and env._environment.base.cleaned == 1
    env = make(config={"mood": "list of groups"})
    env.reset()
    assert env.step("1")[1] == 2.0, "the mean of all their scores"
    env = make(config={"mood": "comes back"})
    for number in ("1", "12", "2"):
        env.reset()
        assert env.step(number)[1] == 1.0


def test_gem_episode_cut_at_max_tokens_is_truncated(make):
    env = make(config={"max_tokens": 2})
    env.reset()
    *_, truncated, info = env.step("11111")
    assert not truncated and info["cut"] and info["messages"][-2]["content"] == "11"
    *_, info = env.step("0")
    assert not info["cut"]
    env.step("0")
    _, reward, terminated, truncated, info = env.step("0000")
    assert (reward, terminated, truncated) == (-1.0, False, True) and info["cut"]
    assert env.reset()[1]["last_episode"]["truncated"] is True


# ---------------------------------------------------------------------- no score


def test_gem_unscored_episode_is_no_reward_of_0(make):
    """An environment that never scores is an error."""
    env = make(config={"mood": "never scores"})
    for episode in range(8):
        _, info = env.reset()
        assert (info["last_episode"] is None) == (episode == 0)
        for _ in range(3):
            env.step("0")
        if episode < 7:
            _, reward, terminated, _, info = env.step("0")
            assert terminated and math.isnan(reward) and info["unscored"] == "the environment made None and no scores"
    with pytest.raises(NeverScored, match="8 episodes and no score.*group_size': 4"):
        env.step("0")


def test_gem_dropped_group_of_equal_scores_has_its_score(make, tokenizer):
    env = make(config={"mood": "drops equal"})
    env.reset()
    _, reward, _, _, info = env.step("1")
    assert (reward, info["dropped"], info["unscored"]) == (1.0, True, None)
    assert env.reset()[1]["last_episode"] == {
        "reward": 1.0, "truncated": False, "scores": [1.0], "raw_scores": [1.0], "dropped": True, "unscored": None
    }  # fmt: skip


def test_gem_environment_that_scored_once_is_not_one_that_never(make):
    env = make(config={"mood": "scores once"})
    env.reset()
    assert env.step("1")[1] == 1.0
    for number in range(2, 12):
        env.reset()
        assert math.isnan(env.step(str(number))[1])


def test_gem_first_observation_has_all_messages(make, caplog):
    """Examples of answers are among them."""
    assert make(config={"mood": "few shots"}).reset()[0] == f"{guess_env.RULES}\n\nExample.\n\n8\n\nBegin."
    assert "nothing can be trained on" not in caplog.text


def test_gem_new_conversations_are_observed_whole(make):
    """A judge's after a solver's, each answer of a group, each choice of a call; what goes on is not."""

    class JudgedEnv(guess_env.GuessEnv):
        async def collect_trajectory(self, item):
            for rules in ("Guess.", "Judge."):
                messages = [{"role": "system", "content": rules}, {"role": "user", "content": "2?"}]
                messages += [{"role": "assistant", "content": "no"}, {"role": "user", "content": "1?"}]
                await self.server.chat_completion(messages=messages, n=2, max_tokens=16)
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}]
            await self.server.chat_completion(messages=messages, n=2, max_tokens=16)
            return {"tokens": [1, 2], "masks": [-100, 2], "scores": 1.0}, []

    env = make(JudgedEnv)
    seen = [env.reset()[0], *(env.step("yes")[0] for _ in range(5))]
    assert seen == ["Guess.\n\n2?\n\nno\n\n1?"] * 2 + ["Judge.\n\n2?\n\nno\n\n1?"] * 2 + ["sure?"] * 2
    env = make(config={"mood": "few shots", "group_size": 2})
    assert env.reset()[0] == env.step("0")[0]
    assert env.step("0")[0] == "higher"


def test_gem_passes_over_items_that_ask_for_no_answer(make):
    """They are counted; where there are no others, that is an error."""
    assert make(config={"mood": "skips odd"}).reset()[1]["skipped"] == 1
    with pytest.raises(NeverScored, match="no answer to any of 8 items in a row"):
        make(config={"mood": "asks nothing"}).reset()


# ---------------------------------------------------------------------- errors, time limits


@pytest.mark.parametrize(
    ("mood", "error", "message"),
    [
        ("breaks", KeyError, "in the second turn"),
        ("no number", ValueError, "must be finite"),
        ("too many scores", ValueError, "2 scores for 1 sequences"),
        ("exits", RuntimeError, "the environment ended its process: SystemExit"),
        ("prompt logprobs", NotImplementedError, "logprobs of a prompt"),
        ("no item", RuntimeError, "get_next_item.. has no item"),
        ("asks in setup", Exception, "outside a rollout"),
    ],
)
def test_gem_raises_what_goes_wrong_in_the_environment(make, mood, error, message):
    """The next reset begins anew."""
    env = make(config={"mood": mood})
    for _ in range(2):
        with pytest.raises(error, match=message):
            env.reset()
            for _ in range(4):
                env.step("0")
        with pytest.raises(RuntimeError, match="waits for no answer; call reset"):
            env.step("0")
    assert tasks(env) == 0


def test_gem_errors_name_their_environment(make):
    """A prompt without room for an answer is an error too."""
    with pytest.raises(ValueError, match="an answer of 0 tokens: its prompt leaves no room") as raised:
        make(config={"max_tokens": 0}).reset()
    assert raised.value.__notes__ == ["raised by the environment GuessEnv after its beginning"]


def test_nothing_waits_longer_than_the_timeout(make):
    env = make(config={"mood": "hangs"}, timeout=0.5)
    env.reset()
    with pytest.raises(TimeoutError, match="no call of its server and no end within 0.5 s of an answer"):
        env.step("0")
    assert tasks(env) == 0
    env = make(config={"mood": "slow setup"}, timeout=0.2)
    with pytest.raises(TimeoutError, match=r"GuessEnv.setup\(\) takes longer than 0.2 s"):
        env.reset()
    assert until(lambda: tasks(env) == 0)


def test_an_environment_that_goes_on_after_its_end_is_told(make, monkeypatch):
    monkeypatch.setattr(gem_env, "GRACE", 0.1)
    env = make(config={"mood": "ignores the end"})
    env.reset()
    base, loop = env._environment.base, env._environment._thread.loop
    with pytest.raises(TimeoutError, match="goes on 0.1 s after it was canceled"):
        env.reset()
    env.reset()
    with pytest.raises(TimeoutError, match="goes on 0.1 s after it was canceled"):
        env.close()
    base.released = True
    assert until(lambda: loop.is_closed() or not asyncio.run_coroutine_threadsafe(count_tasks(), loop).result(10))


@pytest.mark.parametrize("mood", ["waits for its calls", "asks again"])
def test_gem_canceled_environment_gets_no_more_answers(make, mood):
    """On its way out it may wait for its calls, or make another."""
    env = make(config={"mood": mood})
    env.reset()
    before = tasks(env)
    assert env.reset()[0] == FIRST and env._environment.base.cancelled == 1 and tasks(env) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": "recipe.atropos.nowhere:Env"}, EnvironmentTargetError, "no module recipe.atropos.nowhere"),
        ({"target": "recipe.atropos.data.rows:Row"}, EnvironmentTargetError, "no class Row that derives from BaseEnv"),
        ({"target": GUESS, "config": {"gruop_size": 4}}, ValueError, "knows no gruop_size; it has .*group_size"),
        ({"target": GUESS, "config": {"way": "post"}}, ValueError, "Input should be 'managed'"),
        ({"target": GUESS, "timeout": 0}, ValueError, "timeout=0: give seconds"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(arguments, error, message):
    with pytest.raises(error, match=message):
        AtroposEnv(**arguments)


def test_an_action_is_text_and_belongs_to_an_episode(make):
    env = make()
    env.reset()
    with pytest.raises(TypeError, match="an action is the policy's text, not int 1"):
        env.step(1)
    assert env.step("1")[2]
    with pytest.raises(RuntimeError, match="waits for no answer; call reset"):
        env.step("1")
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        env.spawn(same_state=True)
    assert env.spawn(config={"way": "chat"}).reset()[0] == FIRST
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="is closed"):
        env.reset()


# ---------------------------------------------------------------------- items


def test_a_seed_decides_which_items_come(make):
    def numbers(env, seed, count=3):
        found = []
        for i in range(count):
            env.reset(seed if i == 0 else None)
            found.append(env._environment.base.number)
        return found

    env = make(SEEDED, seed=5)
    first = numbers(env, None)
    assert len(set(first)) == 3 and numbers(env, 5) == first != numbers(env, 6) and numbers(env, 5) == first
    assert numbers(make(SEEDED), 5) == first
    drawn = []
    for _ in range(2):
        env.reset(7)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_gem_environments_made_alike_share_their_items(tokenizer):
    """The environments have no seed."""
    ones, others = ([AtroposEnv(t, tokenizer=tokenizer.name_or_path) for _ in range(3)] for t in (GUESS, SEEDED))
    for env in ones + others:
        env.reset(4)
    assert len({id(env._environment) for env in ones}) == 1
    assert len({id(env._environment) for env in others}) == 3
    assert [env.step(str(i + 1))[2] for i, env in enumerate(ones)] == [True] * 3  # numbers 1, 2 and 3
    for env in ones + others:
        env.close()


def test_gem_environments_of_other_options_are_not_shared(monkeypatch):
    """A mapping in another order is the same; a number without an end is not none."""

    class Config(BaseEnvConfig):
        most: float | None = None
        options: dict = {}

    monkeypatch.setattr(stepped_env, "SteppedEnvironment", lambda *_: threading.Event())
    given = ({"most": math.inf}, {}, {"options": {"a": 1, "b": 2}}, {"options": {"b": 2, "a": 1}})
    found = [stepped_env.shared_environment(guess_env.GuessEnv, Config(**fields)) for fields in given]
    assert found[2] is found[3] and len({*map(id, found)}) == 3


# ---------------------------------------------------------------------- ends


def test_gem_reset_close_and_the_collector_end_what_runs(make):
    """Reset ends what is not finished; close and the garbage collector end everything."""
    assert until(lambda: not threads())
    env = make()
    for _ in range(5):
        env.reset()
    assert env._environment.base.cancelled == 4
    assert tasks(env) == 2  # the rollout, and its one trajectory
    [thread] = threads()
    env.close()
    assert not thread.is_alive()

    left = AtroposEnv(GUESS, tokenizer=env._config.tokenizer_name)
    left.reset()
    [thread] = threads()
    base = left._environment.base
    del left
    assert until(lambda: not thread.is_alive()) and base.cancelled == 1

    stays, goes = (AtroposEnv(GUESS, tokenizer=env._config.tokenizer_name) for _ in range(2))
    stays.reset(), goes.reset()
    base = goes._environment.base
    del goes
    assert until(lambda: base.cancelled == 1 and tasks(stays) == 2) and stays.step("0")[0] == "higher"
    stays.close()


@pytest.mark.parametrize("group_size", [1, 3])
def test_gem_answer_that_nobody_waits_for_goes_unread(make, group_size):
    env = make(config={"mood": "impatient", "group_size": group_size})
    for _ in range(2):
        env.reset()
        assert until(lambda: not tasks(env))
        observation, reward, terminated, _, info = env.step("1")
        assert (observation, reward, terminated) == (TERMINAL_STATE, -1.0, True) and not info["dropped"]
    assert tasks(env) == 0
