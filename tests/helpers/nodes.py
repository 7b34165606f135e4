"""A Ray cluster of several nodes on this machine, each in a network namespace of its own with its own loopback."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from helpers import ROOT

_SECONDS = 90


def namespaces_are_permitted():
    name = f"atropos-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


class Cluster:
    """``cpus``: of each node, the first of which is the head. Nodes are numbered from 0; so are their addresses.

    ``first``: commands of a shell before Ray is started, by node. ``started``: whether it is.
    """

    def __init__(self, folder, cpus, first=None, started=True):
        self.first, self.started = first or {}, started
        self.cpus, self.prefix = cpus, f"atropos-{os.getpid()}"
        self.folder = Path(folder)
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self.variables |= {"RAY_enable_metrics_collection": "0", "RAY_worker_niceness": "0"}
        self.nodes = {}

    def address(self, node):
        return f"10.77.{os.getpid() % 250}.{node + 1}"

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))  # whose paths must be short
            stack.callback(self._close)
            for node in range(len(self.cpus)):
                self._join_network(node)
                if self.started:
                    self.start(node)
            self._left = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._left.close()

    def _close(self):
        for node in reversed(range(len(self.cpus))):
            self.kill(node)
            _ip("netns", "delete", f"{self.prefix}-{node}", check=False)

    def _join_network(self, node):
        """The head's namespace holds a bridge, and every other one a cable to it."""
        own, head = f"{self.prefix}-{node}", f"{self.prefix}-0"
        _ip("netns", "add", own)
        _ip("-n", own, "link", "set", "lo", "up")
        if node == 0:
            _ip("-n", head, "link", "add", "nodes", "type", "bridge")
            device = "nodes"
        else:
            device = "eth0"
            _ip("-n", own, "link", "add", device, "type", "veth", "peer", "name", f"node{node}", "netns", head)
            _ip("-n", head, "link", "set", f"node{node}", "master", "nodes", "up")
        _ip("-n", own, "address", "add", f"{self.address(node)}/24", "dev", device)
        _ip("-n", own, "link", "set", device, "up")

    def environment(self):
        """Variables of a node's programs, without those of a Ray that an earlier test has started in this process."""
        return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | self.variables

    def command(self, node, *command):
        return ["ip", "netns", "exec", f"{self.prefix}-{node}", *command]

    def run(self, node, *command, timeout=300):
        """Run a program of this checkout on a node to its end; return what ``subprocess.run`` does, with its output."""
        given = {"env": self.environment(), "cwd": ROOT, "timeout": timeout}
        return subprocess.run(self.command(node, *command), capture_output=True, text=True, **given)

    def start(self, node):
        """Start Ray on a node."""
        where = ["--head", "--port=6379", "--include-dashboard=false"]
        where += [f"--temp-dir={self.sockets}"]
        if node:
            where = [f"--address={self.address(0)}:6379"]
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        ray += [*where, f"--node-ip-address={self.address(node)}", f"--num-cpus={self.cpus[node]}"]
        ray += ["--object-store-memory=200000000"]
        log = open(self.folder / f"ray-{node}.log", "wb")
        with log:
            self.nodes[node] = subprocess.Popen(
                self.command(node, "sh", "-ec", f'{self.first.get(node, "")}\nexec "$@"', "sh", *ray),
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )
        self._wait(node)

    def _wait(self, node):
        log, until = self.folder / f"ray-{node}.log", time.monotonic() + _SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            if self.nodes[node].poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"node {node} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    def kill(self, node):
        """End all processes of a node at once, as a power failure does; its network goes too."""
        self.nodes.pop(node, None)
        while processes := self.processes(node):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=5)

    def processes(self, node):
        """All processes in a node's namespace."""
        found = subprocess.run(["ip", "netns", "pids", f"{self.prefix}-{node}"], capture_output=True, text=True).stdout
        processes = []
        for pid in map(int, found.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes


def _ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, capture_output=True)
