"""Credit on the tokens of scored groups, up to the gradient, and through the adapter."""

import asyncio
import json
import re
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers.trainer import random_group
from recipe.atropos.adapter.flags import UsageError, take_settings
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.credit.group import Credit, CreditError, _decisions, add_credit, give_credit
from recipe.atropos.credit.rules import PAPERS
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils import patterns

V = 40


def values_of(group):
    """The advantage of each turn, by sequence; every other token must have 0."""
    found = []
    for advantages, masks in zip(group["advantages"], group["masks"], strict=True):
        spans = list(trained_spans(masks))
        turns = [advantages[start:end] for start, end in spans]
        assert all(len(set(turn)) == 1 for turn in turns), "a turn has one advantage"
        assert sum(map(len, turns)) == len(masks) - masks.count(-100) and len(advantages) == len(masks)
        assert not any(value for value, mask in zip(advantages, masks, strict=True) if mask == -100)
        found.append([turn[0] for turn in turns])
    return found


@pytest.fixture
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture
def group():
    return random_group(np.random.default_rng(0), V, turns=3, size=4) | {"scores": [1.0, 0.0, 0.0, 1.0]}


@pytest.mark.parametrize("values", [False, True])
def test_credit_of_many_turns_takes_little_memory(values):
    """As many as its tokens, for each of its turns nothing of those before."""
    tokens = [[-100, turn] * 10 for turn in range(100)]
    rows = [sum(tokens[:length], []) for length in [50, 100] * 4]
    group = {"tokens": [[abs(token) for token in row] for row in rows], "masks": rows, "scores": [0.0, 1.0] * 4}
    if values:
        turns = [len(list(trained_spans(row))) for row in rows]
        group["group_overrides"] = {"turn_values": [[0.5] * count for count in turns]}
    tracemalloc.start()
    add_credit(group, Credit())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6 and len(group["advantages"][1]) == 2000


def test_credit_of_turn_values_by_hand(group):
    """All begin in one state; then no two histories are the same: each turn is compared with others of its number."""
    group["group_overrides"] = {"turn_values": [[0.5, 0.5, 9], [0.0, 0.5, 9], [0.5, 0.0, 9], [0.0, 0.0, 9]]}
    add_credit(group, Credit(lam=0.0))
    progress = np.array([[0.5, 0.0, 0.5], [0.0, 0.5, -0.5], [0.5, -0.5, 0.0], [0.0, 0.0, 1.0]])
    centered = progress - (progress.sum(0) - progress) / 3
    scale = np.sqrt((centered**2).mean(1).mean() * 4 / 3)
    assert values_of(group) == [pytest.approx(row, abs=1e-5) for row in (centered / scale).tolist()]


def test_credit_compares_turns_in_the_same_state(group):
    states = [["", "a", "x"], ["", "a", "y"], ["", {"b": 1}, "y"], ["", {"b": 1}, "z"]]
    group["group_overrides"] = {"turn_states": states}
    add_credit(group, Credit())
    found = np.array(values_of(group))
    assert found[0, 1] == -found[1, 1] > 0 and found[3, 1] == -found[2, 1] == found[0, 1]
    assert found[1, 2] == found[2, 2] == 0 < found[0, 2], "equal scores in y; others are compared with all"


def test_credit_of_one_episode_in_several_sequences(group):
    """Sequences of one number are one episode: its turns go on from one to the other."""
    whole = random_group(np.random.default_rng(0), V, turns=3, size=2) | {"scores": [1.0, 0.0]}
    overrides = {"trajectory": [0, 0, 1], "turn_values": [[0.5, 0.5, 0.75], [0.5], [0.5, 0.25, 0.1]]}
    masks = [[-100] * len(whole["masks"][0]), *whole["masks"]]
    *_, (start, end) = trained_spans(whole["masks"][0])
    masks[0][start:end], masks[1] = whole["tokens"][0][start:end], [*whole["masks"][0]]
    masks[0], masks[1] = masks[1], masks[0]  # three turns, and a fourth in a sequence of its own
    split = {"tokens": [whole["tokens"][0], *whole["tokens"]], "masks": masks, "scores": [1.0, 1.0, 0.0]}
    split["group_overrides"] = overrides
    add_credit(split, Credit(lam=0.0))
    first, more, other = values_of(split)
    assert (len(first), len(more), len(other)) == (3, 1, 3)
    progress = [0.5, 0.0, 0.25, 0.25, 0.5, -0.25, -0.25]
    compared = np.array([0.0, 0.25, 0.5, 0.25, 0.0, -0.25, -0.5])  # the fourth with an episode that has ended, 0
    assert [*first, *more, *other] == pytest.approx(compared / compared[2] * first[2], abs=1e-6), progress


def test_credit_of_branches(group):
    """Sequence 1 goes on after the first turn of 0, sequence 2 after the second of 1, which is the first of its own."""
    tokens, masks = group["tokens"], group["masks"]
    spans = [list(trained_spans(each)) for each in masks]
    for sequence, shared in ((1, 1), (2, 2)):
        masks[sequence][: spans[sequence][shared - 1][1]] = [-100] * spans[sequence][shared - 1][1]
    group["group_overrides"] = {"branches": [None, [0, 1], [1, 2], None]}
    add_credit(group, Credit())
    found = values_of(group)
    assert [len(each) for each in found] == [3, 2, 1, 3] and len(tokens) == 4
    # V of the first decision is the mean of what is below it: (1 + (0 + 0)) / 3; the other rollout has 1
    assert found[0][0] < 0 < found[3][0] and found[0][0] == pytest.approx(-found[3][0])
    assert found[0][1] > 0 > found[1][0] and found[0][1] == pytest.approx(-found[1][0]), "siblings after one turn"
    assert found[2][0] == 0.0 == found[1][1], "equal scores after the same turns"


def reached(item, text):
    """Part of the item's words that a text has."""
    return sum(word in text for word in item) / len(item)


def test_credit_of_parts_of_a_turn_by_a_function(tokenizer):
    texts = ["12 + 7 = 19 so 19 - 4 = 15", "12 + 7 = 19 so 19 - 4 = 16"]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    group = {"tokens": [[1, 2, *row] for row in rows], "masks": [[-100, -100, *row] for row in rows]}
    group["scores"] = [1.0, 0.0]
    credit = Credit(spans=r"= \d+", values=f"{__name__}:reached", lam=0.0)
    add_credit(group, credit, tokenizer, ["= 19", "= 15"])
    for row, advantages, sign in zip(rows, group["advantages"], (1, -1), strict=True):
        first = next(n for n in range(len(row)) if "= 19" in tokenizer.decode(row[:n]))
        assert not any(advantages[: 2 + first]) and all(sign * value > 0 for value in advantages[2 + first :])


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize(
    ("spans", "parts"),
    [
        ("tool_calls", ["<think>so</think><tool_call>1+1</tool_call>", "<tool_call>2+1</tool_call>",
                        " it is \\boxed{3} <answer>3</answer>"]),
        ("answer", ["<think>so</think><tool_call>1+1</tool_call><tool_call>2+1</tool_call> it is",
                    " \\boxed{3} ", "<answer>3</answer>"]),
        ("markers", ["<think>", "so</think>", "<tool_call>", "1+1</tool_call>", "<tool_call>", "2+1</tool_call>",
                     " it is \\boxed{3} <answer>", "3</answer>"]),
    ],
)  # fmt: skip
def test_credit_of_named_spans(tokenizer, spans, parts, special):
    """Also where the markers are special tokens, which the text for values is without."""
    if special:
        markers = [f"<{end}{name}>" for end in ("", "/") for name in ("think", "tool_call", "answer")]
        tokenizer.add_special_tokens({"additional_special_tokens": markers})
    row = tokenizer.encode("".join(parts), add_special_tokens=False)
    group = {"tokens": [[1, 2, *row]], "masks": [[-100, -100, *row]], "scores": [1.0]}
    cuts = [each[2:] for each in _decisions(group, Credit(spans=spans, values=f"{__name__}:heard"), tokenizer)]
    found = [tokenizer.decode(group["tokens"][0][start:end]) for start, end in cuts]
    assert [part.strip() for part in found] == [part.strip() for part in parts]


TEXTS: list[str] = []


def heard(item, text):
    TEXTS.append(text)
    return 0.0


@pytest.mark.parametrize("pattern", [r"= \d+", "\n", r"\w*", "👍", "none", r"(?s:.*)"])
def test_credit_cuts_a_turn_after_each_match(tokenizer, pattern):
    """A part ends with the first token that covers its match; one of several characters may hold two matches."""
    text = "a = 1\nbb = 22\n7 × 3 = 21 äöü 👍 and\nccc = 333\nend"
    row = tokenizer.encode(text, add_special_tokens=False)
    group = {"tokens": [[1, 2, *row]], "masks": [[-100, -100, *row]], "scores": [1.0]}
    TEXTS.clear()
    add_credit(group, Credit(spans=pattern, values=f"{__name__}:heard"), tokenizer)
    covered = [tokenizer.decode(row[:count]) for count in range(len(row) + 1)]
    ends = {next(n for n, each in enumerate(covered) if text[: m.end()] in each) for m in re.finditer(pattern, text)}
    assert TEXTS == [covered[end] for end in sorted(ends - {0, len(row)})]


@pytest.mark.parametrize(
    "text", ["日本語の答え 👍👍👍 is <answer>7</answer>", "答え\n<answer>7</answer>", "é<answer>答え</answer>"]
)
def test_credit_cuts_after_characters_of_several_tokens(text):
    """As those of Llama 2 and Gemma write what they have no token for: a run of bytes is read as a whole, or not."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁"]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(numbers, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), *last])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    row = tokenizer.encode(text, add_special_tokens=False)
    group = {"tokens": [[1, *row]], "masks": [[-100, *row]], "scores": [1.0]}
    parts = [each[2:] for each in _decisions(group, Credit(spans="answer", values="operator:eq"), tokenizer)]
    found = [tokenizer.decode(group["tokens"][0][start:end]) for start, end in parts]
    assert "".join(found) == text and found[1:] == [text[text.index("<answer>") :]]
    for spans in ("。", "\n"):  # within a run of bytes, where each is one
        text = "まず三と四を足す。次に二を\n掛ける。\n答えは十四です。ok。\nend"
        row = tokenizer.encode(text, add_special_tokens=False)
        group = {"tokens": [[1, *row]], "masks": [[-100, *row]], "scores": [1.0]}
        parts = [each[2:] for each in _decisions(group, Credit(spans=spans, values="operator:eq"), tokenizer)]
        found = [tokenizer.decode(group["tokens"][0][start:end]) for start, end in parts]
        assert found == [f"{part}{spans}" for part in text.split(spans)[:-1]] + [text.split(spans)[-1]]


async def test_credit_refuses_a_group_whose_spans_take_too_long(monkeypatch):
    """A pattern that tries again and again holds up nothing else meanwhile."""
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    row = [*map(ord, "a" * 200 + "c")]
    group = {"tokens": [[1, *row]], "masks": [[-100, *row]], "scores": [1.0]}
    given = asyncio.ensure_future(
        give_credit(group, Credit(spans="(a|aa|b?a)+$", values="operator:eq"), Letters(), None)
    )
    await asyncio.sleep(0.05)
    assert not given.done(), "the loop goes on while it is matched"
    with pytest.raises(RefusedGroup, match="environment.credit.spans: pattern .* took more than 0.2 s") as refused:
        await given
    assert refused.value.reason == Reason.MARKER_TIMEOUT


class Letters:
    """A tokenizer with a character for each token."""

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


def test_credit_values_are_given_all_of_an_episode():
    """Also what its other sequences say, in the order in which these begin; of other episodes nothing."""
    texts = ["?A.B.", "?a.", "?Z.Y."]  # capitals and small letters are sampled
    masks = [[ord(each) if each.isalpha() else -100 for each in text] for text in texts]
    group = {"tokens": [[*map(ord, text)] for text in texts], "masks": masks, "scores": [1.0, 1.0, 0.0]}
    group["group_overrides"] = {"trajectory": [0, 0, 1], "turn_numbers": [[0, 2], [1], [0, 1]]}
    TEXTS.clear()
    add_credit(group, Credit(values=f"{__name__}:heard"), Letters())
    assert sorted(TEXTS) == ["A.", "A.\na.", "Z."]


class Words(Letters):
    """One that leaves out the space before a text's first word, as those of SentencePiece do."""

    def decode(self, tokens, **_):
        return super().decode(tokens).removeprefix(" ")


@pytest.mark.parametrize("tokenizer", [Letters(), Words()])
def test_credit_values_are_given_text_as_it_is_decoded_at_once(tokenizer):
    text = "?A. B. C"
    masks = [[-100 if each in "?." else ord(each) for each in text]]
    group = {"tokens": [[*map(ord, text)]], "masks": masks, "scores": [1.0]}
    TEXTS.clear()
    add_credit(group, Credit(values=f"{__name__}:heard"), tokenizer)
    assert TEXTS == ["A.", "A. B."]


def test_credit_cuts_long_turns_without_decoding_each_beginning():
    """Forty lines of fifty characters: the values need each once, and the whole, the cuts only what is near."""
    decoded, row = [], [*map(ord, ("x" * 49 + "\n") * 40)]

    class Counted(Letters):
        def decode(self, tokens, **_):
            decoded.append(len(tokens))
            return super().decode(tokens)

    group = {"tokens": [[1, *row]], "masks": [[-100, *row]], "scores": [1.0]}
    add_credit(group, Credit(spans="\n", values=f"{__name__}:heard"), Counted())
    assert sum(decoded) < 22 * len(row)


def test_credit_tells_long_histories_in_arrays_apart():
    """NumPy leaves out the middle of a long array when it prints one; three turns, the second after a long reply."""
    rows = [[1, 2, 3, first, *[4] * 2000, 5, 6, 7] for first in (8, 9, 9)]
    masks = [[-100] * 3 + row[3:4] + [-100] * 2000 + [5, -100, 7] for row in rows]
    overrides = {"turn_values": [[0.25, 0.5, 1], [0.0, 0.75, 1], [0.5, 0.5, 1]]}
    group, same = ({"tokens": rows, "masks": masks, "scores": [1.0, 0.0, 1.0]} for _ in range(2))
    same["tokens"] = [np.array(row) for row in rows]
    for each in (group, same):
        each["group_overrides"] = overrides
        add_credit(each, Credit())
    assert same["advantages"] == group["advantages"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"turn_values": [[0.5], *[[0.5] * 3] * 3]}, "turn_values: sequence 0 has 3 turns"),
        ({"turn_values": [[0.5] * 4] * 4}, "turn_values: sequence 0 has 3 turns"),
        ({"turn_states": [[1, 2, 3]]}, "turn_states: sequence 1 has 3 turns"),
        ({"branches": [None, [0, 4], None, None]}, "branches: sequence 0 comes later, or ends within 4 turns"),
        ({"branches": [None, [0, 3], None, None]}, "branches: sequence 0 comes later, or ends within 3 turns"),
        ({"turn_values": {"a": 1}}, "turn_values: sequence 0 has 3 turns"),
        ({"turn_values": [["high", 1, 1]] * 4}, "turn_values: ValueError.*'high'"),
        ({"branches": [None, [2, 1], [1, 1], None]}, "branches=.*: sequence 1: . is no earlier sequence"),
        ({"branches": [None, [1, 1], None, None]}, "branches=.*: sequence 1: . is no earlier sequence"),
        ({"branches": [None, [0], None, None]}, "branches=.*: sequence 1: not enough values"),
        ({"branches": [None, None]}, "branches=.*: sequence 2: list index out of range"),
        ({"branches": 3}, "branches=3: sequence 0"),
        *(({"turn_values": [[x, 0.5, 1.0]] * 4}, "each must be a finite number") for x in (np.nan, np.inf, None)),
        ({"turn_values": [[0.5] * 3] * 4}, "gigpo: group_overrides has turn_values"),
        ({"branches": [None, [0, 1], None, None]}, "gigpo: group_overrides has branches"),
    ],
)
def test_credit_names_what_is_missing_or_not_read(group, overrides, message):
    """By a method, if the message begins with it."""
    group["group_overrides"], method = overrides, message.partition(": ")[0]
    with pytest.raises(CreditError, match=message):
        add_credit(group, Credit(method=method) if method in PAPERS else Credit())


@pytest.mark.parametrize("method", ["vineppo", "mt_grpo"])
def test_credit_by_values_of_turns_refuses_a_group_without(group, method):
    """As one of a reason that is counted; of single turns the score is enough."""
    with pytest.raises(RefusedGroup, match=f"{method}: give values, or turn_values in group_overrides") as refused:
        add_credit(group, Credit(method=method))
    assert refused.value.reason == Reason.MALFORMED
    single = random_group(np.random.default_rng(0), V, turns=1, size=4) | {"scores": [1.0, 0.0, 0.0, 1.0]}
    add_credit(single, Credit(method=method))
    expected = 2 / 3 if method == "vineppo" else 0.5 / np.sqrt(1 / 3)  # over the mean of others; or by the deviation
    assert np.ravel(values_of(single)) == pytest.approx(expected * np.array([1, -1, -1, 1]), abs=1e-5)


def test_credit_does_not_shrink_values_of_the_environment(group):
    group["group_overrides"] = {"turn_values": [[0.5] * 3] * 4}
    with pytest.raises(CreditError, match="progress: group_overrides has turn_values"):
        add_credit(group, Credit(shrink=1.0))


@pytest.mark.parametrize("each", [lambda row: [0.0] * len(row), lambda row: 0.5], ids=["tokens", "sequences"])
def test_credit_refuses_a_group_with_advantages(group, each):
    group["advantages"] = [each(row) for row in group["tokens"]]
    with pytest.raises(CreditError, match="leave environment.credit out"):
        add_credit(group, Credit())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lam": 2}, r"environment.credit.lam=2: Input should be less than or equal to 1"),
        ({"rule": "x"}, r"environment.credit.rule=x: Extra inputs"),
        ({"spans": "(", "values": "a:b"}, r"environment.credit.spans=\(: "),
        ({"method": "gigpo", "lam": 0.5}, "gigpo leaves no effect to lam"),
        ({"method": "mt_grpo", "gamma": 0.5, "shrink": 1}, "mt_grpo leaves no effect to gamma, shrink"),
        ({"weight": 0.5}, "progress leaves no effect to weight"),
        ({"shrink": 1, "values": "a:b"}, "progress leaves no effect to shrink"),
        ({"spans": "x"}, r"environment.credit={'spans': 'x'}: .*spans=x: parts of turns need values"),
        ({"teacher": {}}, "own server knows no more; give hint or base_url"),
        ({"teacher": {"hint": "a:b", "api_key_env": "KEY"}}, "teacher.api_key_env is for base_url"),
        ({"teacher": {"base_url": "teacher:1"}}, "teacher.base_url=teacher:1: "),
        ({"teacher": {"base_url": "http://key@teacher"}}, "teacher.base_url=http://key@teacher: "),
        ({"teacher": {"hint": "solution"}}, "teacher.hint=solution: "),
        *(
            ({"teacher": {"hint": "a:b"}, key: value}, f"teacher leaves no effect to {key};")
            for key, value in {"values": "a:b", "spans": "turns", "lam": 0.5, "gamma": 1.0}.items()
        ),
    ],
)
def test_credit_settings_are_checked_by_name(given, message):
    with pytest.raises(ConfigurationError, match=message):
        Credit.parse(given, "environment.credit")


def test_credit_settings_travel_as_a_flag():
    given = {"lam": 0.25, "spans": "a=b", "values": "json:dumps"}
    flags = AdapterSettings(credit=json.dumps(given)).flags()
    assert take_settings(flags).credit == Credit.parse(given, "environment.credit")
    with pytest.raises(UsageError, match="--adapter.credit="):
        take_settings(['--adapter.credit={"lam": 3}'])


def test_credit_of_no_trained_token_is_zero(group):
    group["masks"] = [[-100] * len(masks) for masks in group["masks"]]
    add_credit(group, Credit())
    assert not any(map(any, group["advantages"])) and list(map(len, group["advantages"])) == list(
        map(len, group["masks"])
    )


def test_credit_names_the_function_that_fails():
    for given in ("nowhere:f", "json:nothing", "os:sep", "os..path:join"):
        with pytest.raises(ConfigurationError, match=f"environment.credit.values={given}"):
            Credit(values=given).function()


# ---------------------------------------------------------------------- a teacher

TAUGHT = Credit(teacher={"base_url": "http://teacher:1", "scale": 2.0}, mix=0.5)


def judged_group():
    """Two rows of two turns, (N, T); the last token of the first row has no logprob, so nobody sampled it."""
    group = {"tokens": [[1, 2, 3, 4, 5]] * 2, "masks": [[-100, 2, -100, 4, 5]] * 2, "scores": [1.0, 0.0]}
    return group | {"inference_logprobs": [[1.0, -1.0, 1.0, -2.0, 1.0], [1.0, -0.5, 1.0, -0.25, -1.0]]}


TEACHERS = [[0.0, -0.5, -9.0, -3.0, -0.5], [0.0, -0.5, -9.0, -0.25, -2.0]]


def test_credit_of_a_teacher_by_hand():
    """Half of GRPO, half of twice log(teacher / policy); nothing of the latter on a token that was not sampled."""
    group = judged_group()
    add_credit(group, TAUGHT, taught=TEACHERS)
    a = 0.5 / np.sqrt(2)
    expected = [[0.0, 0.5 + a, 0.0, -1.0 + a, a], [0.0, 0.0 - a, 0.0, 0.0 - a, -1.0 - a]]
    assert np.allclose(group["advantages"], expected, atol=1e-5)
    assert group["group_overrides"]["credit"] == f"mix=0.5 teacher={TAUGHT.teacher.model_dump(exclude_defaults=True)}"
    alone = judged_group()
    add_credit(alone, TAUGHT.model_copy(update={"mix": 0.0}), taught=TEACHERS)
    assert np.allclose(alone["advantages"], [[0.0, 1.0, 0.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0, -2.0]])
    for nothing in (None, []):  # of a row that came without
        some = judged_group() | {"inference_logprobs": [judged_group()["inference_logprobs"][0], nothing]}
        add_credit(some, TAUGHT.model_copy(update={"mix": 0.0}), taught=TEACHERS)
        assert np.allclose(some["advantages"], [alone["advantages"][0], [0.0] * 5])


@pytest.mark.parametrize(
    ("changes", "taught", "message"),
    [
        ({}, None, "teacher: it is asked for environments that the launcher starts"),
        ({"inference_logprobs": None}, TEACHERS, "teacher: the group has no inference_logprobs"),
        ({"group_overrides": {"turn_values": [[0, 0]] * 2}}, TEACHERS, "teacher: group_overrides has turn_values"),
        ({"group_overrides": {"branches": [None, [0, 1]]}}, TEACHERS, "teacher: group_overrides has branches"),
        ({"group_overrides": {"sampling_params": [[{"temperature": 0.5}], None]}}, TEACHERS, r"sampled at \[0.5\]"),
    ],
)
def test_credit_of_a_teacher_refuses_what_has_no_effect(changes, taught, message):
    with pytest.raises(CreditError, match=message):
        add_credit(judged_group() | changes, TAUGHT, taught=taught)


def test_credit_gate_takes_scores_where_no_bridge_shaped_them():
    """Also if they are said to be none."""
    group = judged_group() | {"scores": [1.0, 1.0], "group_overrides": {"raw_scores": None}}
    add_credit(group, Credit(outcome_gate=True))
    assert group["advantages"] == [[0.0] * 5] * 2
