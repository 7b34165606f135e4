"""The real SGLang on a CPU: right logprobs, weights that change under a named version, errors that name their cause."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.sglang import make_tiny_model
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine
from recipe.atropos.weight_sync.servers import WeightPushError

PROMPT = [20, 40, 60, 80, 100]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def new_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("new") / "new", seed=1)


@pytest.fixture
async def client(server, model_path):
    """A client of the server with the old weights under version "0"; no test leaves a pause behind."""
    client = SGLangClient(server, timeout=60)
    await client.update_weights_from_disk(model_path, "0")
    yield client
    await client.post("/abort_request", {"abort_all": True})
    await client.resume()


@functools.cache
def policy_of(model: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs_of(model: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The distributions (T, V) after each of the tokens, computed by transformers in float32, without a cache."""
    with torch.no_grad():
        return (policy_of(model)(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def transformers_output(model: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens (`count`) and their logprobs."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        distribution = logprobs_of(model, ids)[-1]
        ids.append(int(distribution.argmax()))
        logprobs.append(float(distribution[ids[-1]]))
    return ids[len(prompt) :], logprobs


async def greedy(client: SGLangClient) -> list[int]:
    return (await client.generate(input_ids=PROMPT, sampling_params=GREEDY))["output_ids"]


@contextlib.asynccontextmanager
async def in_flight(client: SGLangClient) -> AsyncIterator[asyncio.Task]:
    """A long request that has begun to generate."""
    request = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=LONG))
    await asyncio.sleep(0.1)
    await greedy(client)  # first come, first served: when this later one is done, the long one has tokens
    assert not request.done()
    yield request
    request.cancel()


async def needs(client: SGLangClient, sessions: bool) -> None:
    """Skip the test on servers that are otherwise."""
    capabilities = await client.capabilities()
    if capabilities.weight_update_session != sessions:
        pytest.skip(f"SGLang {capabilities.version} is not of the kind that this is about")


@pytest.mark.timeout(300)  # the first test waits for the server
async def test_it_says_what_it_is(client):
    assert await client.health()
    capabilities = await client.capabilities()
    assert {"abort", "retract", "in_place"} <= capabilities.pause_modes
    assert {"/update_weights_from_disk", "/generate"} <= capabilities.endpoints
    assert capabilities.safe_pause_mode("abort") == "abort"
    await client.begin_weight_update()
    await client.end_weight_update()


async def test_greedy_tokens_and_logprobs_are_those_of_transformers(client, model_path, new_model):
    for model in (model_path, new_model):
        tokens, logprobs = transformers_output(model, PROMPT, GREEDY["max_new_tokens"])
        await client.update_weights_from_disk(model, "1")
        reply = await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert reply["output_ids"] == tokens
        sampled = reply["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in sampled] == tokens
        assert [logprob for logprob, _, _ in sampled] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("sampling", [{"temperature": 2.0}, {"temperature": 0.5, "top_p": 0.5}, {"top_k": 5}])
async def test_sampled_logprobs_are_tempered_and_before_truncation(client, model_path, sampling):
    parameters = {"max_new_tokens": 32, "ignore_eos": True, **sampling}
    reply = await client.generate(input_ids=PROMPT, sampling_params=parameters)
    found = logprobs_of(model_path, PROMPT + reply["output_ids"], sampling.get("temperature", 1.0))
    expected = found[len(PROMPT) - 1 : -1]
    for row, (logprob, token, _) in zip(expected, reply["meta_info"]["output_token_logprobs"], strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)


async def test_retract_keeps_requests_and_names_each_tokens_version(client, new_model):
    """After the push the prefix is computed anew: each later token has the logprob that the new weights give it."""
    await needs(client, sessions=True)
    async with in_flight(client) as request:
        await client.pause("retract")
        await client.update_weights_from_disk(new_model, "1")
        await client.flush_cache()
        waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=GREEDY))
        await asyncio.sleep(0.5)
        assert not request.done() and not waiting.done()
        await client.resume()
        reply = await request
    first, second = reply["meta_info"]["weight_versions"]
    split = first["end"]
    assert (first["version"], first["start"], second["version"]) == ("0", 0, "1")
    assert second["start"] == split and second["end"] == LONG["max_new_tokens"] == len(reply["output_ids"])
    assert (await waiting)["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 24}]

    prefix = PROMPT + reply["output_ids"][:split]
    tokens, logprobs = transformers_output(new_model, prefix, 8)
    assert reply["output_ids"][split : split + 8] == tokens
    sampled = [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"][split : split + 8]]
    assert sampled == pytest.approx(logprobs, abs=1e-4)


async def test_flush_waits_for_a_request_that_is_ending(client):
    async with in_flight(client) as request:
        flush = asyncio.create_task(client.flush_cache())
        await asyncio.sleep(0.1)
        await client.post("/abort_request", {"abort_all": True})
        await asyncio.gather(flush, request)


async def test_in_place_cannot_flush_but_has_changed_the_weights(client, new_model):
    """Why a push uses `retract`: in place, the server refuses only after it has loaded the weights."""
    await needs(client, sessions=True)  # of that update SGLang 0.5.12 dies
    before = await greedy(client)
    async with in_flight(client) as request:
        await client.pause("in_place")
        with pytest.raises(InferenceError, match="(?i)not flushed"):
            await client.update_weights_from_disk(new_model, "1")
        assert await client.weight_version() == "0"
        with pytest.raises(InferenceError, match="(?i)flush"):
            await client.flush_cache()
        await client.post("/abort_request", {"abort_all": True})
        await client.resume()
        await request
    await client.flush_cache()
    assert await greedy(client) != before


async def test_auto_push_leaves_no_old_key_and_replies_are_true(client, new_model):
    """Every reply says the versions that its tokens were sampled with.

    On every SGLang, and with several samples of a prompt in flight, whose common prefix is in the cache."""
    fresh, _ = transformers_output(new_model, PROMPT, GREEDY["max_new_tokens"])

    mode = (await client.capabilities()).safe_pause_mode("auto")
    several = asyncio.create_task(client.generate(input_ids=PROMPT[:4], sampling_params={**LONG, "n": 4}))
    async with in_flight(client) as request:
        await client.pause("auto")
        await client.update_weights_from_disk(new_model, "1", flush_cache=False)
        await client.flush_cache()
        assert await client.weight_version() == "1"
        await client.resume()
        replies = [await request, *await several]
    assert await greedy(client) == fresh
    for reply in replies:
        meta_info = reply["meta_info"]
        versions = [span["version"] for span in meta_info.get("weight_versions", [])]
        if mode == "abort":
            assert (meta_info["finish_reason"]["type"], meta_info["weight_version"]) == ("abort", "0")
        else:
            assert meta_info["finish_reason"]["type"] == "length" and versions == ["0", "1"]


async def test_push_fails_where_retracted_requests_cannot_be_flushed(client, new_model):
    """The server lives, and an abort fixes it. SGLang 0.5.12 to 0.5.20."""
    await needs(client, sessions=False)
    with pytest.raises(ValueError, match="cannot flush .*pause_mode to auto or abort"):
        (await client.capabilities()).safe_pause_mode("retract")
    async with in_flight(client) as request:
        await client.pause("retract")
        await client.update_weights_from_disk(new_model, "1", flush_cache=False)
        with pytest.raises(InferenceError, match="/flush_cache: HTTP 400"):
            await client.flush_cache()
        assert not request.done()
        await client.pause("abort")
        assert (await request)["meta_info"]["finish_reason"]["type"] == "abort"
        await client.flush_cache()
        await client.resume()
    tokens, _ = transformers_output(new_model, PROMPT, GREEDY["max_new_tokens"])
    assert await greedy(client) == tokens


async def test_a_pause_mode_that_cannot_work_is_refused_before_a_push(client, server, tmp_path, caplog):
    async def check(client, mode):
        options = {"transport": "disk", "directory": tmp_path, "pause_mode": mode}
        await AtroposCheckpointEngine(1, True, urls=[server], **options)._check(client)

    capabilities = await client.capabilities()
    for mode in ("auto", "abort"):
        await check(client, mode)
    assert ("each push ends the requests that run" in caplog.text) != capabilities.weight_update_session
    if capabilities.weight_update_session:
        await check(client, "retract")
    else:
        with pytest.raises(WeightPushError, match=f"pause_mode=retract does not work with .*{server}"):
            await check(client, "retract")
    with pytest.raises(WeightPushError, match=f"pause_mode=unknown does not work with .*{server}"):
        await check(client, "unknown")


async def test_prompt_logprobs_are_those_of_transformers(client, model_path):
    """`logprob_start_len`: what kills SGLang 0.5.12 on a CPU without the shim."""
    distribution = logprobs_of(model_path, PROMPT)[:-1]
    expected = distribution.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()

    reply = await client.generate(input_ids=PROMPT, sampling_params=GREEDY, logprob_start_len=0)
    (nothing, first, _), *rest = reply["meta_info"]["input_token_logprobs"]
    assert (nothing, first) == (None, PROMPT[0])
    assert [token for _, token, _ in rest] == PROMPT[1:]
    assert [logprob for logprob, _, _ in rest] == pytest.approx(expected, abs=1e-4)


async def test_abort_ends_requests_with_what_they_have(client):
    """Before it, their keys cannot be flushed."""
    async with in_flight(client) as request:
        with pytest.raises(InferenceError, match="/flush_cache: HTTP 400"):
            await client.flush_cache()
        await client.pause("abort")
        reply = await request
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < LONG["max_new_tokens"]


@pytest.mark.parametrize(("damage", "message"), [("no folder", ""), ("no weights", ".*weights")])
async def test_after_a_failed_update_the_old_version_stays_in_force(client, new_model, tmp_path, damage, message):
    broken = tmp_path / "broken"
    if damage != "no folder":
        shutil.copytree(new_model, broken)
        (broken / "model.safetensors").unlink()

    before = await greedy(client)
    with pytest.raises(InferenceError, match=rf"http://.*/update_weights_from_disk: HTTP 400: {message}"):
        await client.update_weights_from_disk(broken, "9")
    assert await client.weight_version() == "0"
    await client.flush_cache()
    assert await greedy(client) == before


async def test_a_call_that_takes_too_long_is_an_error(client, server):
    with pytest.raises(InferenceError, match=r"/generate: no answer within 0.2 s"):
        await SGLangClient(server, timeout=0.2).generate(input_ids=PROMPT, sampling_params=LONG)
