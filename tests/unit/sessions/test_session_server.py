"""The session server over HTTP, with the clients that programs use."""

import http.client
import json
import threading
import time
from types import SimpleNamespace

import anthropic
import openai
import pytest

from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.sessions.server import session_key
from recipe.atropos.sessions.session import Session
from recipe.atropos.sessions.store import Store

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Sessions(tmp_path_factory.mktemp("sessions"), ScriptedPolicy(chat_tokenizer("thinking_kept"))) as sessions:
        yield sessions


@pytest.fixture
def sessions(served):
    served.policy.sampled.clear()
    served.policy.script.clear()
    served.policy.delay = 0.0
    return served


def test_session_of_openai_chat_with_tools_is_one_row(sessions):
    sessions.policy.script = [f"<think>so</think>the sum {CALL}{CALL}", "19", "12"]
    opened = sessions.open()
    client, tools = (
        sessions.openai(opened),
        [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}],
    )
    messages = [
        {"role": "system", "content": "sum"},
        {"role": "user", "content": [{"type": "text", "text": "1 and 2"}]},
    ]
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = reply.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        if not said.tool_calls:
            messages.append({"role": "user", "content": "and"})
    assert reply.choices[0].token_ids and reply.prompt_token_ids and reply.weight_versions[0]["version"] == "3"
    sessions.check(opened)
    assert sessions.call("GET", f"/sessions/{opened['id']}")[1] | {"sampled": 0, "created": 0, "id": 0} == {
        "id": 0, "env": "", "item": None, "group": None, "seq": 0, "sampling": {}, "created": 0, "end": None,
        "limits": {"turns": None, "tokens": None, "seconds": None, "context": None}, "reward": None, "metrics": {},
        "turn_values": None, "finished": False, "turns": 3, "sampled": 0, "rows": 1, "tools": True, "tool_calls": 1,
        "repeats": 0, "retries": 0, "forks": {},
    }  # fmt: skip


def test_session_of_openai_chat_streams_what_it_answers(sessions):
    opened = sessions.open()
    client, messages = sessions.openai(opened), [{"role": "user", "content": "1 and 2"}]
    sessions.policy.script = [f"<think>so</think>sum {CALL}{CALL}"]
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}]
    with client.chat.completions.stream(
        model="policy", messages=messages, tools=tools, stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    said = streamed.choices[0].message
    assert (said.content, said.reasoning_content) == ("sum ", "so")
    assert [call.function.arguments for call in said.tool_calls] == ['{"a":1,"b":2}'] * 2
    assert streamed.choices[0].finish_reason == "tool_calls"
    [(prompt, tokens, _)] = sessions.policy.sampled
    assert (streamed.usage.prompt_tokens, streamed.usage.completion_tokens) == (len(prompt), len(tokens))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_session_of_openai_responses_with_tools_is_one_row(sessions, stream, by_id):
    opened = sessions.open()
    client = sessions.openai(opened)
    sessions.policy.script = [f"<think>so</think>sum {CALL}{CALL}", "19", "12"]
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": None}]
    asked, history, previous = [{"role": "user", "content": "1 and 2"}], [], None
    for _ in range(3):
        history += asked
        fields = {"input": asked, "previous_response_id": previous} if by_id else {"input": history}
        if stream:
            with client.responses.stream(model="policy", tools=tools, **fields) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(model="policy", tools=tools, **fields)
        previous = reply.id
        history += [item.model_dump() for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        asked = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        asked = asked or [{"role": "user", "content": "and"}]
    assert reply.output_text == "12" and reply.status == "completed"
    sessions.check(opened)
    assert sessions.session(opened).summary()["rows"] == 1


def test_session_instructions_of_a_response_are_its_own(sessions):
    """As OpenAI's API has it: they do not carry over by ``previous_response_id``; a developer's message does."""
    opened, previous = sessions.open(), None
    client = sessions.openai(opened)
    asked = [{"role": "developer", "content": "of the"}, {"role": "user", "content": "1 and 2"}]
    for instructions in ("sum", "result: 12", None):
        given = {} if instructions is None else {"instructions": instructions}
        previous = client.responses.create(model="policy", input=asked, previous_response_id=previous, **given).id
        asked = [{"role": "user", "content": "and"}]
        prompt = sessions.policy.tokenizer.decode(sessions.policy.sampled[-1][0])
        systems = [part.partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>system\n")[1:]]
        assert systems == [*given.values(), "of the"]
    sessions.check(opened)


@pytest.mark.parametrize("stream", [False, True])
def test_session_of_anthropic_messages_with_tools_is_one_row(sessions, stream):
    opened = sessions.open()
    client, messages = sessions.anthropic(opened), [{"role": "user", "content": "1 and 2"}]
    sessions.policy.script = [f"<think>so</think>sum {CALL}{CALL}", "19", "12"]
    tools = [{"name": "add", "description": "", "input_schema": PARAMETERS}]
    fields = {"model": "policy", "max_tokens": 99, "system": "sum", "tools": tools}
    for _ in range(3):
        if stream:
            with client.messages.stream(messages=messages, **fields) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(messages=messages, **fields)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert all(call.input == {"a": 1, "b": 2} for call in calls)
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
        messages.append({"role": "user", "content": results or "and"})
    assert reply.content[0].text == "12" and reply.stop_reason == "end_turn"
    assert client.messages.count_tokens(messages=messages, model="policy", system="sum", tools=tools).input_tokens > 50
    messages.append({"role": "assistant", "content": "12"})  # also after an assistant's turn
    assert client.messages.count_tokens(messages=messages, model="policy", system="sum", tools=tools).input_tokens > 50
    sessions.check(opened)
    assert sessions.session(opened).summary()["rows"] == 1


def test_session_of_texts_and_ids_is_one_row(sessions):
    opened, encode = sessions.open(), sessions.policy.tokenizer.encode
    sessions.policy.script = ["the sum is", "19", "12", "7"]
    client, text = sessions.openai(opened), "<|im_start|>user\n12"
    for _ in range(2):
        streamed = client.completions.create(model="policy", prompt=text, max_tokens=50, stream=True)
        text += "".join(part.choices[0].text for part in streamed) + "<|im_end|>\n and 7"
    assert sessions.session(opened).summary()["rows"] == 1
    ids = encode("12 and 7")
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 50}}
    ids += sessions.call("POST", "/generate", body, opened["api_key"])[1]["output_ids"] + encode(" no")
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 50}}
    status, answer = sessions.call("POST", "/inference/v1/generate", body, opened["api_key"])
    assert (status, answer["prompt_token_ids"]) == (200, ids)
    sessions.check(opened)
    assert sessions.session(opened).summary()["rows"] == 2
    models = [model.id for model in client.models.list()]
    assert models == ["policy"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, "the last"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "assistant", "content": "a"}]}, "the last"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_7"}, "previous_response_id=7"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "regex"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ],
)
def test_session_requests_that_cannot_be_answered_are_named(sessions, path, body, named):
    opened = sessions.open()
    status, answer = sessions.call("POST", path, body, opened["api_key"])
    assert status in (400, 404) and named in answer["error"]["message"]
    assert not sessions.policy.sampled


def test_session_key_opens_its_own_session_alone(sessions):
    mine, other = sessions.open(), sessions.open()
    body = {"messages": [{"role": "user", "content": "sum"}]}
    for path, key in (
        ("/v1/chat/completions", "nobody's"),
        ("/v1/chat/completions", sessions.KEY),
        ("/v1/chat/completions", f"{mine['id']}-{other['api_key'].rpartition('-')[2]}"),
        (f"/sessions/{other['id']}/v1/chat/completions", mine["api_key"]),
        ("/sessions", mine["api_key"]),
        (f"/sessions/{mine['id']}/reward", mine["api_key"]),
    ):
        assert sessions.call("POST", path, body, key)[0] in (401, 403), path
    assert sessions.call("GET", f"/sessions/{mine['id']}/rows", key=mine["api_key"])[0] == 401
    assert not sessions.policy.sampled
    assert sessions.call("POST", f"/sessions/{mine['id']}/v1/chat/completions", body, mine["api_key"])[0] == 200


def test_session_retries_get_the_recorded_reply(sessions):
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}
    first = sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])
    retry = sessions.call("POST", "/v1/chat/completions", body, opened["api_key"], **{"x-stainless-retry-count": "1"})
    again = sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])
    assert retry == first and again[1]["id"] != first[1]["id"]
    assert len(sessions.policy.sampled) == 2
    sessions.stop()
    sessions.start()
    assert sessions.call("GET", f"/sessions/{opened['id']}")[1]["retries"] == 1
    sessions.check(opened)


def begun(sessions, opened, body, path="/v1/chat/completions"):
    """A request whose client leaves before it is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", sessions.port, timeout=10)
    connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {opened['api_key']}"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_session_client_that_leaves_and_comes_again(sessions, stream, waits):
    """While its reply is sampled, or after; the reply is sampled once and trained once."""
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}], "stream": stream}
    sessions.policy.delay = 0.5
    connection = begun(sessions, opened, body)
    time.sleep(0.2)
    connection.close()
    time.sleep(0.1 if waits else 0.6)
    body = json.dumps(body).encode()
    answers = [begun(sessions, opened, json.loads(body)).getresponse() for _ in range(1)]
    assert [answer.status for answer in answers] == [200] and answers[0].read()
    assert len(sessions.policy.sampled) == 1 and sessions.session(opened).summary()["retries"] == 1
    sessions.check(opened)


def test_session_equal_requests_at_once_are_two_turns(sessions):
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}
    sessions.policy.delay = 0.3
    replies = [begun(sessions, opened, body) for _ in range(2)]
    ids = {json.loads(connection.getresponse().read())["id"] for connection in replies}
    assert len(ids) == len(sessions.policy.sampled) == 2
    sessions.check(opened)


def test_session_failed_requests_are_sampled_again(sessions):
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}
    policy = sessions.policy

    async def fails(ids, params):
        raise InferenceError("http://gateway", "/generate", "no server is admitted", 503)

    sessions.server._generate = fails
    try:
        assert sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])[0] == 503
        streamed = begun(sessions, opened, {**body, "stream": True}).getresponse().read().decode()
        assert "no server is admitted" in streamed and "[DONE]" not in streamed
    finally:
        sessions.server._generate = policy
    client = sessions.openai(opened)
    assert client.chat.completions.create(model="policy", **body).id
    sessions.check(opened)


def test_session_retries_of_what_failed_are_sampled(sessions):
    """Also where an equal request was answered before, as of a program that asks several times."""
    opened, failures, policy = sessions.open(limits={"turns": 2}), [503], sessions.policy

    async def fails_once(ids, params):
        if failures and policy.sampled:
            raise InferenceError("http://gateway", "/generate", "no server is admitted", failures.pop())
        return await policy(ids, params)

    sessions.server._generate = fails_once
    try:
        client, messages = sessions.openai(opened), [{"role": "user", "content": "sum"}]
        ids = {client.chat.completions.create(model="policy", messages=messages).id for _ in range(2)}
    finally:
        sessions.server._generate = policy
    assert len(ids) == len(policy.sampled) == 2 and not failures
    assert sessions.session(opened).summary()["retries"] == 0
    sessions.check(opened)


@pytest.mark.parametrize(
    ("path", "sign"), [("/v1/chat/completions", b": still sampling\n"), ("/v1/messages", b"event: ping\n")]
)
def test_session_streams_show_life_at_once(sessions, monkeypatch, path, sign):
    monkeypatch.setattr("recipe.atropos.sessions.server._KEEP_ALIVE", 0.1)
    opened = sessions.open()
    sessions.policy.delay = 0.6
    body = {"messages": [{"role": "user", "content": "sum"}], "max_tokens": 8, "stream": True}
    response = begun(sessions, opened, body, path).getresponse()
    started = time.monotonic()
    assert response.status == 200 and response.readline() == sign
    assert time.monotonic() - started < 0.5
    assert response.read().count(sign) >= 2


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
    rows = sessions.call("GET", f"/sessions/{opened['id']}/rows")[1]
    assert len(rows["tokens"]) == 1 and rows["sampling_params"] == [[{"temperature": 0.5}]]
    assert rows["policy_version_min"] == [3] and rows["policy_version_max"] == [4]


def test_session_ends_by_its_reward_once(sessions):
    opened = sessions.open()
    path = f"/sessions/{opened['id']}/reward"
    assert sessions.call("POST", path, {"reward": 1.5, "metrics": {"steps": 2}})[1]["reward"] == 1.5
    assert sessions.call("POST", path, {"reward": 7.0})[1]["reward"] == 1.5
    with pytest.raises(openai.PermissionDeniedError, match="the session has ended"):
        sessions.openai(opened).chat.completions.create(model="", messages=[{"role": "user", "content": "sum"}])
    with pytest.raises(anthropic.PermissionDeniedError, match="the session has ended"):
        sessions.anthropic(opened).messages.create(model="", max_tokens=9, messages=[{"role": "user", "content": "a"}])
    failed = sessions.open()
    assert sessions.call("POST", f"/sessions/{failed['id']}/reward", {"end": "exit_status"})[1]["end"] == "exit_status"
    assert sessions.call("POST", f"/sessions/{failed['id']}/reward", {"rewards": 1})[0] == 400


def test_session_of_many_agents_at_once_is_a_tree(sessions):
    opened = sessions.open()
    sessions.policy.delay = 0.01

    def agent(number):
        client, messages = sessions.openai(opened), [{"role": "user", "content": f"sum {number % 3}"}]
        for _ in range(4):
            said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "and"}]

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sessions.check(opened)
    summary = sessions.session(opened).summary()
    assert (summary["turns"], summary["forks"]) == (24, {}) and summary["rows"] >= 3


def test_session_that_ends_answers_nothing_more(sessions):
    """What is sampled while the reward comes would be in no row that was read."""
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}
    sessions.policy.delay = 1.0
    connection = begun(sessions, opened, body)
    time.sleep(0.2)
    assert sessions.call("POST", f"/sessions/{opened['id']}/reward", {"reward": 1.0})[0] == 200
    assert connection.getresponse().status == 403
    time.sleep(1.0)
    assert sessions.session(opened).summary()["turns"] == 0 and not sessions.policy.sampled


def test_session_may_end_by_a_limit_that_it_has_not(sessions):
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}
    assert sessions.call("POST", f"/sessions/{opened['id']}/reward", {"end": "turns"})[0] == 200
    status, answer = sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])
    assert status == 403 and "ended (turns)" in answer["error"]["message"]


def test_session_that_has_ended_is_not_kept_in_memory(sessions):
    """Whatever its environment calls its group, and also where its rows are read, or its program asks for more."""
    opened, body = sessions.open(group="its own name"), {"messages": [{"role": "user", "content": "sum"}]}
    sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])
    sessions.call("POST", f"/sessions/{opened['id']}/reward", {"reward": 1.0})
    assert len(sessions.call("GET", f"/sessions/{opened['id']}/rows")[1]["tokens"]) == 1
    assert sessions.call("POST", "/v1/messages", {**body, "max_tokens": 5}, opened["api_key"])[0] == 403
    assert opened["id"] not in sessions.server._sessions


def test_session_that_nobody_ends_leaves_memory_and_goes_on(sessions, monkeypatch):
    monkeypatch.setattr("recipe.atropos.sessions.server._IN_MEMORY", 1)
    opened, messages = sessions.open(), [{"role": "user", "content": "sum"}]
    for _ in range(2):
        reply = sessions.call("POST", "/v1/chat/completions", {"messages": messages}, opened["api_key"])[1]
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "and"}]
        sessions.open()
        assert opened["id"] not in sessions.server._sessions
    assert sessions.call("GET", f"/sessions/{opened['id']}")[1]["rows"] == 1
    sessions.check(opened)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 100000000000000000000}', True),
        ('{"a": %s}' % ("[" * 300 + "]" * 300), True),
        ('{"a": "\\ud83d"}', False),
        ('{"a": %s' % ("[" * 3000), False),
        ('{"a": %s}' % ("1" * 5000), False),
        ('{}, "name": 5', False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_session_replies_with_odd_calls_are_answered(sessions, arguments, read, stream):
    """Large numbers, deep lists, half of a surrogate pair, lists without an end, more digits than Python reads, a name
    that is no text; also where they are sent again.
    """
    call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    tools = {"chat/completions": [{"type": "function", "function": {"name": "add"}}], "messages": [{"name": "add"}]}
    for path, given in tools.items():
        opened, asked = sessions.open(), [{"role": "user", "content": "sum"}]
        sessions.policy.sampled.clear()
        sessions.policy.script = [call, "19"]
        body = {"messages": asked, "tools": given, "max_tokens": 9999, "stream": stream}
        answer = begun(sessions, opened, body, f"/v1/{path}").getresponse()
        text = answer.read()
        assert answer.status == 200 and text.endswith(b"\n\n") == stream
        stored = Session.load(Store(sessions.folder / "sessions.sqlite", read_only=True), opened["id"])
        message = stored.recorded(0).message()
        assert ("tool_calls" in message) == read
        more = [message, {"role": "user", "content": "and"}] if path == "chat/completions" else asked
        answer = begun(sessions, opened, {**body, "messages": asked + more}, f"/v1/{path}").getresponse()
        assert answer.status == 200 and answer.read()
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
        assert sessions.call("GET", f"/sessions/{found['id']}")[0] == 200


def test_session_retries_get_the_reply_that_was_lost(sessions):
    """Not that of an equal request on another connection."""
    opened, body = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}
    sessions.policy.delay = 0.3
    lost = begun(sessions, opened, body)
    time.sleep(0.1)
    other = begun(sessions, opened, body)
    time.sleep(0.1)
    lost.close()
    time.sleep(0.1)
    retried = sessions.call("POST", "/v1/chat/completions", body, opened["api_key"], **{"x-stainless-retry-count": "1"})
    assert json.loads(other.getresponse().read())["id"] != retried[1]["id"]
    assert len(sessions.policy.sampled) == 2
    sessions.check(opened)


def test_session_limit_of_turns_holds_for_requests_at_once(sessions):
    opened, body = sessions.open(limits={"turns": 2}), {"messages": [{"role": "user", "content": "sum"}]}
    sessions.policy.delay = 0.3
    answers = [connection.getresponse() for connection in [begun(sessions, opened, body) for _ in range(5)]]
    assert sorted(answer.status for answer in answers) == [200, 200, 403, 403, 403]
    assert len(sessions.policy.sampled) == 2


def test_session_limit_of_tokens_holds_for_requests_at_once(sessions):
    """One that leaves tokens runs beside another; one that finds none left waits for what those before do not use."""
    opened, text = sessions.open(limits={"tokens": 40}), "the sum of 12 and 7 is 19"
    sessions.policy.script, sessions.policy.delay = [text, text, *["the sum"] * 9], 1.0
    started, body = time.monotonic(), {"messages": [{"role": "user", "content": "sum"}], "max_tokens": 20}
    answers = [connection.getresponse() for connection in [begun(sessions, opened, body) for _ in range(2)]]
    assert [answer.status for answer in answers] == [200, 200] and time.monotonic() - started < 1.9
    del body["max_tokens"]
    sessions.policy.delay = 0.05
    answers = [connection.getresponse() for connection in [begun(sessions, opened, body) for _ in range(12)]]
    assert {answer.status for answer in answers} == {200, 403}
    assert sum(answer.status == 200 for answer in answers) > 1
    assert sum(len(tokens) for _, tokens, _ in sessions.policy.sampled) <= 40
    assert sessions.call("GET", f"/sessions/{opened['id']}")[1]["end"] == "tokens"
    sessions.check(opened)


@pytest.mark.parametrize("choice", [{}, {"tools": [{"type": "function", "function": {"name": "add"}}]}])
def test_session_requests_without_tools_get_no_calls(sessions, choice):
    """A program that has none reads the content, which would be null beside a call."""
    opened, choice = sessions.open(), choice and {**choice, "tool_choice": "none"}
    sessions.policy.script = [f"so {CALL}", "19"]
    client, messages = sessions.openai(opened), [{"role": "user", "content": "sum"}]
    reply = client.chat.completions.create(model="policy", messages=messages, **choice).choices[0]
    assert reply.finish_reason == "stop" and reply.message.tool_calls is None
    assert reply.message.content.startswith("so ") and '"name": "add"' in reply.message.content
    messages += [reply.message, {"role": "user", "content": "and"}]
    client.chat.completions.create(model="policy", messages=messages, **choice)
    assert sessions.session(opened).summary()["rows"] == 1
    sessions.check(opened)


def test_session_replies_without_logprobs_are_not_recorded(sessions):
    """SGLang writes null for a logprob that is no number."""
    opened, body, policy = sessions.open(), {"messages": [{"role": "user", "content": "sum"}]}, sessions.policy

    async def answers(**_):
        finish, sampled = {"type": "stop"}, [[None, 5, None]]
        return {"text": "a", "meta_info": {"output_token_logprobs": sampled, "finish_reason": finish}}

    client, sessions.server.client = sessions.server.client, SimpleNamespace(url="gateway", generate=answers)
    del sessions.server._generate
    try:
        assert sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])[0] == 502
    finally:
        sessions.server.client, sessions.server._generate = client, policy
    assert sessions.call("POST", "/v1/chat/completions", body, opened["api_key"])[0] == 200
    sessions.check(opened)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"temprature": 1.0}, "temprature"),
        ({"regex": "a"}, "regex"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 10**400}, "top_p"),
    ],
)
def test_session_sampling_is_checked_as_it_is_opened(sessions, given, named):
    status, answer = sessions.call("POST", "/sessions", {"sampling": given})
    assert status == 400 and named in answer["error"]["message"]


def test_session_sampling_is_written_as_sglang_takes_it(sessions):
    opened = sessions.open(sampling={"top_k": 0, "stop": "a", "seed": 7, "temperature": None})
    state = sessions.call("GET", f"/sessions/{opened['id']}")[1]
    assert state["sampling"] == {"top_k": -1, "stop": ["a"], "sampling_seed": 7}


def test_session_keys_are_made_of_keys_of_any_length():
    found = {session_key("a", "k" * length) for length in (1, 64, 65, 1000)}
    assert len(found) == 4
