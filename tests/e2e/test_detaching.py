"""A program that leaves its terminal."""

import sys

from helpers.terminal import terminals

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


def test_detached_program_is_interrupted_until_it_has_left(tmp_path):
    with terminals() as open_one:
        terminal = open_one([sys.executable, "-c", PROGRAM], tmp_path)
        terminal.wait_for("checked")
        terminal.type("\x03")
        assert terminal.wait_for_end() == 130 and "interrupted" in terminal.text
