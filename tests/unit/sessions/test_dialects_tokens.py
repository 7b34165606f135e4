"""The dialects of ids: SGLang's /generate, and vLLM's as the renderers package calls it."""

import asyncio
from types import SimpleNamespace

import httpx2
import openai
import pytest
from renderers.base import ParsedResponse
from renderers.client import generate as ask

from helpers.dialects import REPLIES, data_of, transport
from recipe.atropos.sessions.dialects import generate, tokens


@pytest.mark.parametrize("name", ["text", "cut", "stopped"])
def test_generate_answers_as_sglang_does(name):
    reply = REPLIES[name]
    asked = generate.read({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True})
    found = generate.answer(asked, reply)
    finish = {"text": {"type": "stop", "matched": 12}, "cut": {"type": "length", "length": 2}}
    assert (found["text"], found["output_ids"]) == (reply.content, reply.tokens)
    expected = {"id": "a1b2", "finish_reason": finish.get(name, {"type": "stop", "matched": "END"})}
    expected |= {"prompt_tokens": 3, "completion_tokens": 2, "weight_version": "3", "weight_versions": reply.versions}
    assert found["meta_info"] == expected | {"output_token_logprobs": [[-0.5, 11, None], [-1.25, 12, None]]}
    assert data_of(generate.events(asked, reply)) == [found, "[DONE]"]
    assert "output_token_logprobs" not in generate.answer(generate.read({"text": "a"}), reply)["meta_info"]


def test_generate_takes_ids_or_a_text_and_sglangs_parameters():
    params = {"max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 3, "top_k": -1, "n": 1, "regex": None}
    asked = generate.read({"input_ids": [5], "sampling_params": params, "stream": True})
    sampling = {"max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 3, "top_k": -1}
    assert (asked.prompt, asked.sampling, asked.stream) == ([5], sampling, True)
    asked = generate.read({"text": "a", "logprob_start_len": -1})
    assert (asked.prompt, asked.sampling) == ("a", {"max_new_tokens": 128})
    assert generate.read({"text": "a", "sampling_params": {"max_new_tokens": None}}).sampling == {}


@pytest.mark.parametrize("name", ["text", "cut"])
def test_the_client_of_renderers_reads_the_tokens(name):
    """Its renderer has no part in the request but the ids at which a reply ends."""
    reply = REPLIES[name]
    handle = transport(tokens, reply)
    renderer = SimpleNamespace(
        get_stop_token_ids=lambda: [12], parse_response=lambda ids, prompt_ids, tools: ParsedResponse(content=str(ids))
    )

    async def call():
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(handle))
        async with openai.AsyncOpenAI(api_key="key", base_url="http://session/v1", http_client=http) as client:
            params = {"temperature": 1.0, "max_tokens": 4, "seed": 1, "n": 1}
            given = {"messages": [], "model": "policy", "prompt_ids": [5, 6, 7], "cache_salt": "3"}
            return await ask(client=client, renderer=renderer, sampling_params=params, max_prompt_len=100, **given)

    found = asyncio.run(call())
    assert (found["request_id"], found["finish_reason"]) == ("a1b2", reply.finish)
    assert (found["prompt_ids"], found["completion_ids"]) == (reply.prompt, reply.tokens)
    assert found["completion_logprobs"] == reply.logprobs
    asked = tokens.read(handle.body)
    assert asked.prompt == [5, 6, 7]
    assert asked.sampling == {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 1, "stop_token_ids": [12]}


def test_the_answer_of_tokens_has_what_vllms_has():
    reply = REPLIES["text"]
    asked = tokens.read({"token_ids": [5, 6, 7]})
    found = tokens.answer(asked, reply)
    assert (found["prompt_logprobs"], found["kv_transfer_params"]) == (None, None)
    assert (found["prompt_token_ids"], found["weight_versions"]) == (reply.prompt, reply.versions)
    assert (found["choices"][0]["index"], found["usage"]["total_tokens"]) == (0, 5)
    assert data_of(tokens.events(asked, reply)) == [found, "[DONE]"]
