"""The launcher and the trainer's command line, as a person uses them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import orjson
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.launchers import living_of
from helpers.terminal import terminals
from helpers.waiting import until
from recipe.atropos.commands.dry_run import service_commands
from recipe.atropos.launch_services import compose_overrides, parse_arguments
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.launcher.services import Run
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.run.status import RunReader
from recipe.atropos.utils.files import read_lines
from recipe.atropos.utils.process import RUN_ID_VARIABLE, free_port, start_service

pytestmark = pytest.mark.timeout(1800)

LAUNCH = "recipe.atropos.launch_services"
MAIN = "recipe.atropos.main"
DETACHED = [sys.executable, "-m", "recipe.atropos", "train", "--detach", "--preset", "demo"]
LEFT = "ending what it left running"


def run(folder, module, *arguments):
    command = [sys.executable, "-m", module, *arguments]
    return start_service(module, command, log_path=folder / "log", cwd=folder, env={"WANDB_MODE": "offline"})


def wait(service, timeout):
    """(exit status, output, whether it left a process behind that its guardian had to end)."""
    try:
        status = service.process.wait(timeout)
        output = Path(service.log_path).read_text()
        return status, output, LEFT in output
    finally:
        service.stop(grace=0)


def listed(files):
    return orjson.loads(files.services.read_bytes())


def words(text):
    """Without the line breaks that a terminal's width made."""
    return re.sub(r"\s+", " ", text)


def command(name, *arguments):
    return [sys.executable, "-m", "recipe.atropos", name, *map(str, arguments)]


def output_of(name, *arguments):
    done = subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


BROKEN = """
from atroposlib.envs.base import BaseEnv

class Broken(BaseEnv):
    async def setup(self):
        raise RuntimeError("no water in the pool")

    async def get_next_item(self): ...

    async def evaluate(self): ...
"""


@pytest.mark.slow
def test_an_environment_that_exits_stops_everything_and_is_named(tmp_path, model_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    model = os.path.relpath(model_path, tmp_path)
    target = "environment.target=broken.py"
    service = run(tmp_path, LAUNCH, "--preset", "demo", f"--model={model}", "--run-dir=r", target)
    status, output, left = wait(service, 350)  # 35 to 40 s where nothing else runs
    assert status == 1 and "no water in the pool" in words(output) and not left, output


@pytest.mark.slow
def test_launch_of_a_trainer_that_fails_waits_for_no_service(tmp_path, model_path):
    """It has five minutes to wait for them, and fails long before: Ray has no room for its ranks."""
    url = f"http://127.0.0.1:{free_port()}"
    options = ["preset=demo", f"actor_rollout_ref.model.path={model_path}", "trainer.atropos.startup_timeout=1000"]
    options += ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=1"]
    service = run(tmp_path, MAIN, *options, f"inference.urls=[{url}]", f"trainer.atropos.api_url={url}")
    status, output, left = wait(service, 900)
    assert status == 1 and not left
    assert "n_gpus_per_node=2: Ray found no room for all ranks of a node on one within 10 s" in words(output), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_lock_refuses_a_trainer_started_by_hand(tmp_path, model_path):
    with RunDir(tmp_path / "run").lock():
        options = ["preset=demo", f"actor_rollout_ref.model.path={model_path}", f"run.dir={tmp_path / 'run'}"]
        status, output, _ = wait(run(tmp_path, MAIN, *options, "inference.urls=[http://127.0.0.1:1]"), 300)
    assert status == 1 and f"is in use by process {os.getpid()}" in words(output), output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_orphans_of_a_launcher_killed_in_its_start_are_ended(tmp_path, number):
    """While the trainer starts Ray and SGLang its processes; some of them show neither environment nor name."""
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    command = [sys.executable, "-m", LAUNCH, "--preset", "demo", f"--run-dir={folder}"]
    environment = {**os.environ, RUN_ID_VARIABLE: mark}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and would be in the launcher
    try:
        with (tmp_path / "log").open("wb") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=environment)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    seen = {}

    def look():
        seen.update({p.pid: p for p in psutil.Process(launcher.pid).children(recursive=True)})
        names = set()
        for process in seen.values():
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                names |= {process.name(), *process.cmdline()[:1]}
        return names

    def living():
        return [process for process in living_of(mark, seen) if process.pid != launcher.pid]

    try:
        until(lambda: any("raylet" in name for name in look()), 240, told=(tmp_path / "log").read_text)
        assert len(look()) > 3
        launcher.send_signal(number)
        assert launcher.wait(300) == 130 or number != signal.SIGINT
        until(lambda: not living(), 20, told=lambda: str(living()))
    finally:
        for process in [*living(), launcher]:
            process.kill()
        launcher.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three starts of everything
def test_sampling_at_another_temperature_ends_the_run(tmp_path):
    """Naming both options, of which each trains; with a warning instead, alarms say that the logprobs are wrong."""
    options = ["--preset", "demo", "--steps", "2", "evaluation.timeout=600", "environment.evaluate=false"]
    other, fixed = "environment.args.temperature=0.7", "actor_rollout_ref.rollout.temperature=0.7"
    folders = [tmp_path / name for name in ("error", "fixed", "warn")]

    status, output, left = wait(run(tmp_path, LAUNCH, *options, f"run.dir={folders[0]}", other), 900)
    assert status == 1 and not left, output
    expected = (
        "environment gsm8k sampled at temperature 0.7, but the trainer computes logprobs at "
        "actor_rollout_ref.rollout.temperature=1; set environment.args.temperature=1 (or what the environment calls "
        f"it), or {fixed}, or trainer.atropos.sampling_mismatch=per_row"
    )
    assert expected in words(output)

    # The environment samples at the trainer's temperature without being told so.
    status, output, left = wait(run(tmp_path, LAUNCH, *options, f"run.dir={folders[1]}", fixed), 900)
    assert status == 0 and not left, output
    summary = orjson.loads((folders[1] / "summary.json").read_bytes())
    assert summary["steps"] == 2 and summary["alarms"] == {}
    assert not any("rows_with" in key for line in read_metrics(folders[1]) for key in line)

    warn = [other, "trainer.atropos.sampling_mismatch=warn"]
    status, output, left = wait(run(tmp_path, LAUNCH, *options, f"run.dir={folders[2]}", *warn), 900)
    assert status == 0 and not left, output
    alarms = orjson.loads((folders[2] / "summary.json").read_bytes())["alarms"]
    assert set(alarms) == {"other_temperature", "logprob_difference"}
    assert alarms["other_temperature"]["seen"].startswith("128 rows, at step ")
    assert [alarms["other_temperature"][key] for key in ("first_step", "last_step", "steps")] == [1, 2, 2]
    lines = read_lines(RunDir(folders[2]).alarms)
    assert {(line["alarm"], line["state"], line["since_step"]) for line in lines} == {
        ("other_temperature", "raised", 1),
        ("logprob_difference", "raised", 1),
    }
    for alarm in alarms.values():
        assert alarm["raised"] == 1 and alarm["now"] and alarm["means"] in words(output)
        assert alarm["advice"][-60:] in words(output)


def test_detach_says_on_the_terminal_what_is_wrong(terminal, tmp_path):
    wrong = terminal([*DETACHED, "--model=/no/such/model", f"--run-dir={tmp_path / 'run'}"], tmp_path)
    assert wrong.wait_for_end() == 1 and "no model there" in wrong.text
    options = ["environment.target=null", "inference.api_key=null", f"--run-dir={tmp_path / 'run'}"]
    joined = terminal([*DETACHED, *options], tmp_path)
    assert joined.wait_for_end() == 1 and "--detach leaves it" in " ".join(joined.text.split())
    assert not os.listdir(tmp_path)


LEAVES = """
import sys, time
from recipe.atropos.launcher.detaching import run_detached

def program(leave):
    print("checked", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130

sys.exit(run_detached(program))
"""


def test_detached_program_is_interrupted_until_it_has_left(terminal, tmp_path):
    left = terminal([sys.executable, "-c", LEAVES], tmp_path)
    left.wait_for("checked")
    left.type("\x03")
    assert left.wait_for_end() == 130 and "interrupted" in left.text


def test_stop_signal_during_the_checks_is_an_interrupt(tmp_path):
    arguments = ["--preset", "demo", f"--run-dir={tmp_path / 'run'}"]
    with subprocess.Popen(command("train", *arguments), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline().startswith("run ")
        launcher.terminate()
        assert "stopped the same command resumes the run" in launcher.stdout.read()
        assert launcher.wait(60) == 130 and not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """(files, its options, mark of its processes) of a demo that trains: some steps are done, many are to come.

    It has left its terminal, which is closed.
    """
    folder = tmp_path_factory.mktemp("training")
    files = RunDir(folder / "run")
    options = ["--run-dir", str(files.path), "trainer.save_freq=2"]
    tracking = ["--seed", "0", "trainer.logger=[console,tensorboard,wandb]"]
    with terminals() as open_one:
        terminal = open_one([*DETACHED, *options, "--steps", "1000", *tracking], folder, WANDB_MODE="offline")
        assert terminal.wait_for_end() == 0, terminal.text
        assert "goes on without this terminal" in terminal.text and "attach" in terminal.text
        terminal.close()
        until(
            lambda: len(read_metrics(files.path)) >= 2, 900, told=files.log("launcher").read_text
        )  # everything starts
        yield files, ["--preset", "demo", *options], terminal.mark


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def maps_of(process):
    with contextlib.suppress(psutil.Error):
        return process.memory_maps()
    return []


def processes_of(files):
    launcher = psutil.Process(listed(files)["launcher"]["pid"])
    return [launcher, *launcher.children(recursive=True)]


def test_detached_run_goes_on_without_its_terminal(training):
    files, *_ = training
    services = listed(files)
    assert all(lives(service["pid"]) for service in services.values())
    assert {"launcher", "api", "gateway", "sglang", "trainer"} <= services.keys()
    assert services["launcher"]["log"] == str(files.log("launcher"))
    assert files.holder().pid == services["launcher"]["pid"]
    log = files.log("launcher").read_text()
    assert files.log("launcher").stat().st_mode & 0o777 == 0o600
    assert "sglang  starting" in log and "\x1b" not in log, "its output is no terminal"


def test_status_of_a_run_that_trains(training):
    files, *_ = training
    status = RunReader(files.path).read()
    assert status.state == "running" and status.total == 1000 and status.step >= 2
    assert {service.name: service.health for service in status.services if service.name != "trainer"} == dict.fromkeys(
        ("api", "sglang", "gateway", "environment"), "ok"
    ), status.services
    assert status.diagnosis["trainer"]["live"] and status.heldout_share and 0.2 < status.heldout[0] < 0.5
    assert status.memory.run > 1 << 30 and status.seconds_left > 0


def test_dry_run_prints_the_commands_that_a_run_starts(training):
    files, options, _ = training
    run = Run(plan_run(compose_overrides(parse_arguments([*options, "--steps", "1000"]))))
    place_servers(run.config)
    planned = service_commands(run)
    started = {name: psutil.Process(service["pid"]).cmdline() for name, service in listed(files).items()}
    [made] = [word.partition("=")[2] for word in started["environment"] if word.startswith("--openai.model_name=")]
    port = re.compile(r"127.0.0.1:\d+|(?<=--port=)\d+|^\d{4,5}$")
    for name in ("api", "gateway", "trainer", "environment"):
        expected = [word.replace("small-policy", made) for word in planned[name][0]]
        assert [port.sub("PORT", word) for word in started[name]] == [port.sub("PORT", word) for word in expected], name


def test_secret_of_a_run_is_in_no_file_and_no_command_line(training):
    files, *_ = training
    key = psutil.Process(listed(files)["gateway"]["pid"]).environ()["ATROPOS_API_KEY"]
    assert len(key) >= 32
    for process in processes_of(files):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not any(key in word for word in process.cmdline()), process
    paths = [path for path in files.path.parent.rglob("*") if path.is_file()]
    assert {"config.yaml", "evaluate_config.yaml", "sglang.log", "environment.log"} <= {path.name for path in paths}
    holders = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a temporary file of the running trainer was renamed
            holders += [path] if key.encode() in path.read_bytes() else []
    assert not holders


def test_secret_ports_of_a_run_are_on_loopback(training):
    """Those of Ray, torch and SGLang too; Ray asks for a token."""
    files, *_ = training
    listening, names, ports = {}, set(), []
    for process in processes_of(files):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(process.name())
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.append((process.name(), connection.laddr.port))
                    listening.setdefault(connection.laddr.ip.removeprefix("::ffff:"), set()).add(process.name())
    assert set(listening) == {"127.0.0.1"}, listening
    assert {"gcs_server", "raylet"} <= names
    assert not {44217, 44227} & {port for _, port in ports}, "Ray's metrics, without a token"
    assert sum(name == "ray::DashboardAgent" for name, _ in ports) <= 2, "its metrics would be a third"
    trainer = psutil.Process(listed(files)["trainer"]["pid"])
    [raylet] = [child for child in trainer.children(recursive=True) if child.name() == "raylet"]
    assert raylet.environ()["RAY_AUTH_MODE"] == "token" and len(raylet.environ()["RAY_AUTH_TOKEN"]) == 64


def test_attach_leaves_a_detached_run_alone(training, terminal, tmp_path):
    files, *_ = training
    view = terminal(command("attach", files.path), tmp_path)
    view.wait_for(r"╭─ run")
    view.wait_for(r"Ctrl-C leaves the run alone")
    view.type("\x03")
    assert view.wait_for_end() == 0
    assert "run goes on; to end it:" in " ".join(view.text.split()) and "Traceback" not in view.text
    assert lives(listed(files)["launcher"]["pid"])


def test_launch_restarts_what_is_killed(training, tmp_path):
    """Each step and each batch is trained on once all the same."""
    files, options, _ = training
    before, told = listed(files), files.log("launcher").read_text
    temporary = Path(psutil.Process(before["gateway"]["pid"]).environ()["TMPDIR"])
    assert (temporary / "ray").is_dir()
    maps = [m.path for process in processes_of(files) for m in maps_of(process) if "sglang_loads" in m.path]
    assert all(temporary.name in path for path in maps), "shared memory is named by its run"
    for name in ("sglang", "gateway"):
        psutil.Process(before[name]["pid"]).kill()  # no batch comes without it: only the waiting trainer can go on

    def restarted(*names):
        return all(listed(files).get(name, before[name])["pid"] != before[name]["pid"] for name in names)

    def trained():
        return len(read_metrics(files.path))

    until(lambda: restarted("sglang", "gateway"), 600, told=told)
    reached = trained()
    until(lambda: trained() >= reached + 4, 600, told=told)  # more than were ahead
    assert listed(files)["sglang"]["url"] == before["sglang"]["url"]
    [left] = Path("/dev/shm").glob(f"sglang_loads_{temporary.name}_*")
    assert f"_{listed(files)['sglang']['pid']}_" in left.name, "of the killed server nothing is left"
    for name in ("api", "trainer"):
        before, reached = listed(files), trained()
        psutil.Process(before[name]["pid"]).kill()
        until(lambda: restarted(name), 600, told=told)  # noqa: B023
        until(lambda: trained() >= reached + 2, 600, told=told)  # noqa: B023
    lines = read_metrics(files.path)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["atropos/batch"] for line in lines] == list(range(1, len(lines) + 1))
    restarts = r"sglang ended \(-9\), started again at http://127.0.0.1:\d+: 1 of 3 restarts"
    assert re.search(restarts, words(told())), told()
    status, output, _ = wait(run(tmp_path, LAUNCH, *options, "--steps", "1000"), 600)
    assert status == 1 and f"is in use by process {listed(files)['launcher']['pid']} (" in words(output)


def test_stop_ends_a_detached_run_and_who_follows_it(training, terminal, tmp_path):
    """No process is left, no file in a temporary folder, and no shared memory."""
    files, _, mark = training
    temporary = Path(psutil.Process(listed(files)["gateway"]["pid"]).environ()["TMPDIR"])
    view = terminal(command("attach", files.path), tmp_path)
    view.wait_for(r"╭─ run")
    follower = subprocess.Popen(command("logs", files.path, "launcher", "-f"), stdout=subprocess.PIPE)
    status, text = output_of("stop", files.path)
    assert status == 0 and re.search(r"run after step \d+, in", text) and "resumes it" in text, text
    assert not living_of(mark) and listed(files) == {}
    assert not temporary.exists() and not [p for p in Path("/dev/shm").iterdir() if temporary.name in p.name]
    assert view.wait_for_end() == 1 and "ended before it was finished" in " ".join(view.text.split())
    assert b"the same command resumes the run" in follower.communicate(timeout=60)[0] and follower.returncode == 0
    assert output_of("status", files.path)[0] == 1 and output_of("stop", files.path)[0] == 0


@pytest.fixture(scope="module")
def finished(training, tmp_path_factory):
    """(folder, its options, what the second launcher printed, its working folder): stopped, then gone on with."""
    files, options, _ = training
    output_of("stop", files.path)
    (files.checkpoints / "latest_checkpointed_iteration.txt").write_bytes(b"")
    options = [*options, "--steps", str(len(read_metrics(files.path)) + 1)]
    where = tmp_path_factory.mktemp("finished")
    status, output, left = wait(run(where, LAUNCH, *options), 900)
    assert status == 0 and not left, output
    return files.path, options, output, where


@pytest.mark.slow
def test_launch_goes_on_after_an_interrupt(finished):
    """The demonstration reports each step once."""
    folder, options, output, where = finished
    steps = int(options[-1])
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert summary["steps"] == summary["policy_version"] == steps
    assert summary["heldout_problems"] >= 200
    assert 0.2 <= summary["heldout_accuracy_before"] <= 0.5
    assert summary["heldout_accuracy_after"] > 0
    assert summary["sequences_trained"] > steps * 100 and summary["tokens_trained"] > steps * 1250
    assert summary["dropped"] == {} and summary["alarms"] == {}
    counts, groups = summary["environments"]["gsm8k"], summary["groups"]
    ends = [n for name, n in counts.items() if name.startswith(("not_sent/", "failed/"))]
    assert counts["items"] == counts["groups_sent"] + sum(ends) + counts.get("in_flight", 0)
    assert groups["trained"] == steps * 16 and groups["dropped"] == 0 <= groups["left"], groups
    assert 0 <= groups["received"] - counts["groups_sent"] < 8, groups  # being sent as the environment ended
    assert [line["atropos/batch"] for line in read_metrics(folder)] == list(range(1, steps + 1)), "each batch once"
    assert len(list((folder / "checkpoints").glob("global_step_*"))) == 2, "of both processes"
    assert f"model {os.path.relpath(folder / 'model', where)}: step {steps}, float32" in words(output), output
    card = (folder / "model/README.md").read_text()
    assert f"| {summary['heldout_accuracy_before']:.4g} (step 0) | {summary['heldout_accuracy_after']:.4g} |" in card
    exported = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    assert exported.dtype == torch.float32 and exported.num_parameters() > 1e5
    assert sum(summary["seconds_per_phase"].values()) == pytest.approx(summary["seconds"], rel=0.05)
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), "each step once"
    assert lines[0]["atropos/logprob_diff/max"] < 1e-4, "the first samples are the first policy's"
    assert all(line["atropos/policy_version"] == line["step"] for line in lines)
    for name in (
        "config.yaml",
        "given.yaml",
        "services.json",
        "reward.png",
        "report.html",
        f"rollouts/{steps}.jsonl",
        "logs/trainer.log",
        "tensorboard",
        "wandb",
    ):
        assert (folder / name).exists(), name
    assert lines[0]["atropos/staleness/max"] == 0 and not any("atropos/rows_with/unknown_version" in x for x in lines)
    assert all(0 <= line["atropos/staleness/mean"] <= line["atropos/staleness/max"] < line["step"] for line in lines)
    row = orjson.loads((folder / "rollouts/1.jsonl").read_bytes().splitlines()[0])
    assert row["policy_version_min"] == row["policy_version_max"] == 0 and row["env_name"] == "gsm8k"
    assert 4 <= row["response_tokens"] <= 64
    assert row["score"] in (1.0, -1.0) and "boxed" in row["output"] and row["input"].startswith("<|im_start|>user")


@pytest.mark.slow
def test_a_run_stopped_in_its_last_evaluation_goes_on_with_it(finished, tmp_path):
    """All of it is trained, and not all evaluated."""
    folder, options, *_ = finished
    summary, lines = orjson.loads((folder / "summary.json").read_bytes()), read_metrics(folder)
    evaluations = read_evaluations(folder)
    (folder / "evaluations.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in evaluations[:-1]))
    del summary["finished_steps"], summary["heldout_accuracy_after"]
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    status, output, left = wait(run(tmp_path, LAUNCH, *options), 900)
    assert status == 0 and not left, output
    again = read_evaluations(folder)
    assert [line["metrics"] for line in again] == [line["metrics"] for line in evaluations], "of the same weights"
    assert read_metrics(folder) == lines, "nothing is trained again"

    status, output, _ = wait(run(tmp_path, LAUNCH, *options), 300)
    assert status == 1 and f"has trained {options[-1]} steps already" in words(output)
