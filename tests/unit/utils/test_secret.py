"""Secrets stand in no command line, no kept file and no output."""

import json
import os
import runpy

import pytest
import ray
from omegaconf import OmegaConf

from helpers.runs import prepare_trainer, run_of
from helpers.trainer import compose_config
from recipe.atropos import main, train_run
from recipe.atropos.config import compose
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch, sglang_command
from recipe.atropos.launcher.environment_processes import environment_command, environment_variables
from recipe.atropos.utils import private_process
from recipe.atropos.utils.local_ray import start_ray
from recipe.atropos.utils.secret import (
    API_KEY_VARIABLE,
    config_yaml,
    environments_key,
    hidden_settings,
    is_secret,
    public_config,
    without_secrets,
)

KEY, JUDGE = "the-key-of-the-run", "the-key-of-a-judge"
OPTIONS = [
    "actor_rollout_ref.model.path=m",
    f"inference.api_key={KEY}",
    "++environment.args.train_size=7",
    f"++environment.args.judge_api_key={JUDGE}",
    "++environment.args.openai.timeout=8",
]


SECRETS = """
api_key api-key openai.api_key environment.args.OPENAI_API_KEY hf_token ssl_keyfile_password
AWS_SECRET_ACCESS_KEY HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN ray_init.runtime_env.env_vars.WANDB_API_KEY
hub-token secret_key private_key api_keys openai_key token judge.token judge_token headers.Authorization bearer
"""
OTHERS = """
tokenizer stop_token_ids pad_token_id eos_token distill_token_ids sort_key pad_token max_tokens
token_level_scores key max_token_length tokens per_token trained_tokens next_token token_counts
"""


def test_secret_of_environments_is_printed_or_asked(monkeypatch, capsys):
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    runpy.run_module("recipe.atropos.utils.secret", run_name="__main__")
    assert capsys.readouterr().out == f"{environments_key(KEY)}\n"
    monkeypatch.delenv(API_KEY_VARIABLE)
    with pytest.raises(SystemExit, match=f"error: .{API_KEY_VARIABLE} is not set"):
        runpy.run_module("recipe.atropos.utils.secret", run_name="__main__")


def test_secret_settings_are_known_by_name():
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in OTHERS.split() if is_secret(name)] == []
    # What is no value is shown.
    settings = {"api_key": None, "hf_token": "", "secret": False, "password": "${oc.env:PASSWORD}", "a": [{"b": 1}]}
    assert without_secrets(settings) == settings and not hidden_settings(settings)
    assert hidden_settings({"api_key": "${oc.env:KEY,literal}"})


def test_secret_is_hidden_from_config_yaml_and_trackers(tmp_path, monkeypatch):
    config = compose_config(*OPTIONS)
    public, saved = public_config(config), config_yaml(config)
    for text in (json.dumps(public), saved.decode()):
        assert KEY not in text and JUDGE not in text
    assert public["inference"]["api_key"] == public["environment"]["args"]["judge_api_key"] == "***"
    assert public["environment"]["args"]["train_size"] == 7 and config.inference.api_key == KEY
    (tmp_path / "config.yaml").write_bytes(saved)
    monkeypatch.setenv("ATROPOS_API_KEY", "another")
    loaded = OmegaConf.load(tmp_path / "config.yaml")
    assert loaded.inference.api_key == "another", "who loads it gets the key from its environment"


def test_secret_flags_are_in_no_command_line(tmp_path):
    config = compose_config(*OPTIONS)
    run = run_of(config, tmp_path, OPTIONS)
    assert run.api_key == KEY, "the user's own"
    [spec] = environment_specs(config).values()
    command = environment_command(run, spec, "serve", "http://api", "http://server")
    flags = json.loads(environment_variables(run, spec)[private_process.SECRET_FLAGS])
    assert flags == [f"--openai.api_key={environments_key(KEY)}", f"--env.judge_api_key={JUDGE}"]
    assert environment_variables(run, spec)[API_KEY_VARIABLE] == environments_key(KEY) != KEY
    server, variables = sglang_command(
        SGLangLaunch("m", python="py", port=5, device="cpu", api_key=KEY, extra_args={"admin_api_key": JUDGE})
    )
    assert json.loads(variables[private_process.SECRET_FLAGS]) == ["--api-key", KEY, "--admin-api-key", JUDGE]
    for words in (command, server):
        assert not any(KEY in word or JUDGE in word for word in words)
    assert "--openai.timeout=8" in command


NESTED = [
    "environment.args.judge_api_key=123456",
    "environment.args.judge={first: {api_key: the-key-of-a-judge}, sizes: [1, 2]}",
    "environment.args.judges=[{api_keys: [the-key-of-a-judge, 123456]}]",
]


@pytest.mark.parametrize(
    "override",
    [
        *("inference.api_key=123456", "inference.api_key={a: 123456}", "inference={api_key: 123456}"),
        *("inference.api_key=1,123456", "inference.api_key=123456[", "inference={api_key: 123456, a"),
        *("inference.api_key: 123456", "{api_key: 123456"),
        *("+inference.api_key.a=123456", "environment.args=[{api_key: 123456}]", "model.pretrained.api_key=123456"),
    ],
)
def test_secret_of_a_wrong_form_is_hidden_in_the_error(override):
    with pytest.raises(ConfigurationError) as error:
        load_config(["actor_rollout_ref.model.path=m", override])
    assert "123456" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (NESTED, {"--openai.api_key", "--env.judge_api_key", "--judge.first", "--env.judges"}),
        (["environment.args={openai: {api_key: the-key-of-a-judge}}"], {"--openai.api_key"}),
    ],
    ids=["env", "openai"],
)
def test_secret_inside_of_a_value_is_hidden(overrides, names, tmp_path):
    config = compose_config("actor_rollout_ref.model.path=m", f"inference.api_key={KEY}", *overrides)
    [spec] = environment_specs(config).values()
    run = run_of(config, tmp_path)
    flags = json.loads(environment_variables(run, spec)[private_process.SECRET_FLAGS])
    command = environment_command(run, spec, "serve", "http://api", "http://server")
    kept = config_yaml(config).decode() + json.dumps(public_config(config))
    for text in (" ".join(command), kept):
        assert JUDGE not in text and "123456" not in text
    assert {flag.partition("=")[0] for flag in flags} == names
    assert all(KEY not in flag for flag in flags) and any(JUDGE in flag for flag in flags)


TOKENS = "ray_kwargs.ray_init.runtime_env.env_vars"


@pytest.mark.parametrize(
    "given",
    [
        [f"{TOKENS}.HF_TOKEN={KEY}"],
        ["ray_kwargs.ray_init.runtime_env={env_vars: {HF_TOKEN: the-key-of-the-run}}"],
        [f"{TOKENS}.HF_TOKEN=${{oc.env:MY_TOKEN}}"],
    ],
    ids=["key", "mapping", "reference"],
)
def test_secret_of_the_trainer_reaches_it_in_its_environment(given, tmp_path, model_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", KEY)
    overrides = ["preset=demo", f"actor_rollout_ref.model.path={model_path}", "inference.api_key=null", "seed=5"]
    overrides += given
    trainer = prepare_trainer(run_of(load_config(overrides), tmp_path, compose.compose_config(overrides)), monkeypatch)
    command, variables = trainer.command, trainer.variables
    assert command[1:] == ["-m", "recipe.atropos.train_run", str(tmp_path)]
    saved = (tmp_path / "config.yaml").read_text()
    assert KEY not in saved and "http://127.0.0.1:1" in saved and "seed: 5" in saved
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trained = []
    monkeypatch.setattr(main, "run", lambda config, given: trained.append(config))
    train_run.main(*command[3:])
    assert private_process.SECRET_FLAGS not in os.environ, "what the trainer starts does not have it"
    [config] = trained
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN == KEY and config.seed == 5
    assert config.inference.api_key == variables["ATROPOS_API_KEY"] and config.inference.urls == ["http://127.0.0.1:1"]


def test_secret_tokens_are_asked_of_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    with pytest.raises(ConfigurationError, match=rf"ray=={ray.__version__} has no token .* install ray>=2.55"):
        start_ray(num_cpus=1)
