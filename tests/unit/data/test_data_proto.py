"""The row contract, against a reference that walks token by token."""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from helpers.trainer import compose_config
from recipe.atropos.data.data_proto import groups_to_data_proto, real_rows, rows_to_data_proto
from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rows import IGNORED, NO_TEACHER, RowLimits, VersionLimits
from recipe.atropos.data.scored_group import LARGEST

LIMITS = RowLimits(max_length=11, pad_token_id=0, vocab_size=100)


def slow_reference(groups, limits, multiple_of):
    """The contract as one would say it aloud: a dict a row, with plain lists over the response. No refusals here."""
    rows, dropped = [], {}
    for index, group in enumerate(groups):
        said = group.get("group_overrides") or {}
        lost = []
        for i, tokens in enumerate(group["tokens"]):
            trained = [m != IGNORED for m in group["masks"][i]]
            first = trained.index(True) if any(trained) else None
            reason = None
            if first is None:
                reason = "no_trained_token"
            elif first == 0:
                reason = "no_prompt"
            elif first >= limits.max_length:
                reason = "overlong_prompt"
            elif limits.overlong == "drop" and len(tokens) > limits.max_length:
                reason = "overlong_response"
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
                number = (said.get("trajectory") or [None] * 5)[i]
                lost.append((float(group["scores"][i]), sum(trained), reason, number))
                continue
            end = min(len(tokens), limits.max_length)
            row = {
                "prompt": tokens[:first],
                "response": tokens[first:end],
                "mask": [int(t) for t in trained[first:end]],
                "score": [0.0] * (end - first),
                "truncated": end < len(tokens),
                "uid": str(index),
                "versions": [(said.get(f"policy_version_{end}") or [None] * 5)[i] for end in ("min", "max")],
            }
            last = max(j for j in range(end - first) if row["mask"][j])
            row["score"][last] = float(group["scores"][i])
            for name in ("inference_logprobs", "ref_logprobs", "advantages"):
                values = (group.get(name) or [None] * 5)[i]
                kept = [values[j] if trained[j] else 0.0 for j in range(first, end)] if values else None
                if kept and name != "advantages" and not all(value is not None and value <= 0 for value in kept):
                    kept = None
                row[name] = kept
            ids, teacher = group.get("distill_token_ids"), group.get("distill_logprobs")
            row["teacher"] = (
                [dict(zip(ids[i][j], teacher[i][j], strict=True)) if trained[j] else {} for j in range(first, end)]
                if ids
                else None
            )
            own = (group.get("overrides") or [{}] * len(group["tokens"]))[i] or {}
            row["zero"] = bool(own.get("set_advantage_to_zero") or said.get("set_advantage_to_zero"))
            row["raw_score"] = said.get("raw_scores", group["scores"])[i]
            row["env"] = [group["env_id"], said.get("env_name")]
            row["dropped"] = lost  # the group's, once it is read
            rows.append(row)
    return rows, dropped, -len(rows) % multiple_of


@st.composite
def groups(draw):
    """Any interleaving of trained and untrained tokens, also without prompt or trained token.

    Only the form is Hypothesis' choice: drawing each value takes ten times as long.
    """
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=5))
    rng, size = random.Random(draw(st.integers(0, 2**32))), len(lengths)

    def choose(*options):
        return draw(st.sampled_from(options))

    def parallel(make):
        return [[make() for _ in range(n)] for n in lengths]

    def number(low, high):
        return float(np.float32(rng.choice([low, high]) if rng.random() < 0.1 else rng.uniform(low, high)))

    def logprob():
        return number(-9, 0)

    def any_logprob():
        return rng.choice([1.0, None]) if rng.random() < 0.1 else logprob()

    def logprobs():
        return choose(None, parallel(logprob), parallel(any_logprob))

    tokens, masks = parallel(lambda: rng.randrange(100)), []
    for row in tokens:
        trained = rng.choice([0.05, 0.5, 0.9])
        masks.append([token if rng.random() < trained else IGNORED for token in row])
    versions = {"policy_version_min": [*range(size)], "env_name": "e", "raw_scores": [7.0] * size}
    group = {
        "tokens": tokens,
        "masks": masks,
        "scores": [number(-5, 5) for _ in lengths],
        "inference_logprobs": choose(logprobs(), []),
        "ref_logprobs": logprobs(),
        "advantages": choose(None, [], parallel(lambda: number(-5, 5))),
        "overrides": choose(None, [], [{"set_advantage_to_zero": i % 2 == 0} for i in range(size)]),
        "env_id": choose(None, 0, 3),
        "distill_token_ids": choose(None, []),
        "group_overrides": choose(None, {"set_advantage_to_zero": True}, versions, {"policy_version_max": [5] * size}),
    }
    if top_k := choose(0, 0, 0, 1, 2, 3):
        group["distill_token_ids"] = parallel(lambda: rng.sample(range(100), top_k))
        group["distill_logprobs"] = parallel(lambda: [number(-9, -1.25) for _ in range(top_k)])
    return group


def teacher_of(tensors, row, prompt_width):
    """A row's teacher as {token: logprob} a response position, read where the logits predict that position."""
    pairs = zip(tensors["teacher_ids"][row].tolist(), tensors["teacher_logprobs"][row].tolist(), strict=True)
    positions = [
        {token: value for token, value in zip(*pair, strict=True) if value != float(NO_TEACHER)} for pair in pairs
    ]
    assert not any(positions[: prompt_width - 1]) and not positions[-1]
    return positions[prompt_width - 1 : -1]


def assert_verls_slices_see_the_right_tokens(data):
    """Through verl's removal of padding and back: each response position gets the value of the token before it."""
    sample = left_right_2_no_padding(data.to_tensordict())
    # A "model" whose output at a position names the next token there: what logprobs are gathered by.
    ids, offsets = sample["input_ids"].values(), sample["input_ids"].offsets()
    output = torch.roll(ids, -1).float()
    back = no_padding_2_padding(torch.nested.nested_tensor_from_jagged(output, offsets), sample)
    mask = data.batch["response_mask"].bool()
    assert back.shape == data.batch["responses"].shape
    assert (back[mask] == data.batch["responses"][mask].float()).all()


OF_SCORES = {"rollout_log_probs", "ref_log_prob", "atropos_advantages", "token_level_scores", "teacher_logprobs"}
OF_PADDING = {
    **dict.fromkeys(("env_id", "env_name", "policy_version_min", "policy_version_max", "credit", "sampling")),
    **dict.fromkeys(("has_log_probs", "has_advantages", "has_teacher", "zero_advantage"), False),
    **{"is_padding": True, "raw_score": 0.0, "dropped": ()},
}


@settings(max_examples=200)
@given(st.lists(groups(), min_size=1, max_size=4), st.integers(1, 6), st.sampled_from(["truncate", "drop"]))
def test_every_row_equals_the_slow_reference(batch, multiple_of, overlong):
    limits = replace(LIMITS, overlong=overlong)
    rows, dropped, n_pad = slow_reference(batch, limits, multiple_of)
    data, report = groups_to_data_proto(copy.deepcopy(batch), limits, multiple_of)

    assert dict(report.dropped) == dropped
    assert report.received == len(rows) + sum(dropped.values())
    assert report.group_sizes == [len(group["tokens"]) for group in batch]
    events = {
        "response_truncated": sum(row["truncated"] for row in rows),
        "no_logprobs": sum(row["inference_logprobs"] is None for row in rows),
        "own_advantages": sum(row["advantages"] is not None for row in rows),
        "teacher": sum(row["teacher"] is not None for row in rows),
        "zero_advantage": sum(row["zero"] for row in rows),
    }
    assert report.events == {name: count for name, count in events.items() if count}
    if not rows:
        assert data is None
        return
    assert len(data) == len(rows) + n_pad and report.padding_rows == n_pad
    tensors, others = data.batch, data.non_tensor_batch
    width = max(len(row["response"]) for row in rows)
    prompt_width = max(len(row["prompt"]) for row in rows)
    assert tensors["responses"].shape == (len(data), width) and tensors["prompts"].shape == (len(data), prompt_width)

    def assert_values(name, i, values):
        assert tensors[name][i].tolist() == values + [0.0] * (width - len(values)), name

    for i, row in enumerate(rows):
        n, p = len(row["response"]), len(row["prompt"])
        assert tensors["prompts"][i].tolist() == [0] * (prompt_width - p) + row["prompt"]
        assert tensors["responses"][i].tolist() == row["response"] + [0] * (width - n)
        assert tensors["response_mask"][i].tolist() == row["mask"] + [0] * (width - n)
        assert tensors["input_ids"][i].tolist() == tensors["prompts"][i].tolist() + tensors["responses"][i].tolist()
        attended = [0] * (prompt_width - p) + [1] * (p + n) + [0] * (width - n)
        assert tensors["attention_mask"][i].tolist() == attended
        positions = tensors["position_ids"][i][torch.tensor(attended).bool()]
        assert positions.tolist() == list(range(p + n))
        assert_values("token_level_scores", i, row["score"])
        assert_values("atropos_advantages", i, row["advantages"] or [])
        if "rollout_log_probs" in tensors:
            assert_values("rollout_log_probs", i, row["inference_logprobs"] or [])
        if "ref_log_prob" in tensors:
            assert_values("ref_log_prob", i, row["ref_logprobs"])
        if "teacher_ids" in tensors:
            assert teacher_of(tensors, i, prompt_width) == (row["teacher"] or [{}] * n) + [{}] * (width - n)
        given = [row[name] is not None for name in ("inference_logprobs", "advantages", "teacher")]
        assert [others[f"has_{name}"][i] for name in ("log_probs", "advantages", "teacher")] == given
        assert others["uid"][i] == row["uid"] and others["raw_score"][i] == row["raw_score"]
        assert others["zero_advantage"][i] == row["zero"]
        versions = [others[f"policy_version_{end}"][i] for end in ("min", "max")]
        assert versions == row["versions"], "unknown is None, never 0"
        assert [others["env_id"][i], others["env_name"][i]] == row["env"]
        assert list(others["dropped"][i]) == row["dropped"]
    assert ("rollout_log_probs" in tensors) == any(row["inference_logprobs"] is not None for row in rows)
    assert ("ref_log_prob" in tensors) == all(row["ref_logprobs"] is not None for row in rows)
    assert (
        ("teacher_ids" in tensors) == ("teacher_logprobs" in tensors) == any(row["teacher"] is not None for row in rows)
    )
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if name in OF_SCORES else torch.int64), name
    padding = slice(len(rows), None)
    for name, value in OF_PADDING.items():
        assert others[name][padding].tolist() == [value] * n_pad, name
    assert not others["is_padding"][: len(rows)].any()
    assert not tensors["response_mask"][padding].any() and not tensors["token_level_scores"][padding].any()
    assert (tensors["attention_mask"][padding].sum(-1) == 1).all()  # verl wants a prompt, and no more
    assert len(set(others["uid"][padding])) == n_pad and not set(others["uid"][padding]) & {r["uid"] for r in rows}
    assert_verls_slices_see_the_right_tokens(data)


def test_real_rows_have_the_lengths_that_flops_are_counted_by():
    group = {"tokens": [[1, 2, 5], [1, 7]], "masks": [[IGNORED, 2, 5], [IGNORED, 7]], "scores": [0.0, 1.0]}
    rows, _ = read_groups([group], LIMITS)
    whole = rows_to_data_proto([rows[0], None, rows[1]], LIMITS)
    real = real_rows(whole)
    assert len(whole) == 3 and len(real) == 2 and real.meta_info["global_token_num"] == [3, 2]


def good_group(**changes):
    group = {
        "tokens": [[5, 6, 7, 8], [5, 6, 9]],
        "masks": [[-100, -100, 7, 8], [-100, -100, 9]],
        "scores": [1.0, -1.0],
        "inference_logprobs": [[1.0, 1.0, -0.1, -0.2], [1.0, 1.0, -0.3]],
        "env_id": 2,
        "group_overrides": {"env_name": "gsm8k_0"},
    }
    return group | changes


def teacher(ids=([], [], [1, 2], [3, 4]), logprobs=([], [], [-1.0, -2.0], [-1.0, -2.0])):
    """Changes of ``good_group``: a top-2 teacher for its first sequence."""
    return {"distill_token_ids": [list(ids), []], "distill_logprobs": [list(logprobs), []]}


def test_distillation_fields_may_be_empty():
    """Empty where nothing is trained, and for whole rows."""
    data, report = groups_to_data_proto([good_group(**teacher())], LIMITS)
    assert not report.dropped and data.non_tensor_batch["has_teacher"].tolist() == [True, False]
    assert teacher_of(data.batch, 0, 2) == [{1: -1.0, 2: -2.0}, {3: -1.0, 4: -2.0}]
    assert teacher_of(data.batch, 1, 2) == [{}, {}]


def test_a_teachers_untrained_positions_do_not_count():
    """As where vLLM adds the sampled token to the top-k of a prompt."""
    said = teacher([[-7], [7, 7, 8], [1, 2], [3, 4]], [[9.0, 9.0], [-1.0, -1.0, -1.0], [-1.0, -2.0], [-1.0, -2.0]])
    data, report = groups_to_data_proto([good_group(**said)], LIMITS)
    assert not report.dropped and teacher_of(data.batch, 0, 2) == [{1: -1.0, 2: -2.0}, {3: -1.0, 4: -2.0}]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"advantages": [[0.0] * 4]}, "unequal_lengths", "1 advantages for 2 sequences"),
        ({"advantages": [[0.0, 0.0, 1e39, 0.0], [0.0] * 3]}, "nonfinite_advantages", "1e+39 at position 2; it must be"),
        (teacher([[], [], [1, 2], [3]]), "ragged_distillation", "1 distill_token_ids and 2 distill_logprobs"),
        (teacher([[], [], [], []], [[], [], [], []]), "ragged_distillation", "0 distill_logprobs at position 2"),
        (
            teacher([[], [], [1, 2], [3]], [[], [], [-1.0, -2.0], [-1.0]]),
            "ragged_distillation",
            "1 distill_token_ids and 1 distill_logprobs at position 3, and 2 at its first trained one",
        ),
        (teacher([[], [], [3, 100], [200, 4]]), "foreign_tokens", "distill_token_ids[0] is 100 at position 2"),
        (teacher([[], [], [4, 4], [3, 3]]), "repeated_distill_token", "distill_token_ids[0] is [4, 4] at position 2"),
        (teacher([[], [], [1, 2]]), "unequal_lengths", "distill_token_ids[0] has 3 positions, tokens[0] has 4"),
        (
            teacher(logprobs=[[], [], [-1, -2], [-1, math.nan]]),
            "invalid_distill_logprobs",
            "distill_logprobs has no JSON form: Out of range",
        ),
        (teacher(logprobs=[[], [], [-1, -2], [0.5, -1]]), "invalid_distill_logprobs", "sum to at most 1"),
        ({"distill_token_ids": [[[]] * 4, [[]] * 3]}, "unequal_lengths", "one of distill_token_ids"),
        (teacher([[], [], [3, -1], [3, 4]]), "foreign_tokens", "distill_token_ids[0] is -1 at position 2"),
        (teacher([[], [], [2**70, 4], [3, 4]]), "malformed", "distill_token_ids"),
        (teacher(logprobs=[[], [], [math.log(0.6), math.log(0.5)], [-1, -1]]), "invalid_distill_logprobs", "sum to"),
        ({"tokens": [[5, 6, 7, 100], [5, 6, 9]]}, "foreign_tokens", "token 100 at position 3"),
        ({"tokens": [[5, 6, 7, -1], [5, 6, 9]]}, "foreign_tokens", "token -1 at position 3"),
        ({"scores": [LARGEST * 1.01, 0.0]}, "nonfinite_scores", "score 0 is 1010000000000000"),
        (
            {"advantages": [[0.0, 0.0, LARGEST * 1.01, 0.0], [0.0] * 3]},
            "nonfinite_advantages",
            "[0] is 1010000000000000",
        ),
        ({"advantages": [0.5, 0.5]}, "malformed", "advantages[0] is not a flat list of numbers"),
        (
            {"inference_logprobs": [[1.0, 1.0, None, -1e39], [1.0, 1.0, -0.3]]},
            "nonfinite_inference_logprobs",
            "inference_logprobs[0] is -inf at position 3",
        ),
        (teacher([0, 0, 1, 2]), "malformed", "distill_token_ids[0] is not a list of lists"),
        (teacher([[], [], [1, 2], [3, 4.5]]), "malformed", "distill_token_ids[0] is not a flat list of whole numbers"),
        (teacher(logprobs=[[], [], [-1, -2], ["-1", -2]]), "malformed", "distill_logprobs[0]"),
    ],
    ids=range(23),
)
def test_group_that_cannot_be_trained_on_is_refused_and_counted(changes, reason, words):
    """The message names the group, and the first place. ``test_parsing`` has what is no group for the API either."""
    rows, report = read_groups([good_group(), good_group(**changes)], LIMITS)
    assert len(rows) == 2 and {row.uid for row in rows} == {"0"}, "the good group stays"
    assert report.dropped == {reason: 2}
    assert report.messages[0].startswith("group 1 of env gsm8k_0: ") and words in report.messages[0]


@pytest.mark.parametrize("longest", [2, 3])
def test_a_row_that_is_too_long_can_be_an_error(longest):
    words = r"sequence 0 has 4 tokens, 2 of them prompt, data.max_prompt_length \+ data.max_response_length is "
    with pytest.raises(ValueError, match=f"{words}{longest}; raise one, or set trainer.atropos.overlong to drop or tr"):
        read_groups([good_group()], RowLimits(longest, 0, "error"))
    rows, _ = read_groups([good_group()], RowLimits(4, 0, "error"))
    assert len(rows) == 2


def test_turns_of_a_tool_are_trained_in_their_whole_context():
    """Only the last of three turns is trained on, so what came before it is prompt, longer than max_prompt_length."""
    config = compose_config("data.max_prompt_length=64", "data.max_response_length=64")
    limits = RowLimits.from_config(config, pad_token_id=0, vocab_size=1000)
    system, call, result, answer = 40, 12, 20, 8
    prompt = system + 2 * (call + result)
    tokens = [1 + i for i in range(prompt + answer)]
    group = {
        "tokens": [tokens, tokens[: prompt + 5]],
        "masks": [[IGNORED] * prompt + tokens[prompt:], [IGNORED] * prompt + tokens[prompt : prompt + 5]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0] * prompt + [-0.5] * n for n in (answer, 5)],
    }
    data, report = groups_to_data_proto([group], limits)
    assert prompt > config.data.max_prompt_length and not report.dropped and not report.events
    attended = data.batch["attention_mask"].bool()
    assert [ids[kept].tolist() for ids, kept in zip(data.batch["input_ids"], attended, strict=True)] == group["tokens"]
    assert data.batch["response_mask"].sum(-1).tolist() == [answer, 5]


@pytest.mark.parametrize(("overlong", "kept"), [("drop", [1, 7]), ("truncate", [1, 7, 7])])
def test_a_prompt_without_room_for_a_response_has_its_reason(overlong, kept):
    """In a budget of 8 tokens: prompts of 7, 1, 7, and 8 tokens, responses of 1, 7, 2, and 1."""
    shapes = [(7, 1), (1, 7), (7, 2), (8, 1)]
    group = {
        "tokens": [[*range(p + r)] for p, r in shapes],
        "masks": [[IGNORED] * p + [1] * r for p, r in shapes],
        "scores": [0.0, 1.0, 2.0, 3.0],
    }
    rows, report = read_groups([group], RowLimits(8, 0, overlong))
    assert sorted(len(row.prompt) for row in rows) == kept and all(len(row.response) in (1, 7) for row in rows)
    assert report.dropped == {"overlong_prompt": 1} | ({"overlong_response": 1} if overlong == "drop" else {})
    assert rows[0].dropped[-1][:3] == (3.0, 1, "overlong_prompt"), "its score counts in its group"


def test_a_teacher_that_is_not_read_is_not_checked():
    rows, _ = read_groups([good_group(distill_token_ids=["whatever"])], replace(LIMITS, read_teacher=False))
    assert len(rows) == 2 and rows[0].teacher_ids is None


@pytest.mark.parametrize("group", [None, 7, "tokens", [good_group()]], ids=lambda group: type(group).__name__)
def test_a_group_that_is_no_mapping_is_refused_and_counted(group):
    rows, report = read_groups([group, good_group()], LIMITS)
    assert len(rows) == 2 and report.dropped == {"malformed": 1} and report.received == 3
    assert report.messages[0].startswith("group 0 of env unknown: ") and "not a mapping" in report.messages[0]
    assert report.metrics()["atropos/unknown/dropped/malformed"] == 1


@pytest.mark.parametrize(
    ("oldest", "newest", "max_staleness", "reason"),
    [
        (5, 5, 0, None),
        (4, 5, 0, "stale"),
        (3, 5, 2, None),
        (2, 5, 2, "stale"),
        (0, 0, None, None),
        (5, 6, None, "future_version"),
        (5, 6, 9, "future_version"),
        (6, 6, 0, "future_version"),
        (6, None, None, "future_version"),
        (6, None, 2, "future_version"),
        (-1, 5, None, "not_pushed"),
        (-1, -1, 9, "not_pushed"),
        (None, None, None, None),
        (None, None, 0, "unknown_version"),
        (None, 5, 9, "unknown_version"),
        (5, None, 0, None),
    ],
)
def test_version_limits_hold_at_their_very_bounds(oldest, newest, max_staleness, reason):
    """Of a policy with 5 updates behind it."""
    assert VersionLimits(5, max_staleness).refuses(oldest, newest) == reason
