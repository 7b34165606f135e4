"""Every transport brings every tensor, or nothing that counts: real SGLang servers, the engine of rank 0 alone."""

import asyncio
import functools
import gc
import json
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import dynamic_module_utils

import helpers.pigeon_transport  # noqa: F401  (registers a fourth)
from helpers.checksums import can_checksum
from helpers.export import answers_of
from helpers.sglang import PROMPTS, call, greedy, make_tiny_model, running_sglang, version_of
from helpers.transports import LIMIT, engine, send, shared_memory, weights_of
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.utils.hosts import address_towards
from recipe.atropos.weight_sync import servers
from recipe.atropos.weight_sync.colocated import SharedMemory
from recipe.atropos.weight_sync.fleet import ServerFleet
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports import distributed

pytestmark = pytest.mark.timeout(240)

TRANSPORTS = ["disk", "distributed", "tensor"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name; of the tied ones, embedding and output layer are the same, and "old-tied" is served at first."""
    folder = tmp_path_factory.mktemp("models")
    return {
        f"{age}{kind}": make_tiny_model(folder / f"{age}{kind}", seed, family, tie_word_embeddings=bool(kind))
        for seed, age in enumerate(("old", "new"))
        for kind, family in (("", "qwen2"), ("-tied", "llama"))
    }


@pytest.fixture(scope="module")
def tied_server(models):
    log_path = models["old"].parent / "tied.log"
    with running_sglang(models["old-tied"], dtype="bfloat16", max_total_tokens=2048, log_path=log_path) as (_, url):
        yield url


@pytest.fixture
def version():
    """A version that no earlier push had."""
    return time.time_ns()


@functools.cache
def expected(model):
    return answers_of(model, PROMPTS, 12)


@pytest.mark.parametrize("transport", [*TRANSPORTS, "pigeon"])
@pytest.mark.parametrize("bucket_size", [200_000, pytest.param(1 << 29, marks=pytest.mark.slow)], ids=["many", "one"])
def test_the_server_computes_with_what_was_pushed(server, models, tmp_path, version, transport, bucket_size):
    pusher = engine([server], transport, tmp_path, bucket_size)
    others, kept = shared_memory(), []
    for i, model in enumerate(("new", "old", "new")):  # the second and third find group and buffers as they were left
        metrics = send(pusher, models[model], version + i)
        kept.append(shared_memory() - others)
        assert greedy(server) == expected(models[model]) and version_of(server) == str(version + i)
    assert metrics["weight_sync/bytes"] == sum(tensor.nbytes for _, tensor in weights_of(models["new"]))
    assert 0 < metrics["weight_sync/pause_s"] <= metrics["weight_sync/total_s"]
    assert kept[1] == kept[2] and bool(kept[2]) == (transport == "tensor")
    del pusher
    gc.collect()
    assert shared_memory() <= others


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_and_tied_embeddings_arrive_bit_for_bit(tied_server, models, tmp_path, version, transport):
    """The checksums are of bfloat16 tensors, so what was cast here is what is served."""
    pusher = engine([tied_server], transport, tmp_path, dtype="bfloat16")
    send(pusher, models["old-tied"], version)
    before = greedy(tied_server)
    metrics = send(pusher, models["new-tied"], version + 1)
    assert greedy(tied_server) != before and version_of(tied_server) == str(version + 1)
    assert metrics["weight_sync/bytes"] == sum(tensor.numel() * 2 for _, tensor in weights_of(models["new-tied"]))


def test_comparison_of_tensors_sees_a_corrupted_bucket(server, models, tmp_path, version):
    """What ``send`` asserts in every test of this file can fail."""
    if not can_checksum(server):
        pytest.skip("this server computes no checksums")
    pusher = engine([server], "tensor", tmp_path)
    fill = pusher._transport._buckets.of

    def damaged(weights):
        for bucket in fill(weights):
            dict(bucket.tensors()).get("model.layers.1.mlp.up_proj.weight", torch.zeros(1, 1))[0, 0] += 1
            yield bucket

    pusher._transport._buckets.of = damaged
    with pytest.raises(AssertionError, match=r"other values in \['model\.layers\.1\.mlp\.gate_up_proj\.weight'\]"):
        send(pusher, models["new"], version)
    send(engine([server], "tensor", tmp_path / "whole"), models["new"], version + 1)
    assert greedy(server) == expected(models["new"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stream_that_breaks_leaves_the_old_version_in_force(server, models, tmp_path, version, transport):
    def breaking():
        for i, pair in enumerate(weights_of(models["old"])):
            if i == 15:
                raise RuntimeError("out of memory, say")
            yield pair

    pusher = engine([server], transport, tmp_path)
    send(pusher, models["new"], version)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        asyncio.run(pusher.send_weights(breaking(), version + 1, [server]))
    assert version_of(server) == str(version), "half of the weights are no version"
    send(pusher, models["old"], version + 2)
    assert greedy(server) == expected(models["old"]) and version_of(server) == str(version + 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transport_refuses_a_server_of_another_model(server, models, tmp_path, version, transport):
    """Nothing has been sent to it by then."""
    send(engine([server], transport, tmp_path), models["new"], version)
    other = make_tiny_model(tmp_path / "other", seed=0, hidden_size=64)
    with pytest.raises(WeightPushError, match=f"{server} serves another model.*hidden_size=128, the trainer's is 64"):
        send(engine([server], transport, tmp_path, model_path=str(other)), other, version + 1)
    with pytest.raises(WeightPushError, match="dtype float32, inference.dtype is bfloat16"):
        half = engine([server], transport, tmp_path, model_path=str(models["new"]), dtype="bfloat16")
        send(half, models["new"], version + 1)
    assert greedy(server) == expected(models["new"]) and version_of(server) == str(version)
    send(engine([server], transport, tmp_path, model_path=str(models["old"])), models["old"], version + 1)


def test_transport_compares_a_model_with_trusted_code(server, models, tmp_path, version, monkeypatch):
    """The model has code of its own; without trust in it the push is refused."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = shutil.copytree(models["new"], tmp_path / "own")
    (own / "own.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
    )
    settings = json.loads((own / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (own / "config.json").write_text(json.dumps(settings))
    with pytest.raises(WeightPushError, match="trust_remote_code"):
        send(engine([server], "tensor", tmp_path, model_path=str(own)), models["new"], version)
    send(engine([server], "tensor", tmp_path, model_path=str(own), trust_remote_code=True), models["new"], version)
    settings["intermediate_size"] = 64
    (own / "config.json").write_text(json.dumps(settings))
    with pytest.raises(WeightPushError, match="intermediate_size=256, the trainer's is 64"):
        pusher = engine([server], "tensor", tmp_path, model_path=str(own), trust_remote_code=True)
        send(pusher, models["new"], version + 1)


def test_transport_names_a_folder_that_a_server_does_not_see(server, models, tmp_path, version):
    """The server's weights stay."""
    pusher = engine([server], "disk", tmp_path)
    send(pusher, models["new"], version)
    unseen = tmp_path / "of" / "another" / "machine"
    stage = pusher._transport.stage

    async def stage_elsewhere(*arguments):
        await stage(*arguments)
        pusher._transport.directory.rename(tmp_path / "here")
        pusher._transport.directory = unseen

    pusher._transport.stage = stage_elsewhere
    with pytest.raises(WeightPushError, match=f"on {server}.*Is {unseen} a folder that this server can read"):
        send(pusher, models["old"], version + 1)
    assert version_of(server) == str(version)
    call(server, lambda client: client.resume())
    assert greedy(server) == expected(models["new"])


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_transport_names_a_server_that_hangs_or_dies_in_a_push(server, models, tmp_path, version, monkeypatch):
    """By the transport in which all must take part in every bucket; the server joins again when it is back."""
    monkeypatch.setattr(servers, "_CLEANUP_SECONDS", 1.0)
    monkeypatch.setattr(distributed, "_ABANDON_SECONDS", 1.0)
    launch = {"max_total_tokens": 2048, "log_path": tmp_path / "second.log"}
    with running_sglang(models["old"], **launch) as (service, second):
        pusher = engine([server, second], "distributed", tmp_path, timeout=15)
        send(pusher, models["new"], version)
        port = int(second.rpartition(":")[2])

        def signalling(what):
            for i, pair in enumerate(weights_of(models["old"])):
                if i == 15:
                    for process in service.members():
                        process.send_signal(what)
                yield pair

        told, seconds = failure(pusher, signalling(signal.SIGSTOP), version + 1)
        assert f"in phase 'deliver' on {second}: " in told and "no answer within 15 s" in told
        assert seconds < 15 + 30, "one request's time, and some to tidy up"
        for process in service.members():
            process.send_signal(signal.SIGCONT)
        assert version_of(server) == str(version)
        send(pusher, models["new"], version + 2)
        assert greedy(second) == greedy(server) == expected(models["new"])

        told, seconds = failure(pusher, signalling(signal.SIGKILL), version + 3)
        assert re.search(f"in phase 'deliver' on .*{second}", told)
        assert seconds < 15, "nobody waits for it in vain"
        assert version_of(server) == str(version + 2)
        pusher.urls = [server]
        send(pusher, models["old"], version + 4)
        assert greedy(server) == expected(models["old"])

    with running_sglang(models["new"], port=port, **launch) as (service, second):
        pusher.urls = [server, second]
        send(pusher, models["old"], version + 5)
        assert greedy(second) == greedy(server) == expected(models["old"])

        # one that hangs before the group forms: the others, who wait for it, are let go
        scheduler = next(p for p in service.members() if "scheduler" in " ".join(p.cmdline()))

        def hangs(url):
            scheduler.suspend()
            return address_towards(url)

        monkeypatch.setattr(distributed, "JOIN_SECONDS", 2.0)
        monkeypatch.setattr(distributed, "address_towards", hangs)
        another = engine([server, second], "distributed", tmp_path, timeout=5)
        told, seconds = failure(another, weights_of(models["new"]), version + 6)
        assert told == f"weight push failed in phase 'join' on {second}: did not come within 2 s" and seconds < 10
        monkeypatch.setattr(distributed, "address_towards", address_towards)
        another.urls = [server]
        send(another, models["new"], version + 7)
        assert greedy(server) == expected(models["new"])


def failure(pusher, weights, version):
    """What a push says that fails, and after how many seconds."""

    async def inner():
        started = time.monotonic()
        with pytest.raises(WeightPushError) as error:
            await pusher.send_weights(weights, version, pusher.urls)
        return str(error.value), time.monotonic() - started

    return asyncio.run(inner())


@pytest.mark.slow
def test_requests_wait_while_a_server_is_offloaded(server, models, tmp_path, version):
    """They go on with the next weights."""
    if call(server, SGLangClient.capabilities).safe_pause_mode("auto") != "retract":
        pytest.skip("this server ends running requests when it is paused")
    mark = tmp_path / "lent"
    memory = SharedMemory(ServerFleet([server], None, timeout=LIMIT), "auto", mark)
    pusher = engine([server], "tensor", tmp_path, colocated=True)
    send(pusher, models["old"], version)
    memory.resume([server])
    parameters = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
    request = functools.partial(SGLangClient.generate, input_ids=PROMPTS[0], sampling_params=parameters)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(call, server, request, 120)
        time.sleep(0.5)
        memory.release([server])
        arriving = threads.submit(call, server, request, 120)
        time.sleep(1.5)
        assert not running.done() and not arriving.done()
        memory.resume_weights(version + 1)
        assert memory.without_cache.keys() == {server} and mark.exists()
        send(pusher, models["new"], version + 1)
        time.sleep(0.5)
        assert not running.done() and not arriving.done(), "its cache comes first"
        memory.resume_caches()
        memory.resume([server])
        assert not memory.without_cache and not mark.exists()
        spans = [
            [span["version"] for span in each.result()["meta_info"]["weight_versions"]] for each in (running, arriving)
        ]
    assert spans == [[str(version), str(version + 1)], [str(version + 1)]]
    assert greedy(server) == expected(models["new"])

    memory.released = {server: "of a process that is no more", "http://127.0.0.1:1": "1"}
    memory.resume_weights()
    memory.resume_caches()  # SGLang dies of memory given back that was not taken
    assert greedy(server) == expected(models["new"]) and not memory.released


@pytest.mark.parametrize(
    ("transport", "flag", "said"),
    [
        ("disk", "pp_size", "goes on generating while it is paused: start it with tp_size"),
        ("tensor", "dp_size", "takes no handles: start several servers instead, or set .*transport=disk"),
        ("distributed", "dp_size", "joins no group: start several servers instead, or set .*transport=disk"),
    ],
)
def test_transport_refuses_a_server_that_cannot_be_paused(
    server, models, tmp_path, version, monkeypatch, transport, flag, said
):
    """The same goes for one that cannot be given weights; nothing is sent."""
    capabilities = SGLangClient.capabilities

    async def with_flag(client, **options):
        found = await capabilities(client, **options)
        return replace(found, arguments=found.arguments | {flag: 2})

    before = version_of(server), greedy(server)
    monkeypatch.setattr(SGLangClient, "capabilities", with_flag)
    told, _ = failure(engine([server], transport, tmp_path), weights_of(models["new"]), version)
    assert re.search(f"{server} runs with {flag}=2, and such a server {said}", told)
    assert (version_of(server), greedy(server)) == before
