"""Values that a program gives for its turns, from its reward to the advantages of the group that is sent."""

import asyncio
import json
from functools import partial

import numpy as np
import orjson
import pytest
from openai import AsyncOpenAI

from helpers.agents import program_env
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from helpers.waiting import until
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.credit.rules import Decisions, advantages
from recipe.atropos.sessions.client import scored_group
from recipe.atropos.utils.secret import API_KEY_VARIABLE

VALUES = [[0.25, 0.5, 0.25, 0.75, 9.0], [0.0, 0.5, 1.0, 0.25, 9.0]]
REWARDS = [1.0, 0.0]
pytestmark = pytest.mark.timeout(120)


async def delegates(item, base_url, api_key):
    """Asks, lets a second agent take two turns, goes on, and then again after it changed its first message."""
    client, tried = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key), len(item["tried"])
    item["tried"].append(api_key)

    async def ask(messages):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return [*messages, reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and"}]

    first = await ask([{"role": "user", "content": "sum"}])
    await ask(await ask([{"role": "user", "content": "result"}]))
    first = await ask(first)
    await ask([{"role": "user", "content": "no"}, *first[1:]])
    return {"reward": REWARDS[tried % 2], "turn_values": VALUES[tried % 2][: item.get("values", 5)] or None}


def rows(turns, values):
    ids = [i for turn in range(turns) for i in (1, 5 + turn)]
    masks = [i if i > 1 else -100 for i in ids]
    return {"tokens": [ids], "masks": [masks], "turn_numbers": [[*range(turns)]], "turn_values": [values]}


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """A function that returns what the adapter sends of a group of two sessions, the policy, and the counts."""

    def send(method="progress", **item):
        monkeypatch.setenv(API_KEY_VARIABLE, Sessions.KEY)
        tokenizer = chat_tokenizer()
        tokenizer.save_pretrained(tmp_path / "model")
        credit = {"lam": 0.0} if method == "progress" else {"method": method}
        settings = AdapterSettings(credit=json.dumps(credit))
        with Sessions(tmp_path, ScriptedPolicy(tokenizer, script=[f"{n} is the sum" for n in range(40)])) as sessions:
            fields = {"agent": f"{__name__}:delegates", "data_path_to_save_groups": str(tmp_path / "sent.jsonl")}
            adapted = partial(adapt, settings=settings)
            env = program_env(tmp_path, tmp_path / "model", sessions, [item] * 2, adapted, **fields)

            async def collect():
                await env.setup()
                item = (await env.get_next_item()) | {"tried": []}
                group, _ = await env.collect_trajectories(item)
                if group is not None:
                    await env.handle_send_to_api(group, item, do_send_to_api=False)

            asyncio.run(collect())
            env.jsonl_writer._fp.flush()
        groups = [orjson.loads(line) for line in (tmp_path / "sent.jsonl").read_bytes().splitlines()]
        return groups, sessions.policy, env.report.counts

    return send


def test_credit_of_sessions_comes_through_the_adapter(sent):
    """Each sampled token has its turn's advantage in one row; turns follow each other as they were made."""
    [group], policy, _ = sent()
    overrides = group["group_overrides"]
    assert overrides["credit"] == "spans=turns lam=0.0" and overrides["trajectory"] == [0, 0, 0, 1, 1, 1]
    assert overrides["turn_numbers"][:3] == [[1, 2], [0, 3], [4]]
    found = {}
    for logprobs, masks, values in zip(group["inference_logprobs"], group["masks"], group["advantages"], strict=True):
        for logprob, mask, value in zip(logprobs, masks, values, strict=True):
            assert mask != -100 or value == 0.0
            if mask != -100:
                assert logprob not in found, "credited twice"
                found[logprob] = value
    assert len(found) == sum(len(tokens) for _, tokens, _ in policy.sampled)
    outcomes = np.full((2, 5), np.nan)
    outcomes[:, -1] = REWARDS
    chains = np.array([[-1, 0, 1, 2, 3], [-1, 5, 6, 7, 8]])
    states = [str(prompt) for prompt, _, _ in policy.sampled]
    expected = advantages(Decisions(chains.ravel(), outcomes.ravel(), np.ravel(VALUES), states), lam=0.0)
    assert np.abs(expected).min() > 0
    for (_, _, logprobs), value in zip(policy.sampled, expected, strict=True):
        assert [found[logprob] for logprob in logprobs] == pytest.approx([value] * len(logprobs))


def test_credit_of_too_few_values_fails_a_session(sent):
    groups, _, counts = sent(values=4)
    assert groups == [] and counts["sessions/failed/SessionError"] == 4 and counts["sessions/left_out"] == 2


@pytest.mark.parametrize("method", ["vineppo", "mt_grpo"])
def test_credit_that_needs_values_refuses_a_group_without(sent, method):
    """Its environment goes on."""
    groups, _, counts = sent(method, values=0)
    assert groups == [] and counts["not_sent/malformed"] == 1


@pytest.mark.parametrize(("silent_turns", "kept"), [(1, True), (2, False)])
def test_session_values_are_those_of_all_or_of_none(silent_turns, kept):
    outcomes = [("a", 1.0, rows(2, [0.5, 1.0])), ("b", 0.0, rows(silent_turns, None))]
    group = scored_group(outcomes, "program")
    assert group["group_overrides"].get("turn_values") == ([[0.5, 1.0], [None]] if kept else None)
    add_credit(group, Credit())
    assert group["group_overrides"]["credit"].endswith(", without values") != kept


def test_session_of_one_turn_is_rewarded_once_by_mt_grpo():
    """MT-GRPO adds the outcome once; of two turns and two sessions, the second turn's part is that of one alone, 0."""
    group = scored_group([("a", 0.0, rows(2, [0.5, 7.0])), ("b", 1.0, rows(1, None))], "program")
    add_credit(group, Credit(method="mt_grpo"))
    part = np.sqrt(1 / 2)  # of each mean over deviation of two; first turns have the rewards 0.5 and 0, not 1
    expected = [[0, part - part, 0, -part], [0, part - part]]
    assert [[*row] for row in group["advantages"]] == [pytest.approx(row, abs=1e-5) for row in expected]


def test_session_turn_values_have_one_for_each_turn(sessions):
    opened = sessions.open()
    sessions.ask(opened)
    for values in ([], [0.5, 0.5]):
        status, answer = sessions.reward(opened, reward=1.0, turn_values=values)
        message = f"turn_values has {len(values)} values; give 1, one for each turn of the session"
        assert (status, answer["error"]["message"]) == (400, message)
    assert sessions.state(opened)["end"] is None
    assert sessions.reward(opened, reward=1.0, turn_values=[0.5])[0] == 200
    assert sessions.rows(opened)[1]["turn_values"] == [[0.5]]


@pytest.mark.parametrize(("lost", "given", "expected"), [(1, [0.1, 0.3], [0.1, 0.1, 0.3]), (0, [0.2], [0.2, 0.2])])
def test_session_turn_values_are_of_replies_that_were_read(sessions, lost, given, expected):
    """Its program does not know of one that was recorded after it had left: that has its neighbor's, or its own."""
    for values in (given, expected):
        opened = sessions.open()
        for number in range(len(expected)):
            asked = {"messages": [{"role": "user", "content": f"sum {number}"}]}
            if number != lost:
                assert sessions.ask(opened, **asked)[0] == 200
                continue
            sessions.policy.delay = 0.3
            connection = sessions.begin(opened, **asked)
            until(lambda opened=opened, number=number: len(sessions.session(opened).exchanges) > number)
            connection.close()
            until(lambda opened=opened, number=number: len(sessions.session(opened).tree.turns) > number)
            sessions.policy.delay = 0.0
        answer = sessions.reward(opened, reward=1.0, turn_values=values)
        assert answer[0] == 200 and answer[1]["turn_values"] == expected


def test_session_turns_without_a_token_between_have_one_value(sessions):
    """They are one run of trained tokens: what was reached after the last counts."""
    opened, ids = sessions.open(), sessions.policy.tokenizer.encode("12 and 7")
    for more in ([], [], sessions.policy.tokenizer.encode(" no")):
        body = {"token_ids": ids + more, "sampling_params": {"max_tokens": 9}}
        answer = sessions.call("POST", "/inference/v1/generate", body, opened["api_key"])[1]
        ids += [*more, *answer["choices"][0]["token_ids"]]
    sessions.reward(opened, reward=1.0, turn_values=[0.1, 0.2, 0.3])
    rows = sessions.rows(opened)[1]
    assert rows["tokens"] == [ids] and rows["turn_values"] == [[0.2, 0.3]] and rows["turn_numbers"] == [[1, 2]]
