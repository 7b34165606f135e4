"""What the environment of programs counts of its sessions."""

import asyncio
import builtins
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.agents import adds, program_env
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from helpers.squatter import needs_root
from recipe.atropos.adapter.recorded_calls import cause_of
from recipe.atropos.environments.program import ProgramEnv, ProgramEnvConfig, SessionFailed, parted, read_reward
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.reporting import EnvReport
from recipe.atropos.sessions.client import Opened
from recipe.atropos.utils.process import unstopped
from recipe.atropos.utils.secret import API_KEY_VARIABLE

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = CALL.replace("1", "2")
pytestmark = pytest.mark.timeout(120)


def counted(tmp_path, monkeypatch, item, replies, **fields):
    """The counts of a group of two sessions, by default of an agent with a tool."""
    if "command" not in fields:
        fields = {"agent": "helpers.agents:adds", **fields}
    monkeypatch.setenv(API_KEY_VARIABLE, Sessions.KEY)
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    with Sessions(tmp_path, ScriptedPolicy(tokenizer, script=list(replies))) as sessions:
        env = program_env(tmp_path, tmp_path / "model", sessions, [item] * 2, **fields)

        async def collect():
            await env.setup()
            assert env._most_items == 2  # one group that has the only slot, one that waits for it
            await env.collect_trajectories(await env.get_next_item())

        asyncio.run(collect())
    counts = env.report.counts
    assert env.report.metrics()["env/turns"] == counts["sessions/turns"] / counts["sessions/ended"]
    return {name.removeprefix("sessions/"): n for name, n in counts.items() if name.startswith("sessions/")}


def test_program_that_always_fails_is_told_with_its_cause():
    env = SimpleNamespace(report=EnvReport("program"))
    env.report.count("sessions/failed/exit_status", 4)
    with pytest.raises(SessionFailed, match="all 2 sessions of the evaluation failed: sessions/failed/exit_status 4"):
        ProgramEnv.eval_summary(env, [{"item": 1}, {"item": 2}])


def executed(item, **fields):
    """What a command gives for an item; needs no server."""
    env = object.__new__(ProgramEnv)
    env.config = ProgramEnvConfig(**fields)
    return env._execute(item, Opened("s", "http://127.0.0.1:1", "key"))


def printed(command):
    return read_reward(asyncio.run(executed(1, command=command)))["reward"]


def test_program_counts_calls_of_tools_and_repeats(tmp_path, monkeypatch):
    """A session of the same call in most turns repeats it, one of a call that comes twice does not."""
    replies = [CALL, CALL, CALL, "19", CALL, CALL, OTHER, "19"]
    found = counted(tmp_path, monkeypatch, {"turns": 4, "reward": 1.0}, replies)
    expected = {"ended": 2, "turns": 8, "tool_calls": 6, "with_tools": 2, "with_calls": 2, "with_repeats": 1}
    assert found.pop("sampled") > 8 and found == expected


def test_program_counts_sessions_that_fail_too(tmp_path, monkeypatch):
    found = counted(tmp_path, monkeypatch, {"turns": 2}, ["19"] * 8, max_turns=1)
    assert found.pop("sampled") >= 4
    assert found == {"failed/turns": 4, "left_out": 2, "ended": 4, "turns": 4, "with_tools": 4}


@pytest.mark.parametrize("given", ["", "other.example"])
def test_program_reaches_its_session_without_a_proxy(tmp_path, monkeypatch, given):
    """That of the machine would be given the key and what is said, and cannot reach this address."""
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": given, "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    found = counted(tmp_path, monkeypatch, {"turns": 1, "reward": 1.0}, ["19"] * 2)
    assert found["ended"] == found["turns"] == 2
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == f"{given},127.0.0.1".lstrip(",")


def test_program_ends_also_if_its_time_is_over_at_once(tmp_path, monkeypatch):
    """Before its process is known."""
    before = len(unstopped)
    found = counted(tmp_path, monkeypatch, {}, [], command="sleep 47", time_limit=0.005)
    assert found["failed/seconds"] == 4 and len(unstopped) == before


async def answers_once(item, base_url, api_key):
    """An agent whose first session alone ends."""
    if item["session"].append(1) or len(item["session"]) > 1:
        await asyncio.sleep(600)
    return await adds({"turns": 1, "reward": 1.0}, base_url, api_key)


def test_program_that_hangs_ends_before_its_item_does(tmp_path, monkeypatch):
    """Else what the other sessions of its group did would be lost with it."""
    item = {"session": []}
    found = counted(tmp_path, monkeypatch, item, ["19"], agent=f"{__name__}:answers_once", worker_timeout=2.0)
    assert found["failed/seconds"] == 2 and found["left_out"] == 1 and found["ended"] == 3


async def raises(item, base_url, api_key):
    raise {"CancelledError": asyncio.CancelledError, "outcome": pytest.fail.Exception}.get(item["error"]) or getattr(
        builtins, item["error"]
    )


@pytest.mark.parametrize("error", ["TimeoutError", "SystemExit", "CancelledError", "outcome"])
def test_program_function_may_raise_what_it_likes(tmp_path, monkeypatch, error):
    """A session fails by it, no other, and no limit is blamed; also by what is no Exception."""
    found = counted(tmp_path, monkeypatch, {"error": error}, [], agent=f"{__name__}:raises")
    assert found == {f"failed/{'Failed' if error == 'outcome' else error}": 4, "left_out": 2, "ended": 4}


async def closes_badly(item, base_url, api_key):
    try:
        await asyncio.sleep(60)
    finally:
        raise ValueError("its connection was closed")


def test_program_function_that_is_canceled_is_not_repeated(tmp_path, monkeypatch):
    """Whatever it raises then."""
    chat_tokenizer().save_pretrained(tmp_path / "model")
    nowhere, begun = SimpleNamespace(url="http://127.0.0.1:1"), []
    env = program_env(tmp_path, tmp_path / "model", nowhere, [1], agent=f"{__name__}:closes_badly")
    env._sessions = SimpleNamespace()

    async def opened(**_):
        begun.append(Opened("s", "http://127.0.0.1:1", "key"))
        return begun[-1]

    async def cancel():
        env._sessions.open, env._slots = opened, asyncio.Semaphore(2)
        work = asyncio.create_task(env.collect_trajectories(1))
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work], timeout=10)
        return work.done()

    assert asyncio.run(cancel()) and len(begun) == 2


async def values_of_numpy(item, base_url, api_key):
    await adds({"turns": 2}, base_url, api_key)
    return {"reward": np.float32(1.0), "turn_values": np.array([0.5, 1.0], np.float32)}


def test_program_may_give_values_of_numpy(tmp_path, monkeypatch):
    found = counted(tmp_path, monkeypatch, {}, ["19"] * 4, agent=f"{__name__}:values_of_numpy")
    assert found["ended"] == 2 and "left_out" not in found


def scores_slowly(item, output):
    time.sleep(0.6)
    return 1.0


def test_program_score_holds_up_nothing(tmp_path, monkeypatch):
    """It is a plain function; where it takes longer than its session may, that has no reward."""
    found = counted(tmp_path, monkeypatch, {}, [], command="true", score=f"{__name__}:scores_slowly", time_limit=0.4)
    assert found["failed/seconds"] == 4


def scores_the_worst(item, output):
    return 0.0


@pytest.mark.parametrize(("turns", "cause"), [(1, "exit_status"), (2, "turns")])
def test_program_that_crashes_is_not_scored(tmp_path, monkeypatch, turns, cause):
    """Nor after it has reached a limit, which is then the cause."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys\nfrom urllib.request import Request, urlopen\n"
        "said = json.dumps({'messages': [{'role': 'user', 'content': 'sum'}]}).encode()\n"
        "key = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    urlopen(Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', said, key)).read()\n"
        "sys.exit(1)"
    )
    command = f"{sys.executable} {script} {turns}"
    score = f"{__name__}:scores_the_worst"
    found = counted(tmp_path, monkeypatch, {}, ["19"] * 4, command=command, score=score, max_turns=1)
    assert found[f"failed/{cause}"] == found["ended"] == 4 and found["left_out"] == 2


BEGUN, RELEASED = threading.Event(), threading.Event()


def scores_never(item, output):
    if item == "hangs":
        BEGUN.set()
        RELEASED.wait(30)
    return 1.0


def test_program_score_that_hangs_costs_only_its_session():
    """Programs are started and ended beside it, and scored."""
    command = {"command": "true", "score": f"{__name__}:scores_never"}

    async def scored():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        hung = asyncio.create_task(executed("hangs", **command))
        while not BEGUN.is_set():
            await asyncio.sleep(0.05)
        async with asyncio.timeout(15):
            assert await executed("ends", **command) == 1.0
        assert not hung.done()
        RELEASED.set()
        await hung

    asyncio.run(scored())


def test_program_group_whose_session_raises_ends_the_others():
    """As where the session server is lost; the cause is what the report counts."""
    left = []

    class Lost(ProgramEnv):
        async def _session(self, item, sampling, group, seq, over):
            if seq == 1:
                raise ConnectionError("lost")
            try:
                await asyncio.sleep(60)
            finally:
                left.append(seq)

    async def collected():
        env = object.__new__(Lost)
        env.config = ProgramEnvConfig(command="true", group_size=3)
        try:
            await env.collect_trajectories(1)
        except Exception as error:
            assert isinstance(cause_of(error), ConnectionError)
        assert sorted(left) == [0, 2]

    asyncio.run(collected())


@needs_root
def test_program_folder_that_cannot_be_removed_costs_nothing(tmp_path, monkeypatch):
    """As one with files of another user, which containers leave."""
    if subprocess.run(["sh", "-c", 'touch "$0" && chattr +i "$0" && chattr -i "$0"', tmp_path / "probe"]).returncode:
        pytest.skip("no file can be made immutable here (chattr, CAP_LINUX_IMMUTABLE)")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        assert printed("sh -c 'touch kept && chattr +i kept && echo 0.5'") == 0.5
    finally:
        kept = list(tmp_path.rglob("kept"))
        subprocess.run(["chattr", "-i", *kept], check=True)
    assert kept


@pytest.mark.parametrize("output", ['{"done": true}', '"bye"', "[1]", "null", "[" * 100_000, "bye"])
def test_program_reward_is_the_last_line_that_holds_one(tmp_path, output):
    """Of its standard output; not the last that is JSON. What it writes to standard error, as a bar of progress, may
    end without a line, or be a number."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import sys\nsys.stderr.write('7\\n 50%')\nprint(0.25, flush=True)\n"
        f"print('{{\"reward\": 0.5}}')\nprint({output!r}, flush=True)\nsys.stderr.write('\\n8\\n')"
    )
    assert printed(f"{sys.executable} {script}") == 0.5


def scores_what_is_read(item, output):
    return {"reward": len(output), "metrics": {"ends": output.endswith("still\n1\n")}}


def test_program_output_is_read_in_its_last_part():
    """It may be as long as its program likes; lines end as a terminal's do."""
    command = "sh -c 'yes still | head -c 9000000; printf \"1\\r\\n\"'"
    assert printed(command) == 1
    found = asyncio.run(executed(1, command=command, score=f"{__name__}:scores_what_is_read"))
    assert found == {"reward": 4_000_000 - 1, "metrics": {"ends": True}}


def test_program_command_is_found_through_path(tmp_path, monkeypatch):
    """Where a file or a folder has its name; the paths after it are of the folder where it is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "agent.sh").write_text("#!/bin/sh\necho 0.5")
    assert printed("env sh agent.sh") == 0.5
    (tmp_path / "agent.sh").chmod(0o700)
    assert printed("./agent.sh") == 0.5
    (tmp_path / "agent").mkdir()  # a module with -m, too
    (tmp_path / "agent" / "__main__.py").write_text("print(0.5)")
    assert printed("python agent") == 0.5
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert printed(f"{sys.executable} -m agent") == 0.5


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"reward": 1, "metrics": {"a": "x", "b": None, "c": float("nan"), "d": 2, "e": 10**400}}, (1.0, {"d": 2.0})),
        ('{"reward": 0.5, "metrics": ["a"], "turn_values": [0.5]}', (0.5, {}, [0.5])),
        ("2", (2.0, {})),
        (np.float32(0.5), (0.5, {})),
        ({"reward": np.int64(1), "metrics": {"a": np.float32(2)}}, (1.0, {"a": 2.0})),
    ],
)
def test_program_metrics_that_are_no_numbers_are_left_out(result, expected):
    reward, metrics, *values = expected
    assert read_reward(result) == {"reward": reward, "metrics": metrics, "turn_values": (values or [None])[0]}


@pytest.mark.parametrize("result", [None, "true", "NaN", 10**400, {"metrics": {}}, "[1]", np.float32("inf")])
def test_program_rewards_are_finite_numbers(result, caplog):
    with pytest.raises(SessionFailed, match="no_reward"):
        read_reward(result)
    assert "give a finite number" in caplog.text


def test_program_items_that_are_held_out_are_not_trained_on():
    """A fifth of the different ones, wherever they are in the file and however often."""
    items = [{"a": n % 10, "b": [n % 2]} for n in range(50)]
    train, test = parted(ProgramEnvConfig(), items, None)
    assert len(train) == 40 and len(test) == 10 and not [item for item in test if item in train]
    again, held_out = parted(ProgramEnvConfig(), [dict(reversed(item.items())) for item in items[::-1]], None)
    assert (again, held_out) == (train[::-1], test[::-1])
    assert [*map(len, parted(ProgramEnvConfig(), items[:2], None))] == [1, 1]
    assert parted(ProgramEnvConfig(train_size=1, eval_size=1), items, items) == (items[:1], items[:1])
    message = r"the items are 3 times \{'a': 1\}: none can be held out; give others for evaluation with --env.held_out"
    with pytest.raises(ConfigurationError, match=message):
        parted(ProgramEnvConfig(), [{"a": 1}] * 3, None)


def test_program_items_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    """Lines that are no JSON, values that cannot be sent, and data sets that are not there."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(item := {"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert ProgramEnv.load(ProgramEnvConfig(command="true", items=str(path), held_out=str(path)))[0] == [item], (
        "lines end as JSON's do"
    )
    for lines, items, expected in (
        ("1\n\n{'a': 1}", path, "--env.items=.*items.jsonl line 3 is not JSON: Expecting"),
        ("1\n" + json.dumps({"n": 10**20}), path, "item 2 cannot be sent"),
        ("1\n" + json.dumps({"text": "\ud83d"}), path, "item 2 cannot be sent"),
        ("", "no/such", "--env.items=no/such: .*give a"),
    ):
        path.write_text(lines)
        with pytest.raises(ConfigurationError, match=expected):
            ProgramEnv.load(ProgramEnvConfig(command="true", items=str(items), held_out=str(path)))
