"""Ports and servers of a run that no other user of the machine can take; the other user is real."""

import asyncio
import os
import socket
import struct
import urllib.error
import urllib.request

import aiohttp
import pytest
from atroposlib.envs.base import APIServerConfig

from helpers.configs import loaded
from helpers.runs import run_of
from helpers.squatter import NOBODY, needs_root, squats, squatted
from helpers.waiting import until
from recipe.atropos.adapter.recorded_calls import client_of
from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.gateway_client import GatewayClient, gateway_command
from recipe.atropos.inference.server import SGLangLaunch, check_launch
from recipe.atropos.launcher.sglang import InferenceServices, inference_healthy
from recipe.atropos.launcher.startup import api_command
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import RunReader
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.utils import sockets
from recipe.atropos.utils.process import free_port, port_is_free
from recipe.atropos.utils.secret import API_KEY_VARIABLE, environments_key

pytestmark = pytest.mark.timeout(120)


def answers(url):
    """The HTTP status that comes; None if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


@needs_root
@pytest.mark.parametrize("name", ["api", "gateway"])
def test_squat_of_a_port_fails_before_and_after_its_service(name, tmp_path):
    """The launcher holds it, before the service is started and while it is restarted; connections are refused."""
    config = loaded("preset=demo", f"api.port={free_port()}")
    run = run_of(config, tmp_path)
    if name == "api":
        command, url = api_command(run)
    else:
        url = f"http://127.0.0.1:{free_port()}"
        command = gateway_command(url, "127.0.0.1", ["http://127.0.0.1:1"], 1.0)
    port = int(url.rpartition(":")[2])
    run.reserved[name] = sockets.reserve("127.0.0.1", port, "api.port")
    try:
        for _ in range(2):
            assert not squats(port) and answers(url) is None and not port_is_free(port)
            service = run.start(name, command, url=url, **{API_KEY_VARIABLE: run.api_key})
            status = until(lambda: answers(url), 60, service)
            assert status == 401 and not squats(port)
            service.stop(grace=1)
    finally:
        run.stop()
    assert port_is_free(port), "it is held no longer than the run"


async def asks_server(url):
    await SGLangClient(url, "the-key").weight_version()


async def asks_gateway(url):
    await GatewayClient(url, "the-key", timeout=1.0).fetch_status()


async def asks_api(url):
    async with TrajectoryApiClient(url, "the-key", retry_timeout=0.0) as client:
        await client.diagnose()


async def asks_as_environment(url):
    await client_of(APIServerConfig(base_url=f"{url}/v1", api_key="the-key"), 1.0).model_info()


@needs_root
@pytest.mark.parametrize("ask", [asks_server, asks_gateway, asks_api, asks_as_environment])
def test_squat_of_a_server_gets_no_key_and_is_named(ask, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "the-key")
    port = free_port()
    named = f"process of user {NOBODY} listens at port {port} of 127.0.0.1"
    with squatted(port) as sent:
        with pytest.raises(sockets.OtherUsersServer, match=named):
            asyncio.run(ask(f"http://127.0.0.1:{port}"))
    assert "the-key" not in str(sent)


@needs_root
def test_squat_of_the_apis_default_port_gets_no_key_from_a_view(tmp_path, monkeypatch):
    """Before the run has started its own."""
    monkeypatch.setenv(API_KEY_VARIABLE, "the-key")
    port, run = free_port(), RunDir(tmp_path)
    run.config.write_text(f"trainer: {{atropos: {{api_url: http://127.0.0.1:{port}}}}}")
    with squatted(port) as sent, run.lock():
        assert RunReader(tmp_path).read().state == "starting"
    assert sent and "the-key" not in str(sent) and environments_key("the-key") not in str(sent)


@needs_root
def test_squat_of_a_starting_server_ends_the_launch(tmp_path):
    """At once, with the port and the user, though the server itself would notice only when its model is loaded."""
    port = free_port()
    config = loaded("preset=demo")
    run = run_of(config, tmp_path)
    launch = SGLangLaunch("m", port=port, api_key=run.api_key)
    with sockets.reserve("127.0.0.1", gate := free_port(), "inference.gateway_port") as run.reserved["gateway"]:
        url = f"http://127.0.0.1:{gate}"
        try:
            run.start(
                "gateway", gateway_command(url, "127.0.0.1", [launch.url], 1.0), **{API_KEY_VARIABLE: run.api_key}
            )
            run.start("sglang", ["sleep", "100"])
            with (
                squatted(port) as sent,
                pytest.raises(sockets.OtherUsersServer, match=f"user {NOBODY} listens at port {port}"),
            ):
                asyncio.run(inference_healthy(run, InferenceServices({"sglang": launch}, url, run.api_key)))
        finally:
            run.stop()
    assert run.api_key not in str(sent)


@needs_root
def test_squat_of_a_port_that_is_given_is_an_error_naming_it(monkeypatch):
    """The port, and the user who holds it; at the first start and, for a server, at each restart."""
    monkeypatch.setattr("recipe.atropos.inference.server.versions_in", lambda *_, **__: {"sglang": "1"})
    with squatted(port := free_port()):
        named = rf"{port} .*taken.* \(by a process of user {NOBODY}\)"
        with pytest.raises(ConfigurationError, match=f"api.port={named}; give another"):
            sockets.reserve("127.0.0.1", port, "api.port")
        with pytest.raises(LaunchError, match=f"port {named}"):
            check_launch(SGLangLaunch("their/model", python="python", port=port))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_squat_check_finds_who_listens(kernel, address, monkeypatch):
    """From the kernel or, where it does not answer, from the list of all sockets; a dead listener is nobody's."""
    if not kernel:
        monkeypatch.setattr(socket, "AF_NETLINK", -1)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    async def connect(port):
        async with (
            sockets.OwnServers(force_close=True) as connector,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            await session.get(f"http://{'[::1]' if address == '::1' else '127.0.0.1'}:{port}/", timeout=0.2)

    with socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError):  # it accepts, and says nothing
            asyncio.run(connect(port))
        monkeypatch.setattr(sockets, "_ROOT", -1)
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        with pytest.raises(sockets.OtherUsersServer, match=f"user {os.getuid()} listens at port {port}"):
            asyncio.run(connect(port))
        monkeypatch.setattr(sockets, "_listening_user", lambda host, port: None)
        with pytest.raises(aiohttp.ClientConnectionError, match=f"no process listens at port {port}"):
            asyncio.run(connect(port))


def test_connection_that_is_reset_at_once_can_be_retried():
    """Its address is unknown by then, so that nobody can be looked up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        class ResetMeanwhile(socket.socket):
            def getpeername(self):
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()
                return super().getpeername()

        async def connect():
            async with (
                sockets.OwnServers(socket_factory=lambda found: ResetMeanwhile(*found[:3])) as connector,
                aiohttp.ClientSession(connector=connector) as session,
            ):
                await session.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")

        with pytest.raises(aiohttp.ClientConnectionError, match="was reset"):
            asyncio.run(connect())
