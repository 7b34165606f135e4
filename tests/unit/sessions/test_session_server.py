"""The session server over HTTP: who may do what, what is refused, limits, ends, and what stays in memory."""

import asyncio
import http.client
import json
import threading

import anthropic
import openai
import pytest

from helpers.sessions import SUM
from helpers.waiting import until
from recipe.atropos.sessions.server import session_key

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "assistant", "content": "a"}]}, "the last"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_7"}, "no reply 7"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "regex"),
        ("/v1/chat/completions", SUM | {"chat_template_kwargs": {"chat_template": "a"}}, "chat_template says"),
        ("/v1/chat/completions", SUM | {"chat_template_kwargs": {"max_length": 4}}, "max_length says"),
    ],
)
def test_session_requests_that_cannot_be_answered_are_named(sessions, path, body, named):
    opened = sessions.open()
    status, answer = sessions.call("POST", path, body, opened["api_key"])
    assert status in (400, 404) and named in answer["error"]["message"]
    assert not sessions.policy.sampled


def test_session_key_opens_its_own_session_alone(sessions):
    mine, other = sessions.open(), sessions.open()
    for path, key in (
        ("/v1/chat/completions", "nobody's"),
        ("/v1/chat/completions", sessions.KEY),
        ("/v1/chat/completions", f"{mine['id']}-{other['api_key'].rpartition('-')[2]}"),
        (f"/sessions/{other['id']}/v1/chat/completions", mine["api_key"]),
        ("/sessions", mine["api_key"]),
        (f"/sessions/{mine['id']}/reward", mine["api_key"]),
    ):
        assert sessions.call("POST", path, SUM, key)[0] in (401, 403), path
    assert sessions.call("GET", f"/sessions/{mine['id']}/rows", key=mine["api_key"])[0] == 401
    assert not sessions.policy.sampled
    assert sessions.call("POST", f"/sessions/{mine['id']}/v1/chat/completions", SUM, mine["api_key"])[0] == 200


@pytest.mark.parametrize(
    ("path", "sign"), [("/v1/chat/completions", b": still sampling\n"), ("/v1/messages", b"event: ping\n")]
)
def test_session_streams_show_life_at_once(sessions, monkeypatch, path, sign):
    monkeypatch.setattr("recipe.atropos.sessions.server._KEEP_ALIVE", 0.1)
    opened = sessions.open()
    sessions.policy.delay = 0.6
    response = sessions.begin(opened, path, max_tokens=8, stream=True).getresponse()
    assert response.status == 200 and response.readline() == sign
    assert not sessions.policy.sampled
    assert response.read().count(sign) >= 2


def test_session_ends_by_its_reward_once(sessions):
    opened = sessions.open()
    assert sessions.reward(opened, reward=1.5, metrics={"steps": 2})[1]["reward"] == 1.5
    assert sessions.reward(opened, reward=7.0)[1]["reward"] == 1.5
    with pytest.raises(openai.PermissionDeniedError, match="the session has ended"):
        sessions.openai(opened).chat.completions.create(model="", messages=[{"role": "user", "content": "sum"}])
    with pytest.raises(anthropic.PermissionDeniedError, match="the session has ended"):
        sessions.anthropic(opened).messages.create(model="", max_tokens=9, messages=[{"role": "user", "content": "a"}])
    failed = sessions.open()
    assert sessions.reward(failed, end="exit_status")[1]["end"] == "exit_status"
    assert sessions.reward(failed, rewards=1)[0] == 400
    unlimited = sessions.open()
    assert sessions.reward(unlimited, end="turns")[0] == 200
    status, answer = sessions.ask(unlimited)
    assert status == 403 and "ended (turns)" in answer["error"]["message"], "a limit that it has not"


@pytest.mark.parametrize("leaves", [False, True])
def test_session_that_ends_while_it_samples_answers_nothing_more(sessions, leaves):
    """What is sampled while the reward comes would be in no row that was read. It leaves memory."""
    opened, ended = sessions.open(), threading.Event()

    async def samples(ids, params):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with sessions.generating(samples):
        connection = sessions.begin(opened)
        [[exchange]] = until(lambda: list(sessions.session(opened).exchanges.values()))
        if leaves:
            connection.close()
            until(lambda: not exchange.open)
        assert sessions.reward(opened, reward=1.0)[0] == 200
        assert leaves or connection.getresponse().status == 403
        assert ended.wait(30)
    until(lambda: opened["id"] not in sessions.server._sessions)
    assert sessions.session(opened).summary()["turns"] == 0


def test_session_that_has_ended_is_not_kept_in_memory(sessions):
    """Whatever its environment calls its group, and also where its rows are read, or its program asks for more."""
    opened = sessions.open(group="its own name")
    sessions.ask(opened)
    sessions.reward(opened, reward=1.0)
    assert len(sessions.rows(opened)[1]["tokens"]) == 1
    assert sessions.ask(opened, "/v1/messages", max_tokens=5)[0] == 403
    assert opened["id"] not in sessions.server._sessions


def test_session_that_nobody_ends_leaves_memory_and_goes_on(sessions, monkeypatch):
    monkeypatch.setattr("recipe.atropos.sessions.server._IN_MEMORY", 1)
    opened, messages = sessions.open(), [{"role": "user", "content": "sum"}]
    for _ in range(2):
        reply = sessions.ask(opened, messages=messages)[1]
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "and"}]
        sessions.open()
        assert opened["id"] not in sessions.server._sessions
    assert sessions.state(opened)["rows"] == 1
    sessions.check(opened)


@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/sessions", b'{"item": "\xff"}', None, 400),
        ("/sessions", b'{"item": ' + b"[" * 2000 + b"]" * 2000 + b"}", None, 400),
        ("/sessions", b"{}", b"\xff", 401),
        ("/v1/chat/completions", b"{}", b"\xff-\xfe", 401),
        ("/generate", b'{"input_ids": [2147483648]}', "own", 400),
        ("/sessions", b'{"item": 100000000000000000000}', None, 200),
    ],
)
def test_session_requests_that_are_no_text_or_too_large(sessions, path, body, key, status):
    key = {None: sessions.KEY, "own": sessions.open()["api_key"]}.get(key, key)
    connection = http.client.HTTPConnection("127.0.0.1", sessions.port, timeout=10)
    connection.request("POST", path, body, {"x-api-key": key})
    answer = connection.getresponse()
    assert answer.status == status
    found = json.loads(answer.read())
    if status == 200:
        assert sessions.rows(found)[0] == 200


def test_session_limit_of_turns_holds_for_requests_at_once(sessions):
    opened = sessions.open(limits={"turns": 2})
    sessions.policy.delay = 0.3
    answers = [connection.getresponse() for connection in [sessions.begin(opened) for _ in range(5)]]
    assert sorted(answer.status for answer in answers) == [200, 200, 403, 403, 403]
    assert len(sessions.policy.sampled) == 2


def test_session_limit_of_tokens_holds_for_requests_at_once(sessions):
    """One that leaves tokens runs beside another; one that finds none left waits for what those before do not use."""
    opened, text, begun = sessions.open(limits={"tokens": 40}), "the sum of 12 and 7 is 19", []
    sessions.policy.script = [text, text, *["the sum"] * 9]

    async def together(ids, params):
        begun.append(ids)
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        return await sessions.policy(ids, params)

    with sessions.generating(together):
        answers = [connection.getresponse() for connection in [sessions.begin(opened, max_tokens=20) for _ in range(2)]]
    assert [answer.status for answer in answers] == [200, 200]
    sessions.policy.delay = 0.05
    answers = [connection.getresponse() for connection in [sessions.begin(opened) for _ in range(12)]]
    assert {answer.status for answer in answers} == {200, 403}
    assert sum(answer.status == 200 for answer in answers) > 1
    assert sum(len(tokens) for _, tokens, _ in sessions.policy.sampled) <= 40
    assert sessions.state(opened)["end"] == "tokens"
    status, answer = sessions.ask(opened, messages=[{"role": "user", "content": "more"}])
    assert status == 403 and "its limit of 40 tokens" in answer["error"]["message"]
    sessions.check(opened)


@pytest.mark.parametrize(
    ("field", "given", "named"),
    [
        ("sampling", {"stop_token_ids": 5}, "stop_token_ids"),
        ("sampling", {"temprature": 1.0}, "temprature"),
        ("sampling", {"regex": "a"}, "regex"),
        ("sampling", {"top_p": 10**400}, "top_p"),
        ("limits", {"tokens": -1}, "limits.tokens"),
        ("limits", {"seconds": 0}, "limits.seconds"),
    ],
)
def test_session_options_are_checked_as_it_is_opened(sessions, field, given, named):
    status, answer = sessions.call("POST", "/sessions", {field: given})
    assert status == 400 and named in answer["error"]["message"]


def test_session_sampling_is_written_as_sglang_takes_it(sessions):
    opened = sessions.open(sampling={"top_k": 0, "stop": "a", "seed": 7, "temperature": None})
    state = sessions.state(opened)
    assert state["sampling"] == {"top_k": -1, "stop": ["a"], "sampling_seed": 7}


def test_session_keys_are_made_of_keys_of_any_length():
    found = {session_key("a", "k" * length) for length in (1, 64, 65, 1000)}
    assert len(found) == 4
