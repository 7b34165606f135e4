"""One session server for the tests of a module, over a scripted policy that each test finds as new."""

import time

import pytest

from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Sessions(tmp_path_factory.mktemp("sessions"), ScriptedPolicy(chat_tokenizer("thinking_kept"))) as sessions:
        yield sessions


@pytest.fixture
def sessions(served):
    served.policy.sampled.clear()
    served.policy.script.clear()
    served.policy.delay = 0.0
    return served


@pytest.fixture
def later(monkeypatch):
    """``later(seconds)``: so much time passes at once, for the clock that sessions go by."""
    now, passed = time.time, []
    monkeypatch.setattr(time, "time", lambda: now() + sum(passed))
    return passed.append


@pytest.fixture
def opened(sessions):
    """A session; in the end, what was sampled in it is trained once."""
    opened = sessions.open()
    yield opened
    sessions.check(opened)
