"""What the gateway promises, one test a promise; the servers behind it are stubs that can be made to fail.

``test_servers_come_and_go.py`` has the real SGLang behind the real process.
"""

import asyncio
import gzip

import aiohttp
import orjson
import pytest
from aiohttp import web
from yarl import URL

from helpers.gateway import HEADERS, KEY, behind_a_gateway
from helpers.squatter import NOBODY, needs_root, squatted
from recipe.atropos.inference import gateway
from recipe.atropos.inference.lora_routing import GENERATES
from recipe.atropos.inference.pool import NothingAdmitted
from recipe.atropos.utils.secret import environments_key

pytestmark = pytest.mark.timeout(60)
PROBE_SECONDS = 0.3


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(gateway, "PROBE_SECONDS", PROBE_SECONDS)


@behind_a_gateway(count=1)
async def test_requests_and_replies_pass_unchanged(client, stub):
    async def teapot(request):
        return web.Response(status=418, reason="Teapot", body=b"\x00\xff", headers={"Content-Type": "x/y", "X-1": "1"})

    await client.admit(stub)
    stub.reply = teapot
    path = "/v1/some%20thing/a%2Fb?q=1&q=%26"
    body = b'{ "spaces": "kept" }'
    for method in ("POST", "PUT", "DELETE", "GET"):
        async with client.session.request(method, client.url + path, data=body, headers={"X-Mine": "2"}) as reply:
            assert (reply.status, reply.reason, await reply.read()) == (418, "Teapot", b"\x00\xff")
            assert reply.headers["Content-Type"] == "x/y" and reply.headers["X-1"] == "1"
        seen_method, seen_path, seen_body, seen_headers = stub.seen[-1]
        assert (seen_method, seen_path, seen_body) == (method, path, body)
        assert seen_headers["X-Mine"] == "2" and seen_headers["Authorization"] == HEADERS["Authorization"]
        assert seen_headers["Host"] == stub.url.removeprefix("http://")
    async with client.session.post(f"{client.url}/generate", data=b"x" * 5_000_000) as reply:
        assert reply.status == 418 and len(stub.seen[-1][2]) == 5_000_000


@behind_a_gateway(count=1)
async def test_a_compressed_request_passes_as_what_it_says(client, stub):
    await client.admit(stub)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with client.session.post(f"{client.url}/generate", data=gzip.compress(b"{}"), headers=headers) as reply:
        assert reply.status == 200 and stub.seen[-1][2] == b"{}" and "Content-Encoding" not in stub.seen[-1][3]


@behind_a_gateway(count=1)
async def test_a_request_names_no_other_host(client, stub):
    """An absolute target would go on the server's host name, and the trainer's key with it."""
    await client.admit(stub)
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(client.url).port)
    key = environments_key(KEY)
    writer.write(f"GET x://foo/generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    assert (await reader.readline()).split()[1] == b"400"
    writer.close()
    assert not stub.seen and await client.states() == ["admitted"]


@behind_a_gateway(count=1)
async def test_a_stream_passes_piece_by_piece(client, stub):
    more = asyncio.Event()

    async def stream(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await more.wait()
        await response.write(b"data: two\n\n")
        return response

    await client.admit(stub)
    stub.reply = stream
    async with client.session.post(f"{client.url}/generate", json={"stream": True}) as reply:
        assert reply.content_type == "text/event-stream"
        assert await reply.content.readany() == b"data: one\n\n", "while the server still generates"
        more.set()
        assert await reply.content.read() == b"data: two\n\n"


@behind_a_gateway(count=1)
async def test_secret_key_is_asked_for_everywhere(client, stub):
    await client.admit(stub)
    async with aiohttp.ClientSession() as stranger:
        for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "Bearer é"}):
            for method, path in (("POST", "/generate"), ("GET", "/gateway/status"), ("PUT", "/gateway/weights")):
                async with stranger.request(method, client.url + path, headers=headers) as reply:
                    assert reply.status == 401 and "ATROPOS_API_KEY" in await reply.text()
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /gateway/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")  # no UTF-8
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()
    assert not stub.seen


@behind_a_gateway()
async def test_nothing_is_admitted_but_by_the_trainer(client, first, second):
    request = await client.held()
    status = await client.status()
    assert status["version"] is None and status["held"] == 1 and await client.states() == ["waiting", "waiting"]
    assert await client.admit(second, pushing=True) == 200, "the beginning of a push admits nothing"
    await asyncio.sleep(0.1)
    assert not request.done() and not first.seen and not second.seen

    assert await client.admit(second, version=0) == 200
    second.version = "0"
    assert (await request)[1]["text"] == second.url
    assert await client.states() == ["waiting", "admitted"] and (await client.status())["version"] == 0


@pytest.mark.parametrize(
    ("word", "named"),
    [
        (b"{", "PUT /gateway/weights takes"),
        (b"[]", "PUT /gateway/weights takes"),
        (b'{"servers": []}', "version"),
        (b'{"version": "7", "servers": []}', "got `str` - at `$.version`"),
        (b'{"version": -1, "servers": []}', ">= 0 - at `$.version`"),
        (b'{"version": 1, "servers": "http://a"}', "got `str` - at `$.servers`"),
        (b'{"version": 1, "servers": ["http://nobody:1"]}', "http://nobody:1"),
        (b'{"version": 1, "servers": [], "pushing": "yes"}', "got `str` - at `$.pushing`"),
        (b'{"version": 1, "servers": [], "adapter": 7}', "got `int` - at `$.adapter`"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else "",
)
def test_a_word_of_the_trainer_that_means_nothing_is_refused(word, named):
    @behind_a_gateway(count=1)
    async def refused(client, stub):
        async with client.session.put(f"{client.url}/gateway/weights", data=word) as reply:
            assert reply.status == 400 and named in await reply.text()
        assert (await client.status())["version"] is None

    refused()


@behind_a_gateway(count=3)
async def test_the_load_is_spread(client, *stubs):
    await client.admit(*stubs)
    for stub in stubs:
        stub.reply = stub.for_ever
    requests = [asyncio.create_task(client.generate()) for _ in range(9)]
    await client.until(lambda: sum(len(stub.seen) for stub in stubs) == 9)
    assert [server["inflight"] for server in (await client.status())["servers"]] == [3, 3, 3]
    for request in requests:
        request.cancel()
    await client.until(lambda: sum(server.inflight for server in client.pool.servers.values()) == 0)


@behind_a_gateway(count=1, max_wait=0.5)
async def test_gateway_tells_a_request_what_it_waited_for(client, stub):
    status, answer = await client.generate()
    message = answer["error"]["message"]
    assert status == 503 and "waited 0.5 s for the trainer to give its weights" in message
    assert f"{stub.url} is waiting" in message
    assert (await client.status())["held"] == 0


@behind_a_gateway(count=1, max_wait=60)
async def test_gateway_counts_the_wait_of_a_request_sent_again(client, _):
    async with asyncio.timeout(5):
        with pytest.raises(NothingAdmitted, match="waited 60 s"):
            await client.pool.acquire(min, waited=59.9)


@behind_a_gateway(count=1)
async def test_a_client_that_goes_away_is_forgotten(client, stub):
    (await client.held()).cancel()
    await client.until(lambda: client.pool.held == 0)

    (await client.running(stub)).cancel()
    async with asyncio.timeout(5):
        await stub.closed.wait()
    status = await client.status()
    assert status["servers"][0]["inflight"] == 0 and status["servers"][0]["state"] == "admitted"
    assert len(stub.seen) == 1, "what was held was never sent"


@pytest.mark.parametrize("fault", ["refused", "reset", "broken"])
def test_gateway_takes_requests_of_a_failed_server_to_another(fault):
    @behind_a_gateway()
    async def sent_again(client, bad, good):
        await client.admit(bad, good)
        client.pool.servers[good.url].requests += 1  # so that the bad one is next
        bad.reply = bad.broken if fault == "broken" else bad.for_ever
        if fault == "refused":
            await bad.runner.cleanup()
        request = asyncio.create_task(client.generate())
        if fault == "reset":
            await bad.begun.wait()
            await bad.runner.cleanup()
        async with asyncio.timeout(5):
            assert (await request) == (200, {"text": good.url, "meta_info": {"weight_version": "1"}})
        by_url = {server["url"]: server for server in (await client.status())["servers"]}
        assert by_url[bad.url]["state"] == "down" and by_url[bad.url]["failures"] == 1
        assert by_url[bad.url]["last_error"] and by_url[good.url]["state"] == "admitted"

        before = len(bad.seen)
        for _ in range(3):
            assert (await client.generate())[1]["text"] == good.url
        assert len(bad.seen) == before

    sent_again()


@behind_a_gateway(count=1)
async def test_gateway_holds_requests_until_a_server_is_readmitted(client, stub):
    await client.admit(stub)
    stub.reply = stub.broken
    request = await client.held()
    assert await client.states() == ["down"]
    stub.reply = stub.answer
    await asyncio.sleep(2 * PROBE_SECONDS)
    assert not request.done(), "it answers again, but nobody said with which weights"
    await client.admit(stub, version=2)
    stub.version = "2"
    assert (await request)[0] == 200 and len(stub.seen) == 2


@behind_a_gateway(count=1)
async def test_gateway_breaks_a_stream_that_broke_after_its_beginning(client, stub):
    await client.admit(stub)
    stub.reply = stub.broken_stream
    async with client.session.post(f"{client.url}/generate", json={"stream": True}) as reply:
        assert await reply.content.readany() == b"data: half\n\n"
        with pytest.raises(aiohttp.ClientError):
            await reply.content.read()
    assert await client.states() == ["down"] and len(stub.seen) == 1


@behind_a_gateway(count=1)
async def test_a_request_that_kills_every_server_that_it_meets_ends(client, stub):
    stub.reply = stub.broken
    await client.admit(stub)
    request = asyncio.create_task(client.generate())
    for _ in range(4):
        await client.until(lambda: client.pool.held == 1 or request.done())
        await client.admit(stub)
    status, answer = await asyncio.wait_for(request, 10)
    assert status == 502 and stub.url in answer["error"]["message"] and len(stub.seen) == 5


@behind_a_gateway()
async def test_an_idle_server_that_dies_is_found(client, first, second):
    await client.admit(first, second)
    await first.runner.cleanup()
    await client.until(lambda: len(client.pool.admitted) == 1)
    assert await client.states() == ["down", "admitted"] and not second.seen
    assert "/model_info" in (await client.status())["servers"][0]["last_error"]


@behind_a_gateway()
async def test_gateway_finds_a_server_that_was_restarted_unnoticed(client, first, second):
    request = await client.running(first)
    await client.admit(first, second)
    first.version = "default"
    async with asyncio.timeout(10):
        assert (await request)[1]["text"] == second.url
    assert await client.states() == ["down", "admitted"]
    assert "'default', not 1" in (await client.status())["servers"][0]["last_error"]


@behind_a_gateway()
async def test_gateway_passes_no_reply_by_weights_that_nobody_pushed(client, first, second):
    async def start_weights(request):
        return web.json_response([{"text": "x", "meta_info": {"weight_version": v}} for v in ("1", "default")])

    await client.admit(first)
    first.reply = start_weights
    request = await client.held()
    await client.admit(second)
    assert (await request)[1]["text"] == second.url

    async def says_it(request):  # a text about it is none
        text = orjson.dumps({"weight_version": "default"}).decode()
        return web.json_response({"text": text, "meta_info": {"weight_version": "1"}})

    second.reply = says_it
    assert (await client.generate())[1]["text"] == '{"weight_version":"default"}'


@behind_a_gateway()
async def test_a_push_takes_no_healthy_server_out(client, first, second):
    """Its servers report the new version before the trainer says that the push is done."""
    await client.admit(first, second, version=1)
    await client.admit(first, second, version=2, pushing=True)
    assert (await client.status())["version"] == 1, "until the push is done"
    first.version = "2"
    await asyncio.sleep(2.5 * PROBE_SECONDS)
    assert await client.states() == ["admitted", "admitted"]
    second.version = "default"  # what was restarted in the middle of it is no healthy server
    await client.until(lambda: len(client.pool.admitted) == 1)
    second.version = "2"
    await client.admit(first, second, version=2)
    await asyncio.sleep(1.5 * PROBE_SECONDS)
    assert await client.states() == ["admitted", "admitted"] and (await client.status())["version"] == 2
    first.version = "1"  # the old one is over
    await client.until(lambda: [server.url for server in client.pool.admitted] == [second.url])


@behind_a_gateway(count=1)
async def test_gateway_judges_no_answer_by_a_later_word(client, stub):
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow():
        asked.set()
        await answer.wait()
        return "1"

    stub.info = slow
    await client.admit(stub, version=1)
    await asked.wait()
    stub.info, stub.version = stub.present_version, "2"
    await client.admit(stub, version=2, pushing=True)
    await client.admit(stub, version=2)
    answer.set()
    await asyncio.sleep(1.5 * PROBE_SECONDS)
    assert await client.states() == ["admitted"]


@behind_a_gateway()
async def test_gateway_gives_nothing_to_what_the_trainer_leaves_out(client, first, second):
    request = await client.running(first)
    await client.admit(second)
    assert (await request)[1]["text"] == second.url and await client.states() == ["waiting", "admitted"]
    async with asyncio.timeout(5):
        await first.closed.wait()


@behind_a_gateway(count=1)
async def test_control_of_servers_wants_the_trainers_key(client, stub):
    """The environments' key, of which the servers know nothing, samples and informs."""
    await client.admit(stub)
    environments = {"Authorization": f"Bearer {environments_key(KEY)}"}
    control = ["update_weights_from_disk", "abort_request", "pause_generation", "configure_logging", "start_profile"]
    control += ["flush_cache", "release_memory_occupation", "server_info", "openapi.json", "v1/models/x", ""]
    control += ["generate/../abort_request", "generate%2F..%2Fabort_request", "%2567enerate", "/generate", "Generate"]
    async with aiohttp.ClientSession() as session:
        for path in [*control, "gateway/weights"]:
            for method in ("GET", "POST", "PUT"):
                url = URL(f"{client.url}/{path}", encoded=True)
                async with session.request(method, url, headers=environments) as reply:
                    assert reply.status == 403 and "takes the trainer's key" in await reply.text(), path
        assert not stub.seen
        for path in ("generate", "v1/chat/completions", "v1/completions", "tokenize", "health", "%67enerate"):
            url = URL(f"{client.url}/{path}", encoded=True)
            async with session.post(url, headers=environments, json={}) as reply:
                assert reply.status == 200
            assert stub.seen[-1][3]["Authorization"] == HEADERS["Authorization"], "the server's own"
        for path in ("model_info", "gateway/status"):
            async with session.get(f"{client.url}/{path}", headers=environments) as reply:
                assert reply.status == 200
    async with client.session.post(f"{client.url}/abort_request") as reply:
        assert reply.status == 200 and stub.seen[-1][1] == "/abort_request"


@needs_root
@behind_a_gateway(count=1)
async def test_squat_of_a_dead_server_gets_no_key(client, stub):
    """Neither from a request nor from a probe, though another user listens before the gateway notices."""
    await client.admit(stub)
    await stub.runner.cleanup()
    with squatted(stub.port) as sent:
        request = await client.held()
        assert f"user {NOBODY} listens at port {stub.port}" in (await client.status())["servers"][0]["last_error"]
        await client.admit(stub)
        await client.until(lambda: client.pool.held == 1 and not client.pool.admitted)
        request.cancel()
        await client.admit(stub)
        await client.until(lambda: not client.pool.admitted)
        assert "/model_info" in (await client.status())["servers"][0]["last_error"]
    assert len(sent) >= 2 and KEY not in str(sent)  # it is killed, and may not have told of the last


# -- a policy that is a LoRA adapter, of which environments know nothing; test_adapter.py has the real servers --------


@behind_a_gateway(count=1)
async def test_adapted_requests_meet_the_adapter_in_force(client, stub):
    """Replies say its version, whatever the server says."""

    async def ask(path):
        body = {"prompt": "é", "n": 2, "lora_path": "of the client", "model": "m:of the client"}
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
            assert orjson.loads(body) == {"prompt": "é", "n": 2, "lora_path": name, "model": "m"}
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
