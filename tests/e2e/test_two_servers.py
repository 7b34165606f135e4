"""One push, two real servers behind the gateway that the trainer starts: who has the version gets requests."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from helpers.checksums import assert_serves
from helpers.gateway import AsPushBegins
from helpers.services import running_api
from helpers.sglang import call, greedy, make_tiny_model, running_sglang, version_of
from helpers.trainer import fit_on, model_vocab, random_group, running, trainer_config
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def second_server(other_model):
    """A service of this module alone, and its URL: some tests harm it."""
    with running_sglang(other_model, max_total_tokens=2048) as (service, url):
        yield service, url


@pytest.fixture(scope="module")
def urls(server, second_server, other_model):
    """Of two servers with other random weights than the trainer begins with."""
    call(server, lambda client: client.update_weights_from_disk(other_model, "default"))
    return [server, second_server[1]]


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes in this machine, each with room for one rank of two trainers, and their own tasks."""
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def trainer(two_nodes, model_path, urls, tmp_path_factory):
    limits = ["trainer.atropos.weight_sync.timeout=8", "trainer.atropos.weight_sync.verify=probe"]
    with running(trainer_config(model_path, tmp_path_factory.mktemp("run"), urls, *limits)) as trainer:
        yield trainer


def send(service, what):
    for process in service.members():
        process.send_signal(what)


def admitted(trainer):
    return GatewayClient(trainer.config.inference.gateway).serves()[:2]


def test_push_reaches_both_servers_or_those_that_answer(trainer, urls, second_server):
    """Those alone get requests."""
    (first, second), (service, _) = urls, second_server
    manager = trainer.checkpoint_manager
    assert greedy(first) == greedy(second)
    before = greedy(first)
    metrics = manager.update_weights(1)
    assert metrics["weight_sync/probe_gap"] < 1e-4
    assert version_of(first) == version_of(second) == "1" and admitted(trainer) == (1, {first, second})
    after = greedy(first)
    assert after == greedy(second) == greedy(trainer.config.inference.gateway) != before

    send(service, signal.SIGSTOP)  # it is there, and answers nothing
    try:
        assert manager.update_weights(2)["weight_sync/servers_removed"] == 1
        assert manager.version == 2 and version_of(first) == "2" and admitted(trainer) == (2, {first})
    finally:
        send(service, signal.SIGCONT)
    assert manager.ensure_current(2)["weight_sync/servers_readmitted"] == 1
    assert version_of(second) == "2" and admitted(trainer) == (2, {first, second})


def test_push_is_repeated_without_a_server_that_hangs(trainer, urls, second_server):
    (first, second), (service, _) = urls, second_server
    manager = trainer.checkpoint_manager
    manager.update_weights(1)
    word = manager.fleet.gateway
    manager.fleet.gateway = AsPushBegins(lambda: send(service, signal.SIGSTOP), **vars(word))
    try:
        metrics = manager.update_weights(2)
    finally:
        manager.fleet.gateway = word
        send(service, signal.SIGCONT)
    assert metrics["weight_sync/servers_removed"] == 1 and admitted(trainer) == (2, {first})
    assert version_of(first) == "2" and version_of(second) == "1"
    manager.update_weights(3)  # a whole push, also to one that was left in the middle of another
    assert version_of(first) == version_of(second) == "3" and admitted(trainer) == (3, {first, second})
    assert greedy(first) == greedy(second)


def test_a_push_while_both_servers_generate_leaves_no_old_key(trainer, urls):
    """The probe is there to see one. Running requests go on with the new weights, or end where SGLang cannot flush."""
    trainer.checkpoint_manager.update_weights(1)
    pushed = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = [(url, pool.submit(generate_until, pushed, url, tokens)) for url in urls for tokens in (900, 700)]
        try:
            time.sleep(0.5)
            metrics = trainer.checkpoint_manager.update_weights(2)
        finally:
            pushed.set()
        endings = {url: [] for url in urls}
        for url, future in running:
            endings[url] += future.result(60)
    assert metrics["weight_sync/probe_gap"] < 1e-4
    for url in urls:
        mode = call(url, SGLangClient.capabilities).safe_pause_mode("auto")
        across = {"abort": ("abort", ["1"]), "retract": ("length", ["1", "2"])}[mode]
        assert across in endings[url]
        assert all(ending in (across, ("length", ["1"]), ("length", ["2"])) for ending in endings[url])


def generate_until(stop, url, max_new_tokens):
    """Requests one after the other until `stop` is set: how each ended, and the versions of its tokens in order."""
    parameters = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    request = partial(SGLangClient.generate, input_ids=[10, 11, 12, 13], sampling_params=parameters)
    endings = []
    while not stop.is_set():
        reply = call(url, request)["meta_info"]
        spans = reply.get("weight_versions") or [{"version": reply["weight_version"]}]
        endings.append((reply["finish_reason"]["type"], [span["version"] for span in spans]))
    return endings


@pytest.mark.slow
@pytest.mark.usefixtures("trainer")  # which takes room on the first node: else Ray would put both ranks there
def test_ranks_on_two_nodes_train_and_push_to_two_servers(two_nodes, model_path, urls, tmp_path):
    """A sharded model over Ray nodes, a process group with both servers, and a whole run of two steps."""
    first, second = urls
    with running_api(tmp_path) as api:
        options = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
        values = {"groups": 2, "size": 4, "lr": 1e-2, "steps": 2, "transport": "distributed", "api": api.url}
        with running(trainer_config(model_path, tmp_path / "run", urls, *options, **values)) as trainer:
            node_of = lambda _: ray.get_runtime_context().get_node_id()  # noqa: E731 (a function would go by its module)
            nodes = ray.get([worker.__ray_call__.remote(node_of) for worker in trainer.actor.workers])
            assert len(nodes) == len(set(nodes)) == 2
            trainer.checkpoint_manager.update_weights(0)
            for url in urls:
                assert_serves(url, model_path)
            before = greedy(first)
            rng = np.random.default_rng(0)
            fit_on(trainer, [random_group(rng, model_vocab(model_path)) for _ in range(4)])
            assert trainer.checkpoint_manager.version == 2 and version_of(first) == version_of(second) == "2"
            assert greedy(first) == greedy(second) != before
