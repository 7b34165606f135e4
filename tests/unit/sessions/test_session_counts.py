"""What the session server counts of sessions that no environment counts."""

import sqlite3
import time

from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from helpers.waiting import until
from recipe.atropos.report.facts import sessions as rows_of_sessions
from recipe.atropos.report.run_history import read_history
from recipe.atropos.run.folder import ELSEWHERE
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.utils.files import read_lines
from recipe.atropos.watchdog.history import EnvironmentHistory
from recipe.atropos.watchdog.rules.environments import agent_finding


def ended(sessions, opened, **result):
    status, answer = sessions.reward(opened, **result)
    assert status == 200
    return answer


def test_sessions_from_elsewhere_are_counted_once(tmp_path, later):
    """Also over a restart of the server, and when a reward is given again; those that their environment counts never
    are."""
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"] * 9)) as sessions:
        whole, failed, silent, late, own = (
            sessions.open(env="my/env", **fields)
            for fields in ({}, {}, {}, {"limits": {"seconds": 60.0}}, {"counted": True})
        )
        for opened in (whole, failed, own):
            sessions.ask(opened)
        sessions.ask(whole, retry=1)
        edited = [
            {"role": "user", "content": "sum"},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": "x"},
        ]
        sessions.ask(whole, messages=edited)
        ended(sessions, whole, reward=1.0)
        ended(sessions, whole, reward=1.0)
        ended(sessions, failed, end="crashed")
        ended(sessions, silent, reward=1.0)
        ended(sessions, own, reward=1.0)
        later(61)
        until(lambda: sessions.state(late)["end"] == "seconds")
        expected = {
            "ended": 4, "turns": 3, "sampled": 6, "retries": 1, "forks/message_edited": 1,
            "failed/crashed": 1, "failed/no_turn": 1, "failed/seconds": 1,
        }  # fmt: skip
        assert sessions.counts("my_env") == expected
        ended(sessions, whole, reward=1.0)
        ended(sessions, failed, reward=1.0)
        assert sessions.counts("my_env") == expected
    (tmp_path / "run" / "config.yaml").write_text("{}")
    [row] = rows_of_sessions(read_history(tmp_path / "run"))
    assert row[:6] == ["my_env", 4, "crashed 1, no_turn 1, seconds 1", 0, "message_edited 1", 1]


def test_sessions_that_nobody_asks_for_are_counted(tmp_path, monkeypatch, later):
    """Those that left memory, and those whose time is over while the server is away."""
    monkeypatch.setattr("recipe.atropos.sessions.server._IN_MEMORY", 1)
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"])) as sessions:
        asked, _ = (sessions.open(env="a", limits={"seconds": 60.0}) for _ in range(2))
        sessions.ask(asked)
        later(61)
        stored = SessionStore(sessions.server.store.path, read_only=True)
        until(lambda: b'"end":"seconds"' in stored.session(asked["id"]))
        stored.close()
        sessions.open(env="a", limits={"seconds": 60.0})
        abandoned = sessions.open(env="a", limits={"seconds": 60.0}, counted=True)  # of an environment that was killed
        sessions.stop()
        later(61)
        sessions.start()
        until(lambda: sessions.counts("a") == {"ended": 3, "turns": 1, "sampled": 2, "failed/seconds": 3})
        assert sessions.state(abandoned)["end"] == "seconds"


def test_sessions_of_an_older_database_go_on(tmp_path):
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"])) as sessions:
        opened = sessions.open()
        sessions.stop()
        with sqlite3.connect(sessions.server.store.path) as database:
            for name in ("due", "ended"):
                database.execute(f"DROP INDEX sessions_{name}")
                database.execute(f"ALTER TABLE sessions DROP COLUMN {name}")
        sessions.start()
        assert sessions.ask(opened)[0] == 200
        assert ended(sessions, opened, reward=1.0)["turns"] == 1


def test_sessions_that_cannot_be_stored_are_counted_later(tmp_path, caplog, later):
    """As while the disk is full."""
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer())) as sessions:
        path = sessions.server.store.path
        late = sessions.open(env="a", limits={"seconds": 60.0})
        with sqlite3.connect(path) as database:
            database.execute(
                "CREATE TRIGGER full BEFORE UPDATE OF state ON sessions BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
            )
        later(61)
        until(lambda: "sessions and groups that have ended wait: disk is full" in caplog.text)
        with sqlite3.connect(path) as database:
            database.execute("DROP TRIGGER full")
        stored = SessionStore(path, read_only=True)
        until(lambda: b'"counted":true' in stored.session(late["id"]), 10)
        stored.close()
        assert sessions.counts("a") == {"ended": 1, "failed/seconds": 1}


def test_sessions_of_a_long_name_are_counted_with_their_metrics(tmp_path):
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"])) as sessions:
        opened = sessions.open(env="å" * 300)
        sessions.ask(opened)
        ended(sessions, opened, reward=1.0, metrics={"steps": 3.0, "/a path/": 1.0})
        name = "å" * 50
        assert sessions.counts(name)["ended"] == 1
        [means] = [
            line["means"] for line in read_lines(sessions.files.environment_report(name, ELSEWHERE)) if "means" in line
        ]
        assert means == {"turns": 1.0, "sessions/metrics/steps": 3.0}


def test_sessions_that_are_damaged_hold_up_no_count(tmp_path, caplog, later):
    """Nor one that stays due; they are told once."""
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"] * 2)) as sessions:
        damaged, endless, late = (sessions.open(env="a", limits={"seconds": seconds}) for seconds in (60, None, 61))
        sessions.ask(damaged)
        sessions.stop()
        with sqlite3.connect(sessions.server.store.path) as database:
            database.execute("UPDATE turns SET record = x'00'")
            database.execute("UPDATE sessions SET due = 1 WHERE id = ?", (endless["id"],))
        later(62)
        sessions.start()
        stored = SessionStore(sessions.server.store.path, read_only=True)
        until(lambda: b'"counted":true' in stored.session(late["id"]))
        time.sleep(0.2)  # several polls
        assert caplog.text.count("is not what was stored") == 1
        assert stored.due(time.time()) == [endless["id"]]
        stored.close()
        assert sessions.ask(endless)[0] == 200


def test_sessions_are_kept_while_they_run(tmp_path, monkeypatch):
    """And until as many others were opened after their end; those that nobody ends, five times as long."""
    monkeypatch.setattr("recipe.atropos.sessions.store._KEPT", 3)
    monkeypatch.setattr("recipe.atropos.sessions.store._PRUNED_EVERY", 1)
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"] * 2)) as sessions:
        runs, whole, endless = (sessions.open(item=[[]]) for _ in range(3))

        def opened(number):
            for _ in range(number):
                sessions.open()
            sessions.stop()
            sessions.start()
            return [sessions.rows(one)[0] for one in (runs, whole, endless)]

        sessions.ask(runs)
        ended(sessions, whole, reward=1.0)
        assert opened(2) == [200, 200, 200]
        assert opened(4) == [200, 404, 200]
        assert ended(sessions, runs, reward=1.0)["turns"] == 1
        assert opened(2) == [200, 404, 200]
        assert opened(6) == [404, 404, 200]
        assert opened(4) == [404, 404, 404]


def test_sessions_from_elsewhere_raise_the_alarms_of_agents(tmp_path):
    """The newest ones alone count: an agent that was repaired is silent again."""
    environment, seen = EnvironmentHistory("mine"), 0
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer())) as sessions:
        for end, alarm in (("seconds", "agent_does_not_end"), ("turns", "agent_loops"), (None, None)):
            for _ in range(64 if end else 130):
                ended(sessions, sessions.open(env="mine"), **({"end": end} if end else {"reward": 1.0}))
            sessions.counts("mine")
            lines = read_lines(sessions.files.environment_report("mine", ELSEWHERE))
            for line in lines[seen:]:
                environment.add(line, None)
            seen, found = len(lines), agent_finding(environment)
            assert (found and found.alarm) == alarm
            time.sleep(0.01)


def test_session_goes_on_after_a_reward_that_is_not_its_last(tmp_path, later):
    """It has that one if its time is over, or its program gives no other."""
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer(), script=["19"] * 9)) as sessions:
        whole, late = sessions.open(env="a"), sessions.open(env="a", limits={"seconds": 60.0})
        for opened in (whole, late):
            sessions.ask(opened)
            assert ended(sessions, opened, reward=0.25, metrics={"tests": 3.0}, finished=False)["end"] is None
        assert sessions.ask(whole, messages=[{"role": "user", "content": "more"}])[0] == 200
        for wrong in ({"end": "crashed"}, {"reward": 1.0, "turn_values": [1.0, 1.0]}, {}):
            status, answer = sessions.reward(whole, **wrong, finished=False)
            assert status == 400 and "finished" in answer["error"]["message"]
        answer = ended(sessions, whole, reward=1.0)
        assert (answer["end"], answer["reward"], answer["turns"]) == ("reward", 1.0, 2)
        assert answer["metrics"] == {"tests": 3.0}, "until it gives others"
        assert ended(sessions, whole, reward=0.5, finished=False)["reward"] == 1.0
        assert sessions.ask(whole)[0] == 403
        limited = sessions.open(env="a", limits={"turns": 1})
        sessions.ask(limited)
        assert sessions.ask(limited)[0] == 403
        assert ended(sessions, limited, reward=0.5, finished=False)["reward"] == 0.5, "also after a limit"
        answer = ended(sessions, limited, end="crashed")
        assert (answer["end"], answer["reward"], answer["finished"]) == ("turns", 0.5, True)
        later(61)
        until(lambda: sessions.state(late)["end"] == "seconds")
        assert sessions.state(late)["reward"] == 0.25
        assert "failed/seconds" not in sessions.counts("a")
