"""What becomes of a run when one of its services ends; the services are small programs."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import orjson
import psutil
import pytest
from omegaconf import OmegaConf

from helpers.disk import fill
from helpers.runs import Placed, run_of
from helpers.seeded_runs import healthy_run
from helpers.trainer import compose_config
from helpers.waiting import until
from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.errors import RECOVERABLE, ConfigurationError, Preempted
from recipe.atropos.inference.server import SGLangLaunch, sglang_command
from recipe.atropos.launch_services import _EarlyPreemption, _signals_as_interrupts
from recipe.atropos.launcher import startup
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import EnvironmentProcesses
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.launch import launch, watch
from recipe.atropos.launcher.services import RestartPolicy, bounded_logs
from recipe.atropos.launcher.sglang import InferenceServices, _enable_restarts, plan_servers, start_inference
from recipe.atropos.launcher.startup import first_version, servers_healthy
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import DiskFull, FolderRemoved, append_line, read_lines
from recipe.atropos.utils.process import ServiceFailed
from recipe.atropos.utils.scratch import Scratch
from recipe.atropos.weight_sync.manager import build_manager

pytestmark = pytest.mark.timeout(60)

SLEEP = [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(100)"]
INFERENCE = InferenceServices({"sglang": SGLangLaunch("m", port=1)}, "http://127.0.0.1:1", "key")
SAVES = [sys.executable, "-c", f"import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit({RECOVERABLE}))"]
SAVES[-1] += "; print('begun', flush=True); import time; time.sleep(100)"
END = [sys.executable, "-c", "print('my last words')"]


@pytest.fixture
def run(tmp_path):
    run = run_of(None, tmp_path / "a[run]")
    run.files.path.mkdir()
    yield run
    run.stop()


@pytest.fixture
def configured(tmp_path):
    """A function that returns a run with a configuration, in a folder."""
    runs = []

    def configured(*overrides, folder=tmp_path):
        runs.append(run_of(compose_config("actor_rollout_ref.model.path=m", *overrides), folder))
        return runs[-1]

    yield configured
    for run in runs:
        run.stop()


def restartable(run, name, command=SLEEP, limit=2, kind="sglang", **options):
    """Start a service by ``command``, and whenever it ends by SLEEP."""

    def start(command=SLEEP):
        return run.start(name, command, url="http://somewhere")

    run.restart_policies[name] = RestartPolicy(start, limit, kind, **options)
    return start(command)


def end(service):
    os.kill(service.pid, signal.SIGKILL)
    service.process.wait(10)


def listed(run):
    """Its pid by the name of each service; the launcher is this process."""
    found = {
        name: entry["pid"] for name, entry in orjson.loads((run.files.path / "services.json").read_bytes()).items()
    }
    assert found.pop("launcher") == os.getpid()
    return found


@pytest.mark.parametrize("take", [shutil.rmtree, lambda path: path.rename(f"{path}.moved")], ids=["removed", "moved"])
def test_a_run_whose_folder_was_taken_ends(run, take):
    """Also if something has made a folder of that name since: what is written from then on would be there alone."""
    with run.files.lock() as run.lock:
        run.check()
        take(run.files.path)
        run.files.path.mkdir()
        with pytest.raises(FolderRemoved, match=f"{re.escape(str(run.files.path))} is gone"):
            run.check()


def test_a_run_goes_on_where_its_disk_does_not_answer(run, monkeypatch):
    """As NFS does for a while."""
    with run.files.lock() as run.lock:
        monkeypatch.setattr(type(run.files), "is_locked_by", Mock(side_effect=OSError(5, "")))
        run.check()


def test_logs_are_bounded_beside_an_event_loop_that_is_busy(run):
    """As while the launcher waits for a server, or for a slow disk; of a process that prints without end."""
    with bounded_logs(run.files.logs, limit=1 << 16):
        run.start("endless", ["sh", "-c", "while :; do echo a line that comes again and again; done"])
        former = run.files.log("endless").with_name("endless.log.1")
        until(former.exists, 30)
    assert 1 << 16 <= former.stat().st_size <= 2 << 16
    assert all(thread.name != "bound-logs" for thread in threading.enumerate())


def test_a_service_is_started_again_so_many_times_and_then_named(run, capsys):
    restartable(run, "sglang")
    run.check()
    for count in (1, 2):
        dead = run.services["sglang"]
        end(dead)
        run.check()
        assert (run.services["sglang"] is dead) is (count == 2), "the second restart waits"
        until(lambda dead=dead: run.check() or run.services["sglang"] is not dead, 20)
        service = run.services["sglang"]
        assert len(run.services) == 1 and listed(run) == {"sglang": service.pid} and service.pid != dead.pid
        *delayed, restarted = capsys.readouterr().out.splitlines()
        assert delayed == ["sglang ended (-9); it starts again in 1 s"] * (count - 1)
        assert f"sglang ended (-9), started again at http://somewhere: {count} of 2" in restarted
        assert restarted.endswith(f"; see {service.log_path}")
    end(run.services["sglang"])
    with pytest.raises(ServiceFailed, match="sglang: ended once more after 2 restarts .inference.max_restarts"):
        run.check()


def test_a_restart_for_a_server_that_moved_does_not_count(run, capsys):
    restartable(run, "gateway", limit=0)
    run.restart_policies["gateway"].moved = True
    end(run.services["gateway"])
    run.check()
    assert run.services["gateway"].poll() is None and "0 of 0 restarts" in capsys.readouterr().out


def test_a_start_that_takes_too_long_names_its_limit(run):
    for name in ("api", "gateway", "sglang", "trainer"):
        restartable(run, name)
    run.config = OmegaConf.create(
        {
            "api": {"start_timeout": 0.2},
            "inference": {"start_timeout": 0.2},
            "trainer": {"ray_wait_register_center_timeout": 0.1, "atropos": {"weight_sync": {"timeout": 0.1}}},
        }
    )
    for wait, told in (
        (servers_healthy(run, run.services["api"], INFERENCE), r"api: .* within 0.2 s \(api.start_timeout\)"),
        (first_version(run, INFERENCE), r"trainer: .* first push .* \(trainer.ray_wait_register_center_timeout \+ "),
    ):
        with pytest.raises(ServiceFailed, match=told):
            asyncio.run(wait)


def test_weights_that_a_gateway_forgot_are_not_awaited(run, monkeypatch):
    """A trainer of a run that has trained all steps pushes once and ends; nobody tells a gateway that starts later."""
    run.config = compose_config("actor_rollout_ref.model.path=m")
    monkeypatch.setattr(startup, "_FORGOTTEN_SECONDS", 0.5)
    run.start("trainer", END).process.wait(20)
    with pytest.raises(ServiceFailed, match="trainer: has ended, and the gateway, .* exit code 0"):
        asyncio.run(asyncio.wait_for(first_version(run, INFERENCE), 20))


def test_a_restart_that_held_is_forgotten(run, monkeypatch):
    """The delays double only while a service keeps ending soon."""
    policy, delays = RestartPolicy(lambda: None, 3, "api"), []
    for lived in (5, 5, 5, 100, 5, 2000):
        policy.since, policy.delayed_until = time.monotonic() - lived, None
        delays.append(round(policy.delay()))
        policy.count += 1
    assert delays == [0, 1, 2, 0, 1, 0] and policy.count == 1


def test_a_run_that_stops_its_services_is_listed_as_ending(run, monkeypatch):
    """So one that has ended while another takes its time does not look like a fault; what fails is told elsewhere."""
    service, other, seen = run.start("gateway", SLEEP), run.start("api", SLEEP), []

    def stop():
        seen.append(orjson.loads((run.files.path / "services.json").read_bytes())["launcher"].get("ending", False))

    with monkeypatch.context() as patched:
        patched.setattr(service, "stop", stop)
        run.end(service)
        run.add(service)
        run.stop()
    assert seen == [False, True] and other.poll() is not None


def test_run_dir_full_disk_ends_the_launcher_with_one_error(full_disk, monkeypatch):
    """It is the first one, and told once: each file that is written at the end meets the same."""
    run = run_of(compose_config("actor_rollout_ref.model.path=m"), full_disk / "run")
    made, create = [], Scratch.create
    monkeypatch.setattr(Scratch, "create", lambda: made.append(create()) or made[-1])
    (full_disk / "run").mkdir()
    fill(full_disk)
    with pytest.raises(DiskFull, match=f"no space left on device: {full_disk}/run/services.json") as raised:
        asyncio.run(launch(run))
    assert not hasattr(raised.value, "__notes__")
    words = [word for process in psutil.Process().children(recursive=True) for word in process.cmdline()]
    assert not any("run_api" in word for word in words)
    assert len(made) == 1 and not made[0].folder.exists()


def start_only_an_api(monkeypatch, servers_healthy):
    """Let a launch start nothing but a program in the place of the API, and call a function in its start."""

    async def planned(_):
        return INFERENCE

    steps = {"start_api": lambda run: run.start("api", SLEEP), "start_inference": planned}
    for name, step in (steps | {"start_trainer": lambda *_: None, "servers_healthy": servers_healthy}).items():
        monkeypatch.setattr(f"recipe.atropos.launcher.launch.{name}", step)


def test_a_launcher_whose_folder_was_moved_ends_with_one_error(tmp_path, monkeypatch):
    run = run_of(compose_config("actor_rollout_ref.model.path=m"), tmp_path / "run")

    async def moved(run, *_):
        run.files.path.rename(tmp_path / "moved")
        run.check()

    start_only_an_api(monkeypatch, moved)
    with run.files.lock() as run.lock, pytest.raises(FolderRemoved, match="/run is gone: .*; move it back") as raised:
        asyncio.run(launch(run))
    assert not hasattr(raised.value, "__notes__") and not run.files.path.exists()


def test_run_dir_full_disk_keeps_no_environment_running(full_disk, configured):
    run = configured(folder=full_disk / "run")
    environments = EnvironmentProcesses(run, "http://api", "http://server")
    [state] = environments._states
    environments._states = [state, replace(state)]
    for number, state in enumerate(environments._states):
        state.service = run.start(f"env-{number}", SLEEP)
    fill(full_disk)
    try:
        with pytest.raises(DiskFull, match="services.json"):
            environments.stop()
    finally:
        (full_disk / "ballast").unlink()
    assert not run.services and all(state.service.poll() is not None for state in environments._states)


def test_an_interrupt_shows_what_fails_at_the_end(tmp_path, monkeypatch, capsys):
    async def interrupted(run, *_):
        monkeypatch.setattr(run, "stop", lambda: exec("raise ServiceFailed('api survived')", globals()))
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    start_only_an_api(monkeypatch, interrupted)
    run = run_of(compose_config("actor_rollout_ref.model.path=m"), tmp_path)
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(launch(run))
    finally:
        monkeypatch.undo()
        run.stop()
    assert "then, at the end: api survived" in capsys.readouterr().out


def test_run_counts_the_seconds_of_all_its_starts(tmp_path, monkeypatch):
    """Also of those that fail: the table at the end shows the time that all steps took."""
    config = compose_config("actor_rollout_ref.model.path=m")

    def fail(run):
        time.sleep(0.1)
        raise ServiceFailed("on purpose")

    monkeypatch.setattr("recipe.atropos.launcher.launch.start_api", fail)
    for starts in (1, 2):
        with pytest.raises(ServiceFailed, match="on purpose"):
            asyncio.run(launch(run_of(config, tmp_path)))
        assert orjson.loads(RunDir(tmp_path).summary.read_bytes())["seconds_in_all"] >= 0.1 * starts
    RunDir(tmp_path).summary.write_text("not JSON")
    with pytest.raises(ServiceFailed, match="on purpose"):
        asyncio.run(launch(run_of(config, tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_run_that_is_terminated_ends_its_services(tmp_path, monkeypatch, number):
    """Also where interrupts are ignored, as in a shell's background job; and leaves a page of what it has trained."""
    run = run_of(compose_config("actor_rollout_ref.model.path=m"), healthy_run(tmp_path))

    async def wait(*_):
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    start_only_an_api(monkeypatch, wait)
    handlers = {number: signal.SIG_DFL, signal.SIGINT: signal.SIG_IGN}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(launch(run))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert run.services["api"].poll() == -signal.SIGTERM and run.files.report.exists()


@pytest.mark.parametrize(
    ("variable", "address", "joins"),
    [
        (None, None, False),
        (None, "auto", True),
        (None, "local", False),
        (None, "10.0.0.1:6379", True),
        ("10.0.0.1:6379", None, True),
        ("10.0.0.1:6379", "auto", True),
        ("10.0.0.1:6379", "local", False),
        ("local", None, False),
        ("local", "10.0.0.1:6379", True),
    ],
)
def test_run_on_the_cluster_that_ray_would_join_uses_its_network(configured, monkeypatch, variable, address, joins):
    """And else the loopback interface."""
    monkeypatch.setenv("RAY_ADDRESS", variable) if variable else monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = configured(f"+ray_kwargs.ray_init.address={address or 'null'}")
    assert ("GLOO_SOCKET_IFNAME" in run.variables) is not joins


def test_run_service_waits_until_it_may_start(run, tmp_path, capsys):
    """It is said to wait. A server on the trainer's GPUs, while the trainer has its memory."""
    offloaded = tmp_path / "offloaded"
    offloaded.touch()
    service = restartable(run, "sglang", limit=1, awaited=lambda: "later" * offloaded.exists())
    end(service)
    for _ in range(3):
        run.check()
    assert run.services == {"sglang": service} and not service.members()
    assert capsys.readouterr().out == "sglang ended (-9); it starts again later\n"
    offloaded.unlink()
    run.check()
    assert run.services["sglang"].poll() is None and "1 of 1 restarts" in capsys.readouterr().out


@pytest.mark.parametrize("colocated", [True, False])
def test_run_servers_wait_for_the_memory_that_the_trainer_has(configured, tmp_path, colocated):
    """They share it, and the trainer says when it has it."""
    run = configured("inference.urls=[http://127.0.0.1:1]", f"run.dir={tmp_path}", f"inference.colocated={colocated}")
    _enable_restarts(run, INFERENCE)
    memory = build_manager(run.config, None, 10, None).memory
    assert not run.restart_policies["sglang"].awaited()
    (memory.mark if colocated else run.files.servers_offloaded).touch()
    assert bool(run.restart_policies["sglang"].awaited()) is colocated
    assert not run.restart_policies["gateway"].awaited()


@pytest.mark.parametrize(("status", "starts"), [(-9, 2), (1, 1)])
def test_run_server_lost_before_it_is_up_is_placed_anew(configured, tmp_path, monkeypatch, capsys, status, starts):
    """With its node; gateway and trainer, which saves, start again with its address. Its own error would repeat."""
    cluster = ("inference.placement=ray", "ray_kwargs.ray_init.address=head:6379")
    run, log, started = configured(*cluster, "inference.python=python"), tmp_path / "sglang.log", []
    log.touch()
    cluster = SimpleNamespace(
        awaited=lambda name: "",
        placed=lambda name, launch: replace(launch, host=f"10.0.0.{len(started)}"),
        start_server=lambda name, launch, _: (
            started.append(name) or Placed(name, len(started), log, launch.url, status=status)
        ),
        close=lambda: None,
    )
    monkeypatch.setattr("recipe.atropos.launcher.on_ray.Cluster", lambda *_: cluster)
    monkeypatch.setattr("recipe.atropos.launcher.cluster_check.check_nodes", lambda *_, **__: [])
    monkeypatch.setattr("recipe.atropos.launcher.sglang.gateway_command", lambda *_: SLEEP)
    inference = asyncio.run(start_inference(run))
    trainer = restartable(run, "trainer", SAVES, kind="trainer", limit=0, recovers=lambda status: False)
    until(lambda: "begun" in trainer.tail(), 20)
    run.complete, before = run.config, dict(run.services)

    async def check():
        run.check()
        until(lambda: trainer.poll() is not None, 20)
        run.check()

    with pytest.raises(ServiceFailed, match="sglang: ended while") if starts == 1 else contextlib.nullcontext():
        asyncio.run(check())
        assert re.match(r"http://10\.0\.0\.1:", inference.urls[0]) and run.complete.inference.urls == inference.urls
        assert all(run.services[name].poll() is None is not before[name].poll() for name in ("gateway", "trainer"))
        assert trainer.poll() == RECOVERABLE
        assert f"sglang ended (-9), started again at {inference.urls[0]}: 1 of 3 restarts" in capsys.readouterr().out
    assert started == ["sglang"] * starts


def test_run_restarts_no_server_once_training_is_done(run, capsys):
    """The servers that are left must do. Nobody could give a new one the weights."""
    first, second = restartable(run, "sglang-0"), restartable(run, "sglang-1")
    restartable(run, "gateway", kind="gateway")
    run.start("trainer", END).process.wait(10)
    run.check()
    end(first)
    run.check()
    assert "sglang-0 ended (-9); the others go on" in capsys.readouterr().out
    assert set(listed(run)) == {"sglang-1", "gateway"}
    end(second)
    with pytest.raises(ServiceFailed, match="sglang-1: ended while the run needs it"):
        run.check()


@pytest.mark.parametrize(("ending", "restarted"), [("kill -9 $$", True), ("exit 75", True), ("exit 1", False)])
def test_run_restarts_a_trainer_that_lost_a_process(run, ending, restarted):
    """Not one that ended with an error that it would end with again."""
    command, recovers = ["bash", "-c", ending], lambda status: status in (-9, 75)
    restartable(run, "trainer", command, kind="trainer", recovers=recovers).process.wait(20)
    told = "trainer: ended while the run needs it"
    with contextlib.nullcontext() if restarted else pytest.raises(ServiceFailed, match=told):
        run.check()
    assert (run.services["trainer"].poll() is None) is restarted


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("exit 75", Preempted),
        ("kill -USR1 $$", Preempted),
        ("kill -9 $$", Preempted),
        ("exit 0", Preempted),  # the last evaluation, which may take longer than SLURM waits, is still to come
        ("exit 1", ServiceFailed),
    ],
)
def test_run_that_is_preempted_fails_as_its_trainer_does(run, ending, error):
    trainer = restartable(run, "trainer", ["bash", "-c", ending], kind="trainer", recovers=lambda status: False)
    trainer.process.wait(20)
    run.preempt()
    with pytest.raises(error):
        run.check()


def test_run_is_preempted_while_a_trainer_has_just_ended(run):
    """Its process is gone, and what it started is not yet."""
    trainer = run.start("trainer", ["bash", "-c", "sleep 100 & exit 75"])
    until(lambda: not psutil.pid_exists(trainer.pid), 20)
    assert trainer.poll() is None
    run.preempt()
    assert run.preempted


def test_run_that_is_preempted_before_its_services_can_go_on():
    with pytest.raises(_EarlyPreemption), _signals_as_interrupts():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_run_ends_its_servers_at_once_and_after_all_others(run, tmp_path):
    """Each takes seconds, and a preempted run has 180 s for all of them. Here each server waits for all to be told."""
    servers = ["sglang-0", "sglang-1", "sglang-2"]
    wait = f"until [ $(ls {tmp_path}/sglang-? | wc -l) = {len(servers)} ]; do sleep 0.05; done"
    told = f"if [ $NAME = trainer ]; then sleep 0.3; touch {tmp_path}/trainer; else touch {tmp_path}/$NAME; {wait}; fi"
    ends = f"trap '{told}; exit' TERM; echo begun; while :; do sleep 0.05; done"
    for name in (*servers, "trainer"):
        service = run.start(name, ["bash", "-c", ends], NAME=name)
        until(lambda log=service.log_path: "begun" in log.read_text(), 20)
    run.stop()
    told = {name: (tmp_path / name).stat().st_mtime_ns for name in (*servers, "trainer")}
    assert min(told, key=told.get) == "trainer" and {service.poll() for service in run.services.values()} == {0}


def test_run_restarts_the_api_also_once_training_is_done(run):
    """The evaluation of the last version is still to come, and the account of the groups."""
    trainer, api = run.start("trainer", ["true"]), restartable(run, "api", limit=1, kind="api", key="api.max_restarts")
    trainer.process.wait(20)
    end(api)
    run.check()
    assert run.services["api"].poll() is None
    end(run.services["api"])
    with pytest.raises(ServiceFailed, match="api: ended once more after 1 restarts .api.max_restarts"):
        run.check()


@pytest.mark.parametrize(("device", "gpus"), [("cpu", [None, None]), ("cuda", [4, 6])])
def test_run_servers_have_own_ports_seeds_and_devices(tmp_path, device, gpus):
    config = compose_config(
        "actor_rollout_ref.model.path=m",
        "inference.servers=2",
        f"inference.device={device}",
        "seed=7",
        "inference.args.tp_size=2",
        *(["inference.args.base_gpu_id=4"] if device == "cuda" else []),
    )
    launches = plan_servers(run_of(config, tmp_path))
    assert list(launches) == ["sglang-0", "sglang-1"]
    assert len({launch.port for launch in launches.values()}) == 2
    assert [launch.extra_args["random_seed"] for launch in launches.values()] == [7, 8]
    assert [launch.extra_args.get("base_gpu_id") for launch in launches.values()] == gpus
    assert not any(launch.extra_args["trust_remote_code"] for launch in launches.values())
    config.actor_rollout_ref.model.trust_remote_code = True
    assert all(launch.extra_args["trust_remote_code"] for launch in plan_servers(run_of(config, tmp_path)).values())

    config.inference.servers, config.inference.port = 1, 30000
    [(name, launch)] = plan_servers(run_of(config, tmp_path)).items()
    assert (name, launch.port) == ("sglang", 30000)


def test_run_starts_servers_that_take_an_adapter_by_itself(model_path, tmp_path):
    def flags(*overrides):
        given = (f"actor_rollout_ref.model.path={model_path}", "inference.device=cpu", "inference.python=py")
        launches = plan_servers(run_of(compose_config(*given, *overrides), tmp_path))
        return " ".join(sglang_command(launches["sglang"])[0])

    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,down_proj]")
    assert "lora-rank" not in flags() + flags(*lora)
    alone = flags(*lora, "actor_rollout_ref.model.lora.merge=false")
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules down_proj q_proj" in alone
    assert "--max-loras-per-batch 4 --max-loaded-loras 4" in alone
    linear = flags(lora[0], "actor_rollout_ref.model.lora.merge=false", "inference.args.max_lora_rank=8")
    assert "--max-lora-rank 8 --lora-target-modules down_proj gate_proj k_proj o_proj q_proj up_proj v_proj" in linear
    mistyped = "actor_rollout_ref.model.target_modules=[q_prj]"
    with pytest.raises(ConfigurationError, match=r"target_modules=\['q_prj'\]: .*not found"):
        flags(lora[0], mistyped, "actor_rollout_ref.model.lora.merge=false")


def test_watch_waits_for_every_batch_that_may_be_empty(configured, monkeypatch):
    """One after the other, each as long as it is announced; what takes longer hangs."""
    limits = "step_timeout=100", "max_wait_time=1000", "max_empty_batches=3"
    run = configured("evaluation.timeout=10", *(f"trainer.atropos.{limit}" for limit in limits))
    run.start("trainer", SLEEP)
    run.files.waiting.touch()
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("recipe.atropos.launcher.launch.time", clock)

    async def poll(_):
        clock.now += 1000

    async def watched():
        async with contextlib.aclosing(AlarmWatch(run, 0, INFERENCE.gateway, INFERENCE)) as alarm_watch:
            await watch(run, 0, SimpleNamespace(poll=poll), Evaluations(run, INFERENCE), alarm_watch)

    with pytest.raises(ServiceFailed, match="no step after step 0 for 4000 s"):
        asyncio.run(watched())


def test_watch_drops_evaluations_of_what_is_trained_again(configured):
    """Of each step after the checkpoint from which the killed trainer starts again, before that trains on."""
    run = configured("evaluation.every=5")
    run.complete = run.config
    with Checkpoints(run.config.trainer.default_local_dir).saving(5, None):
        pass
    for step in (5, 10):
        append_line(run.files.evaluations, {"step": step, "env": "a", "metrics": {}})
    restartable(run, "trainer", ["sh", "-c", "kill -9 $$"])
    evaluations = Evaluations(run, INFERENCE)
    evaluations._mark(10)

    async def ended(_):
        if run.files.evaluated.read_text() == "5":
            raise EOFError

    async def watched():
        async with (
            asyncio.timeout(30),
            contextlib.aclosing(AlarmWatch(run, 0, INFERENCE.gateway, INFERENCE)) as alarm_watch,
        ):
            await watch(run, 0, SimpleNamespace(poll=ended), evaluations, alarm_watch)

    with pytest.raises(EOFError):
        asyncio.run(watched())
    assert [line["step"] for line in read_lines(run.files.evaluations)] == [5]
