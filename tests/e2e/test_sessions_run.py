"""A run whose environment is a program: the launcher's session server, rows of sessions, their training."""

import json
import sys
from pathlib import Path

import pytest

from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.sessions.session import Session
from recipe.atropos.sessions.store import Store
from recipe.atropos.utils.process import run_command

pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_session_rows_of_one_trajectory_are_trained(tmp_path):
    """Each session has two rows, which count as one in batch and baseline; every sampled token is trained once."""
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps({"question": f"{i} and 7?"}) + "\n" for i in range(20)))
    options = [f"environment.items={items}", "environment.agent=helpers.agents:compacts", "trainer.save_freq=-1"]
    options += ["trainer.atropos.max_staleness=0"]
    options += ["environment.evaluate=false", "data.train_batch_size=2", "--preset", "demo", "--steps", "2"]
    command = [sys.executable, "-m", "recipe.atropos.launch_services", *options, "--run-dir", str(tmp_path / "run")]
    variables = {"WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parents[1])}
    status, output = run_command("launcher", command, env=variables, timeout=800)
    assert status == 0, output
    files = RunDir(tmp_path / "run")
    for line in read_metrics(files.path):
        assert (line["atropos/batch_fill"], line["atropos/rows"]) == (1.0, 32.0)
        assert line["atropos/logprob_diff/mean"] < 1e-3
    sessions = sampled_of(files)
    assert sessions and all((summary["turns"], summary["rows"]) == (3, 2) for summary in sessions)


def sampled_of(files):
    store = Store(files.sessions)
    ids = [row[0] for row in store._database.execute("SELECT id FROM sessions")]
    found = [Session.load(store, each) for each in ids]
    return [session.summary() for session in found if session.state.end == "reward"]
