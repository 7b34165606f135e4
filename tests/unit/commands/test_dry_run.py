"""``launch_services --dry-run``: what would be started, without starting it."""

import shlex

import pytest
import yaml
from rich.console import Console

from recipe.atropos.checkpoint.resumption import model_identity
from recipe.atropos.commands.dry_run import service_commands, show_dry_run
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.demo.small_policy import Recipe, policy_folder
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launch_services import compose_overrides, main, parse_arguments
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.launcher.services import Run
from recipe.atropos.run.folder import FORMAT
from recipe.atropos.utils.files import write_json
from recipe.atropos.utils.private_process import SECRET_FLAGS
from recipe.atropos.utils.secret import public_config


@pytest.fixture
def planned(tmp_path, model_path, monkeypatch):
    """A function that returns a run of the demo with further settings."""
    monkeypatch.setenv("ATROPOS_SGLANG_PYTHON", "py")  # no SGLang is needed to print a command

    def plan(*overrides):
        given = ["--preset", "demo", f"--model={model_path}", f"--run-dir={tmp_path / 'run'}", *overrides]
        run = Run(plan_run(compose_overrides(parse_arguments(given))))
        place_servers(run.config)
        return run

    return plan


def shown(run, whole=False):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        show_dry_run(run, console, whole)
    return capture.get()


def test_dry_run_prints_what_differs_and_on_request_all(planned):
    run = planned("data.train_batch_size=24", "environment.args.level=3")
    text = shown(run)
    lines = text.splitlines()
    assert "data.train_batch_size: 24  # default: 16" in lines
    assert "environment.args.level: 3  # default: none" in lines
    marked = sum("  # default: " in line for line in lines)
    assert f"# configuration ({marked} values differ from the default; --all: the rest)" in lines
    assert len(lines) < 120 and "adv_estimator" not in text, "and no default among them"
    whole = shown(run, whole=True)
    assert f"# configuration ({marked} values differ from the default)" in whole
    of_file = whole.partition("the whole configuration\n")[2].partition("\n\n# ")[0]
    assert yaml.safe_load(of_file) == public_config(run.config)


def test_dry_run_prints_the_command_of_each_service(planned, tmp_path):
    run = planned("inference.servers=2", "api.port=8123", "inference.gateway_port=9123", "inference.port=9200")
    commands = {name: command for name, (command, _) in service_commands(run).items()}
    assert list(commands) == ["api", "sglang-0", "sglang-1", "gateway", "trainer", "environment"]
    assert commands["api"][-2:] == [f"--data-dir={tmp_path / 'run/trajectories'}", "--retention=all"]
    assert "--servers=http://127.0.0.1:9200,http://127.0.0.1:9201" in commands["gateway"]
    assert commands["trainer"][-2:] == ["recipe.atropos.train_run", str(tmp_path / "run")]
    assert "--env.rollout_server_url=http://127.0.0.1:8123" in commands["environment"]
    assert "--openai.base_url=http://127.0.0.1:9123/v1" in commands["environment"]
    text = shown(run)
    for command in commands.values():
        assert shlex.join(command) in text


def test_dry_run_prints_the_session_server_of_programs(planned, tmp_path):
    run = planned("environment.command=python agent.py", "environment.items=items.jsonl", "sessions.port=9300")
    commands = service_commands(run)
    assert list(commands) == ["api", "sglang", "gateway", "sessions", "trainer", "environment"]
    command, variables = commands["environment"]
    assert {"--env.command=python agent.py", "--env.items=items.jsonl"} <= set(command)
    assert "recipe.atropos.environments.program" in command
    assert variables["ATROPOS_SESSIONS_URL"] == "http://127.0.0.1:9300"
    assert f"--data={tmp_path / 'run/sessions.sqlite'}" in commands["sessions"][0]
    others = planned("environments.a.command=python a.py", "environments.b.target=recipe.atropos.environments.gsm8k")
    targets = {name: spec.target for name, spec in others.plan.specs.items()}
    assert targets == {"a": "recipe.atropos.environments.program", "b": "recipe.atropos.environments.gsm8k"}
    assert "sessions" in service_commands(others) and "sessions" not in service_commands(planned())
    given = ["sessions.enabled=true", "environment.credit={lam: 0.25}"]
    own, joined = (
        service_commands(planned(*given, *more))["sessions"][0] for more in ([], ["environment.target=null"])
    )
    assert '--credit={"lam": 0.25}' in joined and not any(flag.startswith("--credit") for flag in own)


def test_dry_run_shows_no_secret_and_starts_nothing(planned, tmp_path):
    run = planned("inference.api_key=s3cret-1", "environment.args.hf_token=s3cret-2")
    text = shown(run)
    assert "s3cret" not in text and f"{SECRET_FLAGS}='***'" in text and "api_key: '***'" in text
    assert "nothing was started" in text and not (tmp_path / "run").exists()


@pytest.mark.parametrize("damaged", [False, True], ids=["missing", "damaged"])
def test_dry_run_checks_the_model_as_the_run_would(capsys, tmp_path, damaged):
    """Damaged by a download that was interrupted, for example."""
    model = tmp_path / "model"
    if damaged:
        model.mkdir()
        (model / "config.json").write_text('{"vocab_size": 1')
    assert main(["--preset", "demo", "--dry-run", f"--model={model}", f"--run-dir={tmp_path / 'run'}"]) == 1
    assert ("config.json cannot be read" if damaged else "no model there") in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_dry_run_refuses_a_folder_that_the_run_would_refuse(planned, tmp_path, model_path):
    """Another format, or a checkpoint of another model; neither is changed."""
    run = planned()
    saved = run.files.checkpoints / "global_step_3"
    (saved / "actor").mkdir(parents=True)
    write_json(run.files.identity, {"format": FORMAT})
    model = model_identity(str(model_path))
    write_json(saved / "complete.json", {"step": 3, "sequence": 1, "files": {}, "model": model})
    assert "nothing was started" in shown(run)
    write_json(saved / "complete.json", {"step": 3, "sequence": 1, "files": {}, "model": model | {"digest": "another"}})
    with pytest.raises(ConfigurationError, match="is another model than"):
        shown(run)
    write_json(run.files.identity, {"format": 0})
    with pytest.raises(ConfigurationError, match="holds a run of format 0"):
        shown(run)
    assert not run.files.config.exists() and run.files.identity.read_bytes() == b'{\n  "format": 0\n}\n'


def test_dry_run_has_the_folder_of_a_small_policy(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "cache"))
    run = planned(f"{MODEL_KEY}=small-policy")
    folder, made = policy_folder(run.config.seed, Recipe())
    text = shown(run)
    assert not made and "small-policy is made at the start" in text and str(folder) not in text
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    run = planned(f"{MODEL_KEY}=small-policy")
    text = shown(run)
    assert f"--model-path {folder} " in text and f"--env.tokenizer_name={folder} " in text and "is made at" not in text
