"""A LoRA adapter pushed by itself: real workers, two servers behind the real gateway, of which the second is lost after
the first push and comes back after the last, and one that merged weights are pushed to, to compare with. What the
gateway does is in ``test_gateway.py`` too."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import torch

from helpers.lora import RANK, make_trainer, scored_batch, update
from helpers.sglang import call, wait_healthy
from helpers.trainer import close, compose_config
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.inference.lora_routing import ADAPTERS_KEPT
from recipe.atropos.inference.server import SGLangLaunch, start_sglang
from recipe.atropos.launcher.sglang import lora_arguments
from recipe.atropos.utils.process import free_port, start_service
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports.lora_adapter import AdapterTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Of each pair that SGLang computes together one part only, and one layer by itself.
TARGETS = "[q_proj,up_proj,down_proj]"
ADAPTER_ONLY = ("actor_rollout_ref.model.lora.merge=false", "trainer.atropos.weight_sync.transport=auto")
PROMPT = list(range(3, 90))  # long enough to be kept in a cache


@dataclass
class Servers:
    """``a`` and ``b`` take adapters, behind ``gateway``; both are there at first."""

    urls: dict[str, str]
    gateway: str
    start: Callable[[str], None]
    stop: Callable[[str], None]


@pytest.fixture(scope="module")
def servers(model_path, tmp_path_factory):
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}",
        f"actor_rollout_ref.model.lora_rank={RANK}",
        f"actor_rollout_ref.model.target_modules={TARGETS}",
        *ADAPTER_ONLY,
    )
    flags = {"max_total_tokens": 16384, **lora_arguments(config.actor_rollout_ref.model)}
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in "ab"}
    folder, services = tmp_path_factory.mktemp("logs"), {}
    with contextlib.ExitStack() as stack:

        def start(name):
            port = int(urls[name].rsplit(":", 1)[1])
            options = {"device": "cpu", "dtype": "float32", "extra_args": flags}
            services[name] = start_sglang(SGLangLaunch(str(model_path), port=port, **options), log_path=folder / name)
            stack.callback(services[name].stop, grace=2)

        for name in urls:
            start(name)
        port = free_port()
        command = [sys.executable, "-m", "recipe.atropos.inference.gateway", "--port", str(port), "--servers"]
        gateway = start_service("gateway", [*command, ",".join(urls.values())], log_path=folder / "gateway")
        stack.callback(gateway.stop, grace=2)
        for url in urls.values():
            call(url, wait_healthy, timeout=250)
        yield Servers(urls, f"http://127.0.0.1:{port}", start, lambda name: services[name].stop(grace=2))


@pytest.fixture(scope="module")
def trainer(model_path, servers, cluster, tmp_path_factory):
    options = [*ADAPTER_ONLY, f"inference.gateway={servers.gateway}", "trainer.atropos.weight_sync.verify=probe"]
    folder, urls = tmp_path_factory.mktemp("run"), ",".join(servers.urls.values())
    trainer = make_trainer(model_path, urls, folder, "fsdp2", 2, TARGETS, *options)
    yield trainer
    close(trainer)


async def greedy(client, **fields):
    parameters = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    return await client.generate(input_ids=PROMPT, sampling_params=parameters, **fields)


def logprobs_of(url, tokens, **fields):
    """What a server computes for given tokens, (n - 1,)."""
    ask = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 0, **fields}
    reply = call(url, lambda client: client.generate(**ask))
    return torch.tensor([value for value, *_ in reply["meta_info"]["input_token_logprobs"][1:]])


class Running(threading.Thread):
    """One long request for two answers, from before a push until after it."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.replies = url, []
        self.start()

    def run(self):
        parameters = {"max_new_tokens": 1500, "n": 2, "ignore_eos": True}
        self.replies = call(
            self.url, lambda client: client.generate(input_ids=[5, 6, 7], sampling_params=parameters), timeout=120
        )


@dataclass
class Story:
    """What was seen of pushes of the versions 0, 1 and 2, before and after each."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    greedy: list[list[dict[str, Any]]] = field(default_factory=list)  # the same request twice
    across: dict[int, Running] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(trainer, servers):
    story, word = Story(), GatewayClient(servers.gateway)
    for version in (0, 1, 2):
        if version:
            update(trainer, batch, version)  # noqa: F821
            story.across[version] = Running(servers.gateway)
            while not any(server["inflight"] for server in word.status()["servers"]):
                assert story.across[version].is_alive()
                time.sleep(0.01)
            time.sleep(0.2)
        story.metrics.append(trainer.checkpoint_manager.update_weights(version))
        assert not version or story.across[version].is_alive(), "it was not across the push"
        if not version:
            servers.stop("b")
            assert trainer.checkpoint_manager.ensure_current(0) == {"weight_sync/servers_removed": 1}
        story.names.append(word.status()["adapter"])
        story.greedy.append([call(servers.gateway, greedy) for _ in range(2)])
        batch, gap = scored_batch(trainer, servers.gateway, version + 1)
        story.gaps.append(gap)
    for request in story.across.values():
        request.join(timeout=120)
    return story


def test_adapter_of_the_first_push_changes_no_logprob(story, servers):
    def logprobs(replies):
        return [reply["meta_info"]["output_token_logprobs"] for reply in replies]

    base = [call(servers.urls["a"], greedy) for _ in range(2)]
    assert logprobs(story.greedy[0]) == logprobs(base) != logprobs(story.greedy[1])


def test_adapter_is_used_by_requests_that_name_none(story):
    """After each push they are sampled with the trainer's logprobs."""
    assert max(story.gaps) < 1e-4 and max(m["weight_sync/probe_gap"] for m in story.metrics) < 1e-4
    for version, replies in enumerate(story.greedy):
        for reply in replies:
            said = reply["meta_info"]
            assert said["weight_version"] == str(version)
            assert said["weight_versions"] == [{"version": str(version), "start": 0, "end": 24}]


def test_the_bytes_of_the_adapter_are_all_that_is_sent(story):
    qkv, gate_up, down = 3 * RANK * 128 + RANK * (128 + 64 + 64), 2 * RANK * (128 + 256), RANK * (256 + 128)
    for metrics in story.metrics:
        assert metrics["weight_sync/bytes"] == 4 * 2 * (qkv + gate_up + down)
        assert metrics["weight_sync/pause_s"] == 0


def test_no_key_of_one_adapter_is_used_with_another(story):
    for first, second in story.greedy:
        assert first["meta_info"]["cached_tokens"] == 0
        assert second["meta_info"]["cached_tokens"] == len(PROMPT) - 1, "its own keys are"


def test_adapter_of_a_request_stays_while_another_is_pushed(story, servers):
    """The request goes on with its adapter, and says its version."""
    for version, request in story.across.items():
        old, new = story.names[version - 1 : version + 1]
        for reply in request.replies:
            said = reply["meta_info"]
            assert said["finish_reason"]["type"] == "length"
            assert said["weight_versions"] == [{"version": str(version - 1), "start": 0, "end": 1500}]
        tokens = [5, 6, 7, *reply["output_ids"]]
        sampled = torch.tensor([value for value, *_ in said["output_token_logprobs"]])
        url = servers.urls["a"]
        assert (logprobs_of(url, tokens, lora_path=old)[2:] - sampled).abs().max() < 1e-3
        assert (logprobs_of(url, tokens, lora_path=new)[2:] - sampled).abs().max() > 1e-2


def test_the_adapter_gives_what_a_merged_push_of_it_gives(story, trainer, servers, server):
    def push_merged(worker, url):
        from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine

        weights = worker.actor.engine._pushed(adapter_only=False)
        merged = AtroposCheckpointEngine(1 << 26, worker.rank == 0, urls=[url], transport="tensor", dtype="float32")
        return asyncio.run(merged.send_weights(weights, 2, [url]))

    workers = trainer.actor.workers
    ray.get([worker.__ray_call__.remote(push_merged, server) for worker in workers])
    tokens = [*PROMPT, *story.greedy[2][0]["output_ids"]]
    alone, merged = logprobs_of(servers.gateway, tokens), logprobs_of(server, tokens)
    assert (alone - merged).abs().max() < 1e-4
    assert (alone - logprobs_of(servers.urls["a"], tokens)).abs().max() > 1e-2, "of the base model"


def test_adapter_is_not_pushed_to_servers_that_cannot_take_it(story, trainer, servers, server):
    """They are refused before anything is sent."""
    workers, url = trainer.actor, servers.urls["a"]
    before = call(url, SGLangClient.adapters), call(url, SGLangClient.weight_version)
    with pytest.raises(ray.exceptions.RayTaskError, match=f"{server}.*start it with --enable-lora"):
        ray.get(workers.update_weights(9, [url, server], "policy-9-refused"))
    assert before == (call(url, SGLangClient.adapters), call(url, SGLangClient.weight_version))

    async def staged(client, rank, layer):
        transport = AdapterTransport(None, proven=False)
        transport.adapter = "policy-9-refused"
        tensors = {f"layers.0.{layer}.lora_A.weight": torch.zeros(rank, 4)}
        await transport.stage([client], iter(tensors.items()), 9)

    call(url, lambda client: staged(client, RANK, "gate_proj"))
    for rank, layer in ((RANK + 1, "gate_proj"), (RANK, "o_proj")):
        with pytest.raises(WeightPushError, match=f"max-lora-rank {rank} --lora-target-modules {layer}"):
            call(url, lambda client, rank=rank, layer=layer: staged(client, rank, layer))


def test_adapter_needs_servers_with_the_trainers_base_weights(story, model_path, servers):
    def check(name, path, proven=False):
        call(servers.urls[name], AdapterTransport(str(path), proven).check_server)

    check("a", model_path.parent / "." / model_path.name)
    check("a", "/another/model", proven=True)
    with pytest.raises(WeightPushError, match=f"serves {model_path}, the trainer's base model is /another/model"):
        check("a", "/another/model")


def test_adapter_reaches_a_new_server_before_its_first_request(story, trainer, servers):
    manager, word = trainer.checkpoint_manager, GatewayClient(servers.gateway)

    def seen(name):
        return next(server for server in word.status()["servers"] if server["url"] == servers.urls[name])

    assert manager.ensure_current(2) == {"weight_sync/servers_removed": 1}
    servers.start("b")
    deadline = time.monotonic() + 200
    while "weight_sync/servers_readmitted" not in (metrics := manager.ensure_current(2)):
        assert seen("b")["requests"] == 0 and seen("b")["state"] != "admitted"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert metrics["weight_sync/servers_readmitted"] == 1
    assert word.serves() == (2, {*manager.fleet.urls}, story.names[2])
    for _ in range(4):
        assert call(servers.gateway, greedy)["output_ids"] == story.greedy[2][0]["output_ids"]
    assert seen("b")["requests"] == 4, "whoever has had the fewest is next"

    # no server keeps more than it was started for, and a version that is pushed again is another adapter
    names = set(story.names)
    for pushes, version in enumerate([3, 4, 5, 6, 6], start=len(names) + 1):
        manager.update_weights(version)
        names.add(word.status()["adapter"])
        assert len(names) == pushes
        held = [call(servers.urls[name], SGLangClient.adapters) for name in "ab"]
        assert all(word.status()["adapter"] in names for names in held) and len(held[0]) == ADAPTERS_KEPT
