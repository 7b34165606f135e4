"""The trainer, started by hand where it cannot train."""

import os
import re
import subprocess
import sys

import pytest

from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def train(folder, *arguments, seconds):
    command = [sys.executable, "-m", "recipe.atropos.main", *arguments]
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )


def words(text):
    """Without the line breaks that a terminal's width made."""
    return re.sub(r"\s+", " ", text)


def test_lock_refuses_a_trainer_started_by_hand(tmp_path, model_path):
    with RunDir(tmp_path / "run").lock():
        options = ["preset=demo", f"actor_rollout_ref.model.path={model_path}", f"run.dir={tmp_path / 'run'}"]
        done = train(tmp_path, *options, "inference.urls=[http://127.0.0.1:1]", seconds=300)
    assert done.returncode == 1 and f"is in use by process {os.getpid()}" in words(done.stdout), done.stdout


def test_a_trainer_without_its_services_stops_and_names_them(tmp_path, model_path):
    url = f"http://127.0.0.1:{free_port()}"
    options = ["preset=demo", f"actor_rollout_ref.model.path={model_path}", "trainer.atropos.startup_timeout=5"]
    done = train(tmp_path, *options, f"inference.urls=[{url}]", f"trainer.atropos.api_url={url}", seconds=900)
    fix = "see their logs, or correct inference.urls"
    expected = f"error: no SGLang server answered for 5 s; {fix}: {url}/model_info: cannot connect"
    assert done.returncode == 1 and expected in words(done.stdout), done.stdout


def test_a_trainer_without_the_address_of_a_server_says_so(tmp_path, model_path):
    done = train(tmp_path, "preset=demo", f"actor_rollout_ref.model.path={model_path}", seconds=60)
    assert done.returncode == 1 and "error: inference.urls is empty" in words(done.stdout), done.stdout
    assert not (tmp_path / "runs").exists()
