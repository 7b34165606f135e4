"""What gem's outer policy answers, as a server would have returned it; and math_verify's time limits in a thread."""

import threading
import time

import pytest
from math_verify import parse, verify
from math_verify.errors import TimeoutException

from recipe.atropos.gem import thread_limits
from recipe.atropos.gem.outer_policy import as_served


@pytest.mark.parametrize(
    ("text", "limits", "expected"),
    [
        ("ab", {}, ("ab", "ab<|im_end|>", "stop")),
        ("ab<|im_end|>", {}, ("ab", "ab<|im_end|>", "stop")),
        ("", {}, ("", "<|im_end|>", "stop")),
        ("abc", {"max_tokens": 4}, ("abc", "abc<|im_end|>", "stop")),
        ("abc", {"max_tokens": 3}, ("abc", "abc", "length")),
        ("abc", {"max_tokens": 1}, ("a", "a", "length")),
        ("ab;c!d", {"stop": ("!", ";c")}, ("ab", "ab;c", "stop")),
        ("ab;;c", {"stop": (";", ";;")}, ("ab", "ab;", "stop")),
        ("ab;;c", {"stop": (";;", ";")}, ("ab", "ab;", "stop")),
        ("ab;cd", {"stop": ("b;c", ";")}, ("ab", "ab;", "stop")),
        ("ab;c", {"stop": ("b;", ";")}, ("a", "ab;", "stop")),
        ("abc;d", {"stop": (";",), "max_tokens": 2}, ("ab", "ab", "length")),
    ],
)
def test_an_answer_is_what_a_server_would_have_returned(tokenizer, text, limits, expected):
    answer = as_served(text, tokenizer, **limits)
    assert (answer.text, tokenizer.decode(answer.token_ids), answer.finish_reason) == expected


def in_thread(function):
    """What it returns or raises in a thread."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return outcome[0]


def test_math_verify_keeps_its_time_limit_in_a_thread(monkeypatch):
    """It does so with our fix, and still needs it."""
    monkeypatch.setattr("math_verify.parser.timeout", thread_limits._by_signal)
    assert "threaded environment" in str(in_thread(lambda: parse("$14$")))  # if not: the fix can go

    thread_limits.limit_math_verify_in_threads()
    assert in_thread(lambda: verify(parse("$14$"), parse("$28/2$"))) is True

    def endless():
        while True:
            time.sleep(0.01)

    assert isinstance(in_thread(lambda: thread_limits.time_limit(0.2)(endless)()), TimeoutException)
    assert in_thread(lambda: [thread_limits.time_limit(0.3)(int)("7"), time.sleep(0.5)]) == [7, None]
    with pytest.raises(TimeoutException):
        thread_limits.time_limit(1)(endless)()
    assert thread_limits.time_limit(1)(threading.active_count)() == threading.active_count()  # by the signal
