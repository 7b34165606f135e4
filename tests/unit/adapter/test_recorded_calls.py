"""How an environment's calls become requests to /generate, and their replies what is remembered: against a stub."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer

from helpers.sampled import END, I, Scripted, chat, ids_of, make, with_bos
from helpers.stub_sglang import reply, stub_servers
from recipe.atropos.adapter.recorded_calls import ATTEMPTS, RecordingManagedServer, _one_bos, client_of, sampling_params
from recipe.atropos.data.sampling import SamplingParams
from recipe.atropos.inference.client import InferenceError

pytestmark = pytest.mark.timeout(60)
GO = [{"role": "user", "content": "go"}]


@pytest.fixture
def ask(drifting_model, monkeypatch):
    """``ask(replies, action)``: what ``action`` returns, given an environment of a stub with these replies.

    Then ``ask.env`` is that environment, and ``ask.bodies`` what /generate was asked for.
    """
    monkeypatch.setenv("ATROPOS_TEMPERATURE", "0.7")

    def run(replies, action):
        async def inner():
            async with stub_servers(1) as (server,):
                server.replies = list(replies)
                run.env = make(Scripted, drifting_model, server.url)
                result = await action(run.env)
                run.bodies = [body for _, endpoint, body in server.calls if endpoint == "/generate"]
                run.others = [endpoint for _, endpoint, _ in server.calls if endpoint != "/generate"]
                return result

        return asyncio.run(inner())

    return run


def two(tokenizer):
    a, b = ids_of(tokenizer, "a", "b", END), ids_of(tokenizer, "ab")
    return [reply(a, "ab"), reply(b, "ab", "length", first=-0.9, version="default")]


def test_recorded_calls_for_tokens_give_what_was_sampled(ask, tokenizer):
    def call(env):
        return env.server.tokens_and_logprobs_completion(prompt="Q:", n=2, max_tokens=5, top_p=0.5)

    ids, tokens, logprobs, reasons = ask(two(tokenizer), call)
    assert ids == tokenizer.encode("Q:") == ask.bodies[0]["input_ids"]
    assert tokens == [ids_of(tokenizer, "a", "b", END), ids_of(tokenizer, "ab")]
    assert logprobs == [pytest.approx([-0.5, -0.6, -0.7]), [-0.9]]
    assert [reason["type"] for reason in reasons] == ["stop", "length"]
    (body,) = ask.bodies
    asked = body["sampling_params"]
    assert (asked["n"], asked["max_new_tokens"], asked["temperature"], asked["top_p"]) == (2, 5, 0.7, 0.5)
    assert asked["top_k"] == -1 and asked["repetition_penalty"] == 1, "no default of the server's own applies"
    first, second = (completion for completion, _ in ask.env._calls.caches["train"]._order)
    assert first.prompt.tolist() == ids and second.tokens.tolist() == tokens[1]
    assert first.versions == (3, 3) and second.versions == (-1, -1)
    assert first.logprobs.tolist() == logprobs[0] and first.sampling == SamplingParams(temperature=0.7, top_p=0.5)


def test_recorded_calls_keep_what_stands_before_a_bos(tokenizer):
    bos = with_bos(tokenizer).bos_token_id
    known = SimpleNamespace(bos_token_id=bos)
    for ids in ([], [bos], [5, bos, 6], [bos, 5], [bos, 5, bos]):
        assert _one_bos(known, ids) == ids
    assert _one_bos(known, [bos, bos, 6]) == [bos, 6]
    assert _one_bos(SimpleNamespace(bos_token_id=9), [9, 5, 6]) == [9, 5, 6]
    ids = np.array([128_000, 128_000, 6]).tolist()  # Llama 3's; equal numbers of this size are different objects
    assert _one_bos(SimpleNamespace(bos_token_id=128_000), ids) == [128_000, 6]


def test_recorded_calls_send_one_bos_whoever_writes_it(ask, tokenizer):
    """The tokenizer does before a text; a chat template is told to, so nothing comes before what it gives."""
    bos = with_bos(tokenizer)

    def sent(name, **arguments):
        async def call(env):
            server = env.server.servers[0]
            server.tokenizer = bos
            plain = () if name == "tokens" else (None,)
            return await getattr(env._calls, name)(server, *plain, max_tokens=1, **arguments)

        ask(two(tokenizer)[:1], call)
        return ask.bodies[0]["input_ids"]

    for given, ids in [([5, 6], [5, 6]), ([7], [7]), ([0], [0]), ([0, 0], [0]), ([0, 5], [0, 5]), ([0, 0, 5], [0, 5])]:
        assert sent("tokens", input_ids=given) == ids
    text = tokenizer.encode("Q:")
    assert sent("tokens", prompt="Q:") == sent("text", prompt="Q:") == [0, *text]
    assert sent("chat", messages=GO) == chat(tokenizer, "go")

    async def managed_call(env):
        async with env.server.managed_server(tokenizer=bos) as managed:
            await managed.completion(prompt="Q:", max_tokens=1)

    ask(two(tokenizer)[:1], managed_call)
    assert ask.bodies[0]["input_ids"] == [0, *text]


def test_recorded_calls_leave_servers_alone_that_are_not_sglang(drifting_model):
    async def class_of(server_type):
        env = make(Scripted, drifting_model, server_type=server_type)
        async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
            return type(managed)

    assert asyncio.run(class_of("vllm")) is ManagedServer
    assert asyncio.run(class_of("sglang")) is RecordingManagedServer


def test_recorded_calls_of_evaluation_keep_to_their_own_book(ask, tokenizer):
    async def call(env):
        await env.server.completion(prompt="Q:", max_tokens=5, split="eval")
        assert (len(env._calls.caches["train"]), len(env._calls.caches["eval"])) == (0, 1)
        await env.server.completion(prompt="Q:", max_tokens=5)
        assert (len(env._calls.caches["train"]), len(env._calls.caches["eval"])) == (1, 1)

    ask(two(tokenizer), call)
    assert [body["sampling_params"]["temperature"] for body in ask.bodies] == [1.0, 0.7]


def test_survivors_an_environments_own_temperature_counts(ask, tokenizer):
    """Also 0; the trainer's is only for a request that names none."""

    async def call(env):
        for given in ({"temperature": 0.3}, {"temperature": 0.0}, {}):
            await env.server.completion(prompt="Q:", max_tokens=5, **given)

    ask(two(tokenizer)[:1] * 3, call)
    assert [body["sampling_params"]["temperature"] for body in ask.bodies] == [0.3, 0.0, 0.7]


def test_recorded_calls_for_text_answer_as_openai_does(ask, tokenizer):
    answer = ask(two(tokenizer), lambda env: env.server.completion(prompt="Q:", n=2, stop=["x"]))
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "ab", "stop"), (1, "ab", "length")]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)
    assert ask.bodies[0]["sampling_params"]["max_new_tokens"] == 16, "OpenAI's default"
    assert ask.bodies[0]["sampling_params"]["stop"] == ["x"] and not ask.others
    usage = ask(two(tokenizer), lambda env: env.server.completion(prompt="Q:Q:Q:", n=2)).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 4, 10)


def test_recorded_calls_for_chat_have_earlier_replies_as_sampled(ask, tokenizer):
    async def call(env):
        first = await env.server.chat_completion(messages=GO, max_tokens=5)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await env.server.chat_completion(messages=[*GO, said, *GO], max_tokens=None)
        return first

    first = ask(two(tokenizer), call)
    assert first.choices[0].message.role == "assistant" and first.object == "chat.completion"
    prompt, later = (body["input_ids"] for body in ask.bodies)
    assert prompt == chat(tokenizer, "go")
    assert later[: len(prompt) + 3] == prompt + ids_of(tokenizer, "a", "b", END), "not the token that the text has"
    asked = [body["sampling_params"].get("max_new_tokens", "unknown") for body in ask.bodies]
    assert asked == [5, None] and not ask.others


def test_recorded_calls_take_a_last_message_for_the_users(ask, tokenizer):
    """As SGLang does; the messages of the environment stay as they are."""
    messages = [*GO, {"role": "assistant", "content": "ab"}]
    ask(two(tokenizer)[:1], lambda env: env.server.chat_completion(messages=messages, max_tokens=5))
    asked = [*GO, {"role": "user", "content": "ab"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert ask.bodies[0]["input_ids"] == tokenizer.encode(text, add_special_tokens=False)
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
def test_recorded_calls_that_generate_cannot_answer_are_counted(ask, arguments, why, monkeypatch):
    """They take the server's OpenAI route, which this stub does not have, and are not remembered."""
    kind = "chat" if "messages" in arguments else "text"

    async def call(env):
        async def plain(**kwargs):
            raise InferenceError("http://stub", "/v1", f"asked for {kwargs['n']} by {sorted(kwargs)}")

        await getattr(env._calls, kind)(env.server.servers[0], plain, **arguments)

    n = arguments.get("n", 1)
    with pytest.raises(InferenceError, match=rf"asked for {n} by \[.*{'messages' if kind == 'chat' else 'prompt'}"):
        ask([], call)
    assert ask.env.report.counts == {f"plain_route/{why}": n} and not len(ask.env._calls.caches["train"])


def test_recorded_calls_ask_again_for_what_is_missing_alone(ask, tokenizer):
    good, cut = two(tokenizer)
    replies = [good, reply([], "", "abort"), reply([5], "x", "abort"), reply([], ""), cut, reply([], "", "abort"), good]
    replies += [good, good]  # the last is not asked for
    answer = ask(replies, lambda env: env.server.completion(prompt="Q:", n=4, max_tokens=5))
    assert [body["sampling_params"]["n"] for body in ask.bodies] == [4, 3, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop", "stop"]
    replies = [good, reply([], "", "abort"), reply([], "", "abort"), cut]
    answer = ask(replies, lambda env: env.server.completion(prompt="Q:", n=2, max_tokens=5))
    assert [body["sampling_params"]["n"] for body in ask.bodies] == [2, 1, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert ask.env.report.counts["aborted_samples"] == 2 and len(ask.env._calls.caches["train"]) == 2


def test_recorded_calls_give_up_and_name_the_server(ask, tokenizer):
    aborted = [reply([], "", "abort")] * 2 * ATTEMPTS

    async def call(env):
        server = env.server.servers[0]
        url = server.config.base_url.removesuffix("/v1")
        with pytest.raises(InferenceError, match=rf"{url}/generate: 2 of 2 samples .*, {ATTEMPTS} times"):
            await env._calls.sample(server, [5], {"n": 2}, None)

    ask(aborted, call)
    assert len(ask.bodies) == ATTEMPTS and ask.env.report.counts["aborted_samples"] == 2 * ATTEMPTS
    assert not len(ask.env._calls.caches["train"])


def test_recorded_calls_have_their_servers_key_and_time():
    config = APIServerConfig(base_url="http://server:1/v1", api_key="key", timeout=7)
    client = client_of(SimpleNamespace(config=config))
    assert client.url == "http://server:1" and client.timeout == 7
    assert client._headers["Authorization"] == "Bearer key"
    assert client_of(SimpleNamespace(config=config), 3.0).timeout == 3


@pytest.mark.parametrize("how", ["chat", "text"])
@pytest.mark.parametrize(("second", "lasts"), [(("ab",), "dc"), (("a", "b"), "cd")], ids=["one_text", "same_tokens"])
def test_recorded_calls_of_a_managed_server_extend_its_nodes(ask, tokenizer, how, second, lasts):
    """The longest node that a prompt goes on from, as it was sampled; of two with one text, each once."""
    way_1, way_2 = ids_of(tokenizer, "a", "b", END), ids_of(tokenizer, *second, END)
    replies = [reply(way_1, "ab", first=-0.1), reply(way_2, "ab", first=-0.2)]
    replies += [reply(ids_of(tokenizer, text, END), text, first=first) for text, first in (("c", -0.3), ("d", -0.4))]

    async def call(env):
        async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
            later = [*GO, {"role": "assistant", "content": "ab"}, *GO]

            async def turn(messages, **kwargs):
                if how == "chat":
                    return await managed.chat_completion(messages=messages, max_tokens=9, **kwargs)
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                return await managed.completion(prompt=text, max_tokens=9, **kwargs)

            await turn(GO, n=2)
            await turn(later)
            await turn(later)
            nodes = managed.get_state()["nodes"]
            tokens = [*nodes[0].tokens]
            assert managed._extended(tokens) == (nodes[0], len(tokens))
            assert managed._extended(tokens, [nodes[0]]) == (nodes[0], len(tokens))
            assert managed._extended(tokens, []) == (None, 0)
            managed.reset()
            assert not managed.get_state()["nodes"] and managed._extended([*nodes[0].tokens]) == (None, 0)
            return nodes

    nodes = ask(replies, call)
    assert len(nodes) == 2
    prompt = chat(tokenizer, "go")
    for node, way, last, first in zip(nodes, (way_1, way_2), lasts, (-0.1, -0.2), strict=True):
        reply_at, size = len(prompt), len(way)
        assert node.tokens[:reply_at] == prompt and node.tokens[reply_at : reply_at + size] == way
        assert node.tokens[-2:] == ids_of(tokenizer, last, END)
        trained = [token for token in node.masked_tokens if token != I]
        assert trained == way + ids_of(tokenizer, last, END)
        assert node.logprobs[reply_at] == first and node.logprobs[-2] == {"c": -0.3, "d": -0.4}[last]
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)


def test_recorded_calls_know_every_argument_of_a_template(ask, tokenizer):
    def asked(**arguments):
        seen = []

        async def call(env):
            server = env.server.servers[0]
            server.tokenizer = _Spy(server.tokenizer, seen)
            return await env.server.chat_completion(messages=GO, max_tokens=5, **arguments)

        ask(two(tokenizer)[:1], call)
        return seen[0]

    assert asked() == {}
    assert asked(reasoning_effort="low") == {"thinking": True, "enable_thinking": True, "reasoning_effort": "low"}
    assert asked(extra_body={"reasoning": {"effort": "none"}})["enable_thinking"] is False
    assert asked(extra_body={"reasoning": {"enabled": True}}) == {"thinking": True, "enable_thinking": True}
    assert asked(extra_body={"reasoning": {"enabled": False}}) == {}
    assert asked(extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == {"enable_thinking": False}


class _Spy:
    """A tokenizer that keeps what else its chat template was given."""

    def __init__(self, tokenizer, seen):
        self._tokenizer, self._seen = tokenizer, seen

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **others):
        self._seen.append(others)
        return self._tokenizer.apply_chat_template(
            messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )


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
