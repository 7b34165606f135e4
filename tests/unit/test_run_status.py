"""The state of a run as its folder and its services tell it."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson
import psutil
import pytest

from helpers.runs import make_run, metrics_line, write_lines
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.report.run_history import read_history
from recipe.atropos.run.record import RunRecord
from recipe.atropos.run.status import RunReader, find_run, measure_memory
from recipe.atropos.utils.files import append_line
from recipe.atropos.utils.process import start_time
from recipe.atropos.utils.secret import environments_key


def read(files):
    return RunReader(files.path).read()


def health(files):
    return {each.name: each.health for each in read(files).services}


def this(**more):
    return {"pid": os.getpid(), "started": start_time(os.getpid()), "booted": psutil.boot_time(), **more}


@pytest.fixture
def ended():
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    return process.pid


def test_a_run_is_found_by_folder_by_name_and_as_the_newest(tmp_path):
    make_run(tmp_path / "runs/new", started=2e9)
    make_run(tmp_path / "runs/old", started=1e9)
    (tmp_path / "runs/figures").mkdir()
    runs = tmp_path / "runs"
    assert find_run(None, runs).path == runs / "new"
    assert find_run("old", runs).path == find_run(str(runs / "old"), runs).path == runs / "old"
    with pytest.raises(ConfigurationError, match="odl: no run there .* did you mean old"):
        find_run("odl", runs)
    with pytest.raises(ConfigurationError, match="figures: no run there.*holds new, old"):
        find_run("figures", runs)
    with pytest.raises(ConfigurationError, match="holds no run"):
        find_run(None, tmp_path / "nothing")


def test_state_of_a_run_whose_launcher_lives(tmp_path):
    files = make_run(tmp_path / "run", steps=0)
    assert read(files).state == "starting"
    write_lines(files.metrics, [metrics_line(1, time=time.time() + 1)])
    status = read(files)
    assert (status.state, status.step, status.total, status.max_staleness) == ("running", 1, 20, 2)
    write_lines(files.metrics, [metrics_line(20, time=time.time() + 1)])
    assert read(files).state == "ending", "it evaluates and exports"
    # A resumed one has lines of an earlier start.
    assert read(make_run(tmp_path / "run")).state == "starting", "its lines are of an earlier start"


def test_state_of_a_run_that_ended(tmp_path, ended):
    files = make_run(tmp_path / "run", steps=20, pid=ended)
    assert read(files).state == "stopped", "it was not evaluated last"
    files.summary.write_bytes(orjson.dumps({"finished_steps": 20}))
    assert read(files).state == "finished"
    files.config.write_text(files.config.read_text().replace("20", "30"))
    assert read(files).state == "stopped", "more steps are to be trained"
    # As ``replay`` leaves one: it has no services, and no evaluation after its last step.
    for steps, state in ((19, "stopped"), (20, "finished")):
        files = make_run(tmp_path / state, steps=steps, pid=ended)
        files.services.unlink()
        assert read(files).state == state and read_history(files.path).finished == (state == "finished")


def test_held_out_scores_are_percent_only_if_all_are_shares(tmp_path):
    """Whichever of the environments was evaluated last."""
    files = make_run(tmp_path / "run")
    for env, main in (("a", "accuracy"), ("b", "mean_score")):
        append_line(files.evaluations, {"step": 4, "env": env, "metrics": {main: 0.5}, "main": main})
        assert read(files).heldout_share == (env == "a")
    append_line(files.evaluations, {"step": 8, "env": "a", "metrics": {"accuracy": 0.5}, "main": "accuracy"})
    assert not read(files).heldout_share


def test_state_of_a_killed_launcher_whose_pid_was_reused(tmp_path):
    files = make_run(tmp_path / "run", started=1e9, trainer=this(started=1e9))
    status = read(files)
    assert status.state == "killed" and not status.is_alive and status.services == ()


def test_state_of_a_run_on_another_machine(tmp_path):
    files = make_run(tmp_path / "run", host="elsewhere", trainer=this())
    status = read(files)
    assert status.state == "on another machine" and not status.is_alive and status.services == ()
    files.services.write_bytes(b"{}")
    assert read(files).state == "stopped", "nothing of it runs there either"
    files.services.unlink()
    assert read(files).state == "on another machine", "a trainer without a launcher, or one that begins"


def test_status_of_a_service_whose_pid_was_reused_is_down(tmp_path):
    files = make_run(tmp_path / "run", trainer=this(), environment=this(started=1e9), api={"pid": os.getpid()})
    assert health(files) == {"trainer": "ok", "environment": "down", "api": "down"}
    files.waiting.touch()
    assert health(files)["trainer"] == "waits" and read(files).waiting
    RunRecord(files.path)
    assert health(files)["trainer"] == "ok", "a trainer that starts again, by hand too, after it was killed"


class _Endpoints(BaseHTTPRequestHandler):
    """What the Trajectory API and the gateway answer to who has the run's key."""

    answers = {
        "/diagnose": {"why": "no batch 3", "warnings": {"disk": "the disk is full"}, "batch_size": 8, "queue": {}},
        "/gateway/status": {
            "version": 3,
            "servers": [
                {"url": "http://s0", "state": "admitted", "inflight": 7},
                {"url": "http://s1", "state": "waiting", "inflight": 0},
                {"url": "http://s2", "state": "down", "inflight": 0},
            ],
        },
    }

    def do_GET(self):
        allowed = self.headers.get("Authorization") == f"Bearer {environments_key('the-trainers-key')}"
        body = orjson.dumps(self.answers[self.path]) if allowed else b"{}"
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...


@pytest.fixture
def endpoints():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoints) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_status_asks_the_endpoints_with_the_key_of_the_services(tmp_path, endpoints, monkeypatch):
    """The key is in no file: a service's environment has it."""
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for addresses of this machine
    program = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    environment = {**os.environ, "ATROPOS_API_KEY": "the-trainers-key"}
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE) as service:
        service.stdout.readline()  # it has its environment
        entry = {"pid": service.pid, "started": start_time(service.pid), "booted": psutil.boot_time()}
        files = make_run(
            tmp_path / "run",
            api=entry | {"url": endpoints},
            gateway=entry | {"url": endpoints},
            **{f"sglang-{i}": entry | {"url": f"http://s{i}"} for i in range(3)},
        )
        status = read(files)
        service.kill()
    assert status.diagnosis["why"] == "no batch 3"
    assert [(each.name, each.health, each.detail) for each in status.services] == [
        ("api", "waits", "the disk is full"),
        ("gateway", "ok", ""),
        ("sglang-0", "ok", "7 requests"),
        ("sglang-1", "waits", "waits for weights"),
        ("sglang-2", "down", "removed from rotation"),
    ]


def test_status_without_the_key_says_that_nothing_answers(tmp_path, endpoints, monkeypatch):
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    files = make_run(tmp_path / "run", api=this(url=endpoints), gateway=this(url=endpoints))
    status = read(files)
    assert status.diagnosis is None
    assert [(each.health, each.detail) for each in status.services] == [("unknown", "does not answer")] * 2


def test_status_follows_a_run_back_to_a_checkpoint(tmp_path):
    files = make_run(tmp_path / "run", steps=10)
    reader = RunReader(files.path)
    assert reader.read().series["score"][-1] == 1.0
    write_lines(files.metrics, [metrics_line(step, -1.0) for step in range(1, 5)])
    status = reader.read()
    assert status.series["step"] == [1, 2, 3, 4] and set(status.series["score"]) == {-1.0}
    assert status.seconds_per_step == 2.0
    # It takes the raw score, and a pace without pauses.
    files = make_run(tmp_path / "run")
    lines = [metrics_line(step, 5.0, **{"atropos/mean_raw_score": 0.25}) for step in range(1, 10)]
    lines[-1]["time"] += 1000  # a restart
    write_lines(files.metrics, lines)
    status = read(files)
    assert status.series["score"] == [0.25] * 9 and status.seconds_per_step == 2.0


@pytest.mark.parametrize(("seconds_ago", "left"), [(5.0, 16 * 2.0), (60.0, None)])
def test_status_promises_no_end_while_nothing_arrives(tmp_path, seconds_ago, left):
    files, last = make_run(tmp_path / "run"), time.time() - seconds_ago
    write_lines(files.metrics, [metrics_line(step, time=last + 2.0 * (step - 4)) for step in range(1, 5)])
    assert read(files).seconds_left == left


def test_status_shows_the_alarms_that_are_raised_newest_first(tmp_path):
    files = make_run(tmp_path / "run")
    lines = [
        {"alarm": "queue_full", "environment": None, "state": "raised"},
        {"alarm": "too_long", "environment": "a", "state": "raised"},
        {"alarm": "too_long", "environment": "b", "state": "raised"},
        {"alarm": "too_long", "environment": "a", "state": "cleared"},
    ]
    write_lines(files.alarms, lines)
    shown = [(each["alarm"], each["environment"]) for each in read(files).alarms]
    assert shown == [("too_long", "b"), ("queue_full", None)]


def test_status_measures_the_memory_of_all_descendants():
    program = "import os, time; held = bytearray(os.urandom(1)) * (64 << 20); print(1, flush=True); time.sleep(60)"
    before = measure_memory.__wrapped__(os.getpid(), on_gpu=False)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        after = measure_memory.__wrapped__(os.getpid(), on_gpu=False)
        child.kill()
    assert 60 << 20 < after.run - before.run < 90 << 20 and after.total > after.free > 0


def test_status_of_services_that_end_with_the_run_is_no_fault(tmp_path):
    gone = {"pid": os.getpid(), "started": 1.0}
    files = make_run(tmp_path / "run", steps=20, total=20, trainer=this(), gateway=gone)
    assert read(files).state == "ending" and health(files) == {"trainer": "ok", "gateway": "ended"}
    assert health(make_run(tmp_path / "other", steps=19, total=20, gateway=gone)) == {"gateway": "down"}
    files = make_run(tmp_path / "interrupted", steps=19, total=20, launcher=this(ending=True), gateway=gone)
    assert read(files).state == "ending" and health(files) == {"gateway": "ended"}
