"""Chat completions and completions, through OpenAI's own client."""

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.dialects import FAILED, REPLIES, data_of, each_reply, openai_client
from recipe.atropos.sessions.dialects import chat, completions
from recipe.atropos.sessions.messages import RequestError, same

ASK = {"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}]}
TOOL = {"type": "function", "function": {"name": "search", "description": "d", "parameters": {"type": "object"}}}


def read(*messages, **more):
    return chat.read({**ASK, "messages": list(messages), **more})


def accumulated(stream):
    """What the SDK's stream adds up to; it raises for a reply that was cut."""
    try:
        with stream as found:
            return found.get_final_completion()
    except openai.LengthFinishReasonError as cut:
        return cut.completion


@each_reply
def test_chat_answers_are_those_of_the_sdk(name, reply):
    asked = chat.read({**ASK, "logprobs": True})
    found = ChatCompletion.model_validate(chat.answer(asked, reply))
    [choice] = found.choices
    assert (found.id, found.created, found.model) == ("chatcmpl-a1b2", reply.created, "policy")
    assert found.usage.model_dump(exclude_none=True) == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    exact = (choice.token_ids, found.prompt_token_ids, found.weight_versions)
    assert exact == (reply.tokens, reply.prompt, reply.versions)
    assert [(one.token, one.logprob) for one in choice.logprobs.content] == [
        ("token_id:11", -0.5),
        ("token_id:12", -1.25),
    ]
    assert (choice.message.content or "") == reply.content
    expected = {"call": "tool_calls", "calls": "tool_calls"}.get(name, "length" if "cut" in name else "stop")
    assert choice.finish_reason == expected


@each_reply
@pytest.mark.parametrize("logprobs", [False, True])
def test_chat_streams_accumulate_to_the_answer(name, reply, logprobs):
    client, handle = openai_client(chat, reply)
    options = {"stream_options": {"include_usage": True}, "logprobs": logprobs}
    found = accumulated(client.chat.completions.stream(**ASK, **options)).model_dump(exclude_none=True)
    whole = chat.answer(chat.read(handle.body), reply)
    [choice], [expected] = found["choices"], whole["choices"]
    expected = ChatCompletion.model_validate(whole).model_dump(exclude_none=True)["choices"][0]
    expected.pop("token_ids")
    for call in choice["message"].get("tool_calls", ()):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    assert choice == expected
    assert (found["usage"], found["id"]) == (whole["usage"], whole["id"])
    *chunks, done = data_of(chat.events(chat.read({**ASK, "stream": True}), reply))
    assert done == "[DONE]" and all(ChatCompletionChunk.model_validate(chunk) for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    last = chunks[-1]
    exact = (last["choices"][0]["token_ids"], last["prompt_token_ids"], last["weight_versions"])
    assert exact == (reply.tokens, reply.prompt, reply.versions)
    assert all(chunk["choices"] for chunk in chunks), "no usage was asked for"


@each_reply
@pytest.mark.parametrize("dump", [lambda m: m, lambda m: m.model_dump(), lambda m: m.model_dump(exclude_none=True)])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_message_sent_back_is_recognized(name, reply, dump, streamed):
    client, handle = openai_client(chat, reply)
    if streamed:
        message = accumulated(client.chat.completions.stream(**ASK)).choices[0].message
    else:
        message = client.chat.completions.create(**ASK).choices[0].message
    client.chat.completions.create(model="policy", messages=[*ASK["messages"], dump(message)])
    [_, found] = chat.read(handle.body).messages
    assert same(found, reply.message())
    assert found.get("reasoning_content") == reply.reasoning


def test_errors_raise_in_openais_client():
    client, _ = openai_client(chat, REPLIES["text"])
    with pytest.raises(openai.BadRequestError, match="n is 2"):
        client.chat.completions.create(**ASK, n=2)
    client, _ = openai_client(chat, [FAILED])
    with pytest.raises(openai.APIError, match="no server is left") as caught:
        list(client.chat.completions.create(**ASK, stream=True))
    assert (caught.value.type, caught.value.code) == ("overloaded_error", "503")


def test_chat_messages_become_those_of_the_template():
    calls = [{"id": "c", "type": "function", "function": {"name": "search", "arguments": ""}}]
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    asked = read(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
        {"role": "tool", "tool_call_id": "c", "content": "again", "name": "mine"},
        {"role": "tool", "tool_call_id": "of another", "content": "lost"},
    )
    function = {"name": "search", "arguments": "{}"}
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two parts"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "found", "name": "search"},
        {"role": "tool", "tool_call_id": "c", "content": "again", "name": "mine"},
        {"role": "tool", "tool_call_id": "of another", "content": "lost"},
    ]


def test_tools_go_to_the_template_unless_none_may_be_called():
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    assert chat.read({**ASK, "tools": [strict]}).tools == [TOOL]
    assert chat.read({**ASK, "tools": [TOOL], "tool_choice": "auto"}).tools == [TOOL]
    assert chat.read({**ASK, "tools": [TOOL], "tool_choice": "none"}).tools is None
    assert chat.read({**ASK, "tools": []}).tools is None


@pytest.mark.parametrize(("choice", "call"), [("auto", None), ("required", ""), (None, None)])
def test_choice_of_tools_says_what_must_be_called(choice, call):
    asked = chat.read({**ASK, "tools": [TOOL], "tool_choice": choice})
    assert (asked.call, asked.tools) == (call, [TOOL])
    with pytest.raises(RequestError, match="there are no tools"):
        chat.read({**ASK, "tool_choice": "required"})


def test_chat_parameters_become_sglangs():
    given = {"temperature": 0.5, "top_p": 1, "top_k": 0, "seed": 7, "min_tokens": 2, "stop": "END", "ignore_eos": True}
    asked = chat.read({**ASK, **given, "max_tokens": 9, "max_completion_tokens": 8, "stop_token_ids": [3]})
    own = {"sampling_seed": 7, "min_new_tokens": 2, "max_new_tokens": 8, "stop": ["END"], "stop_token_ids": [3]}
    assert asked.sampling == {"temperature": 0.5, "top_p": 1, "top_k": -1, "ignore_eos": True} | own
    neutral = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}, "stop": None}
    assert chat.read({**ASK, **neutral, "user": "ann", "store": True, "temperature": None}).sampling == {}
    asked = chat.read({**ASK, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"})
    assert asked.template == {"enable_thinking": False, "reasoning_effort": "low"}
    assert not asked.stream


COMPLETE = {"model": "policy", "prompt": "2 + 2 ="}


@pytest.mark.parametrize("name", ["text", "cut"])
def test_completions_are_those_of_the_sdk(name):
    reply = REPLIES[name]
    client, handle = openai_client(completions, reply)
    found = client.completions.create(**COMPLETE, logprobs=0)
    whole = completions.answer(completions.read(handle.body), reply)
    Completion.model_validate(whole)
    assert found.to_dict() == whole
    [choice] = found.choices
    assert (found.id, choice.text, choice.finish_reason) == ("cmpl-a1b2", reply.content, reply.finish)
    assert (choice.token_ids, found.prompt_token_ids) == (reply.tokens, reply.prompt)
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["token_id:11", "token_id:12"], reply.logprobs)
    stream = client.completions.create(**COMPLETE, stream=True, stream_options={"include_usage": True})
    chunk, usage = stream
    assert (chunk.choices[0].text, chunk.choices[0].logprobs) == (reply.content, None)
    assert (chunk.choices[0].token_ids, chunk.choices[0].finish_reason) == (reply.tokens, reply.finish)
    assert (usage.choices, usage.usage.total_tokens) == ([], 5)


def test_a_completions_prompt_is_one_text_or_one_list_of_ids():
    for given, prompt in (("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2])):
        asked = completions.read({"prompt": given})
        assert (asked.prompt, asked.sampling) == (prompt, {"max_new_tokens": 16})
    assert completions.read({"prompt": "a", "max_tokens": 5}).sampling == {"max_new_tokens": 5}
    with pytest.raises(RequestError, match="2 prompts"):
        completions.read({"prompt": ["a", "b"]})
