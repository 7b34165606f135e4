"""A launcher without an environment: what it tells those that may join, and what it refuses."""

import os
import re
import socket
import subprocess
import sys

import pytest
import yaml

from helpers.runs import run_of
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.join_commands import how_to_join
from recipe.atropos.launch_services import check_start
from recipe.atropos.launcher.joining import Joining, check_key
from recipe.atropos.sources.numbered import DataSourceConfig
from recipe.atropos.utils.process import default_port, free_port
from recipe.atropos.utils.secret import environments_key


def config(*overrides):
    no_bound = ["preset=demo", "environment.target=null", "trainer.atropos.max_staleness=null"]
    return load_config([*no_bound, "actor_rollout_ref.model.path='/models/one of é'", *overrides])


@pytest.mark.parametrize("shown", [True, False])
def test_join_commands_say_everything_to_a_shell(shown):
    key = 'it\'s "secret" $HOME' if shown else "it's secret $HOME"  # a shell's variable is not quoted as YAML has it
    told = how_to_join(config(), "http://api:1", "http://server:2", key if shown else None)
    assert shown == ("$HOME" in told)
    adapted, stock = (line for line in told.splitlines() if "serve" in line)
    script = f'python() {{ printf \'%s\\0\' "$ATROPOS_API_KEY" "$@"; cat; }}\n{{ {adapted} < /dev/null; {stock}; }}'
    variables = {"PATH": os.environ["PATH"], **({} if shown else {"ATROPOS_API_KEY": key})}
    printed = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True).stdout
    *parts, settings = printed.split("\0")
    expected = ["--env.rollout_server_url=http://api:1", "--env.tokenizer_name=/models/one of é", "--env.group_size=8"]
    expected += ["--env.max_token_length=128", "--openai.base_url=http://server:2/v1", "--openai.server_type=sglang"]
    assert parts[0] == key and set(expected) <= set(parts)
    settings = yaml.safe_load(settings)
    assert settings["env"]["tokenizer_name"] == "/models/one of é"
    assert settings["env"]["max_token_length"] == 127, "BaseEnv alone drops a group with a sequence of 128"
    server, same = settings["openai"]
    assert server == same and server["base_url"] == "http://server:2/v1" and server["api_key"] == key


def test_join_with_a_bound_on_staleness_needs_the_adapter():
    told = how_to_join(config("trainer.atropos.max_staleness=3"), "http://api:1", "http://server:2", "key")
    assert "(max_staleness=3 refuses what comes without the adapter)" in told and "serve --config" not in told
    assert "max_staleness" not in how_to_join(config(), "http://api:1", "http://server:2", "key")


def test_join_from_another_machine_is_told_this_ones_address(tmp_path, monkeypatch, capsys):
    asked = "recipe.atropos.inference.join_commands.reachable_from_others"
    monkeypatch.setattr(asked, lambda host: host.replace("0.0.0.0", "other"))
    for host, shown in (("0.0.0.0", "other"), ("127.0.0.1", "127.0.0.1")):
        run = run_of(config(f"api.host={host}", f"inference.host={host}", "inference.api_key=k"), tmp_path, config())
        Joining(run, "http://127.0.0.1:8000", "http://127.0.0.1:9001").start()
        told = capsys.readouterr().out
        assert f"rollout_server_url=http://{shown}:8000" in told and f"base_url=http://{shown}:9001/v1" in told


def test_control_key_is_not_what_joining_commands_show(tmp_path, monkeypatch, capsys):
    """They show the environments' key, to a terminal alone."""
    run = run_of(config("inference.api_key=of-the-trainer"), tmp_path, config())
    for terminal in (True, False):
        isatty = "recipe.atropos.launcher.joining.console.file.isatty"
        monkeypatch.setattr(isatty, lambda shown=terminal: shown, raising=False)
        Joining(run, "http://api:8000", "http://server:9001").start()
        told = capsys.readouterr().out
        assert "of-the-trainer" not in told and (environments_key("of-the-trainer") in told) == terminal
        assert ("python -m recipe.atropos.utils.secret" in told) != terminal
    command = [sys.executable, "-m", "recipe.atropos.utils.secret"]
    variables = {**os.environ, "ATROPOS_API_KEY": "of-the-trainer"}
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert printed == f"{environments_key('of-the-trainer')}\n"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("environment.args.seed=3", "environment.args={'seed': 3} has no effect with environment.target=null"),
        ("evaluation.every=5", "evaluation.every=5 has no effect with environment.target=null"),
        ("environment.credit={lam: 0.5}", "environment.credit={'lam': 0.5} has no effect with environment.target=null"),
        ("environment.credit={lam: 5}", "environment.credit.lam=5: Input should be less than or equal to 1"),
        ("environments.one.args.seed=3", "environments.one.target is not set"),
    ],
)
def test_join_refuses_settings_of_no_environment(override, told):
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        check_config(config(override))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("environment.credit={lam: 0.5} environments.one.target=their.env", "environment.credit={'lam': 0.5} has no"),
        ("environment.reward_bridge={clip: [0, 1]} environments.one.target=their.env", "give environments.NAME.reward"),
        ("environment.target=their.env environment.items=a.jsonl", "environment.items=a.jsonl has no effect here"),
        ("environment.target=their.env environment.score=a:b", "give environment.command, or leave it out"),
        ("environment.agent=a:b sessions.enabled=false", "sessions.enabled=false: programs sample through"),
    ],
)
def test_settings_without_effect_on_the_environments_are_refused(given, told):
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        check_config(config(*re.split(" (?=environment|sessions)", given)))


def test_join_takes_credit_for_groups_of_sessions():
    check_config(config("environment.credit={lam: 0.5}", "sessions.enabled=true"))
    with pytest.raises(ConfigurationError, match="teacher.* has no effect with environment.target=null"):
        check_config(config("environment.credit={teacher: {base_url: 'http://h:1'}}", "sessions.enabled=true"))


def test_join_waits_long_and_needs_a_key_that_somebody_can_know(monkeypatch):
    assert DataSourceConfig.from_config(config()).longest_wait == ("join_timeout", 86400)
    assert DataSourceConfig.from_config(load_config(["preset=demo"])).longest_wait == ("max_wait_time", 600)
    for own in ("environment.command=python", "environment.agent=a:b"):
        assert DataSourceConfig.from_config(config(own)).longest_wait[0] == "max_wait_time", "it starts a program"
    several = config("environments.one.target=their.env")
    assert DataSourceConfig.from_config(several).longest_wait[0] == "max_wait_time"
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="inference.api_key is not set, .* set ATROPOS_API_KEY"):
        check_key(config())
    check_key(config("inference.api_key=k"))


def test_join_ports_are_the_defaults_where_they_are_free(model_path, tmp_path):
    """A port that is given twice is refused."""
    port = free_port()
    assert default_port(port) == default_port(port) == port
    assert default_port(port, given=[port]) != port, "another service of this run has it"
    code = f"from recipe.atropos.utils.process import default_port; print(default_port({port}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) != port, "another launcher has chosen it, and does not listen yet"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert default_port(taken.getsockname()[1]) != taken.getsockname()[1]
    port = free_port()
    overrides = [f"actor_rollout_ref.model.path={model_path}", f"api.port={port}", f"inference.gateway_port={port}"]
    with pytest.raises(ConfigurationError, match=f"api.port and inference.gateway_port: both are {port}"):
        run = load_config(["preset=demo", *overrides])
        check_start(run_of(run, tmp_path))
