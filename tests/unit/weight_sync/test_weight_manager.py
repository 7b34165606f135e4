"""The trainer's side of a push: the real fleet and gateway over servers that can be made to fail; ranks are a stub."""

import asyncio
import itertools
import threading
from types import SimpleNamespace

import orjson
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from helpers.gateway import KEY, gateway
from helpers.trainer import compose_config
from recipe.atropos.errors import Preempted
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.utils.process import free_port
from recipe.atropos.verl_ext.worker_group import RankTimeout
from recipe.atropos.weight_sync import fleet as fleet_module
from recipe.atropos.weight_sync.colocated import SharedMemory
from recipe.atropos.weight_sync.fleet import ServerFleet, ServersGone
from recipe.atropos.weight_sync.manager import WeightSyncManager, build_manager
from recipe.atropos.weight_sync.servers import WeightPushError

pytestmark = pytest.mark.timeout(60)


class Group:
    """A worker group whose push gives the stubs that it was told its version, or fails with ``error``.

    ``pushes``: (version, URLs) of each, ``adapters`` the names; ``during`` is called in the midst of one. ``limits``:
    (method, seconds) of each wait.
    """

    def __init__(self, stubs):
        self.stubs, self.pushes, self.adapters, self.limits = stubs, [], [], []
        self.error, self.during = None, lambda: None

    def update_weights(self, global_steps, urls, adapter):
        self.pushes.append((global_steps, list(urls)))
        self.adapters.append(adapter)
        self.during()
        if self.error is not None:
            return [self.error]
        for stub in self.stubs:
            stub.version = str(global_steps) if stub.url in urls else stub.version
        return [{"weight_sync/bytes": 8.0}, None, {}]

    def wait(self, method, results, limit):
        self.limits.append((method, limit))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def empty_cache(self): ...


@pytest.fixture
def served(monkeypatch):
    """Two servers behind a gateway, their fleet, the ranks, and a way to run a coroutine where the servers are."""
    monkeypatch.setattr(fleet_module, "_DYING_SECONDS", 0.2)  # a dying server has no time to die
    monkeypatch.setattr(fleet_module, "_LOOK_SECONDS", 0.05)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(gateway()) as client:
        known = GatewayClient(client.url, KEY)
        fleet = ServerFleet([stub.url for stub in client.stubs], known, KEY, timeout=1)
        made = {"fleet": fleet, "stubs": client.stubs, "gateway": known, "group": Group(client.stubs)}
        yield SimpleNamespace(**made, run=lambda coroutine: portal.call(lambda: coroutine))


def manager_of(served, **options):
    defaults = {"adapter_only": False, "timeout": 30, "startup_timeout": 1}
    return WeightSyncManager(served.group, served.fleet, **defaults | options)


def die(served, number):
    served.run(served.stubs[number].runner.cleanup())


def test_manager_advances_its_version_only_after_verification(served):
    def verify(step, urls, adapter):
        assert (step, urls) == (4, sorted(served.fleet.urls)) and manager.version is None, "not before it is verified"
        assert served.gateway.serves()[:2] == (None, set()), "nor does any request meet it"
        if refusing:
            raise WeightPushError("other weights")
        return {"weight_sync/probe_gap": 0.5}

    refusing, manager = True, manager_of(served, timeout=12.5, verify=verify)
    with pytest.raises(WeightPushError, match="other weights"):
        manager.update_weights(4)
    assert manager.version is None
    refusing = False
    metrics = {"weight_sync/bytes": 8.0, "weight_sync/probe_gap": 0.5, "weight_sync/servers_removed": 0}
    assert manager.update_weights(4) == metrics and manager.version == 4
    urls = sorted(served.fleet.urls)
    assert served.group.pushes == [(4, urls)] * 2 and served.gateway.serves()[:2] == (4, set(urls))
    assert served.group.limits == [("update_weights", 12.5)] * 2


def test_manager_keeps_its_version_when_a_push_fails(served):
    manager = manager_of(served, verify=lambda *_: {})
    manager.update_weights(3)
    manager.verify, served.group.error = lambda *_: pytest.fail("no push"), WeightPushError("rank 1")
    with pytest.raises(WeightPushError, match="rank 1"):
        manager.update_weights(4)
    assert manager.version == 3 and served.gateway.serves()[0] == 3
    assert [step for step, _ in served.group.pushes] == [3, 4], "servers that live and refuse are not asked again"


def test_manager_pushes_to_servers_before_admitting_them(served):
    manager, (first, second) = manager_of(served), served.fleet.urls
    assert manager.ensure_current(5) == {} and not served.group.pushes, "before the first push nothing is compared"
    manager.update_weights(5)
    in_order = {"weight_sync/servers_removed": 0}
    assert manager.ensure_current(5) == in_order and len(served.group.pushes) == 1

    served.stubs[0].version = "default"  # restarted
    served.group.during = lambda: seen.append(served.gateway.serves()[:2])
    seen = []
    metrics = manager.ensure_current(5)
    assert served.group.pushes[1:] == [(5, [first])] and seen == [(5, {second})]
    assert metrics == in_order | {"weight_sync/bytes": 8.0, "weight_sync/servers_readmitted": 1}
    assert served.gateway.serves()[:2] == (5, {first, second})


def test_manager_lets_a_server_wait_where_the_actor_has_gone_on(served):
    """Since the last push: the others serve the active version, which may be evaluated, until the next one."""
    manager, (first, second) = manager_of(served), served.fleet.urls
    manager.update_weights(5)
    served.stubs[0].version = "default"  # restarted
    manager.ensure_current(6)
    assert len(served.group.pushes) == 1 and served.gateway.serves()[:2] == (5, {second})
    served.stubs[1].version = "default"  # nobody serves it any more
    manager.ensure_current(6)
    assert served.group.pushes[1:] == [(6, sorted([first, second]))] and manager.version == 6
    served.stubs[1].version = "default"
    manager.ensure_current(7)
    assert manager.update_weights(8)["weight_sync/servers_readmitted"] == 1
    assert served.group.pushes[2:] == [(8, sorted([first, second]))]
    assert served.gateway.serves()[:2] == (8, {first, second})


@pytest.mark.parametrize("adapter_only", [True, False])
def test_manager_names_an_adapter_anew_for_each_version(served, adapter_only):
    """A server that returns is given the name that the others have; the gateway knows it."""
    manager = manager_of(served, adapter_only=adapter_only)
    manager.update_weights(1)
    served.stubs[0].version = "default"  # restarted
    manager.ensure_current(1)
    first, again = served.group.adapters
    assert first == again == served.gateway.serves()[2] and (first is not None) is adapter_only
    manager.update_weights(2)
    latest = served.group.adapters[-1]
    assert latest == served.gateway.serves()[2] and (latest != first) is adapter_only


@pytest.mark.parametrize(
    ("options", "adapter_only"),
    [
        ([], False),
        (["actor_rollout_ref.model.lora.merge=false", "actor_rollout_ref.model.lora_rank=1"], True),
        (["actor_rollout_ref.model.lora.merge=true", "actor_rollout_ref.model.lora_rank=1"], False),
    ],
    ids=["full", "adapter", "merged"],
)
def test_manager_is_built_as_the_configuration_says(options, adapter_only, tmp_path):
    """A push takes twice the seconds of its requests; only colocated servers have memory to release."""
    urls = ["inference.urls=[http://127.0.0.1:1]", f"run.dir={tmp_path}", "trainer.atropos.weight_sync.timeout=7"]
    urls += ["trainer.atropos.startup_timeout=3"]
    for colocated in (True, False):
        config = compose_config("actor_rollout_ref.model.path=m", *urls, f"inference.colocated={colocated}", *options)
        manager = build_manager(config, None, 10, None)
        limits = manager.timeout, manager.fleet.timeout, manager.startup_timeout
        assert (manager.adapter_only, *limits) == (adapter_only, 44, 7, 3)
        assert (manager.memory is not None) is colocated


def test_manager_begins_only_with_every_server(served):
    """And releases their memory only then."""
    manager = manager_of(served, startup_timeout=0.3)
    die(served, 1)
    with pytest.raises(ServersGone, match=f"only 1 of 2 SGLang servers answered for 0.3 s.*{served.fleet.urls[1]}"):
        manager.update_weights(0)
    manager.memory = SimpleNamespace(release=lambda urls: pytest.fail("one is starting"))
    with pytest.raises(ServersGone, match=f"only 1 of 2 SGLang servers answered for 1 s.*{served.fleet.urls[1]}"):
        manager.offload_servers()
    assert not served.group.pushes and manager.version is None


def test_manager_calls_servers_that_load_no_error(served, caplog):
    """Those that are missing later are one."""
    caplog.set_level("INFO")
    manager, url = manager_of(served, startup_timeout=20), served.fleet.urls[1]
    die(served, 1)
    threading.Timer(0.5, lambda: served.run(served.stubs[1].start())).start()
    manager.update_weights(0)
    assert f"{url} does not answer" in caplog.text and "1 SGLang servers answer, 2 must" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    caplog.clear()
    die(served, 1)
    manager.ensure_current(0)
    assert [record.message.split(",")[0] for record in caplog.records if record.levelname == "ERROR"] == [
        f"SGLang server {url} does not answer"
    ]


def test_manager_goes_on_without_a_server_that_is_gone(served, caplog):
    manager, (first, second) = manager_of(served), served.fleet.urls
    manager.update_weights(1)
    die(served, 1)
    for _ in range(3):
        assert manager.ensure_current(1) == {"weight_sync/servers_removed": 1}
    assert caplog.text.count(f"{second} does not answer, and gets no weights until it does") == 1
    assert served.gateway.serves()[:2] == (1, {first}) and len(served.group.pushes) == 1
    served.run(served.stubs[1].start())
    served.stubs[1].version = "1"  # whatever it says
    assert manager.ensure_current(1)["weight_sync/servers_readmitted"] == 1
    assert served.group.pushes[1:] == [(1, [second])] and served.gateway.serves()[:2] == (1, {first, second})


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_manager_repeats_a_push_in_which_a_server_died(served, hangs):
    """Or answers nothing, with its connections open."""
    manager, (first, second) = manager_of(served), served.fleet.urls
    manager.update_weights(1)

    def once():
        served.group.error = WeightPushError("one died") if served.group.error is None else None
        if hangs:
            served.stubs[1].info = asyncio.Event().wait
        elif served.group.error:
            die(served, 1)

    served.group.during = once
    metrics = manager.update_weights(2)
    assert served.group.pushes[1:] == [(2, sorted([first, second])), (2, [first])]
    assert metrics["weight_sync/servers_removed"] == 1 and served.gateway.serves()[:2] == (2, {first})


def test_manager_repeats_no_push_that_ranks_may_still_be_in(served):
    """Two at once would mix their gathers: a rank is an actor with a coroutine, so Ray starts the second beside it."""
    manager, served.group.error = manager_of(served), RankTimeout("no answer of rank 0")
    served.group.during = lambda: die(served, 1)
    with pytest.raises(RankTimeout):
        manager.update_weights(1)
    assert len(served.group.pushes) == 1 and manager.version is None


def test_manager_ends_when_a_server_dies_in_each_push(served):
    manager, dying = manager_of(served), itertools.cycle((0, 1))

    def one_dies_and_the_other_returns():
        number = next(dying)
        if len(served.group.pushes) > 1:
            served.run(served.stubs[1 - number].start())
        die(served, number)

    served.group.during, served.group.error = one_dies_and_the_other_returns, WeightPushError("one died")
    with pytest.raises(ServersGone, match="a server died in each of 4 pushes of version 7"):
        manager.update_weights(7)
    first, second = served.fleet.urls
    assert served.group.pushes == [(7, sorted([first, second])), (7, [second]), (7, [first]), (7, [second])]
    assert manager.version is None and served.gateway.serves()[:2] == (None, set())


def test_manager_without_any_server_ends_with_what_each_said(served):
    manager = manager_of(served)
    manager.update_weights(1)
    for number in range(2):
        die(served, number)
    with pytest.raises(ServersGone, match="no SGLang server answered for 1 s") as error:
        manager.ensure_current(1)
    assert all(url in str(error.value) for url in served.fleet.urls) and manager.version == 1
    assert served.gateway.serves()[:2] == (1, set())


@pytest.mark.parametrize("method", ["ensure_current", "update_weights"])
def test_manager_waits_no_longer_than_a_trainer_can(served, method):
    """One that is preempted raises."""
    manager = manager_of(served)
    manager.update_weights(1)
    served.fleet.timeout = 50
    for number in range(2):
        die(served, number)

    def end():
        raise Preempted("SIGUSR1")

    with pytest.raises(Preempted):
        getattr(manager, method)(1, end)


def test_manager_gives_servers_their_memory_back_before_a_push(served, monkeypatch):
    order, urls = [], served.fleet.urls
    monkeypatch.setattr(served.group, "empty_cache", lambda: order.append("empty"))
    served.group.during = lambda: order.append("push")
    steps = {name: lambda *_, name=name: order.append(name) for name in ("resume_weights", "resume_caches", "resume")}
    manager = manager_of(served, memory=SimpleNamespace(**steps, release=order.append))
    manager.update_weights(1)
    manager.offload_servers()
    manager.onload_servers()
    made_room = ["empty", "resume_weights"]
    given_back = [*made_room, *made_room, "push", "empty", "resume_caches", "resume"]
    assert order == [*given_back, urls, "resume_weights", "resume_caches"]
    without = manager_of(served)
    without.offload_servers()
    without.onload_servers()
    assert len(order) == 11


def test_memory_that_cannot_be_given_back_is_logged(served, tmp_path, caplog):
    """It takes no error's place. As the trainer does at the end of ``fit``, whatever ended it."""

    async def refuse():
        raise web.HTTPNotImplemented

    url, served.stubs[0].info = served.fleet.urls[0], refuse
    (tmp_path / "offloaded").touch()  # by a trainer that was killed
    manager = manager_of(served, memory=SharedMemory(served.fleet, "auto", tmp_path / "offloaded"))
    assert not manager.memory.mark.exists(), "one that begins has no memory of anybody"
    manager.memory.released = {url: "1"}
    manager.memory.mark.touch()
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        finally:
            manager.onload_servers()
    assert "start the servers again" in caplog.text and f"{url}/model_info: HTTP 501" in caplog.text
    assert not manager.memory.released and not manager.memory.mark.exists()


@pytest.fixture
def memory(served, tmp_path):
    """That of both servers, which they have released."""
    memory = SharedMemory(served.fleet, "retract", tmp_path / "offloaded")
    memory.release(served.fleet.urls)
    asked(served)
    return memory


def asked(served):
    """What each server was asked for since the last call: which memory, or a path."""
    found = []
    for number, stub in enumerate(served.stubs):
        found += [(number, *orjson.loads(body).get("tags", [path])) for _, path, body, _ in stub.seen]
        stub.seen.clear()
    return sorted(found)


def test_memory_comes_back_in_two_parts_around_a_push(served, memory):
    memory.resume_weights(2)
    assert asked(served) == [(0, "weights"), (1, "weights")] and memory.mark.exists()
    for stub in served.stubs:
        stub.version = "2"
    memory.resume_caches()
    memory.resume(served.fleet.urls)
    assert asked(served) == [(number, what) for number in (0, 1) for what in ("/continue_generation", "kv_cache")]
    assert not memory.mark.exists()


def test_memory_of_servers_that_die_holds_up_nobody(served, memory):
    """Who died may be started again as soon as no other waits for its cache; one that was is left alone."""
    _, second = served.fleet.urls
    die(served, 0)
    memory.resume_weights()
    assert asked(served) == [(1, "weights")] and memory.mark.exists()
    memory.forget(served.fleet.urls)
    assert not memory.mark.exists() and not memory.without_cache
    memory.without_cache, served.stubs[1].version = {second: "1"}, "default"
    memory.resume_caches()
    assert not asked(served), "it was started again, and has all of its memory"
    die(served, 1)
    with pytest.raises(WeightPushError, match=second):
        memory.resume(served.fleet.urls)


def test_memory_comes_back_whole_after_a_push_that_failed(served, memory):
    """Also to a server that has loaded the last tensor and reports the new version, when another refused it."""

    def refused():
        served.stubs[0].version, served.group.error = "2", WeightPushError("the second refuses")

    manager, served.group.during = manager_of(served, memory=memory), refused
    with pytest.raises(WeightPushError, match="the second refuses"):
        manager.update_weights(2)
    manager.onload_servers()
    given_back = [what for what in asked(served) if what[1] in ("weights", "kv_cache")]
    assert given_back == [(number, what) for number in (0, 1) for what in ("kv_cache", "weights")]
    assert not memory.mark.exists()


def test_memory_with_an_unanswered_return_is_remembered(served, memory):
    for stub in served.stubs:
        stub.reply = stub.for_ever
    memory.resume_weights()
    assert memory.without_cache.keys() == {*served.fleet.urls} and memory.mark.exists()


@pytest.mark.parametrize("nobody", [True, False])
def test_a_fleet_names_who_is_silent_and_raises_a_wrong_key(served, nobody):
    url = f"http://127.0.0.1:{free_port()}"
    fleet = ServerFleet([url, *served.fleet.urls][: 1 if nobody else None], served.gateway, KEY, timeout=0.3)
    if nobody:
        with pytest.raises(ServersGone, match=f"no SGLang server answered for 0.3 s.*{url}/model_info: cannot connect"):
            fleet.wait_for(1)
    else:
        assert fleet.wait_for(1) == dict.fromkeys(served.fleet.urls, "1") and set(fleet.removed) == {url}
        closed = ServerFleet([served.gateway.url], served.gateway, "another", timeout=0.3)
        with pytest.raises(Exception, match="the API key is wrong or missing"):
            closed.look()
