"""A run whose environment is a program: the launcher's session server, rows of sessions, their training."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import agents
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.sessions.session import Session
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.utils.process import run_command
from recipe.atropos.utils.secret import API_KEY_VARIABLE

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
    store = SessionStore(files.sessions)
    ids = [row[0] for row in store._database.execute("SELECT id FROM sessions")]
    found = [Session.load(store, each) for each in ids]
    return [session.summary() for session in found if session.state.end == "reward"]


GROUP = """
import asyncio, json, sys
from verifiers_env import VerifiersEnv, VerifiersEnvConfig
_, [handle] = VerifiersEnv.config_init()
handle.model_name, url, taskset = sys.argv[1:]
config = VerifiersEnvConfig(
    tokenizer_name=handle.model_name, group_size=2, sessions_url=url, use_wandb=False, taskset=taskset, parallel=1,
    held_out=taskset,
)
env = VerifiersEnv(config, [handle], slurm=False)

async def collect():
    await env.setup()
    try:
        group, _ = await env.collect_trajectories(env.train[0])
        first = env._server.pid
        env._server.stop()
        again, _ = await env.collect_trajectories(env.train[0])
        assert env._server.pid != first
        return group, again, env.report.counts
    finally:
        env._server.stop()

print(json.dumps(asyncio.run(collect())))
"""


@pytest.mark.slow
def test_session_of_verifiers_is_played_by_its_own_server(tmp_path):
    """A taskset with a tool and verifiers' own harness, whose train client sends ids; the server may end between."""
    [program] = [each for each in agents.PROGRAMS.values() if each.environment == "verifiers_env"]
    python, tokenizer = agents.interpreter(program.installed), chat_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "(m.content or '')")
    tokenizer.save_pretrained(tmp_path / "model")
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"question": "12 and 7?", "answer": "19"}) + "\n")
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12+7"}}\n</tool_call>'
    policy = ScriptedPolicy(tokenizer, script=[call, r"\boxed{19}", call, r"\boxed{18}"] * 2)
    policy.split = lambda text: tokenizer.encode(text)
    path = [str(agents.EXAMPLES), str(Path(__file__).parents[2])]
    with Sessions(tmp_path, policy) as sessions:
        taskset = f"{program.target} {agents.VERIFIERS} --env.taskset.file {items}"
        command = [str(python), "-c", GROUP, str(tmp_path / "model"), sessions.url, taskset]
        variables = {"PYTHONPATH": ":".join(path), API_KEY_VARIABLE: Sessions.KEY}
        status, output = run_command("verifiers", command, env=variables, timeout=600)
        assert status == 0, output
        *groups, counts = json.loads(output.splitlines()[-1])
        for group in groups:
            assert group["scores"] == [1.0, 0.0] and group["group_overrides"]["trajectory"] == [0, 1]
        trained = [mask for group in groups for masks in group["masks"] for mask in masks if mask != -100]
        assert trained == [token for _, tokens, _ in policy.sampled for token in tokens]
    expected = {"ended": 4, "turns": 8, "sampled": len(trained)}
    assert {name.removeprefix("sessions/"): n for name, n in counts.items()} == expected
