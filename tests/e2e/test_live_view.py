"""The live view on a real terminal, over a run's folder."""

import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from helpers.runs import make_run, metrics_line, write_lines
from helpers.terminal import terminals
from helpers.waiting import until
from recipe.atropos.terminal.progress import shows_live
from recipe.atropos.utils.files import write_atomic

PROGRAM = """
import sys, time
from recipe.atropos.terminal.progress import LiveView
from recipe.atropos.terminal.progress import console, progress
from recipe.atropos.run.folder import RunDir

with LiveView(console, RunDir(sys.argv[1]).path), progress("the servers start"):
    for number in range(10**6):
        console.print(f"line {number}")
        time.sleep(0.25)
        if number == int(sys.argv[2]):
            raise RuntimeError("on purpose")
"""
HIDE, SHOW, CLEAR = "\x1b[?25l", "\x1b[?25h", "\x1b[2J"
COLOR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])[0-9;]*m")


@pytest.fixture
def view(tmp_path):
    """A function that shows the view of a run on a terminal of its own."""
    files = make_run(tmp_path / "demo")
    with terminals() as open_one:

        def open_view(last=-1, **options):
            return open_one([sys.executable, "-c", PROGRAM, str(files.path), str(last)], tmp_path, **options)

        open_view.files = files
        yield open_view


def drawn(text):
    """The views that were drawn, as lists of lines."""
    found, lines = [], None
    for line in text.split("\n"):
        if "╭─ demo" in line:
            lines = []
        if lines is not None:
            line = line[max(0, line.find("╭")) :]
            lines.append("".join(line.partition("╯")[:2]))
            if line.startswith("╰"):
                found.append(lines)
                lines = None
    return found


def test_live_view_shows_steps_below_what_is_printed(view):
    terminal = view()
    terminal.wait_for(r"line 3\n")
    assert re.search(r"10 of 20", terminal.text) and "the servers start" in terminal.text
    write_lines(view.files.metrics, [metrics_line(step) for step in range(1, 13)])
    terminal.wait_for(r"12 of 20")
    text = terminal.text
    numbers = [int(number) for number in re.findall(r"line (\d+)\n", text)]
    assert numbers == list(range(len(numbers))), "each line once, in order"
    assert re.search(r"line \d+\s*\n╭─ demo", text), "the view is below them"
    assert COLOR.search(terminal.raw)
    assert all({*map(len, lines)} == {80} and len(lines) <= 22 for lines in drawn(text))


def test_live_view_rests_while_a_shell_has_the_terminal(view, tmp_path):
    """After Ctrl-Z and ``bg`` it would erase the shell's lines twice a second."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with terminals() as open_one:
        shell = open_one(["bash", "--norc", "-i"], tmp_path)
        shell.type(f"{sys.executable} program.py {view.files.path} -1\n")
        shell.wait_for(r"line 2\n")
        shell.type("\x1a")
        shell.wait_for("Stopped")
        shell.type("bg\n")
        shell.wait_for(r"&\n[^╭]*line \d+\nline \d+\nline \d+\nline \d+\n")
        shell.type("fg\n")
        shell.wait_for(r"fg\n(.*\n)+╭─ demo")
        shell.type("\x03exit\n")
        shell.wait_for_end()


@pytest.mark.parametrize("end", ["ctrl-c", "error"])
def test_live_view_leaves_the_terminal_as_it_was(view, end):
    terminal = view(last=2 if end == "error" else -1)
    terminal.wait_for(r"line 1\n")
    terminal.wait_for(r"line 2\n")
    if end == "ctrl-c":
        terminal.type("\x03")
    assert terminal.process.wait(30) != 0 and terminal.wait_for_end() != 0
    raw = terminal.raw
    assert ("KeyboardInterrupt" if end == "ctrl-c" else "RuntimeError: on purpose") in raw
    assert HIDE in raw and raw.rindex(SHOW) > raw.rindex(HIDE)
    assert raw.rindex("Traceback") > raw.rindex("╰"), "nothing is drawn over the error"


def test_attach_that_is_terminated_leaves_the_terminal_as_it_was(view, terminal, tmp_path):
    attached = terminal([sys.executable, "-m", "recipe.atropos", "attach", str(view.files.path)], tmp_path)
    attached.wait_for(r"Ctrl-C leaves the run alone")
    attached.process.terminate()
    assert attached.process.wait(30) == 143
    attached.wait_for_end()
    assert attached.raw.rindex(SHOW) > attached.raw.rindex(HIDE)


def test_live_view_follows_the_size_of_its_terminal(view):
    terminal = view()
    terminal.wait_for(r"line 4\n")
    for lines, columns in ((24, 60), (40, 150)):
        seen = len(terminal.text)
        terminal.resize(lines, columns)

        def fits(seen=seen, columns=columns):
            return {*map(len, (drawn(terminal.text[seen:]) or [[]])[-1])} == {columns}

        until(fits, 60, terminal)
    assert terminal.raw.count(CLEAR) == 2, "once for each size"
    kept = terminal.raw.rpartition(CLEAR)[2]
    assert "line 1\n" in kept.replace("\r", ""), "what was printed stands there again"


def test_live_view_respects_no_color(view):
    terminal = view(NO_COLOR="1")
    terminal.wait_for(r"line 3\n")
    assert "10 of 20" in terminal.text and not COLOR.search(terminal.raw)


def test_live_view_goes_on_beside_a_file_that_cannot_be_shown(view):
    """What is printed meanwhile is not lost either."""
    terminal = view()
    terminal.wait_for(r"line 1\n")
    write_atomic(view.files.metrics, b"what?\n")
    terminal.wait_for("cannot be read")
    write_lines(view.files.metrics, [metrics_line(1, "high")])
    terminal.wait_for("state cannot be shown")
    seen = len(terminal.text)
    write_lines(view.files.metrics, [metrics_line(step) for step in range(1, 15)])
    terminal.wait_for(r"14 of 20")
    numbers = [int(number) for number in re.findall(r"line (\d+)\n", terminal.text)]
    assert numbers == list(range(len(numbers))) and "line" in terminal.text[seen:]


def test_live_view_is_for_terminals_that_move_the_cursor(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich call a pipe a terminal
    for variables in ({"TERM": "dumb"}, {}):
        assert not shows_live(Console(_environ={**variables, "FORCE_COLOR": "1"}))


PLAIN = """
import sys, time
from recipe.atropos import launch_services
from recipe.atropos.terminal import progress

def slow(_):
    progress._EVERY_SECONDS = 0.2
    with progress.progress("the policy is made"):
        time.sleep(1)
    raise KeyboardInterrupt

launch_services.plan_run = slow
sys.exit(launch_services.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("arguments", [["--plain"], []], ids=["plain", "live"])
def test_plain_output_moves_no_cursor(terminal, tmp_path, arguments):
    """What is done before the live view begins is told in lines too."""
    launcher = terminal([sys.executable, "-c", PLAIN, *arguments], tmp_path)
    assert launcher.wait_for_end() == 130 and "the policy is made" in launcher.text
    moves = re.findall(r"\x1b\[[0-9;?]*[A-Zhl]", launcher.raw)
    assert not moves if arguments else moves


DISOWNED = """
import contextlib, pathlib, sys, time
from recipe.atropos.terminal.progress import LiveView, shows_live
from recipe.atropos.terminal.progress import console

with LiveView(console, pathlib.Path("run")) if shows_live(console) else contextlib.nullcontext():
    for number in range(int(sys.argv[1])):
        console.print("line", number)
        time.sleep(0.1)
pathlib.Path("done").touch()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_lines_of_a_disowned_job_outlive_its_terminal(terminal, tmp_path, stopped):
    """Else each line that it prints would end it: EIO. One that has a live view goes on without it."""
    (tmp_path / "program.py").write_text(DISOWNED)
    shell = terminal(["bash", "--norc", "-i"], tmp_path)
    shell.type(f"{sys.executable} program.py 45{'' if stopped else ' &'}\n")
    shell.wait_for(r"line 9\s")
    assert ("╭─" in shell.text) is stopped, "a launcher in the background prints lines: the shell writes there too"
    if stopped:
        shell.type("\x1a")
        shell.wait_for("Stopped")
        shell.type("bg\n")
    shell.type("disown\n")
    time.sleep(1)
    shell.close()
    until((tmp_path / "done").exists, 60)


def test_lines_of_a_job_outlive_whoever_reads_them(tmp_path):
    """As ``tee``, which ends with the terminal."""
    (tmp_path / "program.py").write_text(DISOWNED)
    job = subprocess.Popen([sys.executable, "program.py", "6"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert job.stdout.readline() == b"line 0\n"
    job.stdout.close()
    assert job.wait(60) == 0 and (tmp_path / "done").exists()
