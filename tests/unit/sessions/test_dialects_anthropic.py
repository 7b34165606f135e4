"""Messages, through Anthropic's own client."""

import anthropic as sdk
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from helpers.dialects import FAILED, REPLIES, anthropic_client, data_of, each_reply
from recipe.atropos.sessions.dialects import anthropic
from recipe.atropos.sessions.messages import RequestError, error_body, same

ASK = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "2 + 2?"}]}
_CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "search", "description": "d", "input_schema": {"type": "object"}, **_CACHED}
EVENT = TypeAdapter(RawMessageStreamEvent)


def read(*messages, **more):
    return anthropic.read({**ASK, "messages": list(messages), **more})


@each_reply
def test_messages_are_those_of_the_sdk(name, reply):
    found = Message.model_validate(anthropic.answer(anthropic.read(ASK), reply))
    assert (found.id, found.model) == ("msg_a1b2", "policy")
    expected = {"call": "tool_use", "calls": "tool_use", "stopped": "stop_sequence"}
    assert found.stop_reason == expected.get(name, "max_tokens" if "cut" in name else "end_turn")
    assert found.stop_sequence == ("END" if name == "stopped" else None)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (3, 2)
    exact = (found.token_ids, found.prompt_token_ids, found.weight_versions)
    assert exact == (reply.tokens, reply.prompt, reply.versions)
    calls = [(block.id, block.name) for block in found.content if block.type == "tool_use"]
    assert calls == [(call.id, call.name) for call in reply.calls]


@each_reply
def test_message_streams_accumulate_to_the_answer(name, reply):
    client, handle = anthropic_client(anthropic, reply)
    with client.messages.stream(**ASK) as stream:
        found = stream.get_final_message()
    whole = Message.model_validate(anthropic.answer(anthropic.read(handle.body), reply))
    exact = {"token_ids", "prompt_token_ids", "weight_versions"}
    assert Message.model_validate(found.to_dict()).model_dump() == whole.model_dump(exclude=exact)
    events = data_of(anthropic.events(anthropic.read(handle.body), reply))
    for one in events:
        assert EVENT.validate_python(one).type == one["type"]
    assert {name: events[-2][name] for name in exact} == whole.model_dump(include=exact)


@each_reply
@pytest.mark.parametrize("dump", [lambda block: block, lambda block: block.model_dump()])
@pytest.mark.parametrize("streamed", [False, True])
def test_blocks_sent_back_are_the_message(name, reply, dump, streamed):
    client, handle = anthropic_client(anthropic, reply)
    if streamed:
        with client.messages.stream(**ASK) as stream:
            content = stream.get_final_message().content
    else:
        content = client.messages.create(**ASK).content
    said = {"role": "assistant", "content": [dump(block) for block in content]}
    client.messages.create(**{**ASK, "messages": [*ASK["messages"], said, {"role": "user", "content": "sure?"}]})
    [_, found, _] = anthropic.read(handle.body).messages
    assert same(found, reply.message())
    assert found.get("reasoning_content") == reply.reasoning


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_is_signed_as_clients_send_it_back(streamed):
    """pydantic-ai sends a thinking without a signature back as a text of the user's."""
    client, handle = anthropic_client(anthropic, REPLIES["calls"])
    if not streamed:
        assert client.messages.create(**ASK).content[0].signature == "a1b2"
        return
    events = list(client.messages.create(**ASK, stream=True))
    kinds = [one.delta.type for one in events if one.type == "content_block_delta"]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert (events[1].content_block.signature, events[3].delta.signature) == ("", "a1b2")


def test_errors_raise_in_anthropics_client():
    client, _ = anthropic_client(anthropic, REPLIES["text"])
    with pytest.raises(sdk.BadRequestError, match="tool_choice"):
        client.messages.create(**ASK, tool_choice={"type": "any"})
    client, _ = anthropic_client(anthropic, [FAILED])
    with pytest.raises(sdk.APIStatusError, match="no server is left"):
        with client.messages.stream(**ASK) as stream:
            stream.get_final_message()
    found = [error_body(status, "m")["error"]["type"] for status in (400, 401, 404, 500, 503)]
    assert found == [
        f"{kind}_error" for kind in ("invalid_request", "authentication", "not_found", "api", "overloaded")
    ]


def test_counting_needs_neither_a_limit_nor_a_last_question():
    client, _ = anthropic_client(anthropic, REPLIES["text"])
    said = [*ASK["messages"], {"role": "assistant", "content": "4"}]
    assert client.messages.count_tokens(model="policy", messages=said).input_tokens == 3
    with pytest.raises(RequestError, match="max_tokens"):
        anthropic.read({"messages": ASK["messages"]})


def test_blocks_become_messages():
    use = {"type": "tool_use", "id": "t", "name": "search", "input": {"q": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "none"}], "is_error": True},
        {"type": "text", "text": "Go on.", **_CACHED},
    ]
    asked = read(
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Look:"}, use]},
        {"role": "user", "content": results},
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Be brief."}],
    )
    function = {"name": "search", "arguments": '{"q":1}'}
    calls = [{"id": "t", "type": "function", "function": function}]
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "Look:", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t", "content": "none", "name": "search"},
        {"role": "user", "content": "Go on."},
    ]


def test_message_parameters_become_sglangs():
    given = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "stop_sequences": ["END"], "metadata": {"user_id": "a"}}
    asked = anthropic.read({**ASK, **given, "tools": [TOOL], "tool_choice": {"type": "auto"}, "stream": True})
    expected = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "stop": ["END"], "max_new_tokens": 9}
    assert (asked.sampling, asked.stream) == (expected, True)
    function = {"name": "search", "description": "d", "parameters": {"type": "object"}}
    assert asked.tools == [{"type": "function", "function": function}]
    assert anthropic.read({**ASK, "tools": [TOOL], "tool_choice": {"type": "none"}}).tools is None
    choices = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "search"}]
    found = [anthropic.read({**ASK, "tools": [TOOL], "tool_choice": choice}).call for choice in choices]
    assert found == [None, "", "search"]
    thinking = [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, None]
    found = [anthropic.read({**ASK, "thinking": one}).template for one in thinking]
    assert found == [{"enable_thinking": True}, {"enable_thinking": False}, {}, {}]
    assert anthropic.read({**ASK, "output_config": {"effort": "low"}}).template == {"reasoning_effort": "low"}
