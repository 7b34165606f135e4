"""Responses, through OpenAI's own client."""

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from helpers.dialects import FAILED, REPLIES, data_of, each_reply, openai_client
from recipe.atropos.sessions.dialects import responses
from recipe.atropos.sessions.messages import same

ASK = {"model": "policy", "input": "2 + 2?"}
TOOL = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}
EVENT = TypeAdapter(ResponseStreamEvent)


def unparsed(value):
    """Without what the SDK's stream adds."""
    if isinstance(value, dict):
        return {key: unparsed(one) for key, one in value.items() if key not in ("parsed", "parsed_arguments")}
    return [unparsed(one) for one in value] if isinstance(value, list) else value


@each_reply
def test_responses_are_those_of_the_sdk(name, reply):
    asked = responses.read({**ASK, "tools": [TOOL], "instructions": "Be brief.", "temperature": 1.0})
    found = Response.model_validate(responses.answer(asked, reply))
    assert (found.id, found.created_at, found.model) == ("resp_a1b2", reply.created, "policy")
    assert found.status == ("incomplete" if "cut" in name else "completed")
    assert (found.output_text, found.instructions, found.tools[0].name) == (reply.content, "Be brief.", "search")
    exact = (found.token_ids, found.prompt_token_ids, found.weight_versions)
    assert exact == (reply.tokens, reply.prompt, reply.versions)
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (3, 2, 5)
    calls = [(item.call_id, item.name, item.arguments) for item in found.output if item.type == "function_call"]
    assert calls == [(call.id, call.name, call.arguments) for call in reply.calls]
    assert len({item.id for item in found.output}) == len(found.output)


@each_reply
def test_responses_streams_are_typed_and_in_order(name, reply):
    asked = responses.read({**ASK, "stream": True})
    found = data_of(responses.events(asked, reply))
    for one in found:
        assert EVENT.validate_python(one).type == one["type"]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [one["type"].removeprefix("response.") for one in found]
    whole = responses.answer(asked, reply)
    text = "content_part.added {0}.delta {0}.done content_part.done"
    inner = {
        "reasoning": text.format("reasoning_text"),
        "message": text.format("output_text"),
        "function_call": "function_call_arguments.delta function_call_arguments.done",
    }
    expected = ["created", "in_progress"]
    for item in whole["output"]:
        expected += ["output_item.added", *inner[item["type"]].split(), "output_item.done"]
    assert kinds == [*expected, whole["status"]]
    assert found[-1]["response"] == whole
    assert found[0]["response"]["status"] == "in_progress"


@pytest.mark.parametrize("name", [name for name in REPLIES if "cut" not in name])
def test_responses_streams_accumulate_to_the_answer(name):
    reply = REPLIES[name]
    client, handle = openai_client(responses, reply)
    snapshots = {}
    with client.responses.stream(**ASK) as stream:
        for one in stream:
            if one.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                snapshots[one.output_index] = one.snapshot
        found = stream.get_final_response()
    whole = responses.answer(responses.read(handle.body), reply)
    assert unparsed(found.to_dict()) == Response.model_validate(whole).to_dict()
    texts = {"message": lambda item: item.content[0].text, "function_call": lambda item: item.arguments}
    expected = {i: texts[item.type](item) for i, item in enumerate(found.output) if item.type in texts}
    assert snapshots == expected


@each_reply
@pytest.mark.parametrize("dump", [lambda item: item, lambda item: item.model_dump(), lambda item: item.to_dict()])
def test_response_items_sent_back_are_one_message(name, reply, dump):
    client, handle = openai_client(responses, reply)
    items = [{"role": "user", "content": "2 + 2?"}, *map(dump, client.responses.create(**ASK).output)]
    client.responses.create(model="policy", input=[*items, {"role": "user", "content": "sure?"}])
    [_, found, _] = responses.read(handle.body).messages
    assert same(found, reply.message())
    assert found.get("reasoning_content") == reply.reasoning


def test_items_of_several_turns_stay_apart():
    def call(id):
        return {"type": "function_call", "call_id": id, "name": "search", "arguments": "{}"}

    def output(id):
        return {"type": "function_call_output", "call_id": id, "output": [{"type": "input_text", "text": id}]}

    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
    user = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "go on"}]}
    given = [call("a"), call("b"), output("a"), output("b"), text, call("c"), output("c"), thought, text, user, thought]
    found = responses.read({**ASK, "input": given}).messages
    said = [
        (one["role"], one["content"], len(one.get("tool_calls", ())), one.get("reasoning_content")) for one in found
    ]
    assert said == [
        ("assistant", "", 2, None),
        ("tool", "a", 0, None),
        ("tool", "b", 0, None),
        ("assistant", "so", 1, None),
        ("tool", "c", 0, None),
        ("assistant", "so", 0, "hm"),
        ("system", "go on", 0, None),
        ("assistant", "", 0, "hm"),
    ]
    assert {one["name"] for one in found if one["role"] == "tool"} == {"search"}


def test_response_parameters_become_sglangs():
    more = {"store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "truncation": "auto", "include": ["x"]}
    more |= {
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    more |= {"instructions": "Be brief.", "previous_response_id": "resp_a1b2", "max_output_tokens": 9}
    asked = responses.read({**ASK, **more, "tools": [TOOL], "stream": True})
    assert asked.messages == [
        {"role": "system", "content": "Be brief.", "instructions": True},
        {"role": "user", "content": "2 + 2?"},
    ]
    assert (asked.previous, asked.stream, asked.sampling) == ("a1b2", True, {"max_new_tokens": 9})
    assert asked.template == {"reasoning_effort": "low"}
    assert asked.tools == [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    assert responses.read({**ASK, "tools": [TOOL], "tool_choice": "none"}).tools is None
    named = {"type": "function", "name": TOOL["name"]}
    assert responses.read({**ASK, "tools": [TOOL], "tool_choice": named}).call == TOOL["name"]


def test_a_failed_response_raises_in_openais_client():
    client, _ = openai_client(responses, [FAILED])
    with pytest.raises(openai.APIError, match="no server is left"):
        with client.responses.stream(**ASK) as stream:
            stream.get_final_response()
    [found] = data_of([FAILED])
    assert EVENT.validate_python(found).message == "no server is left"
