"""The quick start in two terminals: a launcher without an environment, and environments that join it.

The environments are stock ones: atroposlib's own command line, without the adapter.
"""

import asyncio
import re
import sys

import orjson
import pytest

from helpers.runs import run_of
from helpers.services import group, post
from helpers.terminal import LIMIT, STOCK, told_command
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.config.compose import load_config
from recipe.atropos.launcher import joining
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.launch import watch
from recipe.atropos.launcher.sglang import InferenceServices
from recipe.atropos.run import record as run_record
from recipe.atropos.run.record import read_metrics
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.utils.process import ServiceFailed, free_port

LAUNCH = [sys.executable, "-m", "recipe.atropos.launch_services"]


def options(model, steps):
    fast = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "trainer.save_freq=-1", "trainer.logger=[]"]
    ports = [f"api.port={free_port()}", f"inference.gateway_port={free_port()}"]
    joined = ["environment.target=null", "trainer.atropos.max_staleness=null"]
    return ["--preset=demo", f"--model={model}", f"--steps={steps}", "--run-dir=run", *fast, *ports, *joined]


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_join_trains_on_stock_environments_that_come_and_go(terminal, model_path, tmp_path, monkeypatch):
    """By the printed command and by flags; one leaves and returns, beside another; the key is on the terminal only."""
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    steps, run = 120, tmp_path / "run"
    launcher = terminal([*LAUNCH, *options(model_path, steps)], tmp_path)
    launcher.wait_for(r"python environments/gsm8k_server.py serve .*\n")
    launcher.wait_for("this run starts no environment, so it evaluates nothing")
    command = told_command(launcher.text)
    key, api, gateway = (
        re.search(rf'"{name}": "([^"]+)"', command).group(1) for name in ("api_key", "rollout_server_url", "base_url")
    )
    by_file = ["bash", "-c", f"exec {command}"]
    first = terminal(by_file, tmp_path)
    launcher.wait_for("an environment has joined, as number 0")
    launcher.wait_for_step(2, run)
    first.end()
    flags = {"env.rollout_server_url": api, "env.tokenizer_name": model_path, "env.group_size": 2}
    flags |= {"env.max_token_length": 128, "env.total_steps": 10**9, "env.use_wandb": False}
    flags |= {"openai.base_url": gateway, "openai.model_name": model_path, "openai.server_type": "sglang"}
    given = [f"--{name}={value}" for name, value in {**flags, "openai.api_key": key}.items()]
    terminal([sys.executable, STOCK, "serve", *given], tmp_path)
    terminal(by_file, tmp_path)
    launcher.wait_for("an environment has joined, as number 1")
    assert len(read_metrics(run)) < steps, "it waited for one to return"
    assert launcher.process.wait(LIMIT) == 0, launcher.text[-5000:]
    lines, summary = read_metrics(run), orjson.loads((run / "summary.json").read_bytes())
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["atropos/rows_with/unknown_version"] == line["atropos/rows"] == 4 for line in lines)
    assert summary["environments_joined"] in (2, 3) and summary["alarms"]["unknown_sampling"]["steps"] == steps
    groups = summary["groups"]
    assert groups["trained"] == 2 * steps and groups["dropped"] == 0 <= groups["left"]
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not holders, "the key is in a file"


@pytest.fixture
def api(tmp_path):
    """With a trainer's registration, of batches of two groups of two."""
    with running_trajectory_api(tmp_path) as service:
        service.register(batch_size=4, max_token_len=128, after=0)
        yield service


def small_batches(*overrides):
    joined = ["preset=demo", "environment.target=null", "trainer.atropos.max_staleness=null"]
    small = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2"]
    given = ["actor_rollout_ref.model.path=model", "inference.api_key=the-key"]
    return load_config([*joined, *small, *given, *overrides])


@pytest.fixture
def impatient(monkeypatch):
    for name in ("_FIRST_REPORT", "_LONGEST_SILENCE"):
        monkeypatch.setattr(joining, name, 0.2)


def test_join_announces_who_comes_and_says_why_no_batch_does(tmp_path, impatient, capsys, api):
    environment = {"max_token_length": 128, "desired_name": "e", "weight": 1.0, "group_size": 2}

    async def looks(join, count):
        for _ in range(count):
            await join.poll(await run.ask_api(api.url, TrajectoryApiClient.diagnose))
            await asyncio.sleep(0.15)
        return re.sub(r"\s+", " ", capsys.readouterr().out)

    run = run_of(small_batches(), tmp_path)
    join = joining.Joining(run, api.url, "http://127.0.0.1:9")
    join.start()
    run.files.waiting.touch()
    shown = asyncio.run(looks(join, 6))
    assert "the-key" not in shown and '"$ATROPOS_API_KEY"' in shown, "this output is no terminal"
    assert "evaluates nothing" in shown
    assert "no environment has registered" in shown and "join_timeout=86400 s" in shown
    for _ in range(2):
        post(f"{api.url}/register-env", environment)
    shown = asyncio.run(looks(join, 1))
    assert "has joined, as number 0" in shown and "has joined, as number 1" in shown
    post(f"{api.url}/scored_data", group(0, 3))
    assert "3 of 4 sequences" in asyncio.run(looks(join, 4))
    post(f"{api.url}/scored_data", group(1, 2))
    shown = asyncio.run(looks(join, 4))
    assert "batch 1 is complete" in shown, "the second group does not fit beside the first"
    run.files.waiting.unlink()
    assert "no batch" not in asyncio.run(looks(join, 4)), "a batch is there: the trainer is slow"
    join.stop()
    assert join.number == orjson.loads((tmp_path / "summary.json").read_bytes())["environments_joined"] == 2


@pytest.mark.slow
def test_join_ends_a_run_that_hangs_but_not_one_that_waits(tmp_path, impatient, api, monkeypatch):
    """No step in ``step_timeout`` is an error only where there is one to train, and the trainer has its data."""
    run = run_of(small_batches("trainer.atropos.step_timeout=2"), tmp_path)
    run.start("trainer", ["sleep", "1000"])
    join = joining.Joining(run, api.url, "http://127.0.0.1:9")

    async def watched(seconds, version=0):
        inference = InferenceServices({}, "http://127.0.0.1:9", "the-key")
        async with asyncio.timeout(seconds):
            alarm_watch = AlarmWatch(run, version, api.url, inference)
            await watch(run, version, join, Evaluations(run, inference), alarm_watch)

    try:
        run.files.waiting.touch()
        monkeypatch.setattr(run_record, "_FRESH_SECONDS", 8.0)
        with pytest.raises(TimeoutError):
            asyncio.run(watched(6))
        with pytest.raises(ServiceFailed, match="no step after step 0 for .* s; trainer.atropos.step_timeout=2 s"):
            asyncio.run(watched(60))
        with pytest.raises(TimeoutError):  # after the last step, while the model is exported
            asyncio.run(watched(6, version=run.config.trainer.total_training_steps))
    finally:
        run.stop()
