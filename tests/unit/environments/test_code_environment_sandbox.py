"""What hostile answers can do in the sandbox: nothing, and they fail."""

import gc
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from recipe.atropos.environments.sandbox import runner
from recipe.atropos.environments.sandbox.runner import Job, Sandbox, SandboxError, SandboxLimits

LIMITS = SandboxLimits(cpu_seconds=2, wall_seconds=20, memory_mb=128)
KEY = "sk-the-key-of-this-run"
SOURCE = Path(runner.__file__).parent


@pytest.fixture(scope="module")
def sandbox():
    os.environ["CODE_TEST_KEY"] = KEY  # the workers start with it in their parent's environment
    try:
        with closing(Sandbox(LIMITS, workers=1)) as sandbox:
            sandbox.start()
            yield sandbox
    finally:
        del os.environ["CODE_TEST_KEY"]


def checked(sandbox, program, tests="assert f() == 42", setup="", names=("f",)):
    return sandbox.check(Job(program=program, names=list(names), setup=setup, tests=tests))[:2]


def processes(sandbox):
    """Those that come of the sandbox's worker, in whatever session."""
    worker = sandbox._idle.get()
    sandbox._idle.put(worker)
    return psutil.Process(worker._process.pid).children(recursive=True)


def test_code_environment_right_passes_and_wrong_fails(sandbox):
    assert checked(sandbox, "def f(): return 42") == (True, "passed")
    assert checked(sandbox, "def f(): return 41") == (False, "wrong")
    assert checked(sandbox, "def f(): return 1 / 0") == (False, "raised")
    assert checked(sandbox, "def g(): return 42") == (False, "undefined")
    assert checked(sandbox, "def f() return 42") == (False, "invalid")
    assert checked(sandbox, "def f(): return 42", setup="import nowhere") == (False, "tests")
    assert checked(sandbox, "import math, re, heapq, hashlib, json, dataclasses\ndef f(): return 42")[0]
    assert checked(sandbox, "from __future__ import annotations\ndef f() -> Never: return 42")[0]


HOSTILE = {
    "fork bomb": ("import os\ndef f():\n    while True: os.fork()", {"raised"}),
    "threads without end": (
        "import threading, time\ndef f():\n    while True: threading.Thread(target=time.sleep, args=(99,)).start()",
        {"raised"},
    ),
    "memory bomb": ("def f():\n    x = []\n    while True: x.append(bytearray(1 << 24))", {"ended", "raised"}),
    "endless answer": ("def f(): return 'x' * (1 << 24)", {"ended", "raised", "unreadable"}),
    "deep answer": ("def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", {"raised"}),
    "deep reply": (
        (
            "import os\n"
            "def f():\n"
            "    for d in range(3, 64):\n"
            "        try: os.write(d, b'[' * 10**6 + b'\\n')\n"
            "        except OSError: pass\n"
            "    return 42"
        ),
        {"unreadable"},
    ),
    "exit": ("import os\ndef f(): os._exit(0)", {"ended"}),
    "exit at import": ("import os; os._exit(0)", {"ended"}),
    "sys.exit": ("import sys\ndef f(): sys.exit(0)", {"raised"}),
    "sys.exit at import": ("import sys; sys.exit(0)", {"invalid"}),
    "marker before the tests": (
        (
            "import os\n"
            "for d in range(64):\n"
            '    for text in (b\'.\', b\'{"passed": true, "why": "passed"}\\n\'):\n'
            "        try: os.write(d, text)\n"
            "        except OSError: pass\n"
            "os._exit(0)"
        ),
        {"ended", "unreadable"},
    ),
    "patched checker": (
        (
            "import sys, json, builtins\n"
            "for name in ('answer', 'worker', '__main__'):\n"
            "    module = sys.modules.get(name)\n"
            "    for a in dir(module):\n"
            "        if callable(getattr(module, a)) and a not in ('_send', '_receive'):\n"
            "            setattr(module, a, lambda *_: (True, 'passed'))\n"
            'json.dumps = lambda *_: \'{"passed": true, "why": "passed"}\'\n'
            "builtins.AssertionError = type('Never', (Exception,), {})\n"
            "def f(): return 41"
        ),
        {"invalid", "unreadable"},
    ),
    "equal to all": (
        (
            "class All:\n"
            "    __eq__ = __ge__ = __le__ = lambda *_: True\n"
            "    __ne__ = lambda *_: False\n"
            "    __hash__ = lambda *_: 42\n"
            "def f(): return All()"
        ),
        {"wrong"},
    ),
    "number that is equal to all": (
        "class All(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef f(): return All(41)",
        {"wrong"},
    ),
    "assertion": ("def f(): raise AssertionError", {"raised"}),
    "interrupt": ("def f(): raise KeyboardInterrupt", {"raised"}),
    "kill all": (
        (
            "import os, signal\n"
            "for p in (0, -1, 1, 2, 3, os.getpid(), os.getppid()):\n"
            "    try: os.kill(p, signal.SIGKILL)\n"
            "    except OSError: pass\n"
            "def f(): return 41"
        ),
        {"wrong"},
    ),
    "daemon": (
        (
            "import os, subprocess\n"
            "def f():\n"
            "    for start in (os.fork, lambda: subprocess.Popen(['/bin/sleep', '600']), lambda: os.posix_spawn(\n"
            "            '/bin/sleep', ['sleep', '600'], {}), os.forkpty):\n"
            "        try:\n"
            "            if start() == 0: os.setsid(); __import__('time').sleep(600)\n"
            "        except OSError: continue\n"
            "        return 41\n"
            "    return 42"
        ),
        {"passed"},
    ),
}
ENDLESS = {
    "fork bomb that goes on": (
        "import os\ndef f():\n    while True:\n        try: os.fork()\n        except OSError: pass"
    ),
    "endless loop": "def f():\n    while True: pass",
    "endless sleep": "import time\ndef f(): time.sleep(10**6)",
    "endless output": "def f():\n    while True: print('x' * 10**6, flush=True)",
    "endless loop at import": "while True: pass",
    "ignored limit": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef f():\n    while True: pass",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_sandbox_hostile_answer_fails_and_leaves_nothing(sandbox, name):
    assert checked(sandbox, "def f(): return 42")[0]  # its worker runs
    program, expected = HOSTILE[name]
    before, started = {process.pid for process in processes(sandbox)}, time.monotonic()
    verdict = checked(sandbox, program)
    assert verdict[1] in expected and verdict[0] == (expected == {"passed"})
    assert time.monotonic() - started < 3 * LIMITS.wall_seconds
    assert {process.pid for process in processes(sandbox)} == before
    assert checked(sandbox, "def f(): return 42")[0] and not checked(sandbox, "def f(): return 41")[0]


def test_code_environment_endless_answers_time_out(sandbox):
    limits, started = SandboxLimits(cpu_seconds=1, wall_seconds=1.5), time.monotonic()
    with closing(Sandbox(limits, workers=len(ENDLESS))) as several, ThreadPoolExecutor(len(ENDLESS)) as pool:
        found = dict(zip(ENDLESS, pool.map(lambda program: checked(several, program), ENDLESS.values()), strict=True))
    assert {verdict[1] for verdict in found.values()} <= {"timeout", "ended"} and len(found) == 6
    assert found["endless loop"] == found["endless sleep"] == (False, "timeout")
    assert time.monotonic() - started < 60


def test_code_environment_raising_does_not_end_a_test_early(sandbox):
    for kind in ("StopIteration", "AssertionError", "GeneratorExit", "SystemExit"):
        answer = f"def f(x): raise {kind}"
        assert not checked(sandbox, answer, "assert all(map(f, [1, 2]))\nassert list(map(f, [1])) != [1]")[0]
    assert checked(sandbox, "def f(): raise ValueError('a')", "try: f()\nexcept ValueError as e: assert 'a' in str(e)")


# Each gives a list of what it could do; the same outside of the sandbox can do all of it.
SEARCH = """
import gc, os
def f(paths, key):
    found = []
    if any(key in value for value in os.environ.values()):
        found.append("environment")
    places = [f"/proc/{p}/{n}" for p in ("self", os.getppid(), 1, *range(1, 64)) for n in ("environ", "cmdline", "mem")]
    descriptors = list(range(3, 256))
    for path in [*paths, *places, *descriptors]:
        try:
            with open(path, "rb", closefd=False) if isinstance(path, int) else open(path, "rb") as file:
                if not isinstance(path, int) and key.encode() in file.read(1 << 16):
                    found.append(path)
        except (OSError, ValueError):
            continue
    return found
"""


def here(program, *arguments):
    space = {}
    exec(program, space)
    return space["f"](*arguments)


def test_code_environment_key_cannot_be_read(sandbox, tmp_path):
    secret = tmp_path / "services.json"
    secret.write_text(json.dumps({"api_key": KEY}))
    paths = [str(secret), f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cwd/x"]
    child = [sys.executable, "-c", f"{SEARCH}\nprint(f({paths!r}, 'sk-the-key'))"]
    outside = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    assert "environment" in outside and str(secret) in outside, "the search finds it where nothing is in its way"
    call = f"f({paths!r}, 'sk-the-' + 'key')"
    assert checked(sandbox, SEARCH, f"assert {call} == []") == (True, "passed")


WRITE = """
import os
def f(paths):
    done = []
    for path in paths:
        for act in (lambda: open(path, "a").close(), lambda: os.mkdir(path + ".d"), lambda: os.chmod(path, 0o777),
                    lambda: os.utime(path), lambda: os.remove(path), lambda: os.symlink("/", path + ".l"),
                    lambda: os.truncate(path, 0), lambda: os.rename(path, path + ".r")):
            try:
                act()
                done.append(path)
            except OSError:
                pass
    return done
"""


def test_code_environment_writes_nothing_outside(sandbox, tmp_path):
    kept = tmp_path / "checkpoint"
    kept.write_text("weights")
    other = tmp_path / "other"
    other.write_text("x")
    assert set(here(WRITE, [str(other)])) == {str(other)}
    library = Path(json.__file__).parent
    paths = [str(kept), str(tmp_path / "new"), "/new", "/lib/new", "/etc/new", "/dev/new", str(library / "new")]
    assert checked(sandbox, WRITE, f"assert f({paths!r}) == []") == (True, "passed")
    assert kept.read_text() == "weights" and sorted(path.name for path in tmp_path.iterdir())[0] == "checkpoint"
    assert not (library / "new").exists() and kept.stat().st_mode & 0o777 == 0o644


CONNECT = """
import socket
def f(port):
    done = []
    for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port)),
                            (socket.AF_UNIX, "\\0code-test")):
        try:
            socket.socket(family).connect(address)
            done.append(str(address))
        except OSError:
            pass
    try:
        socket.create_connection(("127.0.0.1", port), 1)
        done.append("again")
    except OSError:
        pass
    return done
"""


def test_code_environment_trajectory_api_cannot_be_reached(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0code-test")
        local.listen()
        port = listener.getsockname()[1]
        assert len(here(CONNECT, port)) == 3
        listener.settimeout(0.0)
        while True:
            try:
                listener.accept()
            except BlockingIOError:
                break
        assert checked(sandbox, CONNECT, f"assert f({port}) == []") == (True, "passed")
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_code_environment_tests_and_other_jobs_stay_unknown(sandbox):
    checked(sandbox, "remembered = 'code-' + 'marker'\ndef f(): return 42", "assert f() == 42 # code-marker")
    program = (
        "import gc\ndef f(word):\n    return [type(o).__name__ for o in gc.get_objects()\n"
        "            if isinstance(o, (dict, list, tuple)) and word in repr(o)[:100000] and word + 'er' in repr(o)]"
    )
    tests = "answer = f('code-mark')\nassert answer == [], 'code-marker'"
    assert gc.isenabled() and checked(sandbox, program, tests) == (True, "passed")


def test_code_environment_values_keep_their_types(sandbox):
    values = "[1, (2, 3.5), {4: {5}}, {'a': None, (1, 2): True}, b'x', 1j, range(3), frozenset({6}), 'ü', 10**50, int]"
    assert checked(sandbox, "def f(x): return x", f"v = {values}\nassert f(v) == v and repr(f(v)) == repr(v)")[0]
    assert checked(sandbox, "def f(x): return x", "assert f(float('inf')) > 1 and f(float('nan')) != f(0)")[0]
    assert not checked(sandbox, "def f(x): return list(x)", "assert f((1, 2)) == (1, 2)")[0]
    node = "class N:\n    def __init__(s, v): s.v, s.n = v, None\ndef f(n): return n.v + (f(n.n) if n.n else 0)"
    tests = "a = N(1)\na.n = N(2)\nassert a.n.v == 2 and f(a) == 3"
    assert checked(sandbox, node, tests, names=("f", "N"))[0]
    assert checked(sandbox, "def f(): yield from (1, 2)", "assert list(f()) == [1, 2] and f() != [1, 2]")[0]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("_prctl(_SET_SECCOMP", "(lambda *_: None)(_SET_SECCOMP", "wrong ['open a socket', 'start a process', 'signal"),
        ("0xC000003E", "0xC00000B7", "ended )"),  # a machine that the filter does not know
    ],
)
def test_code_environment_refuses_where_isolation_fails(tmp_path, monkeypatch, old, new, reason):
    for path in SOURCE.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text().replace(old, new))
    assert (tmp_path / "kernel.py").read_text() != (SOURCE / "kernel.py").read_text()
    monkeypatch.setattr(runner, "_WORKER", tmp_path / "worker.py")
    with pytest.raises(SandboxError) as refusal:
        Sandbox(workers=1).start()
    assert str(refusal.value).startswith(f"answers cannot be isolated here ({platform.machine()}: {reason}")
    assert "--env.isolation=none" in str(refusal.value)
    with closing(Sandbox(isolation="none", workers=1)) as trusting:
        assert checked(trusting, "def f(): return 42") == (True, "passed")


def test_code_environment_nothing_outlives_its_environment():
    script = (
        "import psutil, time, threading\nfrom recipe.atropos.environments.sandbox.runner import *\n"
        "sandbox = Sandbox(SandboxLimits(cpu_seconds=30, wall_seconds=30), workers=1)\nsandbox.start()\n"
        "job = Job(program='while True: pass', names=[], setup='', tests='')\n"
        "threading.Thread(target=sandbox.check, args=(job,)).start()\nown = psutil.Process()\n"
        "while len(own.children(recursive=True)) < 3: time.sleep(0.01)\n"
        "print(*(child.pid for child in own.children(recursive=True)), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as environment:
        left = [psutil.Process(int(pid)) for pid in environment.stdout.readline().split()]
        environment.kill()
    assert len(left) >= 3 and psutil.wait_procs(left, timeout=20)[1] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_code_environment_worker_needs_no_privilege():
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pythons = [Path(sys.base_prefix) / "bin" / version, Path(f"/usr/bin/{version}"), Path("/usr/bin/python3")]
    if (python := next(filter(for_all, pythons), None)) is None:
        pytest.skip("no interpreter that everybody can read")
    job = json.dumps(Job(program=CONNECT, names=["f"], setup="", tests="assert f(1) == []")).encode()
    become = "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); os.execv(sys.argv[1], sys.argv[1:])"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for path in SOURCE.glob("*.py"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        worker = [str(python), "-I", "-S", "-B", f"{folder}/worker.py", "seccomp", json.dumps(LIMITS.__dict__)]
        command = [sys.executable, "-c", become, *worker]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
            process.stdin.write(b"%10d%s" % (len(job), job))
            process.stdin.flush()
            verdict = json.loads(process.stdout.readline())
    assert verdict == {"passed": True, "why": "passed", "detail": ""}


def for_all(path):
    path = Path(os.path.realpath(path))
    return path.exists() and all(part.stat().st_mode & 0o001 for part in (path, *path.parents))
