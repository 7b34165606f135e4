"""The environment's own rules; its rollouts are tested with real servers in test_launch."""

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from recipe.atropos.environments.gsm8k import GSM8kEnv, is_correct, length_penalty
from recipe.atropos.environments.word_problems import SYNTHETIC


@pytest.fixture
def env(make_env):
    own = {"dataset_name": SYNTHETIC, "train_size": 50, "eval_size": 20, "seed": 1}
    return make_env(GSM8kEnv, group_size=4, max_token_length=100, **own)


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (r"12 + 7 = 19 \boxed{19}", "19", True),
        (r"\boxed{19.0}", "19", True),
        (r"\boxed{1,234}", "1234", True),
        (r"\boxed{\$18}", "18", True),
        (r"\boxed{18 apples}", "18", True),
        (r"\boxed{-3}", "-3", True),
        (r"\boxed{20}", "19", False),
        ("the answer is 19", "19", False),
        (r"\boxed{}", "19", False),
        (r"\boxed{19", "19", False),
        (r"<think>\boxed{18}? no</think> \boxed{19}", "19", True),
        (r"<think>\boxed{19}</think> \boxed{18}", "19", False),
        (r"<think>\boxed{19}</think> so 19", "19", False),
        (r"<think>so \boxed{19}", "19", True),
        ("", "19", False),
    ],
)
def test_only_a_boxed_and_equal_number_is_right(text, gold, expected):
    assert is_correct(text, gold) is expected


ITEM = {"question": "?", "answer": "#### 7"}


def test_gsm8k_mixed_group_scores_plus_and_minus_one(env, node):
    """The group has the sampled tokens and logprobs. Where all are right, long answers get less."""
    nodes = [node(env, rf"\boxed{{{n}}}") for n in (7, 8, 7, 9)]
    group = asyncio.run(env.score(ITEM, nodes))
    assert group["scores"] == [1.0, -1.0, 1.0, -1.0] and all(type(score) is float for score in group["scores"])
    assert group["tokens"] == [n.tokens for n in nodes] and group["masks"] == [n.masked_tokens for n in nodes]
    assert group["inference_logprobs"] == [n.logprobs for n in nodes]
    assert env.percent_correct_buffer == [1.0, 0.0, 1.0, 0.0]
    nodes = [node(env, r"\boxed{7}"), node(env, r"\boxed{7}", prompt=70)]
    scores = asyncio.run(env.score(ITEM, nodes))["scores"]
    assert scores[0] == 1.0 and 0 < scores[1] < 1
    assert [length_penalty(n, 100) for n in (10, 50, 75, 100, 120)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_answers_stay_below_the_trainers_limit(env):
    messages = env.messages(ITEM)
    prompt = len(
        env.tokenizer.encode(env.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    )
    assert env.answer_tokens(messages) == 100 - 1 - prompt
    env.max_token_len = 95
    assert env.answer_tokens(messages) == 95 - 1 - prompt
    env.config.max_answer_tokens = 5
    assert env.answer_tokens(messages) == 5


def test_a_server_that_is_not_there_fails_the_evaluation(env):
    env.test, env.config.max_token_length = env.test[:2], 1000
    with pytest.raises(ExceptionGroup):
        asyncio.run(env.evaluate())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_evaluation_tells_how_it_sampled(env, temperature):
    """Only at 0 the launcher shows it as greedy."""
    env.eval_items, env.eval_temperature = Mock(return_value=[ITEM]), temperature
    env.eval_item, env.evaluate_log = AsyncMock(return_value={"correct": True}), AsyncMock()
    asyncio.run(env.evaluate())
    assert env.evaluate_log.call_args.kwargs["generation_parameters"] == {"temperature": env.temperature("eval")}
    assert env.temperature("eval") == temperature


def test_gsm8k_leaves_out_problems_without_room_for_an_answer(env, caplog):
    longest = max(len(env.tokenizer.encode(row["question"])) for row in env.test)
    room = [row for row in env.test if len(env.tokenizer.encode(row["question"])) < longest]
    prompt = env.tokenizer.apply_chat_template(env.messages(room[0]), tokenize=False, add_generation_prompt=True)
    around = len(env.tokenizer.encode(prompt)) - len(env.tokenizer.encode(room[0]["question"]))
    env.config.max_token_length = longest + around + 1
    assert env.eval_items() == room and "leave no room in --env.max_token_length" in caplog.text
    env.config.max_token_length = 5
    with pytest.raises(ValueError, match="none of the 20 held-out problems leaves room.*--env.max_token_length=5"):
        env.eval_items()
