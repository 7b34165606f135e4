"""The page at ``/``, looked at in a real browser."""

import shutil
import subprocess

import pytest

from helpers.services import group
from helpers.trajectory_api import ENVIRONMENT, running_trajectory_api

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_page_shows_queue_and_environments(tmp_path, slash):
    """At the address that the docs give, and at that with a slash."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with running_trajectory_api(tmp_path, secret="s3cret") as api:
        api.url += "/s3cret"
        api.register(after=0)
        env_id = api.post("/register-env", ENVIRONMENT)["env_id"]
        api.post("/scored_data", group(1) | {"env_id": env_id})
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
        command += ["--virtual-time-budget=5000", "--dump-dom", f"{api.url}{slash}"]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "no batch 1: 4 of 8 sequences are queued, and no group is begun" in page
    assert "<td>env_0</td><td>4</td><td>0</td><td>1</td>" in page
