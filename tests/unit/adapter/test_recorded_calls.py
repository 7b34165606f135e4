"""How an environment's calls become requests to /generate, and their replies what is remembered: against a stub."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer

from helpers.sampled import END, I, Scripted, chat, ids_of, make, with_bos
from helpers.stub_sglang import reply, stub_servers
from recipe.atropos.adapter.recorded_calls import ATTEMPTS, RecordingManagedServer, client_of, sampling_params
from recipe.atropos.commands.verify_env import _record_calls
from recipe.atropos.data.rows import one_bos
from recipe.atropos.data.sampling import SamplingParams
from recipe.atropos.inference.client import InferenceError

pytestmark = pytest.mark.timeout(60)
GO = [{"role": "user", "content": "go"}]


@pytest.fixture
async def stub(monkeypatch):
    """A server that gives ``stub.replies``, if the trainer samples at a temperature of 0.7."""
    monkeypatch.setenv("ATROPOS_TEMPERATURE", "0.7")
    async with stub_servers(1) as (server,):
        yield server


@pytest.fixture
async def env(stub, drifting_model):
    return make(Scripted, drifting_model, stub.url)


def bodies(stub):
    """What /generate was asked for."""
    return [body for _, endpoint, body in stub.calls if endpoint == "/generate"]


def only_generates(stub):
    return all(endpoint == "/generate" for _, endpoint, _ in stub.calls)


def two(tokenizer):
    a, b = ids_of(tokenizer, "a", "b", END), ids_of(tokenizer, "ab")
    return [reply(a, "ab"), reply(b, "ab", "length", first=-0.9, version="default")]


async def test_recorded_calls_for_tokens_give_what_was_sampled(env, stub, tokenizer):
    stub.replies = two(tokenizer)
    found = await env.server.tokens_and_logprobs_completion(prompt="Q:", n=2, max_tokens=5, top_p=0.5)
    ids, tokens, logprobs, reasons = found
    (body,) = bodies(stub)
    assert ids == tokenizer.encode("Q:") == body["input_ids"]
    assert tokens == [ids_of(tokenizer, "a", "b", END), ids_of(tokenizer, "ab")]
    assert logprobs == [pytest.approx([-0.5, -0.6, -0.7]), [-0.9]]
    assert [reason["type"] for reason in reasons] == ["stop", "length"]
    asked = body["sampling_params"]
    assert (asked["n"], asked["max_new_tokens"], asked["temperature"], asked["top_p"]) == (2, 5, 0.7, 0.5)
    assert asked["top_k"] == -1 and asked["repetition_penalty"] == 1, "no default of the server's own applies"
    first, second = (completion for completion, _ in env._calls.caches["train"]._order)
    assert first.prompt.tolist() == ids and second.tokens.tolist() == tokens[1]
    assert first.versions == (3, 3) and second.versions == (-1, -1)
    assert first.logprobs.tolist() == logprobs[0] and first.sampling == SamplingParams(temperature=0.7, top_p=0.5)


def test_recorded_calls_keep_what_stands_before_a_bos(tokenizer):
    bos = with_bos(tokenizer).bos_token_id
    known = SimpleNamespace(bos_token_id=bos)
    for ids in ([], [bos], [5, bos, 6], [bos, 5], [bos, 5, bos]):
        assert one_bos(known, ids) == ids
    assert one_bos(known, [bos, bos, 6]) == [bos, 6]
    assert one_bos(SimpleNamespace(bos_token_id=9), [9, 5, 6]) == [9, 5, 6]
    ids = np.array([128_000, 128_000, 6]).tolist()  # Llama 3's; equal numbers of this size are different objects
    assert one_bos(SimpleNamespace(bos_token_id=128_000), ids) == [128_000, 6]


async def test_recorded_calls_send_one_bos_whoever_writes_it(env, stub, tokenizer):
    """The tokenizer does before a text; a chat template is told to, so nothing comes before what it gives."""
    bos = with_bos(tokenizer)

    server = env.server.servers[0]
    server.tokenizer = bos

    async def sent(name, **arguments):
        stub.replies = two(tokenizer)[:1]
        plain = () if name == "tokens" else (None,)
        await getattr(env._calls, name)(server, *plain, max_tokens=1, **arguments)
        return bodies(stub)[-1]["input_ids"]

    for given, ids in [([5, 6], [5, 6]), ([7], [7]), ([0], [0]), ([0, 0], [0]), ([0, 5], [0, 5]), ([0, 0, 5], [0, 5])]:
        assert await sent("tokens", input_ids=given) == ids
    text = tokenizer.encode("Q:")
    assert await sent("tokens", prompt="Q:") == await sent("text", prompt="Q:") == [0, *text]
    assert await sent("chat", messages=GO) == chat(tokenizer, "go")
    stub.replies = two(tokenizer)[:1]
    async with env.server.managed_server(tokenizer=bos) as managed:
        await managed.completion(prompt="Q:", max_tokens=1)
    assert bodies(stub)[-1]["input_ids"] == [0, *text]


@pytest.mark.parametrize(("kind", "expected"), [("vllm", ManagedServer), ("sglang", RecordingManagedServer)])
async def test_recorded_calls_leave_servers_alone_that_are_not_sglang(drifting_model, kind, expected):
    env = make(Scripted, drifting_model, server_type=kind)
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        assert type(managed) is expected


async def test_recorded_calls_of_evaluation_keep_to_their_own_book(env, stub, tokenizer):
    stub.replies = two(tokenizer)
    await env.server.completion(prompt="Q:", max_tokens=5, split="eval")
    assert (len(env._calls.caches["train"]), len(env._calls.caches["eval"])) == (0, 1)
    await env.server.completion(prompt="Q:", max_tokens=5)
    assert (len(env._calls.caches["train"]), len(env._calls.caches["eval"])) == (1, 1)
    assert [body["sampling_params"]["temperature"] for body in bodies(stub)] == [1.0, 0.7]


async def test_survivors_an_environments_own_temperature_counts(env, stub, tokenizer):
    """Also 0; the trainer's is only for a request that names none."""
    stub.replies = two(tokenizer)[:1] * 3
    for given in ({"temperature": 0.3}, {"temperature": 0.0}, {}):
        await env.server.completion(prompt="Q:", max_tokens=5, **given)
    assert [body["sampling_params"]["temperature"] for body in bodies(stub)] == [0.3, 0.0, 0.7]


async def test_verify_env_shows_the_temperature_that_is_added(env, stub, tokenizer):
    stub.replies = two(tokenizer)[:1]
    exchanges = _record_calls(env)
    await env.server.completion(prompt="Q:", max_tokens=5)
    assert exchanges[0].params["temperature"] == bodies(stub)[0]["sampling_params"]["temperature"] == 0.7


async def test_recorded_calls_for_text_answer_as_openai_does(env, stub, tokenizer):
    stub.replies = two(tokenizer) * 2
    answer = await env.server.completion(prompt="Q:", n=2, stop=["x"])
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "ab", "stop"), (1, "ab", "length")]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)
    [body] = bodies(stub)
    assert body["sampling_params"]["max_new_tokens"] == 16, "OpenAI's default"
    assert body["sampling_params"]["stop"] == ["x"] and only_generates(stub)
    usage = (await env.server.completion(prompt="Q:Q:Q:", n=2)).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 4, 10)


async def test_recorded_calls_for_chat_have_earlier_replies_as_sampled(env, stub, tokenizer):
    stub.replies = two(tokenizer)
    first = await env.server.chat_completion(messages=GO, max_tokens=5)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await env.server.chat_completion(messages=[*GO, said, *GO], max_tokens=None)
    assert first.choices[0].message.role == "assistant" and first.object == "chat.completion"
    prompt, later = (body["input_ids"] for body in bodies(stub))
    assert prompt == chat(tokenizer, "go")
    assert later[: len(prompt) + 3] == prompt + ids_of(tokenizer, "a", "b", END), "not the token that the text has"
    asked = [body["sampling_params"].get("max_new_tokens", "unknown") for body in bodies(stub)]
    assert asked == [5, None] and only_generates(stub)


async def test_recorded_calls_take_a_last_message_for_the_users(env, stub, tokenizer):
    """As SGLang does; the messages of the environment stay as they are."""
    messages = [*GO, {"role": "assistant", "content": "ab"}]
    stub.replies = two(tokenizer)[:1]
    await env.server.chat_completion(messages=messages, max_tokens=5)
    asked = [*GO, {"role": "user", "content": "ab"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert bodies(stub)[0]["input_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"messages": GO, "logprobs": True, "n": 3}, "logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}]}, "content"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}, *GO]}, "content"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
    ],
    ids=range(5),
)
async def test_recorded_calls_that_generate_cannot_answer_are_counted(env, arguments, why):
    """They take the server's OpenAI route, which this stub does not have, and are not remembered."""
    kind = "chat" if "messages" in arguments else "text"

    async def plain(**kwargs):
        raise InferenceError("http://stub", "/v1", f"asked for {kwargs['n']} by {sorted(kwargs)}")

    n = arguments.get("n", 1)
    with pytest.raises(InferenceError, match=rf"asked for {n} by \[.*{'messages' if kind == 'chat' else 'prompt'}"):
        await getattr(env._calls, kind)(env.server.servers[0], plain, **arguments)
    assert env.report.counts == {f"plain_route/{why}": n} and not len(env._calls.caches["train"])


async def test_recorded_calls_ask_again_for_what_is_missing_alone(env, stub, tokenizer):
    good, cut = two(tokenizer)
    aborted = reply([], "", "abort")
    stub.replies = [good, aborted, reply([5], "x", "abort"), reply([], ""), cut, aborted, good]
    stub.replies += [good, good]  # the last is not asked for
    answer = await env.server.completion(prompt="Q:", n=4, max_tokens=5)
    assert [body["sampling_params"]["n"] for body in bodies(stub)] == [4, 3, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop", "stop"]
    env.report.counts.clear()
    stub.replies = [good, aborted, aborted, cut]
    answer = await env.server.completion(prompt="Q:", n=2, max_tokens=5)
    assert [body["sampling_params"]["n"] for body in bodies(stub)][3:] == [2, 1, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert env.report.counts["aborted_samples"] == 2 and len(env._calls.caches["train"]) == 4 + 2


async def test_recorded_calls_give_up_and_name_the_server(env, stub):
    stub.replies = [reply([], "", "abort")] * 2 * ATTEMPTS
    with pytest.raises(InferenceError, match=rf"{stub.url}/generate: 2 of 2 samples .*, {ATTEMPTS} times"):
        await env._calls.sample(env.server.servers[0], [5], {"n": 2}, None)
    assert len(bodies(stub)) == ATTEMPTS and env.report.counts["aborted_samples"] == 2 * ATTEMPTS
    assert not len(env._calls.caches["train"])


def test_recorded_calls_have_their_servers_key_and_time():
    config = APIServerConfig(base_url="http://server:1/v1", api_key="key", timeout=7)
    client = client_of(config)
    assert client.url == "http://server:1" and client.timeout == 7
    assert client._headers["Authorization"] == "Bearer key"
    assert client_of(config, 3.0).timeout == 3


@pytest.fixture
async def managed(env):
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        yield managed


def turn(managed, how, messages, **kwargs):
    if how == "chat":
        return managed.chat_completion(messages=messages, max_tokens=9, **kwargs)
    text = managed.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return managed.completion(prompt=text, max_tokens=9, **kwargs)


LATER = [*GO, {"role": "assistant", "content": "ab"}, *GO]
TWO_WAYS = [("ab",), ("a", "b")]


@pytest.mark.parametrize("how", ["chat", "text"])
@pytest.mark.parametrize("second", TWO_WAYS, ids=["one_text", "same_tokens"])
@pytest.mark.parametrize("at_once", [False, True])
async def test_recorded_calls_of_a_managed_server_extend_its_nodes(managed, stub, tokenizer, how, second, at_once):
    """The longest node that a prompt goes on from, as it was sampled; of two with one text, each once, in order."""
    ways = [ids_of(tokenizer, "a", "b", END), ids_of(tokenizer, *second, END)]
    stub.replies = [reply(way, "ab", first=first) for way, first in zip(ways, (-0.1, -0.2), strict=True)]
    firsts = {"c": -0.3, "d": -0.4}
    stub.replies += [reply(ids_of(tokenizer, text, END), text, first=first) for text, first in firsts.items()]
    await turn(managed, how, GO, n=2)
    later = [turn(managed, how, LATER) for _ in range(2)]
    answers = await asyncio.gather(*later) if at_once else [await one for one in later]
    said = [getattr(choice, "text", None) or choice.message.content for [choice] in (each.choices for each in answers)]
    nodes, prompt = managed.get_state()["nodes"], chat(tokenizer, "go")
    assert len(nodes) == 2 and sorted(said) == ["c", "d"]
    for node, way, last, first in zip(nodes, ways, said, (-0.1, -0.2), strict=True):
        reply_at, size = len(prompt), len(way)
        assert node.tokens[:reply_at] == prompt and node.tokens[reply_at : reply_at + size] == way
        assert node.tokens[-2:] == ids_of(tokenizer, last, END)
        trained = [token for token in node.masked_tokens if token != I]
        assert trained == way + ids_of(tokenizer, last, END)
        assert node.logprobs[reply_at] == first and node.logprobs[-2] == firsts[last]
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)


async def test_managed_server_forgets_its_nodes(managed, stub, tokenizer):
    stub.replies = two(tokenizer)[:1] * 2
    await turn(managed, "chat", GO)
    managed.reset()
    assert not managed.get_state()["nodes"]
    await turn(managed, "chat", LATER)
    [node] = managed.get_state()["nodes"]
    assert [token for token in node.masked_tokens if token != I] == ids_of(tokenizer, "a", "b", END)


async def test_managed_server_tells_replies_by_their_white_space(managed, stub, tokenizer):
    """Else a later turn, and its score, would go to the other conversation, which waits for its next turn."""
    replies = [("\n", "ab"), ("ab", "\n"), ("c",), ("d",)]
    stub.replies = [reply(ids_of(tokenizer, *parts, END), "".join(parts)) for parts in replies]
    await turn(managed, "chat", GO, n=2)
    messages = [*GO, {"role": "assistant", "content": "ab\n"}, *GO]
    await turn(managed, "chat", messages)
    await turn(managed, "chat", [*messages, {"role": "assistant", "content": "c"}, *GO])
    trained = [[token for token in node.masked_tokens if token != I] for node in managed.get_state()["nodes"]]
    assert trained == [ids_of(tokenizer, "\n", "ab", END), ids_of(tokenizer, "ab", "\n", END, "c", END, "d", END)]


async def test_recorded_calls_know_every_argument_of_a_template(env, stub, tokenizer, monkeypatch):
    server, seen = env.server.servers[0], []
    template = server.tokenizer.apply_chat_template

    def apply_chat_template(messages, tokenize, add_generation_prompt, **others):
        seen[:] = [others]
        return template(messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt)

    monkeypatch.setattr(server.tokenizer, "apply_chat_template", apply_chat_template)

    async def asked(**arguments):
        stub.replies = two(tokenizer)[:1]
        await env.server.chat_completion(messages=GO, max_tokens=5, **arguments)
        return seen[0]

    assert await asked() == {}
    effort = {"thinking": True, "enable_thinking": True, "reasoning_effort": "low"}
    assert await asked(reasoning_effort="low") == effort
    assert (await asked(extra_body={"reasoning": {"effort": "none"}}))["enable_thinking"] is False
    assert await asked(extra_body={"reasoning": {"enabled": True}}) == {"thinking": True, "enable_thinking": True}
    assert await asked(extra_body={"reasoning": {"enabled": False}}) == {}
    assert await asked(extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("arguments", "params", "unknown"),
    [
        ({"response_format": {"type": "text"}}, {}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}, {}),
        ({"response_format": {"type": "grammar"}}, {}, {"response_format": {"type": "grammar"}}),
        ({"stop": "x", "stop_token_ids": [1]}, {"stop": "x", "stop_token_ids": [1]}, {}),
        ({"stop": ["x", 7], "stop_token_ids": [1]}, {"stop": ["x"], "stop_token_ids": [7, 1]}, {}),
        ({"temperature": 0, "top_k": None, "user": "me", "timeout": 3}, {"temperature": 0}, {}),
        ({"tools": [], "stream": False, "echo": False, "best_of": 0}, {}, {"best_of": 0}),
        ({"n": 2, "extra_body": {"n": 3, "top_k": 4, "min_tokens": 1}}, {"n": 3, "top_k": 4, "min_new_tokens": 1}, {}),
        ({"model": "m", "max_completion_tokens": 5, "seed": 3}, {"max_new_tokens": 5, "sampling_seed": 3}, {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
            {"json_schema": '{"type":"object"}'},
            {},
        ),
        ({"tools": [{}], "logprobs": 0, "tool_choice": "auto"}, {}, {"tools": [{}], "logprobs": 0}),
        ({"tools": None, "logprobs": False, "top_p": None}, {}, {}),
    ],
    ids=range(12),
)
def test_sampling_params_of_openai_arguments(arguments, params, unknown):
    assert sampling_params(arguments) == (params, unknown)
