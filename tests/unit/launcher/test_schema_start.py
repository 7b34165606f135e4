"""What is checked before any service starts: the model, SGLang's interpreter, an environment's target and flags."""

import signal
import socket
import sys
import threading
import time
from pathlib import Path

import orjson
import pytest

from helpers.interpreter import make_interpreter, write_environment
from helpers.runs import run_of
from recipe.atropos.config.compose import compose_overrides, load_config, resolved
from recipe.atropos.config.derived import set_derived
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.config.models import SMALL_POLICIES, check_model, resolve_model
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.inference.server import LaunchError, SGLangLaunch, check_launch, sglang_command
from recipe.atropos.launch_services import check_start, parse_arguments, prepare_model
from recipe.atropos.launcher.environment_processes import _as_key, check_environments, check_target, environment_command
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.launcher.sglang import check_ports, plan_servers
from recipe.atropos.terminal import progress as progress_module
from recipe.atropos.utils.process import unstopped


def executable(path, *lines):
    """A shell's script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/no/such/model", "no model there"),
        ("no-such-org/no-such-model", "a name that the hub can resolve|the hub has no such model"),
        ("small-policy-ters", "choose one of small-policy, small-policy-calculator"),
        ("not a name", "correct the name"),
    ],
)
def test_schema_start_names_a_model_that_is_not_there(path, told):
    with pytest.raises(ConfigurationError, match=f"actor_rollout_ref.model.path={path}: .*({told})"):
        check_model(path)


def test_schema_start_asks_for_nothing_that_is_made_later(tmp_path):
    """A policy that is made on first use, and another run's adapter, are there only once the run's folder is."""
    from recipe.atropos.demo.policies import RECIPES

    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    assert set(RECIPES) == set(SMALL_POLICIES)
    (tmp_path / "sglang-0.5.23.dist-info").mkdir()
    (tmp_path / "sglang-0.5.23.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    python = executable(tmp_path / "python", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    adapter = ["lora_rank=8", "lora.merge=false", f"lora_adapter_path={tmp_path / 'start'}"]
    model = (f"actor_rollout_ref.model.{option}" for option in adapter)
    config = load_config(["preset=demo", f"inference.python={python}", *model])
    check_start(run_of(config, tmp_path))


def test_schema_start_gives_servers_lists_and_mappings(tmp_path, monkeypatch):
    """As SGLang's parser takes them: a list as several words, a mapping as JSON."""
    (tmp_path / "sglang-1.dist-info").mkdir()
    (tmp_path / "sglang-1.dist-info/METADATA").write_text("Name: sglang\nVersion: 1\n")
    (tmp_path / "sglang/srt").mkdir(parents=True)
    (tmp_path / "sglang/srt/server_args.py").write_text("""class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--cuda-graph-bs-decode", type=int, nargs="+")
        parser.add_argument("--model-loader-extra-config")
        parser.add_argument("--lora-paths", nargs="*")
        parser.add_argument("--dp-size", type=int)
""")
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "cache"))
    python = executable(tmp_path / "python", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    loader, adapters = "{num_threads:8,fast:true}", "[{lora_name:a},'b=c']"
    flags = f"{{cuda_graph_bs_decode:[1,2],model_loader_extra_config:{loader},lora_paths:{adapters},dp_size:2}}"
    given = [f"actor_rollout_ref.model.path={tmp_path}", "inference.device=cpu", f"inference.python={python}"]
    given.append("trainer.atropos.weight_sync.transport=disk")  # else a server has no copies of its ranks
    (tmp_path / "config.json").write_text("{}")
    run = run_of(load_config(["preset=demo", *given, f"inference.args={flags}"]), tmp_path)
    check_start(run)
    command, _ = sglang_command(plan_servers(run)["sglang"])
    assert command[command.index("--cuda-graph-bs-decode") :][:3] == ["--cuda-graph-bs-decode", "1", "2"]
    assert command[command.index("--model-loader-extra-config") + 1] == '{"num_threads": 8, "fast": true}'
    assert command[command.index("--lora-paths") :][1:3] == ['{"lora_name": "a"}', "b=c"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("inference.python=/nope", "inference.python=/nope does not run"),
        ("inference.args.port=5", "set inference.port itself"),
        ("inference.args.dp=2", "args.dp_size=2 with .*transport=auto: .*; give inference.servers instead"),
        ("inference.host=::", "inference.host=:: is no IPv4 address of this machine"),
        ("environment.target=recipe.atropos.environments.no", "environment.target=.*environments.no: no such module"),
        ("environment.target=/no/such/env.py", "environment.target=/no/such/env.py: no such file"),
        ("inference.port=TAKEN", "inference.port=.* is taken"),
        ("inference={port: 65535, servers: 2}", "inference.port of server 1=65536: the highest is 65535; give a lower"),
        ("api.port=TAKEN", "api.port=.* is taken"),
        ("api.host=192.0.2.1", "api.host=192.0.2.1 is no IPv4 address of this machine; give 127"),
        ("trainer.resume_from_path=/no/such", "give both"),
        ("trainer.resume_mode=resume_path", "give both"),
    ],
)
def test_schema_start_names_what_cannot_start(override, told, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = load_config(["preset=demo", override.replace("TAKEN", str(taken.getsockname()[1]))])
        run = run_of(config, tmp_path)
        with pytest.raises((ConfigurationError, LaunchError), match=told):
            check_config(config)
            check_target(*run.plan.specs.values())
            check_start(run)


def test_schema_start_gives_everyone_the_folder_of_the_model(tmp_path, monkeypatch):
    """One below the home folder, or a small policy that is made; a checkpoint below the home folder is found too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    options = ["trainer.resume_mode=resume_path", "trainer.resume_from_path='~/global_step_3'"]
    config = load_config(["preset=demo", "actor_rollout_ref.model.path='~/m'", *options])
    check_config(config)
    prepare_model(config, tmp_path / "log")
    assert config.actor_rollout_ref.model.path == str(tmp_path / "m")
    monkeypatch.setattr("recipe.atropos.config.models.run_command", lambda *_, **__: (0, f"made\n{tmp_path}\n"))
    config = load_config(["preset=demo"])
    prepare_model(config, tmp_path / "log")
    assert config.actor_rollout_ref.model.path == str(tmp_path) and resolve_model("org/name", seed=0) == "org/name"


def test_a_small_policy_needs_a_folder_that_can_be_written(tmp_path, monkeypatch):
    """The home folder of a container may be read-only."""
    monkeypatch.delenv("ATROPOS_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(AtroposError) as refused:
        resolve_model("small-policy-terse", seed=0)
    assert str(refused.value).splitlines()[1:] == [
        "[Errno 20] Not a directory: '/dev/null/.cache/verl-atropos'; set ATROPOS_CACHE to a folder that can be written"
    ]


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("inference.urls=[http://h:1]", "give inference.servers"),
        ("inference={gateway: http://h:1}", "give inference.host and inference.gateway_port"),
        ("trainer.atropos.api_url=http://h:1", "give api.host and api.port, or train beside services of your own"),
    ],
)
def test_schema_start_refuses_what_the_launcher_sets_itself(override, instead):
    with pytest.raises(ConfigurationError, match=instead):
        plan_run(["preset=demo", override])


def finished(folder, steps=60):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_bytes(orjson.dumps({"finished_steps": steps}))


def test_run_dir_of_the_next_number_holds_all_of_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "runs/demo")
    for options, name in ((["preset=demo"], "demo-2"), (["preset=demo", "run.name=mine"], "mine")):
        plan = plan_run(options)
        config = plan.config
        assert plan.files.path == tmp_path / "runs" / name and set_derived(resolved(plan.composed)) == config, (
            "the demo names its device"
        )
        for path in (config.run.dir, config.trainer.default_local_dir, config.trainer.rollout_data_dir):
            assert Path(path).resolve().is_relative_to(plan.files.path), path


@pytest.mark.parametrize("options", [["--run-dir=~/run"], ["run.dir='~/run'"], ["--config=~/own.yaml"]])
def test_run_dir_below_home_is_no_folder_of_that_name(tmp_path, monkeypatch, options):
    """A shell leaves the ~ in each of them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("run: {dir: ~/run}")
    plan = plan_run(compose_overrides(parse_arguments(["--preset=demo", *options])))
    assert (
        plan.files.path == tmp_path / "run" and Path(plan.config.trainer.default_local_dir).parent == tmp_path / "run"
    )


@pytest.mark.parametrize("key", ["run.dir=DIR", "++run.dir=DIR", "run={dir: DIR}"])
def test_run_dir_given_by_hand_is_not_replaced(tmp_path, key):
    finished(tmp_path / "run")
    given = ["preset=demo", key.replace("DIR", str(tmp_path / "run"))]
    with pytest.raises(ConfigurationError, match=rf"run.dir={tmp_path}/run holds a run that has trained 60 steps"):
        plan_run(given)
    assert plan_run(given, begins=False).files.path == tmp_path / "run", "who only plans, or looks, begins none"


def test_schema_start_speaks_of_flags_as_keys():
    told = {
        "CliServeConfig: --env.steps='abc': Input should be a valid integer": "environment.args.steps='abc'",
        "--env m:Nope: m has no class Nope": "environment.target=m:Nope: m has no class Nope",
        "ValueError: --env.task=no: reasoning-gym has no such task": "ValueError: environment.args.task=no: ",
        "unknown flag --openai.timout": "unknown flag environment.args.openai.timout",
    }
    for line, wanted in told.items():
        assert _as_key(line, "environment").startswith(wanted)


def test_schema_start_shows_progress_without_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "_EVERY_SECONDS", 0.05)
    with progress_module.progress("making tea", tmp_path / "tea.log"):
        time.sleep(0.2)
    told = capsys.readouterr().out
    assert " s: making tea; log: " in told and "tea.log" in told


def test_schema_start_names_an_interpreter_that_hangs(tmp_path, monkeypatch):
    python = executable(tmp_path / "python", "exec sleep 100")
    monkeypatch.setattr("recipe.atropos.inference.server._PROBE_SECONDS", 0.2)
    with pytest.raises(LaunchError, match="python.* does not start within 0.2 s: "):
        check_launch(SGLangLaunch("m", python=str(python)))


@pytest.mark.timeout(60, method="signal")  # a thread would end the whole worker, for which xdist then waits
def test_schema_start_is_interrupted_in_a_check_of_flags(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)\n")
    config = load_config(["preset=demo", f"environment.target={tmp_path}/slow.py"])

    def interrupt():
        while not (found := [service for service in unstopped if service.name.startswith("check-")]):
            time.sleep(0.05)
        checks.extend(found)
        time.sleep(0.5)  # until it is waited for: Python drops an exception that is raised in a finalizer
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    checks = []
    threading.Thread(target=interrupt, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check_environments(run_of(config, tmp_path / "run"))
    assert time.monotonic() - begin < 30
    assert checks[0].poll() is not None and checks[0] not in unstopped


def checked(tmp_path, python):
    target = write_environment(tmp_path / "own.py")
    config = load_config(["preset=demo", f"environment.target={target}", f"environment.python={python}"])
    run = run_of(config, tmp_path / "run")
    check_environments(run)
    return environment_command(run, *run.plan.specs.values(), "serve", "http://api", "http://server")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (None, "no such program; give the path of an interpreter, such as VENV/bin/python"),
        ("exit 3", "own/python does not run .*; give a Python interpreter"),
        ("echo 3 10 psutil", "Python 3.10; the adapter needs 3.11 or newer"),
        ("echo 3 12 orjson psutil", "the adapter needs orjson, psutil; run .*/own/python -m .* orjson==.* psutil==.*"),
    ],
)
def test_own_interpreter_that_cannot_run_is_named(program, told, tmp_path):
    python = tmp_path / "own" / "python"
    if program is not None:
        executable(python, program)
    with pytest.raises(ConfigurationError, match=f"^environment.python={python}: .*{told}$"):
        checked(tmp_path, python)


def test_own_interpreter_needs_no_package_but_the_adapters(tmp_path):
    """No torch, verl, Ray, hydra or recipe is installed there; one that is too old is named with the version."""
    python = make_interpreter(tmp_path / "venv")
    assert checked(tmp_path, python)[:2] == [str(python), "-m"]
    [metadata] = tmp_path.glob("venv/lib/python*/site-packages/wandb-*.dist-info")
    metadata.unlink()
    (older := metadata.with_name("wandb-0.30.0.dist-info")).mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.30.0\n")
    with pytest.raises(ConfigurationError, match="the adapter needs wandb>=0.31; run .* -m pip install wandb==0"):
        checked(tmp_path, python)


def test_own_interpreter_of_one_of_several_environments():
    options = ["environment.python=shared", "environments.a.target=only.there", 'environments.b.python="~/v/python"']
    a, b = environment_specs(load_config(["preset=demo", *options])).values()
    assert (a.interpreter, b.interpreter) == ("shared", str(Path.home() / "v/python"))
    check_target(a)


def test_schema_start_takes_a_port_that_a_run_has_just_left():
    """Its connections wait there for a minute (TIME_WAIT), as SGLang's do, which closes them first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    check_ports(load_config(["preset=demo", f"inference.port={port}", "inference.host=127.0.0.1"]))
