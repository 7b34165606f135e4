"""A program that leaves its terminal."""

import sys
import time

import pytest

from helpers.terminal import terminals
from helpers.waiting import until

PROGRAM = """
import os, pathlib, sys, time
from recipe.atropos.launcher.detaching import run_detached

def program(leave):
    pathlib.Path("pid").write_text(str(os.getpid()))
    print("checked", flush=True)
    try:
        if sys.argv[1] == "fails":
            return 3
        if sys.argv[1] == "waits":
            time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    leave(pathlib.Path("logs/launcher.log"))
    while not os.path.exists("end"):
        time.sleep(0.05)
    print("at the end", sys.stdout.isatty(), flush=True)
    pathlib.Path("ended").touch()
    return 0

sys.exit(run_detached(program))
"""


@pytest.fixture
def detached(tmp_path):
    with terminals() as open_one:
        yield lambda kind: open_one([sys.executable, "-c", PROGRAM, kind], tmp_path)


def test_detached_program_outlives_its_terminal(detached, tmp_path):
    terminal = detached("leaves")
    assert terminal.process.wait(30) == 0
    terminal.close()
    time.sleep(0.2)
    (tmp_path / "end").touch()
    until((tmp_path / "ended").exists)
    log = tmp_path / "logs/launcher.log"
    assert log.read_text() == "at the end False\n" and log.stat().st_mode & 0o777 == 0o600
    assert "checked" in terminal.text and "at the end" not in terminal.text


def test_detached_program_that_fails_before_gives_its_status(detached, tmp_path):
    terminal = detached("fails")
    assert terminal.wait_for_end() == 3
    assert "checked" in terminal.text and not (tmp_path / "logs").exists()


def test_detached_program_is_interrupted_until_it_has_left(detached):
    terminal = detached("waits")
    terminal.wait_for("checked")
    terminal.type("\x03")
    assert terminal.wait_for_end() == 130 and "interrupted" in terminal.text
