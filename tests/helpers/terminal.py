"""A command on a terminal of its own, as a person starts it."""

import contextlib
import fcntl
import os
import pty
import re
import secrets
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading

import psutil
import pytest

from helpers.environments import join_env
from helpers.waiting import until
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import RUN_ID_VARIABLE

STOCK = join_env.__file__
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
LIMIT = 480  # s of a wait; an order of magnitude above an idle machine's


class Terminal:
    """A command on a terminal of its own, and what stands there; ``end`` leaves no process of it."""

    def __init__(self, command, cwd, size=(24, 80), **variables):
        self.mark = secrets.token_hex(16)
        self._master, slave = pty.openpty()
        self.resize(*size)
        inherited = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS", "LINES"}}  # rich prefers them
        environment = {**inherited, **variables, RUN_ID_VARIABLE: self.mark, "TERM": "xterm"}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C and the end of the terminal reach it
        )
        os.close(slave)
        self._read = b""
        self._reader = threading.Thread(target=self._keep_reading, daemon=True)
        self._reader.start()

    def _keep_reading(self):
        with contextlib.suppress(OSError):  # at its end
            while piece := os.read(self._master, 65536):
                self._read += piece

    def resize(self, lines, columns):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text):
        os.write(self._master, text.encode())

    def close(self):
        """Close the terminal's window."""
        os.close(self._master)

    @property
    def raw(self):
        """All that was written, with control sequences."""
        return self._read.decode(errors="replace")

    @property
    def text(self):
        return CONTROL.sub("", self._read.decode(errors="replace"))

    def poll(self):
        return self.process.poll()

    def tail(self, lines):
        return "\n".join(self.text.splitlines()[-lines:])

    def wait_for(self, pattern):
        return until(lambda: re.search(pattern, self.text), LIMIT, self)

    def wait_for_step(self, step, run):
        """Wait until the run in the folder ``run`` has trained so many steps, however the command shows them."""
        until(lambda: len(read_metrics(run)) >= step, LIMIT, self)

    def wait_for_end(self):
        """Wait until the command has ended and all that it wrote is read."""
        self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        return self.process.returncode

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self.mark in process.environ().get(RUN_ID_VARIABLE, ""):
                    process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def terminals():
    """A function that opens one; all of them are ended, the youngest first."""
    opened = []

    def open_one(command, cwd, **variables):
        opened.append(Terminal(command, cwd, **variables))
        return opened[-1]

    try:
        yield open_one
    finally:
        for one in reversed(opened):
            one.end()


def told_command(text, example="environments/gsm8k_server.py"):
    """The command that the launcher prints for a stock environment, for the one here."""
    found = re.search(rf"^python {example} serve .*$", text, re.MULTILINE)
    return found.group().replace(f"python {example}", f"{shlex.quote(sys.executable)} {STOCK}")


@pytest.fixture
def terminal():
    with terminals() as open_one:
        yield open_one
