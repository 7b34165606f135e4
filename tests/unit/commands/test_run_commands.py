"""status, stop, logs and attach, on folders of runs; tests/e2e/test_launch.py has them on a real run."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import orjson
import psutil
import pytest

from helpers.runs import make_run, metrics_line, write_lines
from recipe.atropos.__main__ import main
from recipe.atropos.commands import read_logs, stop_run
from recipe.atropos.terminal.progress import say
from recipe.atropos.utils.process import start_time

HOLDER = """
import signal, sys, time
from recipe.atropos.run.folder import RunDir

if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with RunDir(sys.argv[1]).lock():
    print("locked", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def held(tmp_path):
    """A function that starts a process that holds a run's folder; it returns both."""
    processes = []

    def hold(kind="hears"):
        files = make_run(tmp_path / "run")
        command = [sys.executable, "-c", HOLDER, str(files.path), kind]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        assert processes[-1].stdout.readline() == b"locked\n"
        threading.Thread(target=processes[-1].wait, daemon=True).start()  # a zombie would count as ended too
        return files, processes[-1]

    yield hold
    for process in processes:
        process.kill()


def told(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize("seconds", [0, -3600, 3600])
def test_stop_ends_the_process_that_holds_the_run(held, monkeypatch, capsys, seconds):
    """Also if the clock was set, as of a virtual machine after a pause: the boot is at another time now."""
    files, process = held()
    booted = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + seconds)
    assert psutil.boot_time() == booted + seconds and files.holder().lives()
    assert files.holder().host == socket.gethostname()
    assert main(["stop", str(files.path)]) == 0
    assert process.wait(10) == -15
    assert "after step 10, in 0 s; the command that started it resumes it" in told(capsys)
    assert main(["stop", str(files.path)]) == 0 and "does not run (stopped)" in told(capsys)


def test_stop_of_a_copy_leaves_the_run_alone(held, tmp_path, capsys):
    """Its lock names the process too, and nobody holds it."""
    files, process = held()
    shutil.copytree(files.path, tmp_path / "copy")
    assert main(["stop", str(tmp_path / "copy")]) == 0
    assert "copy does not run" in told(capsys) and process.poll() is None
    files.path.rename(tmp_path / "moved")
    assert main(["stop", str(tmp_path / "moved")]) == 0 and process.wait(10) == -15


def test_stop_waits_no_longer_than_its_timeout(held, monkeypatch, capsys):
    """And may be interrupted."""
    files, process = held("deaf")
    with pytest.raises(SystemExit, match=f"process {process.pid} has not ended 0.5 s after SIGTERM"):
        main(["stop", str(files.path), "--timeout", "0.5"])
    assert process.poll() is None

    def ctrl_c(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stop_run.time, "sleep", ctrl_c)
    assert main(["stop", str(files.path)]) == 130 and "a run that was signaled still ends" in told(capsys)


@pytest.mark.parametrize("host", [None, "elsewhere"])
def test_stop_signals_no_process_of_another_run(tmp_path, host, capsys):
    """The pid belongs to another process by now, or to another machine; here, it is this test's."""
    this = {"pid": os.getpid(), "started": start_time(os.getpid()), "booted": psutil.boot_time()}
    started = None if host else 1e9
    files = make_run(tmp_path / "run", host=host, started=started, trainer=this)
    if host:
        with pytest.raises(SystemExit, match=f"nothing was stopped: process {os.getpid()} of elsewhere runs it"):
            main(["stop", str(files.path)])
        for looked in ("status", "attach"):
            assert main([looked, str(files.path)]) == 0, "it goes on"
    else:
        assert main(["stop", str(files.path)]) == 0
        assert "does not run (killed); nothing was stopped" in told(capsys)


def test_status_exits_with_0_if_the_run_goes_on_or_has_finished(held, capsys):
    files, process = held()
    assert main(["status", str(files.path)]) == 0
    text = told(capsys)
    assert "run starting" in text and f"process {process.pid}; look on:" in text
    process.kill()
    process.wait(10)
    assert main(["status", str(files.path)]) == 1 and "resumes it" in told(capsys)
    write_lines(files.metrics, [metrics_line(step) for step in range(1, 21)])
    files.summary.write_bytes(orjson.dumps({"finished_steps": 20, "steps": 20}))
    assert main(["status", str(files.path)]) == 0 and "run finished" in told(capsys)


def test_attach_follows_a_run_to_its_end(held, capsys):
    """Where its output is no terminal, by a line for each step."""
    files, process = held()

    def end():
        write_lines(files.metrics, [metrics_line(step) for step in range(1, 12)])
        time.sleep(1.5)
        process.kill()

    threading.Thread(target=end).start()
    assert main(["attach", str(files.path)]) == 1
    text = told(capsys)
    assert "step 11/20 score +0.500" in text and "ended before it was finished" in text


@pytest.fixture
def logged(tmp_path, monkeypatch):
    files = make_run(tmp_path / "runs/demo")
    files.logs.mkdir()
    files.log("trainer").write_text("".join(f"line {number}\n" for number in range(10_000)))
    files.log("api").write_text("no newline at the end")
    monkeypatch.chdir(tmp_path)
    return files


@pytest.mark.parametrize("run", [["demo"], [], ["runs/demo"]])
@pytest.mark.parametrize("lines", [0, 1, 3])
def test_logs_print_as_many_lines_of_the_end_as_are_wanted(logged, run, lines, capfdbinary):
    assert main(["logs", *run, "trainer", "-n", str(lines)]) == 0
    assert capfdbinary.readouterr().out == b"".join(b"line %d\n" % n for n in range(10_000 - lines, 10_000))


def test_logs_print_what_a_terminal_and_the_locale_can_show(logged, capfdbinary):
    with logged.log("trainer").open("ab") as log:
        log.write(b"\x1b[31mred\x1b[0m \x1b[2J\xc2\x9b2J\xff \xe6\xbc\xa2\n")
    assert main(["logs", "trainer", "-n", "1"]) == 0
    assert capfdbinary.readouterr().out.decode() == "red 2J\ufffd 漢\n"
    logged.log("trainer").write_text("100%|██████|\n")
    command = [sys.executable, "-m", "recipe.atropos", "logs", str(logged.path), "trainer"]
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=latin, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"100%|??????|\n", b"")


def test_logs_of_another_user_are_no_traceback(logged, monkeypatch, capsys):
    """Root may read everything, so it is refused here."""
    private = make_run(logged.path.with_name("private")).path

    def guarded(function, *refused):
        def call(path, *arguments, **options):
            if {path.absolute(), *path.absolute().parents} & {*refused}:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *arguments, **options)

        return call

    monkeypatch.setattr(Path, "open", guarded(Path.open, logged.log("trainer"), private))
    monkeypatch.setattr(Path, "stat", guarded(Path.stat, private))
    assert main(["logs", "demo"]) == 0 and "trainer" in told(capsys)
    with pytest.raises(SystemExit, match="error: .*Permission denied: .*trainer.log"):
        main(["logs", "demo", "trainer"])
    with pytest.raises(SystemExit, match="error: .*Permission denied: .*private"):
        main(["logs", "private"])


def test_logs_name_what_there_is(logged, capsys):
    assert main(["logs"]) == 0
    text = told(capsys)
    assert "trainer" in text and "line 9999" in text and "no newline at the end" in text
    with pytest.raises(SystemExit, match="no log of traner; did you mean trainer"):
        main(["logs", "demo", "traner"])
    with pytest.raises(SystemExit, match="nothing: no run there .* holds demo"):
        main(["logs", "nothing"])


def test_logs_follow_what_is_added_until_the_run_ends(held):
    files, process = held()
    log = files.log("trainer")
    log.parent.mkdir()
    log.write_bytes(b"first\n")
    pieces = []
    for piece in read_logs.read_end(files, log, 10, follow=True):
        pieces.append(piece)
        if len(pieces) == 1:
            with log.open("ab") as file:
                file.write(b"second\n")
        elif len(pieces) == 2:
            log.write_bytes(b"cut\n")
        elif len(pieces) == 3:
            log.with_name("other").write_bytes(b"replaced by a longer one\n")
            log.with_name("other").rename(log)
        elif len(pieces) == 4:
            with log.open("ab") as file:
                file.write(b"the end\n")
            process.kill()
    assert pieces == [b"first\n", b"second\n", b"cut\n", b"replaced by a longer one\n", b"the end\n"]
    assert list(read_logs.read_end(files, log, 1, follow=True)) == [b"the end\n"], "it has ended"


def test_names_like_markup_are_printed_as_they_are(tmp_path, monkeypatch, capsys):
    """Of a run, a service and an environment; the launcher's lines, a finished run's table and the list of logs."""
    monkeypatch.setenv("COLUMNS", "200")
    files = make_run(tmp_path / "run [a] :bug:", steps=20, started=1e9)
    files.logs.mkdir()
    files.log("[b]").write_text("[c] :bug:\n")
    found = {"metric": "score", "before": 0.25, "after": 0.5}
    summary = {"finished_steps": 20, "steps": 20, "heldout": {"[d]": found, "[e]": found}}
    files.summary.write_bytes(orjson.dumps(summary))
    assert main(["logs", str(files.path)]) == 0 and main(["status", str(files.path)]) == 0
    say(f"see {files.path}", "[f]")
    text = told(capsys)
    assert "[b] 0 0 [c] :bug:" in text and "held-out [d] 0.25 -> 0.5" in text and "metrics " in text
    assert f"[f] see {files.path}" in text and text.count("[a] :bug:") >= 3
