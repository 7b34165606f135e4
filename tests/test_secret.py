"""Secrets stand in no command line, no kept file and no output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from helpers_trainer import compose_config
from omegaconf import OmegaConf

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch, sglang_command
from recipe.atropos.local_ray import start_ray
from recipe.atropos.secret import config_yaml, is_secret, public_config, without_secret_overrides
from recipe.atropos.services.environments import environment_command, environment_secrets
from recipe.atropos.services.run import Run
from recipe.atropos.services.specs import environment_specs
from recipe.atropos.utils import private_process

KEY, JUDGE, TESTS = "the-key-of-the-run", "the-key-of-a-judge", Path(__file__).parent
OPTIONS = [
    "actor_rollout_ref.model.path=m",
    f"inference.api_key={KEY}",
    "++environment.args.train_size=7",
    f"++environment.args.judge_api_key={JUDGE}",
    "++environment.args.openai.timeout=8",
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("api_key", True),
        ("api-key", True),
        ("openai.api_key", True),
        ("environment.args.OPENAI_API_KEY", True),
        ("hf_token", True),
        ("ssl_keyfile_password", True),
        ("pad_token", False),
        ("max_tokens", False),
        ("token_level_scores", False),
        ("key", False),
    ],
)
def test_secret_settings_are_known_by_name(name, expected):
    assert is_secret(name) is expected


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
    engine = loaded.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.atropos
    assert loaded.inference.api_key == engine.api_key == "another", "who loads it gets the key from its environment"


def test_secret_flags_are_in_no_command_line(tmp_path):
    config = compose_config(*OPTIONS)
    run = Run(config, OPTIONS, tmp_path)
    assert run.api_key == KEY, "the user's own"
    [spec] = environment_specs(config).values()
    command = environment_command(run, spec, "serve", "http://api", "http://server")
    flags = json.loads(environment_secrets(run, spec)[private_process.SECRET_FLAGS])
    assert flags == [f"--openai.api_key={KEY}", f"--env.judge_api_key={JUDGE}"]
    server, variables = sglang_command(
        SGLangLaunch("m", python="py", port=5, device="cpu", api_key=KEY, extra_args={"admin_api_key": JUDGE})
    )
    assert json.loads(variables[private_process.SECRET_FLAGS]) == ["--api-key", KEY, "--admin-api-key", JUDGE]
    for words in (command, server, without_secret_overrides(OPTIONS)):
        assert not any(KEY in word or JUDGE in word for word in words)
    assert "--openai.timeout=8" in command and "++environment.args.train_size=7" in without_secret_overrides(OPTIONS)


def test_secret_tokens_are_asked_of_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    with pytest.raises(ConfigurationError, match=rf"ray=={ray.__version__} has no token .* install ray>=2.55"):
        start_ray(num_cpus=1)


def test_secret_flags_reach_a_process_that_prints_none():
    """It starts a further process, which meets others at a loopback address: torch's store listens only there."""
    variables = {private_process.SECRET_FLAGS: json.dumps(["--api-key", KEY]), "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [sys.executable, private_process.__file__, "helpers_private", "--model", "m"],
        env={**os.environ, **variables},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    arguments, listens = found.stdout.splitlines()
    assert arguments == "arguments ['--model', 'm', '--api-key', '***'] variables []"
    assert KEY not in found.stdout + found.stderr and "error ['--model'" in found.stderr
    assert set(json.loads(listens)["listens"]) == {"127.0.0.1"}
