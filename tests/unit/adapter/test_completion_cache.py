"""What is trained on is what the policy sampled: prompts, nodes and posted groups, without a server."""

import asyncio
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from helpers.sampled import END, I, Scripted, chat, ids_of, make, restored, sampled, trained, with_bos
from recipe.atropos.adapter.completion_cache import ITEM, CompletionCache, Item, Piece
from recipe.atropos.data.sampling import SamplingParams
from recipe.atropos.data.token_keys import key_of, keys_of


def test_cache_tells_a_reply_from_a_longer_one(cache, tokenizer):
    prompt = ids_of(tokenizer, "Q:")
    sampled(cache, prompt, "a")
    longer = sampled(cache, prompt, "a", "ba", "b")
    assert cache.restore_sampled(ids_of(tokenizer, "Q:", "abab so")) == prompt + longer.tokens.tolist() + ids_of(
        tokenizer, " so"
    )


@pytest.mark.parametrize("last", [[END], []], ids=["ended", "cut at a length"])
def test_several_replies_within_one_turn_are_all_found(last, cache, tokenizer, prompt):
    """Also where the posted text has one token for the end of a reply and what the environment puts behind it."""
    one = sampled(cache, prompt, "b", "a", END)
    second = cache.restore_sampled(ids_of(tokenizer, *prompt, "baa-"))
    two = sampled(cache, second, "c", "d", *last)
    assert second == prompt + [*ids_of(tokenizer, "b", "a", "a", "-")]
    posted = chat(tokenizer, "go", "baa-cd", add_generation_prompt=False)
    row, counts = restored(cache, posted, len(prompt))
    assert row.tokens == second + two.tokens.tolist() + ids_of(tokenizer, *([] if last else [END]), "\n")
    assert trained(row) == one.tokens.tolist()[:-1] + two.tokens.tolist()
    assert counts == {"retokenized": 2, "not_sampled": 1}
    row, counts = restored(cache, posted, len(prompt), advantages=[2.0] * len(posted))
    assert not counts["not_aligned"], "also where none of its tokens has a place in the posted ones"
    values = [value for value, mask in zip(row.values["advantages"], row.masks, strict=True) if mask != I]
    assert set(values) == {2.0} and len(row.tokens) == len(row.logprobs) == len(row.masks)


def test_cache_finds_one_reply_for_prompt_and_posted_sequence(cache, tokenizer, prompt):
    sampled(cache, prompt, "a", "bc", END)
    sampled(cache, prompt, "a", "b", "c", END)
    second = cache.restore_sampled(chat(tokenizer, "go", "abc", "next"))
    last = sampled(cache, second, "d", END)
    posted = chat(tokenizer, "go", "abc", "next", "d", add_generation_prompt=False)
    for _ in range(2):  # also once the first was posted
        pieces = list(cache.pieces(posted, posted))
        assert [token for piece in pieces for token in piece.tokens][: len(second)] == second
        assert last in [piece.completion for piece in pieces] and all(piece.context for piece in pieces)
        for piece in pieces:
            if piece.completion:
                piece.completion.posted += 1


def test_replies_of_one_text_are_each_posted_once(cache, tokenizer, prompt):
    ways = [sampled(cache, prompt, *way, END) for way in (("a", "b", "c"), ("a", "bc"))]
    posted = chat(tokenizer, "go", "abc", add_generation_prompt=False)
    found = [restored(cache, posted, len(prompt))[0] for _ in ways]
    tokens = [row.tokens[len(prompt) : len(prompt) + len(way.tokens)] for row, way in zip(found, ways, strict=True)]
    assert tokens == [way.tokens.tolist() for way in ways]
    assert [way.posted for way in ways] == [1, 1]


def test_sampled_replies_of_same_tokens_match_by_logprobs(cache, tokenizer, prompt):
    """As where temperatures differ: whichever was sampled first, or has been posted."""
    replies = {first: sampled(cache, prompt, "ab", END, first=first) for first in (-0.1, -0.2, -0.3)}
    replies[-0.1].continued = True
    posted = chat(tokenizer, "go", "ab", add_generation_prompt=False)
    for first in (-0.3, -0.1, -0.2, -0.3):
        given = [1.0] * len(prompt) + replies[first].logprobs.tolist() + [1.0]
        (piece,) = [piece for piece in cache.trace(posted, given) if piece.completion]
        assert piece.completion is replies[first]
        row, counts = restored(cache, posted, len(prompt), given)
        assert row.logprobs[len(prompt)] == first and not counts["other_logprobs"]


async def test_items_in_flight_together_post_each_their_own_replies(drifting_model):
    class Alike(Scripted):
        async def collect_trajectories(self, item):
            prompt = chat(self.tokenizer, "go")
            for _ in range(self.config.group_size):
                sampled(self._calls.caches["train"], prompt, "ab", END, first=item)
            self.sampled = getattr(self, "sampled", 0) + 1
            while self.sampled < 3:
                await asyncio.sleep(0)
            ids = chat(self.tokenizer, "go", "ab", add_generation_prompt=False)
            row = {"tokens": ids, "masks": [I] * len(prompt) + ids[len(prompt) :]}
            self.size = len(prompt)
            return self.group([row] * self.config.group_size, images=item), []

        def keep(self, group):
            posted = {logprobs[self.size] for logprobs in group["inference_logprobs"]}
            self.sent = {**(self.sent or {}), group["images"]: posted}

    env = make(Alike, drifting_model)
    env.running_items = {str(value): {"item": value} for value in (-0.1, -0.2, -0.3)}
    await asyncio.gather(*(env.handle_env(key) for key in list(env.running_items)))
    assert env.sent == {-0.1: {-0.1}, -0.2: {-0.2}, -0.3: {-0.3}}


@pytest.mark.parametrize(
    ("posted", "kept"),
    [
        ("ab de", ["a", "b", " ", "d", "e", END]),  # as it was
        (" ab de\n", ["a", "b", " ", "d", "e", END]),  # with white space around it
        ("ab", ["ab"]),  # cut short, where the tokens are those sampled
        ("ab de!", ["a", "b", " ", "d", "e"]),  # gone on after: what follows is no end
        ("ba de", []),  # changed
    ],
)
def test_what_an_environment_does_to_a_reply(posted, kept, cache, tokenizer, prompt):
    way = ("ab",) if posted == "ab" else ("a", "b")
    sampled(cache, prompt, *way, " ", "d", "e", END)
    tokens = chat(tokenizer, "go", posted, add_generation_prompt=False)
    row, counts = restored(cache, tokens, len(prompt), [1.0] * len(tokens), advantages=[2.0] * len(tokens))
    assert len(row.tokens) == len(row.logprobs) == len(row.values["advantages"])
    assert trained(row) == ids_of(tokenizer, *kept)
    assert trained(row) == [t for t, m in zip(row.tokens, row.masks, strict=True) if m != I]
    assert counts["not_sampled"] == (posted in ("ab de!", "ba de"))
    tail = "!<|im_end|>\n" if posted == "ab de!" else "\n" if kept and posted != "ab" else "<|im_end|>\n"
    assert tokenizer.decode(row.tokens).endswith(tail)
    assert (END, END) not in set(itertools.pairwise(row.tokens))


def test_promises_reply_with_other_white_space_is_found(cache, tokenizer, prompt):
    """As where an environment writes the JSON of a tool call anew, in its next prompt and in what it posts."""
    one = sampled(cache, prompt, "a", " ", "b", " ", "c", END)
    other = sampled(cache, prompt, "a", "b", "c", END)
    for written, reply in (("a b\nc", one), ("abc", other), ("ab c", one)):
        second = cache.restore_sampled(chat(tokenizer, "go", written, "next"))
        assert second[: len(prompt) + len(reply.tokens)] == prompt + reply.tokens.tolist(), written
        tokens = chat(tokenizer, "go", written, add_generation_prompt=False)
        advantages = [0.0] * len(prompt) + [0.5] * (len(tokens) - len(prompt))
        row, _ = restored(cache, tokens, len(prompt), advantages=advantages)
        assert trained(row) == reply.tokens.tolist()
        assert {v for v, m in zip(row.values["advantages"], row.masks, strict=True) if m != I} == {0.5}
    assert cache.restore_sampled(chat(tokenizer, "go", "acb", "next")) == chat(tokenizer, "go", "acb", "next")


@pytest.mark.parametrize(("first", "last"), [("<x>", ""), ("", "<y>")])
def test_cache_finds_a_reply_beside_text_in_another_context(first, last, cache, tokenizer):
    """As by environments that render the prompt without the beginning of the answer. No BOS is put before the rest."""
    prompt = ids_of(tokenizer, "unlike the template")
    reply = sampled(cache, prompt, "a", "b", "ab", "c", END)
    cache.tokenizer = with_bos(tokenizer)
    posted = chat(tokenizer, "go", f"{first}ababc{last}", add_generation_prompt=False)
    begin = len(chat(tokenizer, "go"))
    assert all(piece.tokens for piece in cache.pieces(posted, [I] * begin + posted[begin:]))
    row, counts = restored(cache, posted, begin)
    kept = reply.tokens.tolist() if first else reply.tokens.tolist()[:-1]
    assert row.tokens == prompt + kept + tokenizer.encode(f"{last}<|im_end|>\n" if last else "\n")
    assert trained(row) == kept and counts["other_context"] == 1 and counts["not_sampled"] == 1


@pytest.mark.parametrize("before", ["", "another prompt "])
def test_restore_puts_back_the_prompt_of_a_moved_reply(before, cache, tokenizer, prompt):
    reply = sampled(cache, prompt, "a", "b", "c", END)
    posted = ids_of(tokenizer, before, "abc")
    masks = [I] * len(before) + [1, 1]
    assert all(piece.tokens for piece in cache.pieces(posted, masks))
    row, counts = restored(cache, posted, masks, advantages=[5.0] * len(before) + [2.0, 2.0])
    assert row.tokens == prompt + reply.tokens.tolist()
    assert row.masks == [I] * len(prompt) + reply.tokens.tolist()
    assert row.logprobs == [1.0] * len(prompt) + reply.logprobs.tolist()
    assert row.values["advantages"] == [0.0] * len(prompt) + [2.0] * 4
    assert counts == {"other_context": 1, "retokenized": 1}


@pytest.mark.parametrize("behind", ["", "!"])
def test_a_later_reply_in_another_context_stays_there(behind, cache, tokenizer, prompt):
    one = sampled(cache, prompt, "a", "b", END)
    two = sampled(cache, ids_of(tokenizer, "another"), "d", "e", END)
    posted = chat(tokenizer, "go", "ab", "next", "de" + behind, add_generation_prompt=False)
    last = len(chat(tokenizer, "go", "ab", "next"))
    masks = [I] * len(prompt) + posted[len(prompt) : len(prompt) + 2] + [I] * (last - len(prompt) - 2) + posted[last:]
    row, counts = restored(cache, posted, masks)
    assert row.tokens[: len(prompt) + 3] == prompt + one.tokens.tolist() and counts["other_context"] == 1
    kept = two.tokens.tolist()[: -1 if behind else None]
    assert trained(row) == one.tokens.tolist() + kept
    assert tokenizer.decode(row.tokens) == tokenizer.decode(posted), "nothing is lost or written twice"


def test_values_for_each_token_go_with_the_tokens_or_keep_them(cache, tokenizer, prompt):
    reply = sampled(cache, prompt, "a", "b", "c", END)
    posted = chat(tokenizer, "go", "abc", add_generation_prompt=False)
    size = len(posted)
    row, counts = restored(cache, posted, len(prompt), advantages=[0.0] * len(prompt) + [3.0] * (size - len(prompt)))
    assert row.values == {"advantages": [0.0] * len(prompt) + [3.0] * len(reply.tokens) + [3.0]}
    assert counts["not_aligned"] == 0
    for values in ({"advantages": [float(i) for i in range(size)]}, {"distill_logprobs": [[-0.1]] * size}):
        kept, counts = restored(cache, posted, len(prompt), **values)
        assert kept.tokens == row.tokens and set(kept.masks) == {I}
        assert counts["not_aligned"] == 1


@pytest.mark.parametrize("values", [{"advantages": 0.1}, {"ref_logprobs": -0.5}, {"distill_logprobs": [-0.1]}])
def test_values_that_fit_no_reply_leave_later_ones_their_context(cache, tokenizer, prompt, values):
    """Which is the reply as it was sampled, though it is not trained on."""
    sampled(cache, prompt, "a", "b", "c", END)
    context = cache.restore_sampled(chat(tokenizer, "go", "abc", "next"))
    sampled(cache, context, "d", END)
    posted = chat(tokenizer, "go", "abc", "next", "d", add_generation_prompt=False)
    [(name, value)] = values.items()
    column = [value * n if name == "advantages" else value for n in range(len(posted))]
    row, counts = restored(cache, posted, len(prompt), **{name: column})
    first = next(place for place, mask in enumerate(row.masks) if mask != I)
    assert row.tokens[:first] == context and counts["not_aligned"] == 1


def test_sampled_ends_of_a_turn_are_trained_on_where_they_were(cache, tokenizer, prompt):
    """Of a reply that was encoded again the mask of the end of its turn is the end's alone, not its content's."""
    reply = sampled(cache, prompt, "a", "b", "c", END)
    posted = chat(tokenizer, "go", "abc", add_generation_prompt=False)
    content = posted[len(prompt) : posted.index(END, len(prompt))]
    masks = [I] * len(prompt) + content + [I] * (len(posted) - len(prompt) - len(content))
    row, counts = restored(cache, posted, masks)
    assert row.masks == [I] * len(prompt) + reply.tokens.tolist()[:-1] + [I, I] and counts == {"retokenized": 1}


@pytest.mark.parametrize(("text", "untrained", "not_sampled"), [("abcd", 2, 1), ("abc!", 3, 0)])
def test_sampled_replies_are_told_from_text_behind_them(text, untrained, not_sampled, cache, tokenizer, prompt):
    """Also where that has no token of its own: "abcd" is "ab" and "cd", and "d" counts as trained as "cd" is."""
    reply = sampled(cache, prompt, "a", "b", "c", END)
    posted = chat(tokenizer, "go", text, add_generation_prompt=False)
    masks = [I] * len(prompt) + posted[len(prompt) : -untrained] + [I] * untrained
    row, counts = restored(cache, posted, masks, [1.0] * len(posted))
    assert trained(row) == reply.tokens.tolist()[:-1]
    assert tokenizer.decode(row.tokens) == tokenizer.decode(posted) and len(row.tokens) == len(row.logprobs)
    assert counts == Counter(retokenized=1, not_sampled=not_sampled)


def test_sampled_prompts_that_end_within_a_turn_stay_open(cache, tokenizer, prompt):
    """Also where the tokenizer puts a token before each text: nothing is put before what follows the reply."""
    sampled(cache, prompt, "a", "b", END)
    cache.tokenizer = with_bos(tokenizer)
    assert cache.restore_sampled(ids_of(tokenizer, *prompt, "abe!")) == ids_of(tokenizer, *prompt, "a", "b", "e!")
    for item in (ITEM.get(), Item()):
        ITEM.set(item)
        assert cache.restore_sampled(ids_of(tokenizer, *prompt, "ab")) == ids_of(tokenizer, *prompt, "a", "b")


def test_sampled_replies_are_preferred_for_the_tokens_kept(cache, tokenizer):
    """A prompt that ends within a turn keeps no end of it: a sequence with the end is not what it goes on from."""
    prompt, ended, open_turn = (ids_of(tokenizer, "Q:", *more) for more in ([], ["ab"], ["a", "b"]))
    sampled(cache, prompt, "ab", END)
    sampled(cache, prompt, "a", "b")
    for other in (prompt, [*ended, END]):
        assert cache.restore_sampled(ids_of(tokenizer, "Q:ab"), {key_of(open_turn), key_of(other)}) == open_turn
        assert cache.restore_sampled(ids_of(tokenizer, "Q:ab"), {key_of(ended), key_of(other)}) == ended


@pytest.mark.parametrize("trained_first", [False, True])
def test_sampled_replies_are_preferred_to_a_greedy_baseline(cache, tokenizer, prompt, trained_first):
    """Of the same prompt and tokens; what is posted has no logprobs."""
    reply = ids_of(tokenizer, "a", END)
    for temperature in (1.0, 0.0) if trained_first else (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature)
        cache.add(np.array(prompt, np.int32), reply, [-0.5 - temperature] * 2, sampling=sampling)
    posted = chat(tokenizer, "go", "a", add_generation_prompt=False)
    [found] = [piece.completion for piece in cache.trace(posted) if piece.completion]
    assert found.sampling == SamplingParams(temperature=1.0)


def test_sampled_replies_of_another_item_must_fit_whole(cache, tokenizer, prompt):
    sampled(cache, prompt, "a", END)
    sampled(cache, prompt, "a", "d", END)
    whole = sampled(cache, prompt, "a", "b", "c", END)
    ITEM.set(Item())
    for text, completion in [("abc", whole), ("abc!", None)]:
        posted = chat(tokenizer, "go", text, add_generation_prompt=False)
        pieces = cache.trace(posted)
        assert [piece.completion for piece in pieces if piece.completion] == ([completion] if completion else [])
    posted = chat(tokenizer, "go", "ab", add_generation_prompt=False)[:-2]
    sampled_by_another = cache.add(np.array(prompt, np.int32), ids_of(tokenizer, "ab", "c"), [-0.5, -0.5])
    ITEM.set(Item())
    row, counts = restored(cache, posted, len(prompt))
    assert sampled_by_another.posted == 0 and set(row.masks) == {I} and counts == {"not_sampled": 1}


def test_sampled_text_is_taken_whole_and_the_longest_of_it(cache, tokenizer, prompt):
    sampled(cache, prompt, "a", "b", "|", text="ab")  # the server left its stop string out, the environment did not
    assert cache.restore_sampled(ids_of(tokenizer, *prompt, "ab|e!")) == ids_of(tokenizer, *prompt, "a", "b", "|", "e!")
    rest = cache.trace(ids_of(tokenizer, *prompt, "ab", "|", "e"))[-1]
    assert rest[:3] == (len(prompt) + 2, len(prompt) + 3, ids_of(tokenizer, "e")), "what is behind keeps its position"
    prompt = chat(tokenizer, "on")
    sampled(cache, prompt, "ab", "e", "c")
    sampled(cache, prompt, "a", "b")  # one that was gone on after comes before one that was cut short
    assert cache.restore_sampled(ids_of(tokenizer, *prompt, "abe")) == ids_of(tokenizer, *prompt, "a", "b", "e")


def test_sampled_text_in_another_context_is_the_longest_part(cache, tokenizer):
    """At least half of the span, of replies to the same item."""
    other, prompt = ids_of(tokenizer, "another"), chat(tokenizer, "go")
    short, long = (sampled(cache, other, *way, END) for way in (("c", "d"), ("b", "cd")))

    def found(text):
        posted = chat(tokenizer, "go", text, add_generation_prompt=False)
        pieces = cache.pieces(posted, [I] * len(prompt) + posted[len(prompt) :])
        return [(piece.completion, piece.tokens) for piece in pieces if piece.tokens]

    begun = found("e bcd")
    assert (long, long.tokens.tolist()) in begun and (None, ids_of(tokenizer, "e ")) in begun
    assert (long, long.tokens.tolist()) in found("ebcd"), "the longer one, where both are within it"
    assert found("eecd")[1:3] == [(None, ids_of(tokenizer, "ee")), (short, short.tokens.tolist())]
    assert {completion for completion, _ in found("eee cd")} == {None}, "less than half of it"


def test_sampled_fits_say_how_well(cache, tokenizer):
    """End, tokens that are kept, text behind them, and the rank: whole, length of the text, these very tokens."""
    reply = sampled(cache, [1], "ab", END, text="ab \n")

    def fit(text, end=9):
        work = [1, *ids_of(tokenizer, text)]
        found = cache._fit(reply, work, 1, min(end, len(work)), text, prompt=False)
        return found and tuple(found)

    assert fit("cab ") is None and fit("abc")[1:] == (1, "c", (True, 2, False))
    assert fit("ab \nc")[1:] == (1, "c", (True, 2, False)), "the longest text that it is known by"
    work = [1, *reply.tokens.tolist(), 7]
    assert tuple(cache._fit(reply, work, 1, 3, "ab", prompt=False)) == (3, 2, "", (True, 2, True))


def test_sampled_token_lists_have_keys_of_their_order():
    lists = [[], [1], [2], [1, 2], [2, 1], [1, 1, 2], [2, 1, 1], [0], [0, 0]]
    assert len({key_of(ids) for ids in lists}) == len(lists)
    assert keys_of([2, 1]).tolist() == [key_of([]), key_of([2]), key_of([2, 1])]
    long = [*range(100)]
    assert keys_of(long).tolist() == [key_of(long[:n]) for n in range(101)]


class Pieces:
    """In the place of a cache: a reply that was trained on, and what was put in behind it."""

    def __init__(self, completion):
        self.completion = completion

    def pieces(self, ids, masks, logprobs):
        yield Piece(0, 1, ids[:1])
        yield Piece(1, 2, ids[1:2], self.completion)
        yield Piece(2, 2, [7])
        yield Piece(2, 3, ids[2:])

    def is_template(self, tokens):
        return False

    def is_part(self, tokens):
        return False


def test_restore_counts_unsampled_text_within_a_turn(cache):
    reply = cache.add(np.array([1], np.int32), [5], [-0.5])
    for first, last, expected in ((5, I, 1), (5, 6, 2), (I, I, 0)):
        _, counts = restored(Pieces(reply), [1, 5, 6], [I, first, last])
        assert counts["not_sampled"] == expected, "of what was put in, and of the last, where they are trained on"


def test_logprobs_are_those_of_the_reply_and_others_are_counted(cache, tokenizer, prompt):
    sampled(cache, prompt, "ab", "ab", END, first=-0.5)
    posted = chat(tokenizer, "go", "abab", add_generation_prompt=False)
    row, counts = restored(cache, posted, len(prompt), [1.0] * len(prompt) + [-0.7, 1.0, float("nan"), 1.0])
    assert row.logprobs[len(prompt) :] == [-0.5, -0.51, -0.52, 1.0] and counts == {"other_logprobs": 1}
    assert not restored(cache, posted, len(prompt), [1.0] * len(posted))[1], "none is given: filled in"
    given = [1.0] * (len(prompt) + 1) + [-math.inf] * 3
    assert not restored(cache, posted, len(prompt), given)[1], "no logprob of a sampled token"


def test_cache_forgets_the_oldest_of_its_own_split(drifting_model, tokenizer):
    """The oldest go first, and evaluation does not displace training."""
    cache = CompletionCache(tokenizer, capacity=28)
    for number in range(10):
        sampled(cache, [number], "ab", "cd", END)
    assert len(cache) == 28 // 4, "it may be full"
    assert len(cache._by_prompt) == 7
    other = [7, 7]
    cache._by_prompt[key_of(other)] = cache._by_prompt[key_of([9])]  # two prompts of one hash
    assert cache.restore_sampled([*other, *ids_of(tokenizer, "abcd<|im_end|>")]) == [
        *other,
        *ids_of(tokenizer, "ab", "cd", END),
    ]
    assert all(piece.completion is None for piece in cache.trace([*other, *ids_of(tokenizer, "ab", "cd", END)]))
    calls = make(Scripted, drifting_model)._calls
    assert calls.caches["eval"].capacity < calls.caches["train"].capacity
