"""Regular expressions that users configure, on texts that a policy writes."""

import regex

_SECONDS = 1.0  # for a pattern and a text


def matches(pattern: regex.Pattern, text: str) -> list[regex.Match]:
    """Return all matches; other threads go on meanwhile, which ``re`` holds up.

    Raises:
        TimeoutError: the pattern took too long; names it.
    """
    try:
        return list(pattern.finditer(text, timeout=_SECONDS, concurrent=True))
    except TimeoutError as error:
        raise TimeoutError(
            f"pattern {pattern.pattern!r} took more than {_SECONDS:g} s on a text of {len(text)} characters; write it "
            "without nested repetition"
        ) from error
