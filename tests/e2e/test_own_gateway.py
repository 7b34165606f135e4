"""The gateway that a trainer starts before servers of somebody else."""

import socket

import pytest

from helpers.trainer import compose_config
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.gateway_client import GATEWAY_PORT, GatewayClient
from recipe.atropos.inference.own_gateway import gateway_before
from recipe.atropos.utils.process import free_port, unstopped
from recipe.atropos.utils.secret import environments_key

SERVERS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def config_of(tmp_path, *overrides):
    urls = f"inference.urls=[{','.join(SERVERS)}]"
    return compose_config("actor_rollout_ref.model.path=m", urls, f"run.dir={tmp_path}", *overrides)


def started():
    return [service for service in unstopped if service.name == "gateway"]


@pytest.mark.parametrize("key", ["the-key", None])
def test_own_gateway_ends_with_the_trainer(tmp_path, capsys, monkeypatch, key):
    monkeypatch.setenv("ATROPOS_API_KEY", "of-somebody-else")
    config = config_of(tmp_path, f"inference.api_key={key or 'null'}")
    with gateway_before(config):
        [service] = started()
        status = GatewayClient(config.inference.gateway, key).status()
        assert [server["url"] for server in status["servers"]] == SERVERS and status["version"] is None
        told = capsys.readouterr().out
        assert f"gateway {config.inference.gateway}, in front of {', '.join(SERVERS)}" in told
        assert f"--openai.base_url={config.inference.gateway}/v1" in told and "the-key" not in told
        assert ("ATROPOS_API_KEY=none" in told) == (key is None), "of servers without a key none is asked for"
    assert service.poll() is not None and not started()
    assert "Traceback" not in (tmp_path / "logs/gateway.log").read_text()


def test_own_gateway_leaves_ports_of_other_services(tmp_path):
    default = f"http://127.0.0.1:{GATEWAY_PORT}"
    for keys in (f"inference.urls=[{default}]", f"trainer.atropos.api_url={default}"):
        config = config_of(tmp_path, keys)
        with gateway_before(config):
            assert config.inference.gateway != default
    config = config_of(tmp_path, f"inference.gateway_port={(port := free_port())}")
    with gateway_before(config):
        assert config.inference.gateway == f"http://127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"inference.gateway_port={number} is taken"):
            with gateway_before(config_of(tmp_path, f"inference.gateway_port={number}")):
                pass


@pytest.mark.parametrize(
    "overrides", [["inference.gateway=http://127.0.0.1:3"], ["trainer.atropos.replay=batches"], ["inference.urls=[]"]]
)
def test_own_gateway_is_not_started_where_one_is_named(tmp_path, overrides):
    config = config_of(tmp_path, *overrides)
    before = config.inference.gateway
    with gateway_before(config):
        assert config.inference.gateway == before and not started()


@pytest.mark.parametrize("guarded", [True, False])
def test_own_gateway_tells_how_to_join_a_guarded_api(tmp_path, capsys, monkeypatch, guarded):
    """A stock environment has no other place for its key than the API's address; an API without a key takes none."""
    monkeypatch.setattr("recipe.atropos.inference.own_gateway.sys.stdout.isatty", lambda: True, raising=False)
    with running_trajectory_api(tmp_path, secret="the-key" if guarded else "") as api:
        keys = [f"trainer.atropos.api_url={api.url}", "inference.api_key=the-key"]
        with gateway_before(config_of(tmp_path, "trainer.atropos.max_staleness=null", *keys)):
            told = capsys.readouterr().out
    key = environments_key("the-key")
    assert f"ATROPOS_API_KEY={key}" in told and "the-key" not in told
    assert f'"rollout_server_url": "{api.url}{f"/{key}" if guarded else ""}"' in told
