"""A run's sessions as turns: what each added, what the policy answered, and which row trains it; see ``sessions``."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import msgspec

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.sessions.messages import Message
from recipe.atropos.sessions.session import Session, State
from recipe.atropos.sessions.store import Store
from recipe.atropos.sessions.tree import Turn

Part = tuple[str, str]
"""Who says it (a role, "thinking", "call", "result of TOOL"), and the text."""


@contextmanager
def open_sessions(files: RunDir) -> Iterator[Store]:
    """Yield a run's sessions to read, also while its server runs. Raises ConfigurationError if it has none."""
    if not files.sessions.exists():
        raise ConfigurationError(f"{files.path} has no sessions: no program sampled there (sessions.enabled)")
    with closing(Store(files.sessions, read_only=True)) as store:
        yield store


def newest_sessions(files: RunDir, limit: int, of_each: bool = False) -> Iterator[Session]:
    """Yield the ``limit`` sessions that were opened last, the newest first. ``of_each``: of these, the newest of each
    environment that has ended. Each can be read until the next is asked for. Raises as ``open_sessions``.
    """
    with open_sessions(files) as store:
        states = [msgspec.json.decode(data, type=State) for data in store.newest(limit)]
        if of_each:
            states = list({state.env: state for state in reversed(states) if state.end is not None}.values())
        yield from filter(None, (Session.load(store, state.id) for state in states))


def turns_of(session: Session) -> Iterator[dict[str, Any]]:
    """Yield a session's turns, each after the one that it continues, what follows that one later after both.

    ``{"number", "parent", "level", "begins", "tokens", "versions", "row", "added", "reply"}``: ``level`` counts the
    turns before it that several continue; ``begins`` says why it continues none, "" if it does; ``tokens`` were
    sampled by the weights ``versions``; ``row`` is the leaf that trains it; ``added`` and ``reply`` are parts.
    """
    rows = {turn.number: row for row, leaf in enumerate(session.tree.leaves()) for turn in leaf.turns}
    roots = [turn for turn in session.tree.turns if turn.parent is None]
    waiting = [(turn, 0) for turn in reversed(roots)]
    while waiting:
        turn, level = waiting.pop()
        waiting += [(child, level + (len(turn.children) > 1)) for child in reversed(turn.children)]
        record = session.record(turn.number)
        reply = record.reply.message()
        yield {
            "number": turn.number,
            "parent": record.parent,
            "level": level,
            "begins": "" if turn.parent else turn.cause or "a new conversation",
            "tokens": len(turn.tokens),
            "versions": turn.versions,
            "row": rows[turn.number],
            "added": [part for message in record.messages for part in _parts(message)] or _prompt(turn, reply),
            "reply": _parts(reply),
        }


def _parts(message: Message) -> list[Part]:
    name = f"result of {message['name']}" if message["role"] == "tool" and "name" in message else message["role"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [("thinking", message.get("reasoning_content") or ""), (name, message.get("content") or "")]
    return [part for part in said if part[1]] + [("call", f"{call['name']}({call['arguments']})") for call in calls]


def _prompt(turn: Turn, reply: Message) -> Sequence[Part]:
    """Return what a turn added that was asked for with a text, or with token ids, which are counted."""
    if turn.text is None:
        return [("prompt", f"{len(turn.added)} token ids")]
    added = turn.text.removeprefix(turn.parent.text or "" if turn.parent else "")
    replied = reply["content"]  # there with what ended it, which the turn's text lacks
    end = next(n for n in range(len(replied), -1, -1) if added.endswith(replied[:n]))
    return [("prompt", added[: len(added) - end])]
