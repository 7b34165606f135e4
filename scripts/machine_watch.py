"""Description of this machine, and memory use of processes on it; none of it touches a GPU."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from recipe.atropos.utils.machine import nvidia_smi


class MemoryWatch:
    """Memory of processes and their descendants, in bytes, sampled twice a second.

    ``on_gpu``: their GPU memory by nvidia-smi, and under the name "devices" the used memory of all GPUs. If nvidia-smi
    does not know the processes, as in most containers, their names have no figure. Otherwise resident memory, with
    shared pages counted in each process.

    ``peaks`` by name; ``lows`` after them: for a colocated server they show whether it released its memory.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.peaks: dict[str, float] = {}
        self.lows: dict[str, float] = {}
        self.on_gpu = on_gpu

    @contextlib.contextmanager
    def of(self, pids: Callable[[], dict[str, int]]) -> Iterator[None]:
        """Sample during the block; ``pids`` returns the current pids by name."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(pids, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(30)

    def _watch(self, pids: Callable[[], dict[str, int]], done: threading.Event) -> None:
        while not done.wait(0.5):
            by_pid = _gpu_bytes_by_pid() if self.on_gpu else None
            used = {name: _bytes_of(pid, by_pid) for name, pid in pids().items()}
            if self.on_gpu:
                used["devices"] = sum(_bytes(mib) for mib, *_ in nvidia_smi("gpu", "memory.used"))
            for name, value in used.items():
                if value > self.peaks.get(name, 0):
                    self.peaks[name] = self.lows[name] = value
                elif value > 0:
                    self.lows[name] = min(value, self.lows[name])


def _bytes_of(pid: int, by_pid: dict[int, float] | None) -> float:
    """Return the memory of a process and its descendants."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss if by_pid is None else by_pid.get(process.pid, 0)
    return total


def _gpu_bytes_by_pid() -> dict[int, float]:
    used: dict[int, float] = {}
    for pid, mib in nvidia_smi("compute-apps", "pid,used_memory"):
        if pid.isdigit():
            used[int(pid)] = used.get(int(pid), 0.0) + _bytes(mib)
    return used


def _bytes(mib: str) -> float:
    """Convert MiB to bytes; 0 for "[N/A]", which the driver may report."""
    return float(mib) * (1 << 20) if mib.isdigit() else 0.0


def this_machine(on_gpu: bool) -> dict[str, Any]:
    """Return the processor, GPUs and driver, and the commit of this code; None for what is unknown."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    machine: dict[str, Any] = {"commit": commit, "cores": os.cpu_count(), "processor": None}
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        machine["processor"] = names[0].partition(":")[2].strip() if names else None
    if on_gpu:
        gpus = nvidia_smi("gpu", "name,memory.total,driver_version")
        machine["gpus"] = [{"name": name, "memory_gib": _bytes(mib) / (1 << 30)} for name, mib, _ in gpus]
        machine["driver"] = gpus[0][2] if gpus else None
    return machine
