"""A reward bridge on the way from an environment's command line to the Trajectory API."""

import re
import sys

import orjson
import pytest
import yaml
from transformers import AutoTokenizer

from helpers.environments import guess_env
from helpers.services import get
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until
from recipe.atropos.utils.process import start_service

WIDE = {"format_markers": [{"pattern": "[a-m]", "regex": True, "weight": 0.1, "count": "each"}], "clip": [0, 0.9]}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_reward_bridge_groups_reach_the_api_with_raw_scores(model_path, server, tmp_path):
    """Also where the environment drops them: its guesses are all wrong, -1."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    (tmp_path / "bridge.yaml").write_text(yaml.safe_dump({"reward_bridge": WIDE}))
    flags = {"reward-bridge": tmp_path / "bridge.yaml", "adapter.report": tmp_path / "report.jsonl", "slurm": "false"}
    flags |= {"env.group_size": 4, "env.use_wandb": "false", "env.mood": "drops equal"}
    flags |= {"env.tokenizer_name": model_path, "openai.model_name": model_path}
    flags |= {"openai.base_url": f"{server}/v1", "openai.api_key": "x"}
    with running_trajectory_api(tmp_path) as api:
        api.register(batch_size=8, max_token_len=2048)
        flags["env.rollout_server_url"] = api.url
        command = [sys.executable, "-m", "recipe.atropos.utils.env_adapter", "serve"]
        command += [f"--env={guess_env.__file__}:GuessEnv", *(f"--{name}={value}" for name, value in flags.items())]
        environment = start_service("environment", command, log_path=tmp_path / "environment.log")
        try:
            batch = until(lambda: get(f"{api.url}/batch")["batch"], 90, environment)
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
