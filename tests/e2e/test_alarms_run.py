"""Environments that go wrong without an error, on the real Trajectory API and server: alarms name why."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from helpers.environments import alarm_env
from helpers.gateway import KEY, gateway
from helpers.runs import run_of
from helpers.scripted_trainer import ScriptedTrainer
from helpers.trainer import compose_config
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import EnvironmentProcesses
from recipe.atropos.launcher.sglang import InferenceServices
from recipe.atropos.terminal.progress import console
from recipe.atropos.utils.files import read_lines

ALARMS = {"raises": "environment_raises", "equal": "equal_scores", "silent": "environment_silent"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_alarms_name_what_environments_do(tmp_path, model_path, server):
    """Each environment its own; a healthy one beside them has none."""
    each = [f"environments.{name}.args.fault={name}" for name in ("none", *ALARMS)]
    each += [f"environments.{name}.target={alarm_env.__file__}:AlarmEnv" for name in ("none", *ALARMS)]
    # Nothing is trained, so that what hangs must not fill the batches that may be begun.
    each += [f"environments.{name}.args.max_batches_offpolicy=1000" for name in ("none", *ALARMS)]
    sizes = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "watchdog.silent_after=12"]
    sizes += ["data.max_prompt_length=32", "data.max_response_length=32"]
    config = compose_config(f"actor_rollout_ref.model.path={model_path}", *each, *sizes)

    async def scene(run, api):
        environments = EnvironmentProcesses(run, api.url, server)
        environments.start()
        async with asyncio.timeout(180), AsyncExitStack() as stack:
            client = await stack.enter_async_context(gateway(0))
            watched = AlarmWatch(run, 0, api.url, InferenceServices({}, client.url, KEY))
            alarm_watch, raised, counts = await stack.enter_async_context(aclosing(watched)), set(), {}
            while raised != set(ALARMS.items()) or counts.get("groups_sent", 0) < 4:
                await environments.poll()
                run.check()
                await alarm_watch.poll()
                raised = {(line["environment"], line["alarm"]) for line in read_lines(run.files.alarms)}
                assert raised <= set(ALARMS.items()), raised
                counts = environments.summary()["none"]
                await asyncio.sleep(0.2)

    with running_trajectory_api(tmp_path) as api, console.capture() as captured:
        ScriptedTrainer(api.url, 8)
        run = run_of(config, tmp_path)
        try:
            asyncio.run(scene(run, api))
        finally:
            run.stop()
    lines = {line["environment"]: line for line in read_lines(run.files.alarms)}
    assert len(lines) == 3 and {line["state"] for line in lines.values()} == {"raised"}
    assert "items raised: ValueError (" in lines["raises"]["seen"] and "mean score 1;" in lines["equal"]["seen"]
    assert "items has ended for" in lines["silent"]["seen"]
    shown = captured.get()
    for name in ALARMS:
        assert f"see {run.files.log(run.plan.specs[name].service)}" in shown and lines[name]["advice"] in shown
