"""Requests that come again: after a broken connection, a failure, a restart; what is sampled anew, and what is not."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import openai
import pytest

from helpers.sessions import SUM
from helpers.waiting import until
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.sessions.server import SessionServer

pytestmark = pytest.mark.timeout(120)


def test_session_retries_get_the_recorded_reply(sessions, opened):
    first = sessions.ask(opened)
    retry = sessions.ask(opened, retry=1)
    assert sessions.ask(opened, retry="9" * 5000) == retry == first
    again = sessions.ask(opened)
    assert again[1]["id"] != first[1]["id"]
    assert len(sessions.policy.sampled) == 2
    sessions.stop()
    sessions.start()
    assert sessions.state(opened)["retries"] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_session_client_that_leaves_and_comes_again(sessions, opened, stream, waits):
    """While its reply is sampled, or after; the reply is sampled once and trained once."""
    sessions.policy.delay = 0.3
    connection = sessions.begin(opened, stream=stream)
    [[exchange]] = until(lambda: list(sessions.session(opened).exchanges.values()))
    connection.close()
    until(lambda: not exchange.open)
    until(lambda: waits or exchange.number is not None)
    answer = sessions.begin(opened, stream=stream).getresponse()
    assert answer.status == 200 and answer.read()
    assert len(sessions.policy.sampled) == 1 and sessions.session(opened).summary()["retries"] == 1


def test_session_retries_get_the_reply_that_was_lost(sessions, opened):
    """Not that of an equal request on another connection, which is another turn."""
    sessions.policy.delay = 0.3
    lost = sessions.begin(opened)
    [known] = until(lambda: list(sessions.session(opened).exchanges.values()))
    other = sessions.begin(opened)
    until(lambda: len(known) == 2)
    lost.close()
    until(lambda: not known[0].open)
    retried = sessions.ask(opened, retry=1)
    assert json.loads(other.getresponse().read())["id"] != retried[1]["id"]
    assert len(sessions.policy.sampled) == 2


def test_session_equal_requests_that_all_come_again(sessions, opened):
    """As when the server was killed amid them: each is a turn still, and one that comes a second time joins its own."""
    sessions.policy.delay = 0.5
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(sessions.ask, opened, retry=1) for _ in range(3)]
        time.sleep(0.2)
        asked.append(pool.submit(sessions.ask, opened, retry=2))
        ids = [each.result()[1]["id"] for each in asked]
    assert len(set(ids[:3])) == len(sessions.policy.sampled) == 3 and ids[3] in ids[:3]


def test_session_failed_requests_are_sampled_again(sessions, opened):

    async def fails(ids, params):
        raise InferenceError("http://gateway", "/generate", "no server is admitted", 503)

    with sessions.generating(fails):
        assert sessions.ask(opened)[0] == 503
        streamed = sessions.begin(opened, stream=True).getresponse().read().decode()
        assert "no server is admitted" in streamed and "[DONE]" not in streamed
    assert sessions.openai(opened).chat.completions.create(model="policy", **SUM).id


def test_session_retries_of_what_failed_are_sampled(sessions):
    """Also where an equal request was answered before, as of a program that asks several times."""
    opened, failures, policy = sessions.open(limits={"turns": 2}), [503], sessions.policy

    async def fails_once(ids, params):
        if failures and policy.sampled:
            raise InferenceError("http://gateway", "/generate", "no server is admitted", failures.pop())
        return await policy(ids, params)

    with sessions.generating(fails_once):
        client = sessions.openai(opened)
        ids = {client.chat.completions.create(model="policy", **SUM).id for _ in range(2)}
    assert len(ids) == len(policy.sampled) == 2 and not failures
    assert sessions.session(opened).summary()["retries"] == 0
    sessions.check(opened)


def test_session_replies_without_logprobs_are_not_recorded(sessions, opened, monkeypatch):
    """SGLang writes null for a logprob that is no number."""

    async def answers(**_):
        finish, sampled = {"type": "stop"}, [[None, 5, None]]
        return {"text": "a", "meta_info": {"output_token_logprobs": sampled, "finish_reason": finish}}

    with sessions.generating(partial(SessionServer._generate, sessions.server)), monkeypatch.context() as patch:
        patch.setattr(sessions.server, "client", SimpleNamespace(url="gateway", generate=answers))
        assert sessions.ask(opened)[0] == 502
    assert sessions.ask(opened)[0] == 200


def test_session_server_that_starts_again_goes_on(sessions):
    opened = sessions.open(limits={"turns": 3}, sampling={"temperature": 0.5})
    client, messages = sessions.openai(opened), [{"role": "user", "content": "sum"}]
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and"}]
        sessions.stop()
        sessions.start()
    with pytest.raises(openai.PermissionDeniedError, match="its limit of 3 turns"):
        client.chat.completions.create(model="policy", messages=messages)
    sessions.check(opened)
    rows = sessions.rows(opened)[1]
    assert len(rows["tokens"]) == 1 and rows["sampling_params"] == [[{"temperature": 0.5}]]
    assert rows["policy_version_min"] == [3] and rows["policy_version_max"] == [4]
