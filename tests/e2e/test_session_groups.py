"""Groups of programs that nobody here starts: a ticket, sessions, one post, whatever is killed."""

import contextlib
import math
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until
from recipe.atropos.credit.group import Credit
from recipe.atropos.data.sampling import TEMPERATURE_VARIABLE
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def api(tmp_path):
    with running_trajectory_api(tmp_path) as api:
        api.register(after=0, batch_size=6, max_token_len=2000)
        yield api


@pytest.fixture
def sessions(api, tmp_path):
    with Sessions(tmp_path, ScriptedPolicy(chat_tokenizer()), api.url) as sessions:
        yield sessions


def opened(sessions, size=3, **fields):
    asked = {"env": "tool", "item": {"question": "sum"}, "size": size, **fields}
    status, group = sessions.call("POST", "/groups", asked)
    assert status == 200, group
    return group["sessions"]


def ended(sessions, session, ask=True, **result):
    """A program: one reply, then its reward or its failure."""
    if ask:
        client = openai.OpenAI(base_url=f"{session['base_url']}/v1", api_key=session["api_key"])
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "sum"}])
    return sessions.reward(session, **result)[1]


def test_session_group_that_cannot_be_stored_frees_its_ticket(sessions, api, monkeypatch):
    """As on a full disk."""

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(sessions.server.store, "put_group", full)
        with pytest.raises(ValueError):  # it answers with status 500, not in JSON
            sessions.call("POST", "/groups", {"env": "tool", "size": 3})
    assert api.get("/diagnose")["counts"]["released/no_group"] == 1 and not sessions.server._groups._groups


def exhausted(session):
    """A program that asks once more than its limit of one turn allows."""
    client = openai.OpenAI(base_url=f"{session['base_url']}/v1", api_key=session["api_key"])
    for content in ("sum", "again"):
        with contextlib.suppress(openai.PermissionDeniedError):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])


def released(sessions, api):
    """How many tickets were given back, by reason, once no group is open."""
    until(lambda: not sessions.server._groups._groups)
    counts = api.get("/diagnose")["counts"]
    return {name: count for name, count in counts.items() if name.startswith("released/")}


def restarted(sessions, **fields):
    sessions.stop()
    vars(sessions).update(fields)
    sessions.start()


def batch(api):
    return api.get("/batch?after=0&wait=20")["batch"]


def test_session_groups_are_posted_once_whatever_is_killed(sessions, api):
    groups = [opened(sessions) for _ in range(2)]
    for number, session in enumerate(session for group in groups for session in group):
        if number == 2:
            restarted(sessions)
        if number == 4:
            api.kill()
            api.start()
        ended(sessions, session, reward=float(number))
        ended(sessions, session, ask=False, reward=7.0)
    found = batch(api)
    assert [group["scores"] for group in found] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for group, expected in zip(found, groups, strict=True):
        overrides = group["group_overrides"]
        assert overrides["sessions"] == [session["id"] for session in expected]
        assert (overrides["trajectory"], overrides["env_name"]) == ([0, 1, 2], "tool")
    restarted(sessions)
    assert sessions.server._groups._groups == {}


def test_session_groups_repeat_what_fails_once(sessions, api):
    for _ in range(3):
        first, second, third = opened(sessions)
        ended(sessions, first, reward=0.0)
        ended(sessions, second, reward=1.0)
        answer = ended(sessions, third, end="crashed")
        assert "again" not in ended(sessions, answer["again"], ask=False, end="crashed again")
    found = batch(api)
    assert [group["scores"] for group in found] == [[0.0, 1.0]] * 3
    unheld = sessions.open(env="tool", group="its own name")
    ended(sessions, unheld, reward=1.0)
    assert sessions.rows(unheld)[0] == 200
    until(lambda: not sessions.server._sessions)  # nothing that has ended is kept in memory
    counts = sessions.counts("tool")
    assert [counts[name] for name in ("ended", "left_out", "failed/crashed")] == [13, 3, 3]


def test_session_groups_that_never_end_give_back_their_ticket(sessions, api):
    opened(sessions, limits={"seconds": 0.2})
    assert released(sessions, api) == {"released/no_group": 1}
    assert not api.get("/diagnose")["queue"]["open_tickets"]
    counts = sessions.counts("tool")
    assert counts == {"ended": 6, "failed/seconds": 6, "left_out": 3}


def test_session_groups_take_a_reward_after_a_limit(sessions, api):
    """A program that reaches a limit gives its reward later than the next look; meanwhile it was to be repeated."""
    group = opened(sessions, limits={"turns": 1}, size=2)
    for session in group:
        exhausted(session)
    time.sleep(0.2)
    for number, session in enumerate(group):
        assert "again" not in ended(sessions, session, ask=False, reward=float(number))
    assert not released(sessions, api)


def test_session_groups_wait_for_a_repetition_at_its_limit(sessions, api):
    """Its program has all its turns, and still finds out its reward; one that fails there gives back the ticket."""
    first, second = opened(sessions, limits={"turns": 1}, size=2)
    ended(sessions, first, reward=0.0)
    again = ended(sessions, second, end="crashed")["again"]
    ended(sessions, again, reward=1.0, turn_values=[0.0] * 7)  # is refused
    time.sleep(0.2)
    assert ended(sessions, again, ask=False, reward=1.0)["reward"] == 1.0
    assert not released(sessions, api)
    [session] = opened(sessions, limits={"turns": 1}, size=1)
    for _ in range(2):
        exhausted(session)
        answer = ended(sessions, session, ask=False, end="crashed")
        assert answer["end"] == "turns"
        session = answer.get("again")
    assert released(sessions, api) == {"released/no_group": 1}


def test_session_groups_say_again_what_repeats_a_session(sessions, api):
    """The answer to the end may be lost."""
    [first] = opened(sessions, size=1)
    answers = [ended(sessions, first, ask=False, end="crashed")["again"] for _ in range(2)]
    assert answers[0] == answers[1]


def test_session_groups_do_not_count_an_unused_repetition(sessions, api):
    """The reward of what it repeats came late."""
    first, second = opened(sessions, size=2)
    again = ended(sessions, first, end="crashed")["again"]
    assert ended(sessions, first, ask=False, reward=1.0)["reward"] == 1.0
    ended(sessions, second, reward=0.0)
    assert not released(sessions, api)
    assert sessions.ask(again)[0] == 403
    stored = SessionStore(sessions.server.store.path, read_only=True)
    assert stored.due(math.inf) == []
    stored.close()
    assert sessions.counts("tool")["ended"] == 2


def test_session_groups_that_are_damaged_hold_up_no_other(sessions, api):
    damaged, whole = opened(sessions, size=2), opened(sessions, size=2)
    ended(sessions, damaged[0], reward=1.0)
    sessions.stop()
    with sqlite3.connect(sessions.folder / "sessions.sqlite") as database:
        database.execute("UPDATE turns SET record = x'00'")
    sessions.start()
    for number, session in enumerate(whole):
        ended(sessions, session, reward=float(number))
    assert released(sessions, api) == {"released/no_group": 1}


def test_session_groups_wait_for_room_on_the_disk(sessions, api, caplog):
    """Those that are posted meanwhile are posted once."""
    groups = [opened(sessions) for _ in range(2)]
    with sqlite3.connect(sessions.server.store.path) as database:
        database.execute("CREATE TRIGGER full BEFORE DELETE ON groups BEGIN SELECT RAISE(FAIL, 'disk is full'); END")
    for number, session in enumerate(session for group in groups for session in group):
        ended(sessions, session, reward=float(number))
    until(lambda: "wait: disk is full" in caplog.text)
    with sqlite3.connect(sessions.server.store.path) as database:
        database.execute("DROP TRIGGER full")
    assert not released(sessions, api)
    assert [group["scores"] for group in batch(api)] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_session_groups_that_the_api_refuses_release_tickets(sessions, api, monkeypatch):
    async def refused(*_):
        raise TrajectoryApiError("too large", 413)

    monkeypatch.setattr(sessions.server._api, "post_groups", refused)
    for number, session in enumerate(opened(sessions)):
        ended(sessions, session, reward=float(number))
    assert released(sessions, api) == {"released/http_413": 1}
    assert not api.get("/diagnose")["queue"]["open_tickets"]


def test_session_groups_have_the_trainers_temperature(sessions, api, monkeypatch):
    """Whatever their programs ask for; their own, if they are opened with one."""
    monkeypatch.setenv(TEMPERATURE_VARIABLE, "0.7")
    for sampling in ({}, {"temperature": 0.3}):
        for number, session in enumerate(opened(sessions, sampling=sampling)):
            sessions.ask(session, temperature=0.0)
            ended(sessions, session, ask=False, reward=float(number))
    found = [group["group_overrides"]["sampling_params"] for group in batch(api)]
    assert found == [[[{"temperature": value}]] * 3 for value in (0.7, 0.3)]


def test_session_groups_of_one_key_are_one(sessions, api):
    """A program whose answer was lost asks again; else the first would hold its ticket until its sessions' time."""
    first = opened(sessions, key="a")
    assert opened(sessions, key="a") == first
    restarted(sessions)
    assert opened(sessions, key="a") == first != opened(sessions, key="b")
    status, answer = sessions.call("POST", "/groups", {"env": "tool", "item": "another", "size": 3, "key": "a"})
    assert status == 409 and "key=a" in answer["error"]["message"]
    assert api.get("/diagnose")["queue"]["open_tickets"] == 2


def test_session_groups_are_checked_before_a_ticket(sessions, api):
    larger = ("give 1 to 6", {"size": 7})  # than a batch
    for told, wrong in (("stop_token_ids", {"sampling": {"stop_token_ids": 5}}), ("size", {"size": 0}), larger):
        status, answer = sessions.call("POST", "/groups", {"env": "tool", "size": 2} | wrong)
        assert status == 400 and told in answer["error"]["message"]
    assert not api.get("/diagnose")["queue"]["open_tickets"]


def test_session_groups_are_given_credit(sessions, api):
    """Where a session of two turns has no values, its group has none."""
    restarted(sessions, credit=Credit(lam=0.0))
    for values in ([[0.5], None], [[0.5, 9.0], [0.25, 9.0]], [[9.0], [9.0]]):
        for number, (session, value) in enumerate(zip(opened(sessions, size=2), values, strict=True)):
            for _ in range(2 if value is None else len(value)):
                ended(sessions, session, reward=float(number), turn_values=[0.0] * 7)  # is refused
            ended(sessions, session, ask=False, reward=float(number), turn_values=value)
    expected = {(0.0, 1.0, 1.0): (-1, 1, 1), (0.0, 0.0, 1.0, 1.0): (1, -1, -1, 1), (0.0, 1.0): (-1, 1)}
    for group, (scores, signs) in zip(batch(api), expected.items(), strict=True):
        assert tuple(group["scores"]) == scores
        without = ", without values" if len(scores) == 3 else ""
        assert group["group_overrides"]["credit"] == f"spans=turns lam=0.0{without}"
        for masks, values, sign in zip(group["masks"], group["advantages"], signs, strict=True):
            assert [sign * value > 0 for value in values] == [mask != -100 for mask in masks]


def test_session_groups_of_equal_rewards_are_sent_for_credit(sessions, api):
    """Where turns differ; where they do not, there is nothing to learn from."""
    restarted(sessions, credit=Credit(lam=0.0))
    for least in (0.5, 0.0):
        for number, session in enumerate(opened(sessions, size=6)):
            ended(sessions, session, reward=0.0, turn_values=[0.0] * 7)  # is refused: the session goes on
            ended(sessions, session, reward=0.0, turn_values=[0.5 if number else least, 9.0])
    [group] = batch(api)
    assert set(group["scores"]) == {0.0} and any(map(any, group["advantages"]))
    assert api.get("/diagnose")["counts"]["released/equal_scores"] == 1


def half(item, text):
    """Values of a function that hangs at one item."""
    time.sleep(1.0 * (item["question"] == "hang"))
    return 0.5


def test_session_groups_are_given_up_if_values_hang(sessions, api, monkeypatch):
    monkeypatch.setattr("recipe.atropos.credit.group._SECONDS", 0.3)
    restarted(sessions, credit=Credit(values=f"{__name__}:half"))
    for question in ("hang", "sum"):
        for number, session in enumerate(opened(sessions, size=6, item={"question": question})):
            for _ in range(2):
                ended(sessions, session, reward=7.0 * (number == 9), turn_values=3)  # refused: the session goes on
            ended(sessions, session, ask=False, reward=float(number))
    [group] = batch(api)
    assert group["group_overrides"]["credit"].startswith("spans=turns")
    assert api.get("/diagnose")["counts"]["released/no_group"] == 1


def test_session_groups_keep_tickets_while_values_take_long(sessions, api, monkeypatch):
    """Whatever becomes of another environment's: the API would take them back if it heard nothing for a minute."""
    restarted(sessions, credit=Credit(values=f"{__name__}:half"))
    opened(sessions, size=1, env="other")
    sessions.server._groups._groups.copy().popitem()[1].env_id = 99  # one that the API does not know
    for number, session in enumerate(opened(sessions, item={"question": "hang"})):
        ended(sessions, session, reward=0.0, turn_values=3)  # refused: the session goes on
        ended(sessions, session, reward=float(number))
    heard, status = set(), TrajectoryApiClient.status

    async def noted(self, env_id=None):
        heard.add(env_id)
        return await status(self, env_id)

    monkeypatch.setattr(TrajectoryApiClient, "status", noted)
    until(lambda: len(sessions.server._groups._groups) == 1)
    assert len(heard - {99}) == 1 and 99 in heard, "meanwhile the values took three seconds"


def test_session_groups_wait_for_tickets_at_once(sessions, api, monkeypatch):
    """Those of several environments; each is registered once."""
    monkeypatch.setattr("recipe.atropos.sessions.groups._TICKET_SECONDS", 2.0)
    while sessions.call("POST", "/groups", {"env": "tool", "size": 6})[0] == 200:
        pass
    started, asked = time.monotonic(), [{"env": env, "size": 1} for env in ("a", "a", "b", "c")]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda body: sessions.call("POST", "/groups", body)[0], asked))
    assert found == [503] * 4 and 2.0 <= time.monotonic() - started < 3.9  # not one after the other
    assert len(api.get("/diagnose")["environments"]) == 4
