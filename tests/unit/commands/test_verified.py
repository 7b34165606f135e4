"""``verl-atropos verify-env``: what it refuses, and what it takes for sampled."""

import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers import ROOT
from recipe.atropos.commands.verify_env import RecordedExchange, Verified, _not_sampled, _show_exchange, _show_groups
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.inference.sampled import SampledReply
from recipe.atropos.utils import debug

GUESS = "helpers.environments.guess_env:GuessEnv"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "nowhere:Env"], "error: nowhere:Env: no module nowhere"),
        (["--env", GUESS, "group_sise=2"], "error: .*knows no group_sise"),
        (["--env", GUESS, "max_token_length"], "error: max_token_length: give key=value"),
        (["--env", GUESS, "tokenizer_name=[x"], r"error: tokenizer_name=\[x: give key=value, and quote a value"),
        (["--env", GUESS, "tokenizer_name=*a"], "error: .*127.0.0.1:1"),
        (["--env", GUESS], "error: .*127.0.0.1:1"),
    ],
)
def test_what_cannot_be_verified_ends_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        debug.main(["verify-env", "--url", "http://127.0.0.1:1", *arguments])


@pytest.fixture
def shown(model_path, tmp_path, monkeypatch, capsys):
    """(exit status, output) of the command for the example with a line replaced, and a server that answers nothing."""

    async def model_info(client):
        return {}

    def shown(line, instead, *options):
        text = (ROOT / "examples/my_env.py").read_text()
        assert text.count(line) == 1
        (tmp_path / "own_env.py").write_text(text.replace(line, instead))
        where = ["--env", str(tmp_path / "own_env.py"), "--model", str(model_path), "--url", "http://127.0.0.1:1"]
        status = debug.main(["verify-env", *where, *options])
        return status, " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr("recipe.atropos.inference.client.SGLangClient.model_info", model_info)
    return shown


SETUP = "self.random = random.Random(0)"


@pytest.mark.parametrize(
    ("line", "instead", "expected"),
    [
        (SETUP, "raise FileNotFoundError('train.jsonl')", "FileNotFoundError: train.jsonl in setup() of repeat"),
        (SETUP, "raise TimeoutError('the hub')", "TimeoutError: the hub in setup() of repeat"),
        (SETUP, "pass", "in get_next_item return self.random.choice(WORDS)"),
        ("return self.random.choice(WORDS)", "return None", "RepeatEnv.get_next_item() has no item"),
        ("async with self.server.managed", "return None\n        async with self.server.managed", "returned None; "),
    ],
)
def test_an_environments_own_error_is_shown_where_it_is(shown, line, instead, expected):
    status, output = shown(line, instead)
    assert status == 1 and expected in output and output.endswith("NOT OK: 0 rows with 0 trained tokens"), output
    assert "not done within" not in output and "Traceback (most recent call last)" in output


def test_a_thread_that_does_not_end_cannot_hold_the_command(shown, monkeypatch):
    """Whatever --timeout says, closing the event loop would wait for it."""
    ended = threading.Event()
    monkeypatch.setattr("builtins.wait_for_test", ended.wait, raising=False)

    def leave(code, seconds):  # in place of the end of the process
        assert code == 1 and seconds < 10
        ended.set()
        return threading.Timer(0, ended.set)

    monkeypatch.setattr("recipe.atropos.commands.verify_env.exit_anyway", leave)
    instead = f"import asyncio; await asyncio.to_thread(wait_for_test); {SETUP}"
    status, output = shown(SETUP, instead, "--timeout=0.2")
    assert status == 1 and "await asyncio.to_thread(wait_for_test)" in output
    assert "not done within --timeout=0.2 s" in output


class Names:
    def decode(self, ids):
        return str(ids)


def test_calls_are_shown_without_control_characters(capsys):
    reply = SampledReply("", [4, 5], [-0.5, -0.25], {}, None)
    said = RecordedExchange([1], {}, messages=[{"role": "user", "content": "\x1b[2Jwhat?"}], answers=[reply])
    failed = RecordedExchange([1, 2], {"n": 2}, error=InferenceError("http://server", "/generate", "broken", 500))
    names = SimpleNamespace(decode=lambda ids: f"\x1b]0;title\x07{ids}")
    for exchange in (said, failed):
        _show_exchange(exchange, Console(width=120, markup=False), names)
    shown = capsys.readouterr().out
    assert "user: what?" in shown and "[4, 5]\n" in shown and "\x1b" not in shown
    assert "prompt, 2 tokens: 1 2" in shown and "no answer: http://server/generate: HTTP 500: broken" in shown


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ({"tokens": [[1]], "masks": [[1]]}, "group 0: {'tokens': [[1]], 'masks': [[1]]}, so nothing is sent"),
        (([{"scores": [1.0]}], []), "group 0: ([{'scores': [1.0]}], []), so nothing is sent"),
        ([{"scores": [1.0]}, None], "group 0: scores [1.0] group 1: None, so nothing is sent sent: 0 of 2 groups"),
    ],
)
def test_what_is_no_group_is_shown_as_it_is(returned, shown, capsys):
    _show_groups(Verified(None, None, [], returned), Console(width=120, markup=False))
    assert shown in " ".join(capsys.readouterr().out.split())


def test_trained_span_is_sampled_only_if_a_reply_has_it():
    reply = SampledReply("", [4, 5, 2], [-0.5, -0.25, -1.0], {}, None)
    exchanges = [RecordedExchange([1], {}, answers=[reply]), RecordedExchange([1], {})]
    group = {
        "tokens": [[1, 4, 5, 2], [1, 4, 5, 9], [1, 4, 5, 2], [1, 5, 2, 3]],
        "masks": [[-100, 4, 5, 2], [-100, 4, 5, 9], [-100, 4, 5, 2], [-100, 5, 2, -100]],
        "inference_logprobs": [[1, -0.5, -0.25, -1], [1, -0.5, -0.25, -1], [1, -0.5, -0.5, -1], [1, -0.25, -1, 1]],
    }
    assert list(_not_sampled([group], exchanges, Names())) == [
        "group 0, sequence 1, positions 1 to 3: '[4, 5, 9]'",
        "group 0, sequence 2, positions 1 to 3: '[4, 5, 2]'",
    ]
