"""A reward bridge on the way from an environment's command line to the Trajectory API."""

import re
import sys
import time

import orjson
import pytest
import yaml
from transformers import AutoTokenizer

from helpers.environments import guess_env
from helpers.services import get, post
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.utils.process import start_service

WIDE = {"format_markers": [{"pattern": "[a-m]", "regex": True, "weight": 0.1, "count": "each"}], "clip": [0, 0.9]}


def serve(model_path, server, tmp_path, api_url, mood):
    """An environment whose guesses are all wrong, -1, which drops such a group itself."""
    (tmp_path / "bridge.yaml").write_text(yaml.safe_dump({"reward_bridge": WIDE}))
    program = guess_env.__file__
    command = [sys.executable, "-m", "recipe.atropos.utils.env_adapter", "serve", "--env", f"{program}:GuessEnv"]
    command += ["--reward-bridge", str(tmp_path / "bridge.yaml"), "--env.group_size=4", "--env.use_wandb=false"]
    command += [
        "--slurm=false",
        f"--env.rollout_server_url={api_url}",
        f"--env.tokenizer_name={model_path}",
        f"--env.mood={mood}",
    ]
    command += [f"--openai.model_name={model_path}", f"--openai.base_url={server}/v1", "--openai.api_key=x"]
    command += [f"--adapter.report={tmp_path / 'report.jsonl'}"]
    return start_service("environment", command, log_path=tmp_path / "environment.log")


def register(api_url):
    settings = {"wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 2048, "checkpoint_dir": ""}
    post(f"{api_url}/register", settings | {"save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 10})


@pytest.mark.timeout(180)
def test_reward_bridge_groups_reach_the_api_with_raw_scores(model_path, server, tmp_path):
    """Groups that the environment drops reach the api shaped with their raw scores."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    with running_trajectory_api(tmp_path) as api:
        register(api.url)
        environment = serve(model_path, server, tmp_path, api.url, "drops equal")
        try:
            batch, deadline = None, time.monotonic() + 90
            while batch is None:
                assert environment.poll() is None and time.monotonic() < deadline, environment.tail(40)
                batch = get(f"{api.url}/batch")["batch"]
                time.sleep(0.2)
        finally:
            environment.stop()
    assert len(batch) == 2
    for group in batch:
        assert group["group_overrides"]["raw_scores"] == [-1.0] * 4
        for score, masks in zip(group["scores"], group["masks"], strict=True):
            said = tokenizer.decode([mask for mask in masks if mask != -100], skip_special_tokens=True)
            assert score == pytest.approx(-1 + min(0.1 * len(re.findall("[a-m]", said)), 0.9))
    last = orjson.loads((tmp_path / "report.jsonl").read_bytes().splitlines()[-1])
    assert last["counts"]["shaping/recovered"] >= 2 and last["means"]["score/shaped"] > last["means"]["score/raw"] == -1


@pytest.mark.timeout(180)
def test_reward_bridge_that_cannot_act_ends_the_environment(model_path, server, tmp_path):
    """A bridge that cannot act ends the environment with a message."""
    with running_trajectory_api(tmp_path) as api:
        register(api.url)
        environment = serve(model_path, server, tmp_path, api.url, "own advantages")
        try:
            deadline = time.monotonic() + 90
            while environment.poll() is None:
                assert time.monotonic() < deadline, environment.tail(40)
                assert get(f"{api.url}/batch")["batch"] is None  # asked once, the API lets environments in
                time.sleep(0.2)
            assert environment.poll() != 0
        finally:
            environment.stop()
    assert "environment guess sends advantages of its own for each token" in environment.tail(40)
