"""``verl-atropos verify-env``: what it refuses, and what it takes for sampled."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from recipe.atropos.commands.verify_env import Exchange, Verified, _not_sampled, _show_exchange, _show_groups
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.inference.sampled import SampledReply
from recipe.atropos.utils import debug

GSM8K, GUESS = "recipe.atropos.environments.gsm8k:GSM8kEnv", "helpers.environments.guess_env:GuessEnv"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "nowhere:Env"], "error: nowhere:Env: no module nowhere"),
        (["--env", GUESS, "group_sise=2"], "error: .*knows no group_sise"),
        (["--env", GUESS], "error: .*127.0.0.1:1"),
    ],
)
def test_what_cannot_be_verified_ends_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        debug.main(["verify-env", "--url", "http://127.0.0.1:1", *arguments])


class Names:
    def decode(self, ids):
        return str(ids)


def test_a_call_that_failed_is_shown_with_its_error(capsys):
    error = InferenceError("http://server", "/generate", "broken", 500)
    _show_exchange(Exchange([1, 2], {"n": 2}, error=error), Console(width=120, markup=False), Names())
    assert "prompt, 2 tokens: 1 2" in (shown := capsys.readouterr().out)
    assert "no answer: http://server/generate: HTTP 500: broken" in shown


def test_what_a_model_said_has_no_control_characters(capsys):
    reply = SampledReply("", [4, 5], [-0.5, -0.25], {}, None)
    exchange = Exchange([1], {}, messages=[{"role": "user", "content": "\x1b[2Jwhat?"}], answers=[reply])
    names = SimpleNamespace(decode=lambda ids: f"\x1b]0;title\x07{ids}")
    _show_exchange(exchange, Console(width=120, markup=False), names)
    assert "user: what?" in (shown := capsys.readouterr().out) and "[4, 5]\n" in shown and "\x1b" not in shown


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
    """A reply must have the same tokens with the same logprobs."""
    reply = SampledReply("", [4, 5, 2], [-0.5, -0.25, -1.0], {}, None)
    exchanges = [Exchange([1], {}, answers=[reply]), Exchange([1], {})]
    group = {
        "tokens": [[1, 4, 5, 2], [1, 4, 5, 9], [1, 4, 5, 2], [1, 5, 2, 3]],
        "masks": [[-100, 4, 5, 2], [-100, 4, 5, 9], [-100, 4, 5, 2], [-100, 5, 2, -100]],
        "inference_logprobs": [[1, -0.5, -0.25, -1], [1, -0.5, -0.25, -1], [1, -0.5, -0.5, -1], [1, -0.25, -1, 1]],
    }
    assert list(_not_sampled([group], exchanges, Names())) == [
        "group 0, sequence 1, positions 1 to 3: '[4, 5, 9]'",
        "group 0, sequence 2, positions 1 to 3: '[4, 5, 2]'",
    ]
