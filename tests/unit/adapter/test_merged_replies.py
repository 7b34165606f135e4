"""Replies whose first characters become one token with the end of their prompt, once an environment encodes both."""

import asyncio
import itertools
import random

import numpy as np
import pytest
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

from helpers.sampled import END, Scripted, make, merging_tokenizer, restored, trained
from recipe.atropos.adapter.completion_cache import ITEM, CompletionCache, Item
from recipe.atropos.adapter.restore import chat_templates_give_lists

USER = {"role": "user", "content": "go"}
LONG = "\n\n<think>\nab\n</think>\n\ncd"
REPLIES = [
    *("ab", "\nab", "\n\nab", "\n\n\n\nabcd e", "\n", "\n\n\n", "", " ", " ab", " \n ab", "\tab", LONG),
    *("a", "\na\n\n", "b", "\n!", "!\n\n", ">ab", "\n\n\n\n\n\n"),
]
BEGUN = {"chat": "", "thinking": "<think>\n", "within a word": "The a", "blackjack": "<think>\n", "in pieces": "\n"}


@pytest.fixture(scope="module")
def tokenizer():
    chat_templates_give_lists()
    return merging_tokenizer()


def reply_to(cache, prompt, text, whole=True, ended=True):
    """``text``, sampled as it is encoded by itself, or letter by letter."""
    parts = [text] if whole else text
    tokens = [i for part in parts for i in cache.tokenizer.encode(part)] + [END] * ended
    logprobs = [-0.5 - 0.01 * i for i in range(len(tokens))]
    return cache.add(np.array(prompt, np.int32), tokens, logprobs, text, (3, 4))


def rendered(tokenizer, messages, begun, closed):
    """The prompt of an answer that is begun; ``closed``: as blackjack_env_thinking does, which ends that turn."""
    if closed:
        return tokenizer.apply_chat_template([*messages, {"role": "agent", "content": begun}])
    return tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + begun)


@pytest.mark.parametrize("flow", BEGUN)
def test_sampled_replies_that_merge_with_their_prompt_are_kept(flow, tokenizer):
    """Whatever they begin with, and however they were sampled: whole, in their context, with version and logprobs.

    In pieces: the prompt's end was encoded by itself, and merges with its beginning."""
    begun, closed = BEGUN[flow], flow == "blackjack"
    prompt = rendered(tokenizer, [USER], begun, closed)
    if flow == "in pieces":
        prompt = rendered(tokenizer, [USER], "", closed) + tokenizer.encode(begun)
    for text, whole, ended in itertools.product(REPLIES, (True, False), (True, False)):
        if not text and not ended:
            continue
        ITEM.set(Item())
        cache = CompletionCache(tokenizer)
        reply = reply_to(cache, prompt, text, whole, ended)
        reply_to(cache, reply.prompt, "zz")
        posted = tokenize_for_trainer(
            tokenizer, [USER, {"role": "agent" if closed else "assistant", "content": begun + text}]
        )
        row, counts = restored(cache, posted["tokens"], posted["masks"], advantages=[2.0] * len(posted["tokens"]))
        assert row.tokens[: len(prompt)] == prompt and trained(row) == reply.tokens.tolist(), (text, whole, ended)
        assert row.versions == (3, 4) and [v for v in row.logprobs if v != 1] == reply.logprobs.tolist()
        assert row.values["advantages"][len(prompt) :][: len(reply.tokens)] == [2.0] * len(reply.tokens)
        assert len(row.tokens) == len(row.masks) == len(row.logprobs) == len(row.values["advantages"])
        assert not counts["not_aligned"] and not counts["partial_reply"]
        starts, ends, *_ = zip(*cache.trace(posted["tokens"]), strict=True)
        assert (*starts, len(posted["tokens"])) == (0, *ends), "no gaps"


@pytest.mark.parametrize("begun", ["", "<think>\n", "The a"])
def test_sampled_replies_that_merge_are_kept_in_every_turn(begun, tokenizer):
    """Also in the next turn's prompt, where the environment renders them from their text."""
    rng = random.Random(begun)
    for _ in range(30):
        ITEM.set(Item())
        cache, messages, replies, prompt = CompletionCache(tokenizer), [USER], [], []
        for _ in range(3):
            prompt = cache.restore_sampled(rendered(tokenizer, messages, begun, closed=False))
            text = rng.choice(REPLIES)
            replies.append(reply_to(cache, prompt, text, rng.random() < 0.5, not text or rng.random() < 0.8))
            messages += [{"role": "assistant", "content": begun + text}, {"role": "user", "content": "\nnext"}]
        posted = tokenize_for_trainer(tokenizer, messages[:-1], train_on_all_assistant_turns=True)
        row, _ = restored(cache, posted["tokens"], posted["masks"])
        assert trained(row) == [token for reply in replies for token in reply.tokens.tolist()]
        assert row.tokens[: len(prompt)] == prompt, "each was sampled after exactly these"


def test_sampled_text_that_only_looks_merged_is_not_trained_on(tokenizer):
    """Another text behind the same prompt, and one before another prompt's end."""
    for text in ("\n\nba", "\n\n", "e\n"):
        ITEM.set(Item())
        cache = CompletionCache(tokenizer)
        reply_to(cache, rendered(tokenizer, [USER], "", closed=False), "\n\nabcd")
        reply_to(cache, rendered(tokenizer, [USER], "The ", closed=False), text)
        posted = tokenize_for_trainer(tokenizer, [USER, {"role": "assistant", "content": "\n\nabdc"}])
        row, counts = restored(cache, posted["tokens"], posted["masks"])
        assert row.tokens == posted["tokens"] and not row.replies and counts == {"not_sampled": 1}


def test_sampled_replies_without_their_thinking_are_counted(tokenizer, tmp_path):
    """A template that removes it leaves an answer that was sampled in another context: not trained on, and named."""
    tokenizer.save_pretrained(tmp_path)
    env = make(Scripted, tmp_path, group_size=1)
    env.config.ensure_scores_are_not_same = False
    ITEM.set(Item())
    reply_to(env._calls.caches["train"], rendered(tokenizer, [USER], "", closed=False), LONG)
    for text, name in (("cd", "partial_reply"), ("dc", "not_sampled")):
        posted = tokenize_for_trainer(tokenizer, [USER, {"role": "assistant", "content": text}])
        asyncio.run(env.handle_send_to_api(env.group([posted])))
        assert env.sent is None and env.report.counts[name] == env.report.counts[f"not_sent/{name}"] == 1
