"""``launch_services --dry-run``: what would be started, without starting it."""

import shlex

import pytest
from rich.console import Console

from recipe.atropos.commands.dry_run import service_commands, show_dry_run
from recipe.atropos.launch_services import compose_overrides, environments_of, load_run_config, main, parse_arguments
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.launcher.services import Run
from recipe.atropos.utils.private_process import SECRET_FLAGS


@pytest.fixture
def planned(tmp_path, model_path, monkeypatch):
    """A function that returns (run, environments) for further settings of the demo."""
    monkeypatch.setenv("ATROPOS_SGLANG_PYTHON", "py")  # no SGLang is needed to print a command

    def plan(*overrides):
        given = ["--preset", "demo", f"--model={model_path}", f"--run-dir={tmp_path / 'run'}", *overrides]
        config, composed, directory, _ = load_run_config(compose_overrides(parse_arguments(given)))
        place_servers(config)
        return Run(config, composed, directory), environments_of(config)

    return plan


def shown(run, specs):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        show_dry_run(run, specs, console)
    return capture.get()


def test_dry_run_marks_what_differs_from_the_default(planned):
    lines = shown(*planned("data.train_batch_size=24", "environment.args.level=3")).splitlines()
    assert "  train_batch_size: 24  # default: 16" in lines
    assert "    level: 3  # default: none" in lines
    assert "  train_size: null" not in [line for line in lines if "default" in line]
    marked = sum("  # default: " in line for line in lines)
    assert f"# configuration ({marked} values differ from the default)" in lines
    assert any(line.strip() == "val_batch_size: null" for line in lines) or marked < len(lines) / 4, "the rest is there"


def test_dry_run_prints_the_command_of_each_service(planned, tmp_path):
    run, specs = planned("inference.servers=2", "api.port=8123", "inference.gateway_port=9123", "inference.port=9200")
    commands = {name: command for name, (command, _) in service_commands(run, specs).items()}
    assert list(commands) == ["api", "sglang-0", "sglang-1", "gateway", "trainer", "environment"]
    assert commands["api"][-4:] == ["--data-dir", str(tmp_path / "run/trajectories"), "--retention", "all"]
    assert "--servers=http://127.0.0.1:9200,http://127.0.0.1:9201" in commands["gateway"]
    assert commands["trainer"][-2:] == ["--run", str(tmp_path / "run")]
    assert "--env.rollout_server_url=http://127.0.0.1:8123" in commands["environment"]
    assert "--openai.base_url=http://127.0.0.1:9123/v1" in commands["environment"]
    text = shown(run, specs)
    for command in commands.values():
        assert shlex.join(command) in text


def test_dry_run_shows_no_secret_and_starts_nothing(planned, tmp_path):
    run, specs = planned("inference.api_key=s3cret-1", "environment.args.hf_token=s3cret-2")
    text = shown(run, specs)
    assert "s3cret" not in text and f"{SECRET_FLAGS}='***'" in text and "api_key: '***'" in text
    assert "nothing was started" in text and not (tmp_path / "run").exists()


def test_dry_run_checks_as_the_run_would(capsys, tmp_path):
    arguments = ["--preset", "demo", "--dry-run", "--model=/no/such/model", f"--run-dir={tmp_path / 'run'}"]
    assert main(arguments) == 1 and "no model there" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
