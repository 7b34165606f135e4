"""The client of SGLang without a server: errors that name their cause, and which pause mode is safe."""

from __future__ import annotations

import asyncio
import socket

import pytest

from recipe.atropos.inference.client import Capabilities, InferenceError, SGLangClient


@pytest.mark.timeout(30)
def test_an_absent_server_is_an_error_that_names_it():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def body():
            async with SGLangClient(url) as client:
                assert not await client.health()
                with pytest.raises(InferenceError, match=f"{url}/model_info: cannot connect"):
                    await client.model_info()

        asyncio.run(body())


@pytest.mark.parametrize(
    ("endpoints", "modes", "wanted", "safe"),
    [
        ({"/begin_weight_update"}, {"abort", "retract"}, "auto", "retract"),
        ({"/begin_weight_update"}, {"abort", "retract"}, "in_place", "has no pause mode 'in_place'"),
        (set(), {"abort", "retract"}, "auto", "abort"),
        (set(), {"abort", "retract"}, "abort", "abort"),
        (set(), {"abort", "retract"}, "retract", "cannot flush its KV cache while retracted requests wait"),
        (set(), set(), "auto", "has no pause mode 'abort'"),
    ],
)
def test_the_safe_pause_mode_is_what_was_asked_for_or_an_error(endpoints, modes, wanted, safe):
    capabilities = Capabilities("0", frozenset(endpoints), frozenset(modes))
    if safe in modes:
        assert capabilities.safe_pause_mode(wanted) == safe
    else:
        with pytest.raises(ValueError, match=safe):
            capabilities.safe_pause_mode(wanted)


@pytest.mark.timeout(30)
def test_a_client_that_was_not_opened_says_so():
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(SGLangClient("http://127.0.0.1:1").model_info())
