"""The order of a push, and what is left after one that failed: against stubs that a test holds to the real server."""

import asyncio
import base64
import gc
import re
from pathlib import Path

import pytest
import torch

from helpers.stub_sglang import stub_servers
from helpers.transports import Allocations
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.push import push
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports.bucket import Buckets, filled_ahead, in_thread, send_in_buckets
from recipe.atropos.weight_sync.transports.disk import DiskTransport
from recipe.atropos.weight_sync.transports.tensor import TensorTransport

pytestmark = pytest.mark.timeout(60)

WEIGHTS = {"a.weight": torch.arange(6.0), "b.weight": torch.ones(2, 2)}
PUSHED = ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/model_info", "/continue_generation"]


def pushed(tmp_path, *, before=lambda servers: None, transport=None, weights=WEIGHTS, version=7):
    """Push to two stubs, the second of which is slower; (servers, metrics or the WeightPushError, the transport)."""
    transport = transport or DiskTransport(directory=tmp_path / "weights", bucket_size=1 << 20)

    async def run():
        async with stub_servers(2) as servers:
            clients = [SGLangClient(server.url, timeout=20) for server in servers]
            servers[1].delays = dict.fromkeys(PUSHED, 0.05)
            before(servers)
            try:
                return servers, await push(clients, transport, iter(weights.items()), version, "retract")
            except WeightPushError as error:
                return servers, error

    return *asyncio.run(run()), transport


def calls_to(servers, endpoint):
    """Places among all calls, and bodies."""
    found = [(i, body) for i, (_, called, body) in enumerate(servers[0].calls) if called == endpoint]
    return [i for i, _ in found], [body for _, body in found]


@pytest.fixture
def old(tmp_path):
    """The folder of the version before."""
    folder = tmp_path / "weights" / "weight_versions" / "version_6"
    folder.mkdir(parents=True)
    return folder


def test_push_does_each_phase_on_all_servers_before_the_next(tmp_path, old):
    """Then, not before, the version before is released."""
    servers, metrics, transport = pushed(tmp_path)
    assert not old.exists() and transport.path(7).exists()
    assert [server.endpoints for server in servers] == [PUSHED, PUSHED]
    places = [calls_to(servers, endpoint)[0] for endpoint in PUSHED]
    assert all(max(earlier) < min(later) for earlier, later in zip(places, places[1:], strict=False))
    assert [(server.version, server.paused) for server in servers] == [("7", False)] * 2
    assert calls_to(servers, "/pause_generation")[1] == [{"mode": "retract"}] * 2
    assert all(body["flush_cache"] is False for body in calls_to(servers, "/update_weights_from_disk")[1])
    assert metrics["weight_sync/version"] == 7 and metrics["weight_sync/bytes"] == 6 * 4 + 4 * 4


@pytest.mark.parametrize("endpoint", PUSHED)
@pytest.mark.parametrize("failing", [0, 1])
def test_push_that_fails_names_the_server_and_resumes_none(tmp_path, old, endpoint, failing):
    phases = dict(zip(PUSHED, ("pause", "deliver", "flush", "verify", "resume"), strict=True))

    def break_one(servers):
        servers[failing].failures = {endpoint: 500}
        if endpoint == "/model_info":
            servers[failing].failures, servers[failing].reported = {}, "68"[failing]

    servers, error, _ = pushed(tmp_path, before=break_one)
    assert isinstance(error, WeightPushError) and f"'{phases[endpoint]}' on {servers[failing].url}" in str(error)
    assert servers[1 - failing].url not in str(error)
    if endpoint == "/model_info":
        assert f"reports weight version '{'68'[failing]}' after a push of 7" in str(error)
    assert endpoint == PUSHED[-1] or not calls_to(servers, "/continue_generation")[0]
    done = PUSHED[: PUSHED.index(endpoint) + 1]
    assert all(server.endpoints == done for server in servers), "no later phase was begun"
    assert old.exists(), "what was staged before goes only after a push that succeeded"


def test_memory_of_a_push_that_failed_is_not_filled_again(tmp_path):
    """A server may still read there."""
    transport, named, refused = TensorTransport(bucket_size=64), [], {"/update_weights_from_tensor": 500}
    for _ in range(2):
        servers, error, _ = pushed(tmp_path, before=lambda s: s[0].failures.update(refused), transport=transport)
        assert f"'deliver' on {servers[0].url}" in str(error)
        bodies = calls_to(servers, "/update_weights_from_tensor")[1]
        handles = [base64.b64decode(body["serialized_named_tensors"][0]) for body in bodies]
        named.append({re.search(rb"atropos-[a-z0-9_]{8}-\d+-\d+", handle)[0].decode() for handle in handles})
    assert named[0] and named[1] and not named[0] & named[1]
    del error  # its frames hold the memory, in a cycle
    gc.collect()
    asyncio.run(transport.stage([], iter(()), 9))
    assert not any(Path("/dev/shm", name).exists() for name in named[0] | named[1])


class Unpaused:
    """A transport that stages 0.1 s and delivers 0.2 s; ``pauses`` as told."""

    def __init__(self, pauses):
        self.pauses, self.events = pauses, []

    async def stage(self, clients, weights, version):
        self.events.append(("stage", version, [name for name, _ in weights]))
        await asyncio.sleep(0.1)

    async def deliver(self, clients, version):
        self.events.append(("deliver", version))
        await asyncio.sleep(0.2)
        await asyncio.gather(*(c.post("/update_weight_version", {"new_version": str(version)}) for c in clients))

    def release(self, version):
        self.events.append(("release", version))


@pytest.mark.parametrize("pauses", [True, False])
def test_push_pauses_and_flushes_only_where_the_transport_pauses(tmp_path, pauses):
    servers, metrics, transport = pushed(tmp_path, transport=Unpaused(pauses))
    asked = ["/pause_generation"] * pauses + ["/update_weight_version"] + ["/flush_cache"] * pauses
    assert all(server.endpoints == [*asked, "/model_info", "/continue_generation"] for server in servers)
    assert transport.events == [("stage", 7, [*WEIGHTS]), ("deliver", 7), ("release", 7)]
    seconds = {key.removeprefix("weight_sync/"): value for key, value in metrics.items()}
    pause = 0.05 * pauses
    assert seconds["stage_s"] >= 0.1 and seconds["deliver_s"] >= 0.2 + pause
    assert seconds["total_s"] >= seconds["stage_s"] + seconds["deliver_s"] + 0.1 + pause  # verify, resume, flush
    if pauses:
        assert seconds["pause_s"] == pytest.approx(seconds["total_s"] - seconds["stage_s"], abs=1e-6)
    else:
        assert seconds["pause_s"] == 0


# -- buckets ---------------------------------------------------------------------------------------------------------


def two_buffers():
    return Buckets(16, Allocations())


def test_buckets_are_sent_one_at_a_time_while_the_next_is_filled():
    """So two buffers suffice: a third bucket is filled only when the first has been sent."""
    events, sent, sending = [], [], 0

    def weights():
        for i in range(5):
            events.append(f"fill {i}")
            yield f"t{i}", torch.full((4,), float(i))

    async def send(bucket):
        nonlocal sending
        sending += 1
        assert sending == 1, "two buckets at once"
        names = list(bucket.names)
        events.append(f"send {names[0]}")
        async with asyncio.timeout(20):
            while f"fill {min(int(names[0][1:]) + 2, 4)}" not in events:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert bucket.names == names
        sent.extend((name, tensor.tolist()) for name, tensor in bucket.tensors())
        events.append(f"sent {names[0]}")
        sending -= 1

    asyncio.run(send_in_buckets(two_buffers().of(iter(())), send))
    assert not sent, "of nothing"
    asyncio.run(send_in_buckets(two_buffers().of(weights()), send))
    assert sent == [(f"t{i}", [float(i)] * 4) for i in range(5)]
    for i in range(3):  # t(i + 2) is known when bucket i + 1 is filled: one look ahead tells which bucket is the last
        assert events.index(f"fill {i + 2}") < events.index(f"sent t{i}"), "filled while another is sent"
        assert events.index(f"sent t{i}") < events.index(f"send t{i + 1}")


def test_buckets_of_later_pushes_are_no_larger_than_all_weights():
    allocated = Allocations()
    buckets = Buckets(1000, allocated)
    for _ in range(3):
        (bucket,) = buckets.of(iter([("a", torch.ones(3)), ("b", torch.ones(4))]))
        assert bucket.last and len(bucket.flat) == 7 and bucket.dtype == "float32"
    assert allocated == [1000, 28], "the third push finds the second's"
    mixed = buckets.of(iter([("a", torch.ones(1)), ("b", torch.ones(1).bfloat16())]))
    assert [bucket.dtype for bucket in mixed] == ["float32", "bfloat16"]
    weights = [(f"t{i}", torch.full((n,), float(i))) for i, n in enumerate((250, 200, 500, 250, 250, 500))]
    allocated = Allocations()
    buckets = Buckets(1000, allocated)
    for _ in range(2):  # the second push finds the first one's
        for bucket in buckets.of(iter(weights)):
            (name, tensor) = bucket.tensors()[0]
            assert torch.equal(tensor, dict(weights)[name])
        assert sorted(allocated) == [1000, 1000, 2000, 2000], "one larger for each larger tensor, none otherwise"


@pytest.mark.parametrize("size", [40, 64, 100, 1000])
def test_buckets_hold_a_layers_attention_together(size):
    """Of DeepSeek's q_a_proj and kv_a_proj_with_mqa in two requests SGLang loads neither."""
    attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    parts = ["input_layernorm", *(f"self_attn.{part}" for part in attention), "mlp.gate_proj", "mlp.up_proj"]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(12) for part in parts]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight"]
    weights = {name: torch.full((2 + i % 3,), float(i)) for i, name in enumerate(names)}
    found = []
    for bucket in Buckets(size, Allocations()).of(iter(weights.items())):
        found.append(bucket.names)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in bucket.tensors())
        used = bucket.flat.nbytes
        assert used <= size or {name.rpartition(".self_attn.")[0] for name in bucket.names} != {""}
    assert [name for each in found for name in each] == names
    for layer in range(12):
        mine = [each for each in found if any(f".{layer}.self_attn." in name for name in each)]
        assert len(mine) == 1


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_buckets_end_with_the_error_of_one_that_cannot_be_sent(where):
    failing = {"first": "t0", "middle": "t2", "last": "t4"}[where]
    begun = []

    async def send(bucket):
        begun.append(bucket.names[0])
        await asyncio.sleep(0.01)
        if bucket.names[0] == failing:
            raise WeightPushError("no room")

    weights = ((f"t{i}", torch.ones(4)) for i in range(5))
    with pytest.raises(WeightPushError, match="no room"):
        asyncio.run(send_in_buckets(two_buffers().of(weights), send))
    assert begun[-1] == failing


def test_buckets_cancel_a_send_when_the_next_cannot_be_filled():
    ended = []

    def weights():
        yield "t0", torch.ones(4)
        yield "t1", torch.ones(4)
        raise OSError("a rank died")

    async def send(bucket):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(bucket.names)

    async def run():
        with pytest.raises(OSError, match="a rank died"):
            await send_in_buckets(two_buffers().of(weights()), send)
        assert ended == [["t0"]] and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_both_buffers_are_filled_before_anything_is_sent():
    asked = []

    def weights():
        for i in range(4):
            asked.append(i)
            yield f"t{i}", torch.ones(4, requires_grad=True) * i

    async def run():
        filled = await filled_ahead(two_buffers().of(weights()))
        assert asked == [0, 1, 2], "one look ahead tells whether the second is the last"
        assert [bucket.names for bucket in filled] == [["t0"], ["t1"], ["t2"], ["t3"]]
        assert list(await filled_ahead(iter(()))) == []
        assert not await in_thread(torch.is_grad_enabled)

    asyncio.run(run())
