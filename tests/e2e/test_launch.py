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


def listed(folder):
    return orjson.loads((folder / "services.json").read_bytes())


def words(text):
    """Without the line breaks that a terminal's width made."""
    return re.sub(r"\s+", " ", text)


BROKEN = """
from atroposlib.envs.base import BaseEnv

class Broken(BaseEnv):
    async def setup(self):
        raise RuntimeError("no water in the pool")

    async def get_next_item(self): ...

    async def evaluate(self): ...
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["environment.args.dataset_name=/no/such/data.jsonl"], "/no/such/data.jsonl"),
        pytest.param(["environment.target=broken.py"], "no water in the pool", marks=pytest.mark.slow),
    ],
    ids=["dataset", "setup"],
)
def test_an_environment_that_exits_stops_everything_and_is_named(tmp_path, model_path, arguments, expected):
    (tmp_path / "broken.py").write_text(BROKEN)
    model = os.path.relpath(model_path, tmp_path)
    service = run(tmp_path, LAUNCH, "--preset", "demo", f"--model={model}", "--run-dir=r", *arguments)
    status, output, left = wait(service, 350)  # 35 to 40 s where nothing else runs
    assert status == 1 and expected in words(output) and not left, output


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
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=lambda number: number.name)
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
        launcher.wait(300)
        until(lambda: not living(), 20, told=lambda: str(living()))
    finally:
        for process in [*living(), launcher]:
            process.kill()
        launcher.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # four starts of everything
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

    # The environment samples at the trainer's temperature without being told so, too.
    for arguments in ([fixed, other], [fixed]):
        status, output, left = wait(run(tmp_path, LAUNCH, *options, f"run.dir={folders[1]}", *arguments), 900)
        assert status == 0 and not left, output
        summary = orjson.loads((folders[1] / "summary.json").read_bytes())
        assert summary["steps"] == 2 and summary["alarms"] == {}
        assert not any("rows_with" in key for line in read_metrics(folders[1]) for key in line)
        folders[1] = tmp_path / "default"

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


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """(launcher, its options) of a demo that trains: some steps are done, many are to come."""
    folder = tmp_path_factory.mktemp("training")
    options = ["--preset", "demo", "--run-dir", str(folder / "run"), "trainer.save_freq=2"]
    tracking = "trainer.logger=[console,tensorboard,wandb]"
    service = run(folder, LAUNCH, *options, "--steps", "1000", "--seed", "0", tracking)
    try:
        until(lambda: len(read_metrics(folder / "run")) >= 2, 900, service)  # everything starts
        yield service, folder / "run", options
    finally:
        service.stop()


def maps_of(process):
    with contextlib.suppress(psutil.Error):
        return process.memory_maps()
    return []


def processes_of(service):
    launcher = psutil.Process(service.pid)
    return [launcher, *launcher.children(recursive=True)]


def test_status_of_a_run_that_trains(training):
    _, folder, _ = training
    status = RunReader(folder).read()
    assert status.state == "running" and status.total == 1000 and status.step >= 2
    assert {service.name: service.health for service in status.services if service.name != "trainer"} == dict.fromkeys(
        ("api", "sglang", "gateway", "environment"), "ok"
    ), status.services
    assert status.diagnosis["trainer"]["live"] and status.heldout_share and 0.2 < status.heldout[0] < 0.5
    assert status.memory.run > 1 << 30 and status.seconds_left > 0


def test_dry_run_prints_the_commands_that_a_run_starts(training):
    _, folder, options = training
    run = Run(plan_run(compose_overrides(parse_arguments([*options, "--steps", "1000"]))))
    place_servers(run.config)
    planned = service_commands(run)
    started = {name: psutil.Process(service["pid"]).cmdline() for name, service in listed(folder).items()}
    [made] = [word.partition("=")[2] for word in started["environment"] if word.startswith("--openai.model_name=")]
    port = re.compile(r"127.0.0.1:\d+|(?<=--port=)\d+|^\d{4,5}$")
    for name in ("api", "gateway", "trainer", "environment"):
        expected = [word.replace("small-policy", made) for word in planned[name][0]]
        assert [port.sub("PORT", word) for word in started[name]] == [port.sub("PORT", word) for word in expected], name


def test_secret_of_a_run_is_in_no_file_and_no_command_line(training):
    service, folder, _ = training
    key = psutil.Process(listed(folder)["gateway"]["pid"]).environ()["ATROPOS_API_KEY"]
    assert len(key) >= 32
    for process in processes_of(service):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not any(key in word for word in process.cmdline()), process
    files = [path for path in folder.parent.rglob("*") if path.is_file()]
    assert {"config.yaml", "evaluate_config.yaml", "sglang.log", "environment.log"} <= {path.name for path in files}
    holders = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # a temporary file of the running trainer was renamed
            holders += [path] if key.encode() in path.read_bytes() else []
    assert not holders


def test_secret_ports_of_a_run_are_on_loopback(training):
    """Those of Ray, torch and SGLang too; Ray asks for a token."""
    service, folder, _ = training
    listening, names, ports = {}, set(), []
    for process in processes_of(service):
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
    trainer = psutil.Process(listed(folder)["trainer"]["pid"])
    [raylet] = [child for child in trainer.children(recursive=True) if child.name() == "raylet"]
    assert raylet.environ()["RAY_AUTH_MODE"] == "token" and len(raylet.environ()["RAY_AUTH_TOKEN"]) == 64


def test_launch_restarts_what_is_killed(training, tmp_path):
    """Each step and each batch is trained on once all the same. An interrupt afterwards leaves nothing."""
    service, folder, options = training
    before = listed(folder)
    temporary = Path(psutil.Process(before["gateway"]["pid"]).environ()["TMPDIR"])
    assert (temporary / "ray").is_dir()
    maps = [m.path for process in processes_of(service) for m in maps_of(process) if "sglang_loads" in m.path]
    assert all(temporary.name in path for path in maps), "shared memory is named by its run"
    for name in ("sglang", "gateway"):
        psutil.Process(before[name]["pid"]).kill()  # no batch comes without it: only the waiting trainer can go on

    def restarted(*names):
        return all(listed(folder).get(name, before[name])["pid"] != before[name]["pid"] for name in names)

    until(lambda: restarted("sglang", "gateway"), 600, service)
    reached = len(read_metrics(folder))
    until(lambda: len(read_metrics(folder)) >= reached + 4, 600, service)  # more than were ahead
    assert listed(folder)["sglang"]["url"] == before["sglang"]["url"]
    [left] = Path("/dev/shm").glob(f"sglang_loads_{temporary.name}_*")
    assert f"_{listed(folder)['sglang']['pid']}_" in left.name, "of the killed server nothing is left"
    for name in ("api", "trainer"):
        before, reached = listed(folder), len(read_metrics(folder))
        psutil.Process(before[name]["pid"]).kill()
        until(lambda: restarted(name), 600, service)  # noqa: B023
        until(lambda: len(read_metrics(folder)) >= reached + 2, 600, service)  # noqa: B023
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["atropos/batch"] for line in lines] == list(range(1, len(lines) + 1))
    (tmp_path / "second").mkdir()
    status, output, _ = wait(run(tmp_path / "second", LAUNCH, *options, "--steps", "1000"), 600)
    assert status == 1 and f"is in use by process {listed(folder)['launcher']['pid']} (launch_services" in words(output)
    os.kill(service.pid, signal.SIGINT)
    status, output, left = wait(service, 300)
    assert status == 130 and "the same command resumes the run" in output, output
    assert not left, "no process of the run is alive"
    assert not temporary.exists() and not [p for p in Path("/dev/shm").iterdir() if temporary.name in p.name]
    assert listed(folder) == {}
    assert re.search(r"sglang ended \(-9\), started again at http://127.0.0.1:\d+: 1 of 3 restarts", words(output)), (
        output
    )


@pytest.fixture(scope="module")
def finished(training, tmp_path_factory):
    """(folder, its options, what the second launcher printed, its working folder): interrupted, then gone on with."""
    service, folder, options = training
    if service.poll() is None:
        os.kill(service.pid, signal.SIGINT)
        wait(service, 300)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_bytes(b"")
    options, where = [*options, "--steps", str(len(read_metrics(folder)) + 1)], tmp_path_factory.mktemp("finished")
    status, output, left = wait(run(where, LAUNCH, *options), 900)
    assert status == 0 and not left, output
    return folder, options, output, where


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
