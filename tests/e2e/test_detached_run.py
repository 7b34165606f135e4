"""A real run that has left its terminal: looked at, followed and ended from others."""

import os
import subprocess
import sys

import orjson
import psutil
import pytest

from helpers.launchers import living_of
from helpers.terminal import terminals
from helpers.waiting import until
from recipe.atropos.run.folder import RunDir

pytestmark = pytest.mark.timeout(900)

LAUNCH = [sys.executable, "-m", "recipe.atropos", "train", "--detach", "--preset", "demo"]


def command(name, *arguments):
    return [sys.executable, "-m", "recipe.atropos", name, *map(str, arguments)]


def output_of(name, *arguments):
    done = subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def services(files):
    return orjson.loads(files.services.read_bytes())


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def detached(tmp_path_factory, model_path):
    """(files, mark of its processes) of a run whose terminal is closed; its services start."""
    folder = tmp_path_factory.mktemp("detached")
    files = RunDir(folder / "run")
    options = [f"--model={model_path}", "--steps=1000", f"--run-dir={files.path}", "environment.evaluate=false"]
    with terminals() as open_one:
        terminal = open_one([*LAUNCH, *options], folder)
        assert terminal.wait_for_end() == 0, terminal.text
        assert "goes on without this terminal" in terminal.text and "attach" in terminal.text
        terminal.close()
        told = files.log("launcher").read_text
        until(lambda: files.services.exists() and "trainer" in services(files), 300, told=told)
        yield files, terminal.mark


def test_detached_run_goes_on_without_its_terminal(detached):
    files, _ = detached
    listed = services(files)
    assert all(lives(service["pid"]) for service in listed.values())
    assert {"launcher", "api", "gateway", "sglang", "trainer"} <= listed.keys()
    assert listed["launcher"]["log"] == str(files.log("launcher"))
    assert files.holder().pid == listed["launcher"]["pid"]
    log = files.log("launcher").read_text()
    assert files.log("launcher").stat().st_mode & 0o777 == 0o600
    assert "sglang  starting" in log and "\x1b" not in log, "its output is no terminal"


def test_attach_leaves_a_detached_run_alone(detached, terminal, tmp_path):
    files, _ = detached
    view = terminal(command("attach", files.path), tmp_path)
    view.wait_for(r"╭─ run  starting")
    view.wait_for(r"Ctrl-C leaves the run alone")
    view.type("\x03")
    assert view.wait_for_end() == 0
    assert "run goes on; to end it:" in " ".join(view.text.split()) and "Traceback" not in view.text
    assert lives(services(files)["launcher"]["pid"])


def test_stop_ends_a_detached_run_and_who_follows_it(detached, terminal, tmp_path):
    files, mark = detached
    pids = [service["pid"] for service in services(files).values()]
    view = terminal(command("attach", files.path), tmp_path)
    view.wait_for(r"╭─ run")
    follower = subprocess.Popen(command("logs", files.path, "launcher", "-f"), stdout=subprocess.PIPE)
    status, text = output_of("stop", files.path)
    assert status == 0 and "run after step 0, in" in text and "resumes it" in text, text
    assert not [pid for pid in pids if lives(pid)] and services(files) == {}
    assert view.wait_for_end() == 1 and "ended before it was finished" in " ".join(view.text.split())
    assert b"the same command resumes the run" in follower.communicate(timeout=60)[0] and follower.returncode == 0
    assert output_of("status", files.path)[0] == 1 and output_of("stop", files.path)[0] == 0
    assert not living_of(mark)


def test_detach_says_on_the_terminal_what_is_wrong(terminal, tmp_path):
    wrong = terminal([*LAUNCH, "--model=/no/such/model", f"--run-dir={tmp_path / 'run'}"], tmp_path)
    assert wrong.wait_for_end() == 1 and "no model there" in wrong.text
    options = ["environment.target=null", "inference.api_key=null", f"--run-dir={tmp_path / 'run'}"]
    joined = terminal([*LAUNCH, *options], tmp_path)
    assert joined.wait_for_end() == 1 and "--detach leaves it" in " ".join(joined.text.split())
    assert not os.listdir(tmp_path)


PROGRAM = """
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
    left = terminal([sys.executable, "-c", PROGRAM], tmp_path)
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
