"""What cannot be done, or is of a wrong type, is refused by name, whatever a request holds."""

import copy

import pytest

from helpers.dialects import REPLIES
from recipe.atropos.sessions.dialects import anthropic, chat, completions, generate, responses, tokens
from recipe.atropos.sessions.messages import RequestError

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_SAMPLING = {"temperature": 1, "top_k": 1, "seed": 1, "stop": ["a"], "stop_token_ids": [1], "ignore_eos": True, "n": 1}
_SCHEMA = {"type": "object"}
FULL = {  # a request of each dialect with most of its fields
    chat: {
        **_SAMPLING,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}],
        "tool_choice": "auto",
        "max_tokens": 1,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    },
    completions: {**_SAMPLING, "prompt": [1, 2], "logprobs": 0, "stream": True, "stream_options": {}, "best_of": 1},
    responses: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "b"},
        ],
        "instructions": "i",
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
        "tool_choice": "auto",
        "max_output_tokens": 1,
        "previous_response_id": "resp_a",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "stream": True,
    },
    anthropic: {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
        ],
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["a"],
        "thinking": {"type": "enabled"},
        "output_config": {"effort": "low"},
        "stream": True,
    },
    generate: {"input_ids": [1, 2], "sampling_params": {**_SAMPLING, "max_new_tokens": 1}, "stream": True},
    tokens: {"token_ids": [1, 2], "sampling_params": {**_SAMPLING, "max_tokens": 1, "logprobs": 1}, "stream": False},
}
each_dialect = pytest.mark.parametrize("dialect", FULL, ids=lambda dialect: dialect.__name__.rpartition(".")[2])


def places(value, path=()):
    """Each place in a request, as a path of keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(body, path, value):
    body = copy.deepcopy(body)
    *outer, last = path
    inner = body
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return body


def check(dialect, body):
    """A request is read, or refused with a message; what was read can be answered."""
    try:
        asked = dialect.read(body)
    except RequestError as problem:
        assert len(str(problem)) < 300 and problem.status == 400
        return
    for reply in (REPLIES["calls"], REPLIES["cut"]):
        assert dialect.answer(asked, reply) and list(dialect.events(asked, reply))


@each_dialect
def test_any_wrong_type_is_only_a_request_error(dialect):
    dialect.read(FULL[dialect])
    for path in places(FULL[dialect]):
        for value in (None, True, -1, 1.5, "text", "", [], {}, [None], [[1]], ["a"], [{}], {"type": []}, {"type": "x"}):
            check(dialect, changed(FULL[dialect], path, value))


@each_dialect
def test_an_empty_request_is_refused(dialect):
    with pytest.raises(RequestError, match="messages|prompt|input|max_tokens|token_ids"):
        dialect.read({})


def _said(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


REFUSED = [  # (dialect, field, a value of it that is refused, what the message names)
    (chat, "top_logprobs", 2, "top_logprobs"),
    (chat, "n", 2, "n is 2"),
    (chat, "logit_bias", {"1": 2}, "logit_bias"),
    (chat, "response_format", {"type": "json_object"}, "response_format.*json_object"),
    (chat, "modalities", ["audio"], "modalities"),
    (chat, "tool_choice", "always", r"tool_choice='always'.*one of tools \(f\)"),
    (chat, "tool_choice", {"type": "function", "function": {"name": "g"}}, r"'g'.*one of tools \(f\)"),
    (chat, "tool_choice", {"type": "function", "function": "f"}, "tool_choice"),
    (chat, "tool_choice", {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.*allowed_tools"),
    (chat, "tools", [{"type": "custom"}], r"tools\[0\].*custom"),
    (chat, "messages", _said({"type": "image_url", "image_url": {}}), r"messages\[0\].content\[0\].*image_url"),
    (chat, "messages", [{"role": "function", "content": "a"}], r"messages\[0\].role.*function"),
    (chat, "messages", [{"role": "user"}], r"messages\[0\].content is missing"),
    (chat, "messages", [], "messages"),
    (chat, "max_tokens", 0, "max_tokens"),
    (chat, "temperature", True, "temperature"),
    (chat, "seed", 1.5, "seed"),
    (chat, "seed", 1 << 63, "seed"),
    (chat, "max_tokens", 10**30, "max_tokens"),
    (generate, "sampling_params", {"min_new_tokens": 1 << 31}, "min_new_tokens"),
    (tokens, "sampling_params", {"top_k": 1 << 31}, "top_k"),
    (chat, "stop", ["a", ""], "stop"),
    (completions, "echo", True, "echo"),
    (completions, "best_of", 2, "best_of is 2"),
    (completions, "suffix", "s", "suffix"),
    (completions, "logprobs", 1, "logprobs"),
    (completions, "prompt", [[1], [2]], "2 prompts"),
    (completions, "prompt", "", "prompt"),
    (responses, "text", {"format": {"type": "json_schema"}}, "text.format.*json_schema"),
    (responses, "conversation", "c", "conversation"),
    (responses, "prompt", {"id": "p"}, "prompt"),
    (responses, "background", True, "background"),
    (responses, "tools", [{"type": "web_search"}], r"tools\[0\].*web_search"),
    (responses, "tool_choice", {"type": "web_search"}, "tool_choice.*web_search"),
    (responses, "input", _said({"type": "input_image"}), "input_image"),
    (responses, "input", [{"type": "item_reference", "id": "i"}], "item_reference"),
    (responses, "input", [{"type": "function_call_output", "call_id": "c"}], r"input\[0\].output is missing"),
    (responses, "input", [], "input"),
    (anthropic, "tool_choice", {"type": "tool", "name": "g"}, "tool_choice.*'g'"),
    (anthropic, "tool_choice", {"type": "tool"}, "tool_choice"),
    (anthropic, "tools", [{"type": "bash_20250124", "name": "bash"}], r"tools\[0\].*bash_20250124"),
    (anthropic, "messages", _said({"type": "image"}), r"messages\[0\].content\[0\].*image"),
    (anthropic, "messages", _said({"type": "tool_use"}), "tool_use"),
    (anthropic, "messages", [], "messages"),
    (anthropic, "thinking", {"type": "between_tools"}, "thinking"),
    (anthropic, "output_config", {"format": {"type": "json_schema"}}, "format"),
    (anthropic, "stop_sequences", [1], "stop_sequences"),
    (generate, "input_ids", [[1], [2]], "input_ids"),
    (generate, "text", "a", "either text or input_ids"),
    (generate, "logprob_start_len", 0, "logprob_start_len"),
    (generate, "image_data", ["u"], "image_data"),
    (generate, "sampling_params", {"regex": "a"}, "regex"),
    (tokens, "features", {"mm_hashes": {}}, "features"),
    (tokens, "token_ids", [-1], "token_ids"),
    (tokens, "token_ids", [], "token_ids"),
    (tokens, "sampling_params", {"logprobs": 5}, "logprobs"),
    (tokens, "sampling_params", {"prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("dialect", "field", "value", "named"), REFUSED)
def test_what_a_session_cannot_do_is_refused_by_name(dialect, field, value, named):
    with pytest.raises(RequestError, match=named):
        dialect.read({**FULL[dialect], field: value})
