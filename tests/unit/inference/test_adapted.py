"""What environments meet where the policy is a LoRA adapter that they know nothing of; the servers are stubs.

``test_adapter.py`` has the real servers.
"""

import asyncio

import orjson
import pytest
from aiohttp import web

from helpers.gateway import behind_a_gateway
from recipe.atropos.inference.lora_routing import GENERATES

pytestmark = pytest.mark.timeout(60)


@behind_a_gateway(count=1)
async def test_adapted_requests_meet_the_adapter_in_force(client, stub):
    """Replies say its version, whatever the server says."""

    async def ask(path):
        body = {"prompt": "é", "n": 2, "lora_path": "of the client"}
        async with client.session.post(f"{client.url}{path}?a=1", json=body) as reply:
            return reply.status, orjson.loads(await reply.read())

    def said(*spans):
        names = ("version", "start", "end")
        spans = [dict(zip(names, span, strict=True)) for span in spans]
        return [{"meta_info": {"weight_versions": spans, "weight_version": spans[-1]["version"]}}] * 2

    async def across_a_push(request):
        await asyncio.sleep(0.2)
        return web.json_response(said(("3", 0, 9), ("4", 9, 12)))

    stub.reply = across_a_push
    for path in GENERATES:
        stub.version = "3"  # or a probe would remove it
        await client.admit(stub, version=3, adapter="policy-3")
        assert (await client.status())["adapter"] == "policy-3"
        running = asyncio.create_task(ask(path))
        await client.until(lambda: stub.seen)
        await client.admit(stub, version=4, pushing=True, adapter="policy-4")
        assert (await client.status())["adapter"] == "policy-3", "until the push is done"
        stub.version = "4"
        await client.admit(stub, version=4, adapter="policy-4")
        later = await ask(path)
        assert await running == (200, said(("3", 0, 12))) and later == (200, said(("4", 0, 12)))
        for (method, path_qs, body, _), name in zip(stub.seen, ("policy-3", "policy-4"), strict=True):
            assert (method, path_qs) == ("POST", f"{path}?a=1")
            assert orjson.loads(body) == {"prompt": "é", "n": 2, "lora_path": name}
        stub.seen.clear()


@behind_a_gateway(count=1)
async def test_adapted_stream_says_the_version_however_it_is_cut(client, stub):
    said = b'data: {"text": "\\"weight_version\\": \\"9\\"", "weight_version": "9"}\n\n' * 3 + b"data: [DONE]"

    async def in_pieces(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(0, len(said), 7):
            await response.write(said[i : i + 7])
            await asyncio.sleep(0.001)
        return response

    stub.reply = in_pieces
    stub.version = "8"
    await client.admit(stub, version=8, adapter="policy-8")
    async with client.session.post(f"{client.url}/generate", json={"stream": True}) as reply:
        assert await reply.read() == said.replace(b'"weight_version": "9"}', b'"weight_version": "8"}')


@behind_a_gateway(count=1)
async def test_nothing_is_sampled_by_the_base_model(client, stub):
    await client.admit(stub, adapter="policy-1")
    for path, body in (("/v1/responses", b"{}"), ("/generate", b"[1]"), ("/generate", b'{"a": NaN}')):
        async with client.session.post(client.url + path, data=body) as reply:
            assert reply.status == 400 and f"POST {path} ".encode() in await reply.read()
    assert not stub.seen
    for method, path in (("POST", "/tokenize"), ("GET", "/v1/models")):
        async with client.session.request(method, client.url + path, data=b"text") as reply:
            assert reply.status == 200 and stub.seen[-1][:3] == (method, path, b"text")
    await client.admit(stub)
    async with client.session.post(f"{client.url}/v1/responses", data=b"{}") as reply:
        assert reply.status == 200, "whole weights need no name"


@behind_a_gateway(count=2)
async def test_adapted_server_that_lost_the_adapter_is_taken_out(client, first, second):
    """A refusal for other reasons is passed on."""

    async def refuse(request):
        return web.json_response({"error": {"message": "no such adapter, or a bad request"}}, status=400)

    await client.admit(first, second, adapter="policy-1")
    first.reply = second.reply = refuse
    assert (await client.generate())[0] == 400 and await client.states() == ["admitted", "admitted"]
    second.reply = second.answer
    first.version = "default"
    for _ in range(2):
        assert (await client.generate())[1]["text"] == second.url
    assert await client.states() == ["down", "admitted"]


@behind_a_gateway(count=1)
async def test_an_adapter_without_a_name_is_refused(client, stub):
    assert await client.admit(stub, adapter=7) == 400
