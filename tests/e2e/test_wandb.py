"""W&B as a tracker, in a process of its own: without a login it is offline, and its process may die."""

import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

RUN = """
import pathlib, sys, time
sys.path[:0] = sys.argv[2:]
from helpers.trainer import compose_config
from helpers.waiting import until
from recipe.atropos.run import trackers as tracking
folder = pathlib.Path(sys.argv[1])
tracking._FINISH_SECONDS = 20.0
options = f"run.dir={folder / 'run'}", "actor_rollout_ref.model.path=/nowhere", "trainer.logger=[wandb,tensorboard]"
line = {"env_name": "sums", "input": "?", "output": "2", "score": 1.0}
line |= {"policy_version_min": 0, "policy_version_max": None}
with tracking.Trackers(compose_config(*options), done=0) as trackers:
    for step in (1, 2):
        trackers.log({"atropos/mean_score": 0.5}, step, {}, [line])
    until(lambda: list(folder.glob("wandb/offline-run-*/files/media/table/a_overview/samples_2_*")))
    tracking._end_wandb_process()
    for step in (3, 4):
        trackers.log({"atropos/mean_score": 0.5}, step, {}, [line])
"""


def test_wandb_without_login_is_offline_and_may_die(tmp_path):
    """Its process is killed in the middle of the run, which goes on, and ends soon."""
    (tmp_path / "run").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_DIR": str(tmp_path)}
    environment["TENSORBOARD_DIR"] = str(tmp_path / "tensorboard")
    command = [sys.executable, "-c", RUN, str(tmp_path), *sys.path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert "W&B tracks offline (No API key configured" in run.stderr
    assert "trainer.logger=wandb is left out from now on" in run.stderr
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("atropos/mean_score")) == 4
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert folder.name.endswith((tmp_path / "run/wandb_run").read_text()), "the number that the next start continues"
