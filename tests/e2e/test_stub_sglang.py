"""The stub of SGLang answers as the real server does."""

import asyncio
import contextlib

import pytest

from helpers.stub_sglang import stub_servers
from recipe.atropos.inference.client import InferenceError, SGLangClient

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["stub", pytest.param("real", marks=pytest.mark.timeout(240))])
def any_server(request):
    """An async context manager that gives the URL of a server."""
    if request.param == "real":
        return contextlib.nullcontext(request.getfixturevalue("server"))

    @contextlib.asynccontextmanager
    async def stub():
        async with stub_servers(1) as (server,):
            yield server.url

    return stub()


async def test_stub_answers_as_the_real_server(any_server, model_path, tmp_path):
    """Endpoints, statuses and fields that a push relies on."""

    async def refused(call, status, words=None):
        with pytest.raises(InferenceError, match=words) as refusal:
            await call
        assert refusal.value.status == status

    async with any_server as url:
        client = SGLangClient(url, timeout=30)
        capabilities = await client.capabilities()
        assert capabilities.weight_update_session and capabilities.pause_modes == {"abort", "retract", "in_place"}
        assert {"tp_size", "dp_size", "pp_size", "device"} <= capabilities.arguments.keys()
        assert await client.weight_version() == "default"
        await client.resume()  # nothing is paused
        await refused(client.pause("gently"), 400, "mode")
        await client.pause("retract")
        await client.pause("retract")
        waiting = asyncio.ensure_future(client.generate(input_ids=[10, 11], sampling_params={"max_new_tokens": 1}))
        await asyncio.sleep(1)
        assert not waiting.done() and await client.weight_version() == "default"
        await client.update_weights_from_disk(model_path, "7", flush_cache=False)
        assert await client.weight_version() == "7"
        await refused(client.update_weights_from_disk(tmp_path / "none", "8", flush_cache=False), 400)
        assert await client.weight_version() == "7"
        await client.flush_cache()
        await refused(client.post("/end_weight_update", {}), 400)
        await client.begin_weight_update()
        await refused(client.post("/begin_weight_update", {}), 400, "already open")
        await client.begin_weight_update()  # closes the one that is open
        await client.end_weight_update()
        await client.post("/update_weight_version", {"new_version": "9", "abort_all_requests": False})
        assert await client.weight_version() == "9" and not waiting.done()
        await client.resume()
        assert (await waiting)["meta_info"]["weight_version"] == "9"
        await refused(client.post("/nowhere", {}), 404)
