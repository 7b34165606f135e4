"""The guardians of one service: ``python -I -S guardian.py NAME``, started by ``process.start_service``.

They are two processes: the outer one, which the launcher starts, the inner one, its child, which starts the service.
Each is a subreaper (Linux), so that every process the service starts stays its descendant, even one that re-parents
itself, changes its session, renames itself or clears its environment. File descriptor 0 is a Unix socket to the
launcher, which sends the command, receives the pid, and may request the end with a grace period in seconds.

Guarantees:

* a guardian that is killed, by whatever signal, leaves nothing behind: the other one ends the service;
* a guardian that is stopped is continued: by the other one or, if the launcher is gone, by the kernel;
* when the launcher is gone, however it ended, or requests the end, no process of the service is left: SIGTERM to the
  service's leader, then to the rest, then SIGKILL until no child is left; cleanup processes come last;
* the same when the leader ends by itself, so a guardian that has ended leaves nothing behind;
* it ends as the leader did: with the same exit code, or by the same signal.

Uses only the standard library, without site packages: it runs beside every service and must start at once.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE = 5.0  # seconds for the leader if no grace period was given: the launcher is gone
_INNER_GRACE = 10.0  # for the inner guardian, which gives the leader _GRACE
_LINGER = 1.0  # seconds for processes that outlive their leader: first to end by themselves, then after SIGTERM
# Cleanup processes: they unlink shared memory that others left, and end when those have ended.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def _receive(control: int, size: int) -> bytes:
    """Return at most ``size`` bytes; none if the launcher is gone, even if it left data unread (ECONNRESET)."""
    try:
        return os.read(control, size)
    except OSError:
        return b""


def _receive_command(control: int) -> list[str] | None:
    """Receive the length in eight bytes, then the words separated by zero bytes; None: the launcher is gone."""
    data, size = b"", 8
    while len(data) < size:
        if not (more := _receive(control, size - len(data))):
            return None
        data += more
        if len(data) == 8:
            size = 8 + int.from_bytes(data, "big")
    return data[8:].decode(errors="surrogateescape").split("\0")


def _log(text: str) -> None:
    """Write to the service's log, if there is room: the service must be ended on a full disk too."""
    try:
        os.write(2, f"{text}\n".encode(errors="replace"))
    except OSError:
        pass


def _execute(command: list[str], parent: int) -> None:
    """Become the command. SIGPIPE and SIGXFSZ, which Python ignores, would stay ignored."""
    try:
        if os.getppid() == parent:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.execvp(command[0], command)
    except OSError as error:
        _log(f"{command[0]} cannot be executed: {error}")
    finally:
        os._exit(127)


def _descendants() -> dict[int, str]:
    """Return the name of each descendant of this process, by pid; for a zombie it is empty."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            continue  # ended meanwhile
        state, parent = tail.split()[:2]
        children.setdefault(int(parent), []).append((int(entry), "" if state == "Z" else head.partition("(")[2]))
    found, below = {}, [os.getpid()]
    while below:
        own = children.get(below.pop(), [])
        found.update(own)
        below += [pid for pid, _ in own]
    return found


def _tidies(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def _signal(pids: list[int], *numbers: int) -> None:
    for pid in pids:
        for number in numbers:
            try:
                os.kill(pid, number)
            except OSError:
                pass  # ended meanwhile, or another user's


class Guardian:
    """A guardian of a service; see the module docstring. ``control`` is the socket, for the inner one, which reads it.

    ``leader`` is its child: the inner guardian or, of the inner one, the service's leader. ``grace``: the seconds that
    it has to end if nobody requested another grace period."""

    def __init__(self, name: str, parent: int, grace: float, *control: int):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.name, self.parent, self.grace, self.control = name, parent, grace, control
        self.leader, self.status, self.alone, self.asked = 0, None, False, False
        self.wake, write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's choice applies to the service too
                signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def start(self, run: Callable[[int], None]) -> None:
        """Start the leader, which runs ``run`` with this process's pid, in its own session."""
        guardian = os.getpid()
        # Until then the child has this process's handlers: a SIGTERM that they meet is lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
        self.leader = os.fork()
        if self.leader == 0:
            for number in _END_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # if the guardian itself is killed
            os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            run(guardian)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def reap(self) -> None:
        """Reap every child that has ended; set ``alone`` if none is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.leader:
                    self.status = ended[1]
        except ChildProcessError:
            self.alone = True

    def pause(self, seconds: float, *descriptors: int) -> list[int]:
        """Wait at most ``seconds`` for a signal or a ready descriptor; return the ready ones."""
        ready = select.select([self.wake, *descriptors], [], [], max(0.0, seconds))[0]
        if self.wake in ready:
            ready.remove(self.wake)
            os.read(self.wake, 4096)
        self.reap()
        return ready

    def watch(self) -> float:
        """Wait until the service must end, or the leader has ended; return the grace period in seconds."""
        while self.status is None:
            for ready in self.pause(1.0, *self.control):
                return float(_receive(ready, 64).split(b"\n")[0] or self.grace)
            # A forked child of the launcher may hold its end of the socket open.
            if self.asked or os.getppid() != self.parent:
                return self.grace
            _signal([self.parent if self.control else self.leader], signal.SIGCONT)  # the other one, if it was stopped
        return _LINGER

    def end(self, grace: float) -> None:
        """End all processes that are left. A stopped process handles SIGTERM only after SIGCONT."""
        if self.status is None:
            deadline = time.monotonic() + grace
            _signal([self.leader], signal.SIGTERM, signal.SIGCONT)
            self.wait(lambda: self.status is not None, deadline)
        else:
            self.wait(lambda: self.alone, time.monotonic() + _LINGER)
            if left := [f"{pid} ({name})" for pid, name in _descendants().items() if name]:
                _log(f"{self.name} has ended; ending what it left running: {', '.join(left)}")
            deadline = time.monotonic() + grace
        if not self.alone:
            _signal([pid for pid in _descendants() if not _tidies(pid)], signal.SIGTERM, signal.SIGCONT)
            self.wait(lambda: self.alone, deadline)
        deadline = time.monotonic() + _LINGER
        while not self.alone:  # what started others meanwhile is met at the next turn
            late = time.monotonic() > deadline
            _signal([pid for pid in _descendants() if late or not _tidies(pid)], signal.SIGKILL)
            self.wait(lambda: self.alone, time.monotonic() + 0.2)

    def wait(self, done, deadline: float) -> None:
        while not done() and (left := deadline - time.monotonic()) > 0:
            self.pause(left)

    def exit(self) -> None:
        if self.status is not None and os.WIFSIGNALED(self.status):
            import resource

            number = os.WTERMSIG(self.status)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.WEXITSTATUS(self.status or 0))


def _guard(name: str, control: int, command: list[str], outer: int) -> None:
    """Be the inner guardian."""
    inner = Guardian(name, outer, _GRACE, control)
    inner.start(lambda guardian: _execute(command, guardian))
    try:
        os.write(control, b"%d\n" % inner.leader)
    except OSError:
        pass  # noticed below
    inner.end(inner.watch())
    inner.exit()


def main() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # the launcher's end also continues one that was stopped
    control = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    outer = Guardian(sys.argv[1], os.getppid(), _INNER_GRACE)
    command = _receive_command(control)
    if command is None:
        return
    outer.start(lambda guardian: _guard(sys.argv[1], control, command, guardian))
    outer.end(outer.watch())
    outer.exit()


if __name__ == "__main__":
    main()
