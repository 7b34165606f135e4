"""Sessions of agents on the page: their counts, and the newest of each environment turn by turn."""

import pytest

from helpers.runs import make_run, write_lines
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from recipe.atropos.report import samples
from recipe.atropos.report.page import describe, page
from recipe.atropos.report.run_history import read_history

pytestmark = pytest.mark.timeout(120)


def report(time, **counts):
    counts = {f"sessions/{name.replace('__', '/')}": n for name, n in counts.items()}
    return {"time": time, "env": "sums", "step": 1, "in_flight": 0, "counts": counts, "means": {}}


def test_report_counts_sessions_over_all_processes(tmp_path):
    """The second one begins at 0."""
    files = make_run(tmp_path, started=1.0)
    files.environments.mkdir()
    first = report(1.0, ended=8, turns=12, failed__seconds=1, failed__turns=2, left_out=1, tool_calls=3)
    second = report(3.0, ended=9, turns=39, failed__turns=2, retries=2, forks__compaction=4, tool_calls=1)
    write_lines(files.environment_report("sums"), [first, {"time": 2.0, "started": 2.0}, second])
    write_lines(files.environment_report("other"), [{**report(1.0), "counts": {"items": 9}}])
    found = describe(read_history(tmp_path), tokens=False)["sessions"]
    row = ["sums", 17, "turns 4, seconds 1", 1, "compaction 4", 2, 4, 3.0]
    assert found == {"rows": [row], "newest": [], "note": ""}


def test_report_has_the_newest_session_of_each_environment(tmp_path, monkeypatch):
    """Of those that have ended; its page is bounded, and is written whatever is the matter with them."""
    monkeypatch.setattr(samples, "TURNS", 2)
    files = make_run(tmp_path, started=1.0)
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer())) as sessions:
        opened = [sessions.open(env=env, item={"q": env}) for env in ("a", "a", "b", "a")]
        sessions.policy.script = ["<think>so</think>the", "is", "no"]
        messages = [{"role": "user", "content": "12 " * 2000}] + [{"role": "user", "content": "7"}] * 9
        for _ in range(3):
            reply = sessions.openai(opened[1]).chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and"}]
        for one, end in zip(opened[:3], ({"reward": 1}, {"reward": 0.5}, {"end": "seconds"}), strict=True):
            sessions.call("POST", f"/sessions/{one['id']}/reward", end)
        history = read_history(tmp_path)
        found = describe(history, tokens=False)["sessions"]
    assert found["note"] == "" and [one["session"] for one in found["newest"]] == [opened[2]["id"], opened[1]["id"]]
    assert not list(tmp_path.glob("*-wal")), "nothing is left open"
    b, a = found["newest"]
    about = {"session": opened[2]["id"], "environment": "b", "item": '{"q":"b"}', "end": "seconds", "forks": "none"}
    assert b == about | {"turns": 0, "tokens": 0, "rows": 0, "turns_shown": []}
    assert (a["end"], a["turns"], [turn["parent"] for turn in a["turns_shown"]]) == ("reward 0.5", 3, [None, 0])
    assert a["turns_shown"][0]["added"] == [("left out", "2 before"), *[("user", "7")] * 8]
    assert a["turns_shown"][0]["reply"] == [("thinking", "so"), ("assistant", "the")]
    long = {"added": [("user", "12 " * 2000)], "reply": []}
    assert len(samples._short(long)["added"][0][1]) <= samples.CHARACTERS // 3
    files.sessions.write_bytes(b"no database" * 100)
    assert "Sessions are not shown: file is not a database" in page([history], tokens=False)
