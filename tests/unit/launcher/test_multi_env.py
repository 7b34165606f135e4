"""Several environments, or replicas of one, in a run: what the configuration may say, and what is counted of them."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import yaml

from helpers.configs import changed_config
from helpers.environments import item_env
from helpers.runs import Placed, run_of
from helpers.trainer import compose_config
from helpers.waiting import until
from recipe.atropos.commands.dry_run import service_commands
from recipe.atropos.config.compose import load_config, resolved
from recipe.atropos.config.env_specs import environment_specs, fill_warnings
from recipe.atropos.config.preflight import ConfigurationError, check_config
from recipe.atropos.launch_services import compose_overrides, parse_arguments
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import (
    EnvironmentProcesses,
    _State,
    check_environments,
    environment_command,
    environment_variables,
)
from recipe.atropos.launcher.launch import scores_of
from recipe.atropos.launcher.services import RestartPolicy
from recipe.atropos.launcher.sglang import InferenceServices
from recipe.atropos.report.run_history import SENT, read_history
from recipe.atropos.run.folder import ELSEWHERE
from recipe.atropos.run.reporting import EnvReport
from recipe.atropos.utils.files import LineReader, append_line
from recipe.atropos.utils.process import ServiceFailed

ITEM_ENV = f"{item_env.__file__}:ItemEnv"


def config(*options):
    model = "actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
    return changed_config(compose_config(*model), list(options))


# ---------------------------------------------------------------- the configuration


def test_environments_by_name_have_defaults_of_the_single_one():
    options = ["environment.target=pkg.one:Env", "environment.max_restarts=7", "environment.args.seed=1"]
    several = ["environments.math.weight=2", "environments.math.args.size=5", "environments.sums.target=x.py:B"]
    bridge = "environments.sums.reward_bridge.length_bounty.target=9"
    settings = load_config(compose_overrides(parse_arguments(["--model=m", *options, *several, bridge])))
    specs = environment_specs(settings)
    assert list(specs) == ["math", "sums"]
    math, sums = specs.values()
    assert (math.target, math.weight, math.max_restarts, math.group_size) == ("pkg.one:Env", 2, 7, 8)
    assert math.args == {"size": 5} and sums.args == {}, "flags are each one's own"
    assert math.reward_bridge is None and sums.reward_bridge == {"length_bounty": {"target": 9}}
    assert (math.service, sums.key, sums.place) == ("environment-math", "environments.sums", "x.py")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "gsm8k"),
        (["environment.target=/some/place/my env.py:Env"], "my_env"),
        (["environment.target=pkg.module:Env"], "module"),
        (["environment.args.wandb_name=mine"], "mine"),
    ],
)
def test_single_environment_is_named_by_its_flag_or_module(options, name):
    [spec] = environment_specs(config(*options)).values()
    assert (spec.name, spec.key, spec.service) == (name, "environment", "environment")


A, B = "environments.a.target=m", "environments.b.target=m"
REFUSED = {
    f"{A} environments.a.min_batch_allocation=1.5": "environments.a.min_batch_allocation=1.5: give 1 or less",
    f"{A} environments.a.args.group_size=4": "environments.a.args.group_size: give environments.a.group_size instead",
    f"{A} environments.a.args.wandb_name=b": "environments.a.args.wandb_name: it is called a",
    "environment.args.min_batch_allocation=0.5": "give environment.min_batch_allocation instead",
    "environments.a=module": "environments.a=module: give a mapping",
    f"{A} {B} environments.a.min_batch_allocation=0.6 environments.b.min_batch_allocation=0.5": (
        "environments.a.min_batch_allocation=0.6 + environments.b.min_batch_allocation=0.5 = 1.1 of a batch"
    ),
    f"{A} {B} environments.a.min_batch_allocation=1": "leaves nothing of a batch to environments.b",
    f"{A} {B} environments.b.group_size=130": "environments.b.group_size=130 is larger than the batch of 128 sequences",
    "evaluation.every=3 trainer.atropos.weight_sync.every=2": "evaluation.every=3 is no multiple of",
    "environment.target=null environment.replicas=2": "environment.replicas=2 has no effect with",
}


@pytest.mark.parametrize("options", REFUSED, ids=range(len(REFUSED)))
def test_environments_that_cannot_work_are_refused_by_key(options):
    with pytest.raises(ConfigurationError) as refusal:
        check_config(resolved(config(*options.split())))
    assert REFUSED[options] in str(refusal.value)


def test_environments_ask_no_proxy_for_the_gateway(tmp_path, monkeypatch):
    """It would be sent their key."""
    monkeypatch.setenv("no_proxy", "inside")
    for host, direct in (("10.20.30.40", "inside,10.20.30.40"), ("127.0.0.1", None)):
        run = run_of(config(A, f"inference.host={host}"), tmp_path)
        [spec] = run.plan.specs.values()
        assert environment_variables(run, spec).get("no_proxy") == direct


def test_environments_start_with_own_name_and_part_of_the_batch(tmp_path):
    options = [A, "environments.a.args={seed: 3, size: null, openai: {timeout: 7}}", "environments.a.weight=2"]
    options += [f"environments.b.target={ITEM_ENV}"]
    bridge = ["environments.b.reward_bridge.clip=[-1,1]", "environments.b.min_batch_allocation=0.25"]
    settings = config(*options, *bridge)
    a, b = environment_specs(settings).values()
    run = run_of(settings, tmp_path)
    of_a = environment_command(run, a, "serve", "http://api", "http://server")
    assert of_a[1:6] == ["-m", "recipe.atropos.utils.env_adapter", "serve", "--env", "m"]
    given = {"--env.wandb_name=a", "--env.inference_weight=2", "--env.seed=3", "--openai.timeout=7"}
    assert given <= set(of_a) and not any("size=" in word for word in of_a if "group" not in word)
    assert "--env.min_batch_allocation=0.0" in of_a, "else one of the environment's own would count"
    of_b = environment_command(run, b, "serve", "http://api", "http://server")
    assert of_b[5:7] == [ITEM_ENV, "--reward-bridge"] and "--env.min_batch_allocation=0.25" in of_b
    assert yaml.safe_load(of_b[7]) == {"clip": [-1, 1]}
    assert "--reward-bridge" not in environment_command(run, b, "evaluate", "http://api", "http://server")


def test_a_step_with_several_environments_says_the_score_of_each():
    line = {"atropos/mean_score": 0.25, "atropos/math/mean_score": 1.0, "atropos/sums/mean_score": -0.5}
    assert scores_of(line) == "+0.250 (math +1.000, sums -0.500)"
    assert scores_of({"atropos/mean_score": 0.25, "atropos/math/mean_score": 0.25}) == "+0.250"


# ---------------------------------------------------------------- one that dies


def end(service):
    os.kill(service.pid, signal.SIGKILL)
    service.process.wait(10)


def no_node():
    raise ConfigurationError("Ray has no node for it")


@pytest.mark.parametrize(
    ("limit", "awaited", "why"),
    [
        (0, lambda: "", "ended once more after 0 restarts (environments.x.max_restarts)"),
        (1, no_node, "Ray has no node for it"),
    ],
)
def test_environment_given_up_leaves_the_run_to_the_others(tmp_path, capsys, limit, awaited, why):
    run = run_of(None, tmp_path)
    command = [sys.executable, "-c", "print('its last words', flush=True); import time; time.sleep(100)"]
    try:
        for name in ("environment-a", "environment-b"):
            run.start(name, command)
            run.restart_policies[name] = RestartPolicy(
                None, limit, "environment", awaited=awaited, key="environments.x.max_restarts", optional=True
            )
        a, b = run.services.values()
        until(lambda: "words" in a.tail(), 20)
        end(a)
        run.check()
        said = capsys.readouterr().out
        assert f"environment-a {why}, abandoned" in said
        assert (
            "its last words" in said and list(run.services) == ["environment-b"] and run.abandoned == {"environment-a"}
        )
        end(b)
        with pytest.raises(ServiceFailed, match=re.escape(f"environment-b: {why}")):
            run.check()
    finally:
        run.stop()


@pytest.mark.parametrize(("status", "starts"), [(-9, 2), (1, 1)])
def test_environment_lost_before_it_starts_is_placed_elsewhere(tmp_path, status, starts):
    """Minutes pass between the reservation of a place and the start; an error of its own would repeat itself."""
    run, log = run_of(config("environments.a={target: m, placement: ray}"), tmp_path), tmp_path / "a.log"
    log.touch()
    started = []
    run.cluster = SimpleNamespace(
        awaited=lambda name: "",
        start_program=lambda name, *_, **__: started.append(name) or Placed(name, len(started), log, status=status),
        close=lambda: None,
    )
    EnvironmentProcesses(run, "http://api", "http://server").start()
    with pytest.raises(ServiceFailed, match="ended while") if starts == 1 else contextlib.nullcontext():
        run.check()
    run.stop()
    assert started == ["environment-a"] * starts


def test_counts_are_summed_over_the_processes_of_an_environment(tmp_path):
    settings = config(A, B)
    path = tmp_path / "environments" / "a.jsonl"

    def process(sent, equal, restarted):
        path.parent.mkdir(exist_ok=True)
        append_line(path, {"env": "a", "started": True, "restarted": restarted})
        report = EnvReport("a", path)
        report.count("sent", sent)
        report.write(1, at_once=True)
        report.count("not_sent/equal_scores", equal)
        report.in_flight = 4
        report.write(2, at_once=True)

    process(5, 2, False)
    process(7, 1, True)
    environments = EnvironmentProcesses(run_of(settings, tmp_path), "http://api", "http://server")
    assert environments.summary()["a"] == {
        "in_flight": 8,  # each process left four undone
        "items": 8,
        "not_sent/equal_scores": 3,
        "sent": 12,
        "restarts": 1,
        "abandoned": False,
    }


def test_environments_that_fill_a_batch_are_let_through():
    """Groups and allocations fill it; sizes that fill little of it are named."""
    several = ",".join(f"{name}: {{target: m, group_size: {size}}}" for name, size in (("a", 8), ("b", 70), ("c", 43)))
    specs = environment_specs(config(f"environments={{{several}}}")).values()
    assert fill_warnings(specs, 128) == [
        "environments.b.group_size=70: whole groups fill 70 of a batch of 128 sequences, and padding the rest; give a "
        "size that divides it",
        "environments.c.group_size=43: whole groups fill 86 of a batch of 128 sequences, and padding the rest; give a "
        "size that divides it",
    ]
    parts = "environments.a.min_batch_allocation=0.5 environments.b.min_batch_allocation=0.5"
    check_config(config(*f"{A} {B} {parts} environments.a.group_size=4 evaluation.every=4".split()))
    check_config(config(*f"{A} {B} environments.a.weight=3".split()))
    sizes = "environments.a.group_size=4 environments.b.group_size=6 data.train_batch_size=12"
    check_config(config(*f"{A} {B} {sizes}".split()))


def test_a_process_number_used_again_is_not_registered(tmp_path):
    report = tmp_path / "a.jsonl"
    append_line(report, {"registered": 3, "pid": 7})
    state = _State(None, 0, LineReader(report))
    state.read()
    state.service = SimpleNamespace(pid=7, poll=lambda: None)
    state.read()
    assert state.registrations == [(7, 3)] and not state.is_registered
    append_line(report, {"registered": 4, "pid": 7})
    state.read()
    assert state.is_registered


# ---------------------------------------------------------------- replicas


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
    run.files.environment_report("a", ELSEWHERE).touch()  # no replica


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


def test_replicas_are_counted_as_one_environment(tmp_path):
    """Those of an earlier start too, of which there were more; it is abandoned once all are."""
    run = run_of(config("environments.a={target: m, replicas: 2}"), tmp_path)
    write_reports(run)
    environments = EnvironmentProcesses(run, "http://127.0.0.1:1", "http://server")
    assert len(environments._states) == 3
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
        inference = InferenceServices({}, "http://127.0.0.1:1", "")
        async with contextlib.aclosing(AlarmWatch(run, 0, "http://127.0.0.1:1", inference)) as watch:
            await watch.poll()
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
