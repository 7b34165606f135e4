"""Replicas of an environment under the launcher: a process each, one environment in what is counted."""

import asyncio

import pytest

from helpers.environments import item_env
from helpers.runs import run_of
from helpers.trainer import changed_config, compose_config
from recipe.atropos.adapter.reporting import EnvReport
from recipe.atropos.commands.dry_run import service_commands
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.config.preflight import ConfigurationError, check_config
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import Environments, check_environments, environment_command
from recipe.atropos.report.run_history import SENT, read_history

ITEM_ENV = f"{item_env.__file__}:ItemEnv"


def config(*options):
    model = "actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
    return changed_config(compose_config(*model), list(options))


def write_reports(run):
    """Of three replicas of an earlier start and then two: each process has sent K + 1 groups, and has 2 items left."""
    run.files.environments.mkdir(exist_ok=True)
    for replicas in (3, 2):
        for replica in range(replicas):
            path = run.files.environment_report("a", replica)
            report = EnvReport("a", path, replica)
            report.add_line({"started": True})
            report.add_line({"registered": 10 * replicas + replica, "pid": 1})
    for replica in range(3):  # interleaved, as processes write them
        report = EnvReport("a", run.files.environment_report("a", replica), replica)
        report.counts.update({"items": replica + 1, "groups_sent": replica + 1})
        report.in_flight = 2
        report.write(1, at_once=True)


def test_replicas_are_services_with_a_part_of_the_work(tmp_path):
    settings = config("environments.a={target: m, replicas: 2, weight: 3}", "environments.b={target: m}")
    run = run_of(settings, tmp_path)
    a, b = environment_specs(settings).values()
    assert (a.services, b.services) == (["environment-a", "environment-a.1"], ["environment-b"])
    commands = {name: command for name, (command, _) in service_commands(run).items() if "environment" in name}
    assert [*commands] == [*a.services, *b.services]
    for replica, service in enumerate(a.services):
        assert {f"--adapter.replica={replica}", "--adapter.replicas=2", "--env.wandb_name=a"} <= set(commands[service])
        assert "--env.inference_weight=3" in commands[service], "the API counts it once"
    assert f"--adapter.report={tmp_path / 'environments/a.1.jsonl'}" in commands["environment-a.1"]
    assert not any(flag.startswith("--adapter.replicas") for flag in commands["environment-b"])
    evaluation = environment_command(run, a, "evaluate", "http://api", "http://server")
    assert not any(flag.startswith("--adapter") for flag in evaluation), "it is on all held-out items"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["environment.replicas=0"], "environment.replicas=0: give 1 or more"),
        (["environments.a={target: m, replicas: 0}"], "environments.a.replicas=0: give 1 or more"),
        (["environment.target=null", "environment.replicas=2"], "environment.replicas=2 has no effect with"),
    ],
)
def test_replicas_that_cannot_be_are_refused(options, why):
    with pytest.raises(ConfigurationError, match=why):
        check_config(config(*options))


def test_replicas_are_counted_as_one_environment(tmp_path):
    """Those of an earlier start too, of which there were more; it is abandoned once all are."""
    run = run_of(config("environments.a={target: m, replicas: 2}"), tmp_path)
    write_reports(run)
    environments = Environments(run, "http://127.0.0.1:1", "http://server")
    run.abandoned.add("environment-a.1")
    counts = {"groups_sent": 6, "in_flight": 6, "items": 12}
    assert environments.summary() == {"a": counts | {"restarts": 0, "abandoned": False}}
    run.abandoned.add("environment-a")
    assert environments.summary()["a"]["abandoned"]

    history = read_history(tmp_path)
    assert [*history.reports] == ["a"] and history.item_totals("a") == {SENT: 6}
    assert [line["time"] for line in history.reports["a"]] == sorted(line["time"] for line in history.reports["a"])


def test_watchdog_sees_one_environment_of_replicas(tmp_path):
    """It says which was abandoned, and takes the items in flight of all together."""
    run = run_of(config("environments.a={target: m, replicas: 2}"), tmp_path)
    run.started = 0.0
    write_reports(run)
    run.abandoned.add("environment-a.1")

    async def watch():
        watch = AlarmWatch(run, 0, "http://127.0.0.1:1", None)
        try:
            await watch.poll()
        finally:
            await watch.aclose()
        return watch.watchdog

    watchdog = asyncio.run(watch())
    [environment] = watchdog.history.environments.values()
    assert (environment.in_flight, environment.counts["sent"]) == (4, 3)
    assert environment.numbers == {0: 20, 1: 21} and environment.log.endswith("environment-a*.log")
    [raised] = watchdog.raised.values()
    assert "of its 2 replicas, environment-a.1 was abandoned after 3 restarts" in raised.finding.seen


def test_shared_items_of_replicas_are_said_before_the_start(tmp_path, model_path, capsys):
    given = f"actor_rollout_ref.model.path={model_path}", f"environment.target={ITEM_ENV}", "environment.replicas=2"
    check_environments(run_of(config(*given), tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert "environment replicas=2 of ItemEnv: it has neither a shard nor a seed, so all may ask the same items" in said
