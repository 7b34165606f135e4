"""Two real servers, the real gateway, verl's real worker: servers die and return, and nobody meets old weights.

The servers start with other weights than the trainer's, so that a reply by a server that nobody pushed to is another
text. The faults of HTTP are in ``test_gateway.py``; that the launcher starts servers again, in ``test_launch.py``.
"""

import asyncio
import contextlib
import sys
import threading
import time

import psutil
import pytest

from helpers.gateway import AsPushBegins
from helpers.sglang import make_tiny_model, wait_healthy
from helpers.trainer import running, trainer_config
from helpers.waiting import until
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient, GatewayError
from recipe.atropos.inference.server import SGLangLaunch, start_sglang
from recipe.atropos.utils.process import free_port, start_service
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.weight_sync.colocated import SharedMemory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "a-secret-of-this-test"
PROMPT = [10, 11, 12]
LENGTH = 150
COMPARED = 12  # first tokens; later ones may differ by the rounding of another batch


class Part:
    """A server that can be killed and started again, with its port and start weights."""

    def __init__(self, service, url, model, log):
        self.service, self.url, self.model, self.log = service, url, model, log

    def kill(self):
        self.service.stop(grace=0)

    def kill_scheduler(self):
        """As the kernel does where memory is short; the HTTP process lives, and sees it when it looks."""
        processes = psutil.Process(self.service.pid).children(recursive=True)
        next(process for process in processes if "scheduler" in " ".join(process.cmdline())).kill()

    def start(self):
        port = int(self.url.rsplit(":", 1)[1])
        options = {"device": "cpu", "dtype": "float32", "extra_args": {"max_total_tokens": 4096}}
        launch = SGLangLaunch(str(self.model), port=port, api_key=KEY, **options)
        self.service = start_sglang(launch, log_path=self.log)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), 0, "qwen3")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two, started side by side."""
    model = make_tiny_model(tmp_path_factory.mktemp("other"), 1, "qwen3")
    with contextlib.ExitStack() as stack:
        parts = []
        for name in "ab":
            log = model.parent / f"{name}.log"
            part = Part(None, f"http://127.0.0.1:{free_port()}", model, log)
            part.start()
            stack.callback(lambda part=part: part.service.stop(grace=2))
            parts.append(part)
        for part in parts:
            asyncio.run(healthy(part.url))
        yield parts


@pytest.fixture(scope="module")
def gateway(servers, tmp_path_factory):
    """A service and its URL in a list, so that a test can start it anew."""
    port = free_port()
    urls = ",".join(part.url for part in servers)
    command = [sys.executable, "-m", "recipe.atropos.inference.gateway", "--port", str(port), "--servers", urls]
    log = tmp_path_factory.mktemp("gateway") / "log"
    part = Part(None, f"http://127.0.0.1:{port}", None, log)
    part.start = lambda: setattr(
        part, "service", start_service("gateway", command, log_path=log, env={API_KEY_VARIABLE: KEY}, url=part.url)
    )
    part.start()
    yield part
    part.kill()


@pytest.fixture(scope="module")
def trainer(cluster, model_path, servers, gateway, tmp_path_factory):
    options = [f"inference.gateway={gateway.url}", f"inference.api_key={KEY}"]
    options += ["trainer.atropos.weight_sync.timeout=60", "trainer.atropos.weight_sync.verify=probe"]
    urls = [part.url for part in servers]
    with running(trainer_config(model_path, tmp_path_factory.mktemp("run"), urls, *options)) as trainer:
        yield trainer


async def healthy(url):
    await wait_healthy(SGLangClient(url, KEY), 200)


async def generate(url, length=LENGTH, timeout=120):
    """(weight version, first tokens) of a greedy answer."""
    parameters = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    client = SGLangClient(url, KEY, timeout=timeout)
    reply = await client.generate(input_ids=PROMPT, sampling_params=parameters)
    return reply["meta_info"]["weight_version"], tuple(reply["output_ids"][:COMPARED])


class Traffic:
    """Requests to the gateway without a pause, from a thread; ``answers`` in their order. An error ends it."""

    def __init__(self, url, concurrent):
        self.url, self.concurrent = url, concurrent
        self.answers, self.errors = [], []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, error, *_):
        self.stop() if error is None else self._stop.set()

    def stop(self):
        self._stop.set()
        self._thread.join(timeout=150)
        assert not self._thread.is_alive(), "a request was never answered"

    async def _run(self):
        await asyncio.gather(*(self._ask() for _ in range(self.concurrent)))

    async def _ask(self):
        while not self._stop.is_set() and not self.errors:
            try:
                self.answers.append(await generate(self.url))
            except Exception as error:
                self.errors.append(error)

    def wait_for(self, more, timeout=60):
        wanted = len(self.answers) + more
        until(lambda: self.errors or len(self.answers) >= wanted, timeout)
        assert not self.errors


def test_servers_answer_by_current_weights_whatever_returns(trainer, servers, gateway, tmp_path):
    """Servers die and return while requests are sent."""
    first, second = servers
    manager, word = trainer.checkpoint_manager, GatewayClient(gateway.url, KEY)
    start_weights = asyncio.run(generate(first.url))
    assert start_weights[0] == "default"

    def seen(part):
        return next(server for server in word.status()["servers"] if server["url"] == part.url)

    with Traffic(gateway.url, concurrent=8) as traffic:
        until(lambda: word.status()["held"] == 8)
        assert not traffic.answers, "nobody is asked before the first push"
        assert manager.update_weights(1)["weight_sync/servers_removed"] == 0
        traffic.wait_for(8)
        current = asyncio.run(generate(first.url))[1]
        assert current != start_weights[1]

        # one dies, in the midst of requests: its scheduler alone, so that who looks at its HTTP finds nothing wrong
        until(lambda: seen(second)["inflight"] >= 2)
        second.kill_scheduler()
        traffic.wait_for(16)
        until(lambda: seen(second)["state"] == "down", within=20)
        assert seen(second)["state"] == "down" and seen(second)["last_error"]
        assert manager.ensure_current(1) == {"weight_sync/servers_removed": 1}
        assert manager.update_weights(2)["weight_sync/servers_removed"] == 1
        traffic.wait_for(8)

        # it returns, with the weights of its command line
        sent = seen(second)["requests"]
        second.kill()  # what is left of it
        second.start()
        deadline = time.monotonic() + 120
        while "weight_sync/servers_readmitted" not in (metrics := manager.ensure_current(2)):
            assert metrics == {"weight_sync/servers_removed": 1} and seen(second)["requests"] == sent
            assert time.monotonic() < deadline and not traffic.errors
            time.sleep(0.2)
        assert metrics["weight_sync/servers_readmitted"] == 1 and metrics["weight_sync/servers_removed"] == 0
        assert seen(second)["state"] == "admitted"
        until(lambda: seen(second)["requests"] > sent + 4)
        assert asyncio.run(generate(second.url)) == ("2", current)
        assert manager.ensure_current(2) == {"weight_sync/servers_removed": 0}, (
            "nothing is pushed where nothing is wrong"
        )

        # the gateway was started anew
        traffic.stop()
        gateway.kill()
        gateway.start()
        until(lambda: word.status()["version"] is None)
        manager.ensure_current(2)
        assert word.serves()[:2] == (2, {first.url, second.url})

    with Traffic(gateway.url, concurrent=4) as later:
        # one dies while the trainer has the memory of both; the next training waits until it has started again
        mark = tmp_path / "lent"
        manager.memory = SharedMemory(manager.fleet, "auto", mark)
        manager.offload_servers()
        assert manager.memory.released.keys() == {first.url, second.url} and mark.exists()
        first.kill()
        first.start()
        metrics = manager.update_weights(3)
        assert metrics["weight_sync/servers_removed"] == 1 and not mark.exists()
        assert word.serves()[:2] == (3, {second.url})
        later.wait_for(8)
        manager.fleet.timeout = 150
        manager.offload_servers()
        assert manager.memory.released == {first.url: "default", second.url: "3"}

        # one dies in a push: the other has the whole of it
        manager.fleet.gateway = AsPushBegins(first.kill, **vars(word))
        metrics = manager.update_weights(4)
        manager.fleet.gateway = word
        assert metrics["weight_sync/servers_removed"] == 1 and word.serves()[:2] == (4, {second.url})
        later.wait_for(8)
    assert later.answers[-1] == ("4", current)
    assert {text for _, text in traffic.answers + later.answers} == {current}, "no reply by the start weights"
    versions = [int(version) for version, _ in traffic.answers]
    assert set(versions) == {1, 2} and not traffic.errors and not later.errors


def test_a_gateway_that_is_lost_or_refuses_is_named(gateway):
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(GatewayError, match=f"no gateway answers at inference.gateway={nobody} within 1 s"):
        GatewayClient(nobody, KEY, timeout=1).status()
    with pytest.raises(GatewayError, match="HTTP 401.*API key"):
        GatewayClient(gateway.url, "another").status()
    with pytest.raises(GatewayError, match=f"HTTP 400.*{nobody}"):
        GatewayClient(gateway.url, KEY).announce(1, [nobody])
