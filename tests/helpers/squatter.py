"""Another user of this machine, who takes ports and records what is sent to them; tests of it run as root."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

_LISTEN = f"""
import os, socket, sys
os.setuid({NOBODY})
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
while True:
    peer = listener.accept()[0]
    peer.settimeout(1)
    try:
        text = peer.recv(65536)
    except OSError:
        text = b""
    print(text, flush=True)
    peer.close()
"""
_TRY = f"""
import os, socket, sys
os.setuid({NOBODY})
for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as wanted:
            for option in options:
                wanted.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                wanted.bind((host, int(sys.argv[1])))
                wanted.listen()
                print("taken", options, host)
            except OSError:
                pass
"""


@contextlib.contextmanager
def squatted(port: int) -> Iterator[list[str]]:
    """Another user listens at the port. The list has what was sent there once the block has ended."""
    sent: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", _LISTEN, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        yield sent
    finally:
        process.kill()
        sent += process.communicate()[0].splitlines()


def squats(port: int) -> str:
    """What another user gets who tries to listen at the port in every way; nothing if it cannot."""
    tried = subprocess.run([sys.executable, "-c", _TRY, str(port)], capture_output=True, text=True, check=True)
    return tried.stdout
