"""``main.py`` as a Hydra application."""

import contextlib
import logging
import os
import sys
from unittest import mock

import pytest
import yaml

from recipe.atropos import launch_services, main
from recipe.atropos.config.compose import compose_config, load_config, quoted
from recipe.atropos.config.hydra_app import hydra_arguments
from recipe.atropos.config.preflight import check_config
from recipe.atropos.launcher import run_plan
from recipe.atropos.launcher.sglang import plan_servers
from recipe.atropos.run.folder import LOCK_VARIABLE, RunDir
from recipe.atropos.utils.gpus import decide_device


@pytest.fixture
def start(tmp_path, monkeypatch, model_path):
    """Start the trainer with arguments in an empty folder; return the configuration that it trains with, or None."""
    trained = []
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(main, "run", lambda config, given: trained.append(config))

    def started(*arguments):
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        model = (
            [] if any(word.startswith("-") for word in arguments) else [f"actor_rollout_ref.model.path={model_path}"]
        )
        main.main([*arguments, *model])
        return trained.pop() if trained else None

    return started


FILE = """
preset: demo
seed: 4
environment: {args: {system_prompt: "\\\\boxed{it's}, a=b", 'no': null}}
trainer: {logger: [console], default_local_dir: elsewhere}
"""


@pytest.mark.parametrize(
    "given",
    [
        [
            "preset=demo",
            "environment.args={}",
            "environment.target=null",
            "environments={a: {target: x.y, args: {list: [1e-5, {k: 'v w'}]}}}",
            "actor_rollout_ref.actor.fsdp_config.wrap_policy={}",
            "run.dir=a b",
        ],
        [
            "preset=demo",
            "environment.args.n=7",
            r"++environment.args.a='\boxed{i\'s}\\'",
            "data={train_batch_size: 8}",
            # The preset's ppo_max_token_len_per_gpu has no effect then.
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.actor.optim.override_optimizer_config={eps: 1e-6}",
        ],
        ["config=FILE", "seed=0", "environment.args.temperature=${actor_rollout_ref.rollout.temperature}"],
    ],
    ids=["mappings", "values", "file"],
)
def test_hydra_main_trains_with_what_load_config_says(start, given, tmp_path, model_path, monkeypatch):
    (tmp_path / "own.yaml").write_text(FILE)
    given = [f"config={tmp_path / 'own.yaml'}" if word == "config=FILE" else word for word in given]
    monkeypatch.setattr(main, "check_config", lambda config: None)
    trained = start(*given)
    assert trained == load_config([*given, f"actor_rollout_ref.model.path={model_path}"])


def test_hydra_main_makes_no_folder_and_leaves_the_logs_alone(start, tmp_path):
    before = (logging.getLogger().level, [*logging.getLogger().handlers])
    config = start("preset=demo", "~environment.args.seed", "hydra.job.name=x")
    assert "seed" not in config.environment.args and config.environment.args.dataset_name == "synthetic"
    assert (logging.getLogger().level, logging.getLogger().handlers) == before
    assert not [*(tmp_path / "cwd").iterdir()]


def test_hydra_main_takes_a_primary_configuration_of_the_users(start, tmp_path, model_path):
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [trainer, _self_]\nseed: 5\nactor_rollout_ref: {{model: {{path: {model_path}}}}}\n"
        "environment: {args: {length: 3}}\n"
    )
    own = [f"--config-dir={tmp_path}", "--config-name=mine"]
    config = start(*own, "seed=0")
    assert config.seed == 0, "a shipped value is a value too"
    assert config.environment.args == {"length": 3}
    assert start("--config-path", str(tmp_path), "--config-name", "mine", "preset=demo").run.name == "demo"
    (tmp_path / "mine.yaml").write_text("defaults: [trainer, _self_]\nsed: 5\n")
    with pytest.raises(SystemExit, match="^error: sed: no such key; did you mean seed\\?$"):
        start(*own)
    (tmp_path / "mine.yaml").write_text(
        "seed: 5\nhydra: {run: {dir: .}, output_subdir: null, job_logging: {root: null}}\n"
    )
    with pytest.raises(SystemExit, match=r"^error: model_engine is missing: .* defaults: \[trainer, _self_\]$"):
        start(*own)


def test_hydra_main_shows_the_configuration_and_its_help(start, capsys):
    start("--cfg", "job", "--package", "environment.args", "preset=demo", "environment.args.x='a, b'")
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["x"] == "a, b" and shown["seed"] == "${seed}"
    for flag, told in (("--help", "Trajectory API"), ("--hydra-help", "== Flags ==")):
        with pytest.raises(SystemExit, match="0"):
            start(flag)
        assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["-m", "seed=1"], "-m, --multirun, hydra.mode: one command trains one run"),
        (["hydra.mode=MULTIRUN"], "-m, --multirun, hydra.mode: one command trains one run"),
        (["+new.key=1", "--cfg", "job"], "new.key: no such key"),
        (["lr=1"], "lr=1: this key has another name here; give actor_rollout_ref.actor.optim.lr=1"),
        (["~seed"], "seed is missing: key=null leaves an option out"),
        (["critic.optim.lr=1"], "critic.optim.lr=1 has no effect here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_hydra_main_refuses_by_name(start, given, told):
    with pytest.raises(SystemExit) as refusal:
        start(*given)
    assert str(refusal.value).startswith(f"error: {told}")


def test_hydra_main_gives_hydra_its_own_arguments():
    own = ["hydra.verbose=true", "hydra/job_logging=default", "~seed"]
    given = ["--cfg=job", *own, "seed=3", "preset=demo"]
    assert hydra_arguments(given) == ["--cfg=job", *own, "preset=demo", "++seed=3"]
    assert hydra_arguments(["--shell-completion", "query=bash"]) == ["--shell-completion", "query=bash"]


KEY = "the-key-of-the-run"


def test_hydra_main_shows_no_argument_of_a_failed_training(start, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(main, "run", fails)
    with pytest.raises(SystemExit) as end:
        start("preset=demo", f"inference.api_key={KEY}")
    told = capsys.readouterr().err
    assert end.value.code == 1 and "in fails" in told and "RuntimeError: a bug" in told
    assert KEY not in told


def test_quoted_text_is_read_as_it_was():
    texts = ["\\boxed{x}", "it's", "end\\", "a\\'b", "x\\\\y", "\\\\'", "a=b, c: {d}", ""]
    assert compose_config([f"environment.args.texts=[{','.join(map(quoted, texts))}]"]).environment.args.texts == texts


@mock.patch.dict(os.environ)
def test_start_checks_and_decides_the_device_once(tmp_path, model_path, monkeypatch):
    """Also by hand; a trainer that the launcher started is checked already."""
    check, decide = mock.Mock(wraps=check_config), mock.Mock(wraps=decide_device)
    for module in (main, launch_services):
        monkeypatch.setattr(module, "check_config", check)
    for module in (main, run_plan):
        monkeypatch.setattr(module, "decide_device", decide)

    def counted(work, *arguments):
        before = check.call_count, decide.call_count
        work(*arguments)
        return check.call_count - before[0], decide.call_count - before[1]

    given = [f"actor_rollout_ref.model.path={model_path}", f"run.dir={tmp_path / 'run'}", "trainer.device=auto"]
    given += ["inference.api_key=k"]
    monkeypatch.setattr(launch_services, "check_start", lambda run: None)  # needs SGLang
    monkeypatch.setattr(launch_services, "show_dry_run", lambda run, *_: list(plan_servers(run)))
    launched = counted(launch_services.main, ["--preset", "demo", "environment.target=null", "--dry-run", *given])
    assert launched == (1, 1)
    monkeypatch.setattr(main, "_train", main.ray_options)
    monkeypatch.setattr(main, "gateway_before", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(main, "installed_versions", lambda python: {})
    given += ["inference.urls=[http://127.0.0.1:1]"]
    by_hand = load_config(["preset=demo", *given])
    assert counted(main.train, by_hand) == (1, 1)
    with RunDir(tmp_path / "run").lock() as descriptor:
        monkeypatch.setitem(os.environ, LOCK_VARIABLE, str(descriptor))
        assert counted(main.train, load_config(["preset=demo", *given])) == (0, 1)
