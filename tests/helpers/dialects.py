"""Replies, and the real SDKs' clients, which a dialect answers without a server."""

import anthropic
import httpx2
import openai
import orjson
import pytest

from recipe.atropos.sessions.messages import KEEP_ALIVE, Call, Reply, RequestError, error_body, event

_HEAD = {
    "id": "a1b2",
    "created": 1_700_000_000,
    "model": "policy",
    "prompt": [5, 6, 7],
    "tokens": [11, 12],
    "logprobs": [-0.5, -1.25],
    "versions": [{"version": "3", "start": 0, "end": 2}],
}
_CALLS = (Call("call_1", "search", '{"q": "ünï", "n": 2}'), Call("call_2", "stop", "{}"))
REPLIES = {
    "text": Reply(content="Four.\n", **_HEAD),
    "reasoned": Reply(content="Four.", reasoning="2 + 2", **_HEAD),
    "call": Reply(content="", calls=_CALLS[:1], **_HEAD),
    "calls": Reply(content="Let me look.", reasoning="I need two.", calls=_CALLS, **_HEAD),
    "empty": Reply(content="", **_HEAD),
    "cut": Reply(content="Fo", finish="length", **_HEAD),
    "cut in thought": Reply(content="", reasoning="2 + ", finish="length", **_HEAD),
    "cut call": Reply(content="", calls=_CALLS[:1], finish="length", **_HEAD),
    "stopped": Reply(content="Four", stop="END", **_HEAD),
}
each_reply = pytest.mark.parametrize(("name", "reply"), REPLIES.items(), ids=REPLIES)


def transport(dialect, reply):
    """Answers each request by ``dialect`` with ``reply``, or the RequestError that it raises; keeps the last body."""

    def handle(request):
        handle.body = orjson.loads(request.content)
        try:
            read = dialect.count if request.url.path == getattr(dialect, "COUNT_PATH", None) else dialect.read
            asked = read(handle.body)
        except RequestError as problem:
            return httpx2.Response(problem.status, json=error_body(problem.status, str(problem), problem.code))
        assert request.url.path in (dialect.PATH, getattr(dialect, "COUNT_PATH", None))
        if request.url.path != dialect.PATH:
            return httpx2.Response(200, json={"input_tokens": 3})
        if not asked.stream:
            return httpx2.Response(200, json=dialect.answer(asked, reply))
        events = b"".join(
            [
                getattr(dialect, "KEEP_ALIVE", KEEP_ALIVE),
                *(reply if isinstance(reply, list) else dialect.events(asked, reply)),
            ]
        )
        return httpx2.Response(200, content=events, headers={"content-type": "text/event-stream"})

    return handle


def openai_client(dialect, reply):
    handle = transport(dialect, reply)
    http = httpx2.Client(transport=httpx2.MockTransport(handle))
    return openai.OpenAI(api_key="key", base_url="http://session/v1", http_client=http, max_retries=0), handle


def anthropic_client(dialect, reply):
    handle = transport(dialect, reply)
    http = httpx2.Client(transport=httpx2.MockTransport(handle))
    return anthropic.Anthropic(api_key="key", base_url="http://session", http_client=http, max_retries=0), handle


def data_of(events):
    """The data of server-sent events, parsed."""
    lines = [line for line in b"".join(events).split(b"\n") if line.startswith(b"data: ")]
    return [line[6:].decode() if line == b"data: [DONE]" else orjson.loads(line[6:]) for line in lines]


FAILED = event(error_body(503, "no server is left"), "error")  # as the server writes it in a stream
