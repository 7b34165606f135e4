"""The quick start in two terminals: a launcher without an environment, and environments that join it.

The environments are stock ones: atroposlib's own command line, without the adapter.
"""

import asyncio
import os
import re
import shlex
import socket
import subprocess
import sys

import orjson
import pytest
import yaml

from helpers.environments import join_env
from helpers.services import get, group, post, running_api
from helpers.terminal import LIMIT, terminals
from recipe.atropos.config.compose import load_config
from recipe.atropos.data_source import DataSourceConfig
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launch_services import check_start
from recipe.atropos.launcher import joining
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.joining import check_key, how_to_join
from recipe.atropos.launcher.preflight import check_config
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.sglang import Inference
from recipe.atropos.launcher.supervision import watch
from recipe.atropos.run_record import read_metrics
from recipe.atropos.utils.process import ServiceFailed, default_port, free_port

LAUNCH = [sys.executable, "-m", "recipe.atropos.launch_services"]
STOCK = join_env.__file__


@pytest.fixture
def terminal():
    with terminals() as open_one:
        yield open_one


def options(model, steps):
    fast = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "trainer.save_freq=-1", "trainer.logger=[]"]
    ports = [f"api.port={free_port()}", f"inference.gateway_port={free_port()}"]
    joined = ["environment.target=null", "trainer.atropos.max_staleness=null"]
    return ["--preset=demo", f"--model={model}", f"--steps={steps}", "--run-dir=run", *fast, *ports, *joined]


def told_command(text, example="environments/gsm8k_server.py"):
    """The command that the launcher prints for a stock environment, for the one here."""
    found = re.search(rf"^python {example} serve .*$", text, re.MULTILINE)
    return found.group().replace(f"python {example}", f"{shlex.quote(sys.executable)} {STOCK}")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_join_trains_on_stock_environments_that_come_and_go(terminal, model_path, tmp_path, monkeypatch):
    """By the printed command and by flags; one leaves and returns, beside another; the key is on the terminal only."""
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    steps = 60
    launcher = terminal([*LAUNCH, *options(model_path, steps)], tmp_path)
    launcher.wait_for(r"python environments/gsm8k_server.py serve .*\n")
    launcher.wait_for("this run starts no environment, so it evaluates nothing")
    command = told_command(launcher.text)
    key, api, gateway = (
        re.search(rf'"{name}": "([^"]+)"', command).group(1) for name in ("api_key", "rollout_server_url", "base_url")
    )
    by_file = ["bash", "-c", f"exec {command}"]
    first = terminal(by_file, tmp_path)
    launcher.wait_for("an environment has joined, as number 0")
    launcher.wait_for(rf"step +2/{steps}")
    first.end()
    flags = {"env.rollout_server_url": api, "env.tokenizer_name": model_path, "env.group_size": 2}
    flags |= {"env.max_token_length": 128, "env.total_steps": 10**9, "env.use_wandb": False}
    flags |= {"openai.base_url": gateway, "openai.model_name": model_path, "openai.server_type": "sglang"}
    given = [f"--{name}={value}" for name, value in {**flags, "openai.api_key": key}.items()]
    terminal([sys.executable, STOCK, "serve", *given], tmp_path)
    terminal(by_file, tmp_path)
    launcher.wait_for("an environment has joined, as number 1")
    assert not re.search(rf"step +{steps}/", launcher.text), "it waited for one to return"
    assert launcher.process.wait(LIMIT) == 0, launcher.text[-5000:]
    run = tmp_path / "run"
    lines, summary = read_metrics(run), orjson.loads((run / "summary.json").read_bytes())
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["atropos/rows_with/unknown_version"] == line["atropos/rows"] == 4 for line in lines)
    assert summary["environments_joined"] in (2, 3) and summary["alarms"]["unknown_sampling"]["steps"] == steps
    assert summary["groups"]["trained"] == 2 * steps and "sent" not in summary["groups"]
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not holders, "the key is in a file"


# ---------------------------------------------------------------------- without a run


def config(*overrides):
    no_bound = ["preset=demo", "environment.target=null", "trainer.atropos.max_staleness=null"]
    return load_config([*no_bound, "actor_rollout_ref.model.path='/models/one of é'", *overrides])


@pytest.mark.parametrize("shown", [True, False])
def test_join_commands_say_everything_to_a_shell(shown):
    key = 'it\'s "secret" $HOME'
    told = how_to_join(config(), "http://api:1", "http://server:2", key if shown else None)
    assert shown == ("secret" in told)
    adapted, stock = (line for line in told.splitlines() if "serve" in line)
    script = f'python() {{ printf \'%s\\0\' "$ATROPOS_API_KEY" "$@"; cat; }}\n{{ {adapted} < /dev/null; {stock}; }}'
    variables = {"PATH": os.environ["PATH"], **({} if shown else {"ATROPOS_API_KEY": key})}
    printed = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True).stdout
    *parts, settings = printed.split("\0")
    expected = ["--env.rollout_server_url=http://api:1", "--env.tokenizer_name=/models/one of é", "--env.group_size=8"]
    expected += ["--env.max_token_length=128", "--openai.base_url=http://server:2/v1", "--openai.server_type=sglang"]
    assert parts[0] == key and set(expected) <= set(parts)
    if shown:  # quotes within YAML are YAML's own
        settings = yaml.safe_load(settings)
        assert settings["env"]["tokenizer_name"] == "/models/one of é" and settings["env"]["max_token_length"] == 128
        server, same = settings["openai"]
        assert server == same and server["base_url"] == "http://server:2/v1" and server["api_key"] == key


def test_join_with_a_bound_on_staleness_needs_the_adapter():
    told = how_to_join(config("trainer.atropos.max_staleness=3"), "http://api:1", "http://server:2", "key")
    assert "ATROPOS_MAX_STALENESS=3 " in told and "gsm8k_server.py serve" not in told
    assert "ATROPOS_MAX_STALENESS" not in how_to_join(config(), "http://api:1", "http://server:2", "key")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("environment.args.seed=3", "environment.args={'seed': 3} has no effect with environment.target=null"),
        ("evaluation.every=5", "evaluation.every=5 has no effect with environment.target=null"),
        ("environments.one.args.seed=3", "environments.one.target is not set"),
    ],
)
def test_join_refuses_settings_of_no_environment(override, told):
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        check_config(config(override))


def test_join_needs_a_key_that_somebody_can_know(monkeypatch):
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="inference.api_key is not set .* set ATROPOS_API_KEY"):
        check_key(config())
    check_key(config("inference.api_key=k"))


def test_join_waits_longer_than_for_an_environment_of_ones_own():
    assert DataSourceConfig.from_config(config()).longest_wait == ("join_timeout", 86400)
    assert DataSourceConfig.from_config(load_config(["preset=demo"])).longest_wait == ("max_wait_time", 600)
    several = config("environments.one.target=their.env")
    assert DataSourceConfig.from_config(several).longest_wait[0] == "max_wait_time"


def test_join_ports_are_the_defaults_where_they_are_free():
    port = free_port()
    assert default_port(port) == default_port(port) == port
    assert default_port(port, given=[port]) != port, "another service of this run has it"
    code = f"from recipe.atropos.utils.process import default_port; print(default_port({port}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) != port, "another launcher has chosen it, and does not listen yet"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert default_port(taken.getsockname()[1]) != taken.getsockname()[1]


def test_join_ports_given_twice_are_refused(model_path):
    port = free_port()
    overrides = [f"actor_rollout_ref.model.path={model_path}", f"api.port={port}", f"inference.gateway_port={port}"]
    with pytest.raises(ConfigurationError, match=f"api.port and inference.gateway_port: both are {port}"):
        check_start(load_config(["preset=demo", *overrides]))


@pytest.fixture
def api(tmp_path):
    """With a trainer's registration, of batches of two groups of two."""
    trainer = {"wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 128, "checkpoint_dir": ""}
    with running_api(tmp_path) as service:
        post(f"{service.url}/register", trainer | {"save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 9})
        get(f"{service.url}/batch")
        yield service


def small_batches(*overrides):
    return config("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "inference.api_key=the-key", *overrides)


@pytest.fixture
def impatient(monkeypatch):
    for name, value in {"_FIRST_WORD": 0.2, "_LONGEST_SILENCE": 0.2, "_FIRST_LOOK": 0.1, "_LONGEST_LOOK": 0.1}.items():
        monkeypatch.setattr(joining, name, value)


@pytest.mark.e2e
def test_join_announces_who_comes_and_says_why_no_batch_does(tmp_path, impatient, capsys, api):
    environment = {"max_token_length": 128, "desired_name": "e", "weight": 1.0, "group_size": 2}

    async def looks(join, count):
        for _ in range(count):
            await join.look_after()
            await asyncio.sleep(0.15)
        return re.sub(r"\s+", " ", capsys.readouterr().out)

    join = joining.Joining(Run(small_batches(), [], tmp_path), api.url, "http://127.0.0.1:9")
    join.start()
    shown = asyncio.run(looks(join, 6))
    assert "the-key" not in shown and '"$ATROPOS_API_KEY"' in shown, "this output is no terminal"
    assert "evaluates nothing" in shown
    assert "no environment has registered" in shown and "join_timeout=86400 s" in shown and join.awaited
    for _ in range(2):
        post(f"{api.url}/register-env", environment)
    shown = asyncio.run(looks(join, 1))
    assert "has joined, as number 0" in shown and "has joined, as number 1" in shown
    for number in range(2):
        post(f"{api.url}/scored_data", group(number, 2))
    assert "joined" not in asyncio.run(looks(join, 2)) and not join.awaited, "a batch is there: the trainer is slow"
    api.stop(grace=3)
    asyncio.run(looks(join, 1))  # an API that has ended is no error here
    join.stop()
    assert join.number == orjson.loads((tmp_path / "summary.json").read_bytes())["environments_joined"] == 2


@pytest.mark.e2e
def test_join_ends_a_run_that_hangs_but_not_one_that_waits(tmp_path, impatient, api):
    """No step in ``step_timeout`` is an error only where a batch is there."""
    run = Run(small_batches("trainer.atropos.step_timeout=2"), [], tmp_path)
    trainer = run.start("trainer", ["sleep", "1000"])
    join = joining.Joining(run, api.url, "http://127.0.0.1:9")

    async def watched(seconds):
        evaluations = Evaluations(run, {}, Inference({}, "http://127.0.0.1:9", "the-key"))
        async with asyncio.timeout(seconds):
            await watch(run, trainer, 0, join, evaluations)

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(watched(6))
        for number in range(2):
            post(f"{api.url}/scored_data", group(number, 2))
        with pytest.raises(ServiceFailed, match="no step after step 0 for .* s; trainer.atropos.step_timeout=2 s"):
            asyncio.run(watched(60))
    finally:
        run.stop()
