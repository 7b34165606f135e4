"""Conversations over HTTP of the clients that programs use: what is answered, and that it is one row."""

import json
import threading

import pytest

from helpers.sessions import SUM
from recipe.atropos.sessions.dialects import chat
from recipe.atropos.sessions.session import Session
from recipe.atropos.sessions.store import SessionStore

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
RESPONSES_TOOLS = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": None}]
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("stream", [False, True])
def test_session_of_openai_chat_with_tools_is_one_row(sessions, opened, stream):
    sessions.policy.script = [f"<think>so</think>sum {CALL}{CALL}", "19", "12"]
    completions, replies = sessions.openai(opened).chat.completions, []
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}]
    messages = [
        {"role": "system", "content": "sum"},
        {"role": "user", "content": [{"type": "text", "text": "1 and 2"}]},
    ]
    for _ in range(3):
        asked = {"model": "policy", "messages": messages, "tools": tools}
        if stream:
            with completions.stream(**asked, stream_options={"include_usage": True}) as events:
                replies.append(events.get_final_completion())
        else:
            replies.append(completions.create(**asked))
        said = replies[-1].choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in said.tool_calls or ()]
        messages += [said, *(results or [{"role": "user", "content": "and"}])]
    first = replies[0].choices[0]
    assert (first.message.content, first.message.reasoning_content, first.finish_reason) == ("sum ", "so", "tool_calls")
    assert [call.function.arguments for call in first.message.tool_calls] == ['{"a":1,"b":2}'] * 2
    for reply, (prompt, tokens, _) in zip(replies, sessions.policy.sampled, strict=True):
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(tokens))
        if not stream:  # the client's own sum of a stream leaves out what it does not know
            assert (reply.choices[0].token_ids, reply.prompt_token_ids) == (tokens, prompt)
            assert reply.weight_versions[0]["version"] == "3"
    assert sessions.state(opened) | {"sampled": 0, "created": 0, "id": 0} == {
        "id": 0, "env": "", "item": None, "group": None, "seq": 0, "sampling": {}, "created": 0, "end": None,
        "limits": {"turns": None, "tokens": None, "seconds": None, "context": None}, "reward": None, "metrics": {},
        "turn_values": None, "finished": False, "counted": False, "turns": 3, "sampled": 0, "rows": 1, "tools": True,
        "tool_calls": 1, "repeats": 0, "retries": 0, "forks": {},
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["history", "id", "references"])
def test_session_of_openai_responses_with_tools_is_one_row(sessions, opened, stream, by):
    client = sessions.openai(opened)
    sessions.policy.script = [f"<think>so</think>sum {CALL}{CALL}", "19", "12"]
    asked, history, previous = [{"role": "user", "content": "1 and 2"}], [], None
    for _ in range(3):
        history += asked
        fields = {"input": asked, "previous_response_id": previous} if by == "id" else {"input": history}
        if stream:
            with client.responses.stream(model="policy", tools=RESPONSES_TOOLS, **fields) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(model="policy", tools=RESPONSES_TOOLS, **fields)
        previous = reply.id
        for item in reply.output:  # references, but of calls, are what Vercel's AI SDK sends
            refers = by == "references" and item.type != "function_call"
            history.append({"type": "item_reference", "id": item.id} if refers else item.model_dump())
        calls = [item for item in reply.output if item.type == "function_call"]
        asked = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        asked = asked or [{"role": "user", "content": "and"}]
    assert reply.output_text == "12" and reply.status == "completed"
    assert sessions.session(opened).summary()["rows"] == 1
    for unknown in ("msg_7", f"fc_{previous.removeprefix('resp_')}_9", "?"):
        body = {"input": [{"type": "item_reference", "id": unknown}]}
        assert sessions.call("POST", "/v1/responses", body, opened["api_key"])[0] in (400, 404)


def test_session_instructions_of_a_response_are_its_own(sessions, opened):
    """As OpenAI's API has it: they do not carry over by ``previous_response_id``; a developer's message does."""
    previous = None
    client = sessions.openai(opened)
    asked = [{"role": "developer", "content": "of the"}, {"role": "user", "content": "1 and 2"}]
    for instructions in ("sum", "result: 12", None):
        given = {} if instructions is None else {"instructions": instructions}
        previous = client.responses.create(model="policy", input=asked, previous_response_id=previous, **given).id
        asked = [{"role": "user", "content": "and"}]
        prompt = sessions.policy.tokenizer.decode(sessions.policy.sampled[-1][0])
        systems = [part.partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>system\n")[1:]]
        assert systems == [*given.values(), "of the"]


@pytest.mark.parametrize("by", ["id", "history"])
def test_session_goes_on_after_the_reply_that_is_meant(sessions, opened, by):
    """Not after another of the same words, sampled at once, whose reasoning or calls differ in their ids alone."""
    client, asked = sessions.openai(opened), [{"role": "user", "content": "1 and 2"}]
    sessions.policy.script, replies = [f"<think>{text}</think>sum {CALL}" for text in ("so", "no", "is")], []
    connections = [sessions.begin(opened, "/v1/responses", input=asked, tools=RESPONSES_TOOLS) for _ in range(3)]
    for connection in connections:
        replies.append(json.loads(connection.getresponse().read()))
    for reply in replies:
        [call] = [item for item in reply["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        fields = {"input": [*asked, *reply["output"], result]}
        if by == "id":
            fields = {"input": [result], "previous_response_id": reply["id"]}
        client.responses.create(model="policy", tools=RESPONSES_TOOLS, **fields)
    turns = sessions.session(opened).tree.turns
    assert [f"resp_{turn.parent.reply}" for turn in turns[3:]] == [reply["id"] for reply in replies]


@pytest.mark.parametrize("stream", [False, True])
def test_session_of_anthropic_messages_with_tools_is_one_row(sessions, opened, stream):
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
    assert sessions.session(opened).summary()["rows"] == 1


def test_session_of_texts_and_ids_is_one_row(sessions, opened):
    encode = sessions.policy.tokenizer.encode
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
    assert sessions.session(opened).summary()["rows"] == 2
    models = [model.id for model in client.models.list()]
    assert [client.models.retrieve(model).id for model in models] == models
    assert models == ["policy"]


def test_session_of_many_agents_at_once_is_a_tree(sessions, opened):
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
    summary = sessions.session(opened).summary()
    assert (summary["turns"], summary["forks"]) == (24, {}) and summary["rows"] >= 3


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 100000000000000000000}', True),
        ('{"a": %s}' % ("[" * 300 + "]" * 300), True),
        ('{"a": "\\ud83d"}', False),
        ('{"a": %s' % ("[" * 2000), False),
        ('{"a": %s}' % ("1" * 4301), False),
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
        opened, asked = sessions.open(), SUM["messages"]
        sessions.policy.sampled.clear()
        sessions.policy.script = [call, "19"]
        body = {"tools": given, "max_tokens": 9999, "stream": stream}
        answer = sessions.begin(opened, f"/v1/{path}", **body).getresponse()
        text = answer.read()
        assert answer.status == 200 and text.endswith(b"\n\n") == stream
        stored = Session.load(SessionStore(sessions.folder / "sessions.sqlite", read_only=True), opened["id"])
        message = stored.recorded(0).message()
        assert ("tool_calls" in message) == read
        more = [message, {"role": "user", "content": "and"}] if path == "chat/completions" else asked
        answer = sessions.begin(opened, f"/v1/{path}", messages=asked + more, **body).getresponse()
        assert answer.status == 200 and answer.read()
        sessions.check(opened)


TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("sum", "add")]
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_session_calls_that_must_be_begin_in_the_prompt(sessions, opened, choice):
    """What the template writes before the tool's name, or its arguments, is context; the rest is the policy's own."""
    opening = sessions.server.rendering.opening(chat.read({**SUM, "tools": TOOLS, "tool_choice": choice}))
    begun = sessions.policy.tokenizer.decode(opening)
    assert begun == CALL.partition("add" if choice == "required" else " {")[0]
    client, messages = sessions.openai(opened), [{"role": "user", "content": "sum"}]
    sessions.policy.script = [CALL[len(begun) :], f"so {CALL}", "no call", "3"]
    for given in (choice, "auto", choice, "none"):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, tool_choice=given)
        message, (prompt, tokens, _) = reply.choices[0].message, sessions.policy.sampled[-1]
        assert (reply.prompt_token_ids, reply.choices[0].token_ids) == (prompt, tokens)
        assert (prompt[-len(opening) :] == opening) == (given == choice)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls or ()]
        messages += [message, *(results or [{"role": "user", "content": "and"}])]
    said = [message for message in messages if not isinstance(message, dict)]
    assert [len(one.tool_calls or ()) for one in said] == [1, 1, 0, 0]
    assert said[0].tool_calls[0].function.arguments == '{"a":1,"b":2}' and not said[0].content
    assert said[2].content == f"{begun}no call".removeprefix("<tool_call>\n"), "what cannot be read is text"
    assert sessions.session(opened).summary()["forks"] == {"other": 1}, "none takes the tools away"


@pytest.mark.parametrize("choice", [{}, {"tools": [{"type": "function", "function": {"name": "add"}}]}])
def test_session_requests_without_tools_get_no_calls(sessions, opened, choice):
    """A program that has none reads the content, which would be null beside a call."""
    choice = choice and {**choice, "tool_choice": "none"}
    sessions.policy.script = [f"so {CALL}", "19"]
    client, messages = sessions.openai(opened), [{"role": "user", "content": "sum"}]
    reply = client.chat.completions.create(model="policy", messages=messages, **choice).choices[0]
    assert reply.finish_reason == "stop" and reply.message.tool_calls is None
    assert reply.message.content.startswith("so ") and '"name": "add"' in reply.message.content
    messages += [reply.message, {"role": "user", "content": "and"}]
    client.chat.completions.create(model="policy", messages=messages, **choice)
    assert sessions.session(opened).summary()["rows"] == 1
