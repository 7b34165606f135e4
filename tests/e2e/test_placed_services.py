"""Services that Ray places, in a real Ray of this machine: what they get from the launcher, and lost actors."""

import contextlib
import os
import subprocess
import sys

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from helpers.waiting import until
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch
from recipe.atropos.launcher import on_ray

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("cluster")]


@pytest.fixture
def placed():
    """Return a cluster with a seat for the program "program", as ``Cluster`` makes it."""
    group = placement_group([{"CPU": 1.0}])
    made = on_ray.Cluster.__new__(on_ray.Cluster)
    made._timeout, made._seats = 60.0, {"program": on_ray._Seat(group, 0, {"CPU": 1.0})}
    yield made
    ray.kill(made._seats["program"].host)
    remove_placement_group(group)


def output_of(placed, folder, *command):
    service = placed.start_program("program", [*command], folder / "program.log")
    until(lambda: service.poll() is not None, 60)
    return service.poll(), service.log_path.read_text()


def test_placed_services_have_the_nccl_of_the_launchers_shell(placed, tmp_path, monkeypatch):
    """NCCL joins no two processes that differ in it, and a node's own environment may have another."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    placed._seats["program"].place()
    until(lambda: not placed.awaited("program"), 60)
    status, printed = output_of(placed, tmp_path, "env")
    assert status == 0 and {"NCCL_CUMEM_ENABLE=1", "NCCL_NVLS_ENABLE=0"} < set(printed.splitlines())


def test_a_place_that_is_lost_before_its_start_is_found_anew(placed, tmp_path):
    """As the start of a service is delayed, which ended soon before; it costs no restart."""
    until(lambda: not placed.awaited("program"), 60)
    ray.kill(placed._seats["program"].host)
    until(lambda: placed.awaited("program") and placed._seats["program"].lost, 60)  # a while after the call
    until(lambda: not placed.awaited("program"), 60)
    assert output_of(placed, tmp_path, "echo", "here") == (0, "here\n")


def test_a_place_at_loopback_is_refused_beside_other_nodes(placed, monkeypatch):
    """A node that joined without --node-ip-address; alone, it needs no other address."""
    launch = SGLangLaunch("m", python="p", port=1)
    placed._seats["program"].address = ("127.0.0.1", 7)
    assert (placed.placed("program", launch).host, placed.placed("program", launch).port) == ("127.0.0.1", 7)
    monkeypatch.setattr(ray, "nodes", lambda: [{}, {}])
    with pytest.raises(ConfigurationError, match="knows the node of program as 127.0.0.1, .*: start Ray there with"):
        placed.placed("program", launch)


@pytest.mark.parametrize(
    ("gpus", "servers", "labels", "room"),
    [
        ([8, 8, 0], 4, {}, None),
        ([8, 8, 0], 5, {}, "with 8, 8, 0 GPUs, have room for 4"),
        ([3, 3], 1, {}, "have room for 0"),
        ([3, 3], 1, {"ray.io/node-group": "workers"}, None),
    ],
)
def test_servers_for_which_no_node_has_room_are_refused(monkeypatch, gpus, servers, labels, room):
    """At once, unless an autoscaler may add nodes; those that are lost do not count."""
    nodes = [{"Alive": True, "Resources": {"GPU": own} if own else {}, "Labels": labels} for own in gpus]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"GPU": 8}, "Labels": {}}])
    with pytest.raises(ConfigurationError, match=room) if room else contextlib.nullcontext():
        on_ray.check_room([{"CPU": 1.0, "GPU": 4.0}] * servers)
    on_ray.check_room([{"CPU": 1.0}] * servers)


def test_a_launcher_that_has_left_its_cluster_starts_no_ray():
    """Where a check goes on after the end; else Ray starts with any call of its own, by a hook that is private."""
    script = "; ".join(
        [
            "import ray, sys",
            "from recipe.atropos.launcher import on_ray",
            "from ray._private.auto_init_hook import auto_init_ray",
            "on_ray.auto_init_hook.enable_auto_connect = False",
            "auto_init_ray()",
            "sys.exit(ray.is_initialized())",
        ]
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "RAY_ADDRESS": ""})
