"""The transports without a server: buckets, handles, and what is refused."""

import asyncio
import base64
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tenacity import stop_after_attempt
from torch.multiprocessing import reductions

import helpers.pigeon_transport  # noqa: F401  (registers it)
from helpers.disk import size_limit
from helpers.sglang import make_tiny_model
from helpers.trainer import compose_config
from helpers.transports import Allocations, engine, send, shared_memory
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.utils.hosts import address_towards, is_this_host
from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports import tensor
from recipe.atropos.weight_sync.transports.bucket import Bucket, Buckets
from recipe.atropos.weight_sync.transports.disk import DiskTransport
from recipe.atropos.workers.actor import engine_settings

pytestmark = pytest.mark.timeout(240)


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """A limit on the size of files stands for it: writing fails in the middle."""
    models = [make_tiny_model(tmp_path / name, seed) for seed, name in enumerate(("old", "new"))]
    pusher = engine([], "disk", tmp_path)
    send(pusher, models[0], 1)
    folder = tmp_path / "weights" / "weight_versions"
    told = f"cannot be written to {folder}: .*make room"
    with size_limit(150_000), pytest.raises(WeightPushError, match=told):
        send(pusher, models[1], 2)
    assert [path.name for path in folder.glob("[!.]*")] == ["version_1"]
    send(pusher, models[1], 3)
    assert [path.name for path in folder.glob("[!.]*")] == ["version_3"]


def test_a_folder_that_another_run_pushes_through_is_refused(tmp_path, monkeypatch):
    """Its version 1 would be loaded as this run's, or removed before the servers have read it."""
    monkeypatch.setattr(DiskTransport._take_folder.retry, "stop", stop_after_attempt(2))
    model, folder = make_tiny_model(tmp_path / "model", 0), tmp_path / "weights" / "weight_versions"
    first, second = engine([], "disk", tmp_path), engine([], "disk", tmp_path)
    send(first, model, 1)
    with pytest.raises(WeightPushError, match=f"cannot be written to {folder}: another run has it"):
        send(second, model, 1)
    send(first, model, 2)
    del first
    send(second, model, 3)
    assert [path.name for path in folder.glob("[!.]*")] == ["version_3"]


def test_a_push_removes_nothing_that_no_push_has_written(tmp_path):
    """The folder given may be the user's own, where Lightning writes ``version_0``."""
    pusher, model = engine([], "disk", tmp_path), make_tiny_model(tmp_path / "model", 0)
    kept = [tmp_path / "weights" / name for name in ("version_0", "version_1", "weight_versions/version_1-backup")]
    for folder in kept:
        folder.mkdir(parents=True)
        (folder / "metrics.csv").touch()
    send(pusher, model, 1)
    send(pusher, model, 2)
    assert all((folder / "metrics.csv").exists() for folder in kept)
    written = {path.name for path in (tmp_path / "weights" / "weight_versions").glob("[!.]*")}
    assert written == {"version_1-backup", "version_2"}


def test_the_engines_defaults_are_the_configurations_own():
    configured = engine_settings(load_config(["actor_rollout_ref.model.path=m", "inference.colocated=false"]))
    parameters = inspect.signature(AtroposCheckpointEngine).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default not in (p.empty, None)}
    assert "pause_mode" in defaults and "trust_remote_code" in defaults
    assert {name: configured[name] for name in defaults} == defaults
    assert configured.keys() == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_memory_is_shared_with_servers_of_this_machine_alone(tmp_path):
    pusher = engine(["http://192.0.2.1:9"], "tensor", tmp_path)
    with pytest.raises(WeightPushError, match=r"http://192\.0\.2\.1:9 is on another machine.*transport=distributed"):
        asyncio.run(pusher._transport.stage([SGLangClient("http://192.0.2.1:9")], iter(()), 1))
    assert is_this_host("http://127.0.0.1:8000") and is_this_host("http://localhost:8000/v1")
    assert not is_this_host("http://192.0.2.1:8000") and not is_this_host("http://no.such.host.invalid")
    assert address_towards("http://127.0.0.1:1") == "127.0.0.1"


@pytest.mark.parametrize("user", ["expandable_segments: True,max_split_size_mb:64", "max_split_size_mb:64"])
def test_gpu_buffers_are_no_expandable_segments(monkeypatch, user):
    """Without a GPU: what torch's allocator is told, and when."""
    told, transport = [], tensor.TensorTransport(bucket_size=64)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", user)
    monkeypatch.setattr(tensor, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(tensor, "get_device_id", lambda: "meta")
    monkeypatch.setattr(tensor, "set_expandable_segments", told.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **how: told.append(how["device"]))
    transport._allocate(64)
    assert told == ([False, "meta", True] if "expandable" in user else ["meta"])


def test_handles_go_by_name_also_while_another_thread_allocates():
    """A server dies of a handle that is a file descriptor."""
    transport = tensor.TensorTransport(bucket_size=64)
    bucket = next(Buckets(64, transport._allocate).of(iter([("t", torch.ones(4))])))
    with ThreadPoolExecutor() as threads:
        allocating = threads.submit(lambda: [transport._allocate(64) for _ in range(2000)])
        handles = [base64.b64decode(tensor._handles(bucket)) for _ in range(2000)]
        allocating.result()
    assert all(b"rebuild_storage_filename" in each for each in handles)


class OnGPU(torch.Tensor):
    """Says that it is on a GPU; there is none here."""

    is_cuda = True


def test_handles_of_a_gpu_name_its_uuid(monkeypatch):
    """The trainer's rank sees its GPU as number 0, and so may a server another one."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[tensor._DEVICE_INDEX] == "storage_device"
    arguments = tuple(0 if name == "storage_device" else name for name in names)
    monkeypatch.setattr(tensor, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    bucket = Bucket(torch.ones(5).as_subclass(OnGPU), ["a", "b"], [torch.Size([2]), torch.Size([3, 1])])

    handles, opened = base64.b64decode(tensor._handles(bucket)), {}
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *given: opened.update(zip(names, given, strict=True)))
    entries = [vars(entry) for entry in pickle.loads(handles)["metadata"]]
    assert [(e["name"], e["start_idx"], e["end_idx"], e["numel"]) for e in entries] == [("a", 0, 2, 2), ("b", 2, 5, 3)]
    assert [e["shape"] for e in entries] == bucket.shapes and all(e["dtype"] == torch.float32 for e in entries)
    assert opened["storage_device"] == "GPU-0"
    assert all(opened[key] == key for key in names if key != "storage_device")


def test_shared_memory_left_by_a_dead_server_goes_with_a_push():
    others = shared_memory()
    transport = tensor.TensorTransport(bucket_size=1 << 20)
    for bucket in transport._buckets.of(iter([("a", torch.ones(1000)), ("b", torch.ones(300_000))])):
        tensor._handles(bucket)  # and nobody opens it
    transport._sweep()
    assert len(shared_memory() - others) == 2, "not while they are in use"
    del bucket
    transport._buckets.drop()
    asyncio.run(transport.stage([], iter(()), 1))
    assert shared_memory() <= others


@pytest.mark.parametrize(
    ("wanted", "urls", "made"),
    [
        ("auto", ["http://127.0.0.1:1", "http://localhost:2"], "TensorTransport"),
        ("auto", ["http://127.0.0.1:1", "http://192.0.2.1:2"], "DistributedTransport"),
        ("disk", ["http://192.0.2.1:2"], "DiskTransport"),
    ],
)
def test_transport_auto_takes_shared_memory_where_it_can(tmp_path, wanted, urls, made):
    assert type(engine(urls, wanted, tmp_path)._transport).__name__ == made


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([torch.float32, torch.bfloat16, torch.int64])), max_size=25),
    st.integers(1, 300),
)
def test_buckets_hold_each_tensor_once_and_take_two_buffers(tensors, size):
    """The tensors keep their order."""
    weights = [(f"t{i}", torch.randn(n, 2).to(dtype)) for i, (n, dtype) in enumerate(tensors)]
    allocated, seen, last = Allocations(), [], []
    buckets = Buckets(size, allocated)
    for bucket in buckets.of(iter(weights)):
        seen += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
        last.append(bucket.last)
    assert [name for name, _ in seen] == [name for name, _ in weights]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(seen, weights, strict=True))
    assert last == [False] * (len(last) - 1) + [True] * bool(last)
    largest = max([size, *(tensor.nbytes for _, tensor in weights)])
    assert all(n_bytes <= largest for n_bytes in allocated)
    assert sum(len(buffer) for buffer in buckets._buffers) <= 2 * largest


MODEL = ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"]
PIGEON = "trainer.atropos.weight_sync.transport=pigeon"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([PIGEON], None),
        ([PIGEON, "inference.colocated=true"], "transport=pigeon: set it to auto"),
        (["trainer.atropos.weight_sync.transport=dove"], "transport=dove; choose one of auto, disk, distributed, "),
    ],
    ids=["known", "refused", "unknown"],
)
def test_a_new_transport_is_known_by_its_file_and_checks(overrides, told):
    config = compose_config(*MODEL, *overrides)
    if told is None:
        check_config(config)
        return
    with pytest.raises(ConfigurationError, match=told):
        check_config(config)
