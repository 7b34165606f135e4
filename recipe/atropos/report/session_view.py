"""A run's sessions as turns: what each added, what the policy answered, and which row trains it; see ``sessions``."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.sessions.messages import Message
from recipe.atropos.sessions.session import Session
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.sessions.tree import Turn

Part = tuple[str, str]  # who says it (a role, "thinking", "call", "result of TOOL"), and the text
_ITEM = 80  # characters of an item


def read_sessions(files: RunDir, limit: int = 1, identifier: str | None = None) -> Iterator[Session]:
    """Yield the session of an id, or the ``limit`` that were opened last, newest first; also while their server runs.

    Each can be read until the next is asked for.

    Raises:
        ConfigurationError: the run has none, or none of this id.
    """
    if not files.sessions.exists():
        raise ConfigurationError(f"{files.path} has no sessions: no program sampled there (sessions.enabled)")
    with closing(SessionStore(files.sessions, read_only=True)) as store:
        if identifier is not None and store.session(identifier) is None:
            raise ConfigurationError(f"{files.path} has no session {identifier}; --sessions lists the newest")
        found = [identifier] if identifier is not None else store.newest(limit)
        yield from (Session.load(store, each) for each in found)


def about(session: Session) -> dict[str, Any]:
    """Return what a session is, in a few words and numbers."""
    state, seen = session.state, session.summary()
    return {
        "session": state.id,
        "environment": state.env,
        "item": msgspec.json.encode(state.item).decode()[:_ITEM],
        **{"turns": seen["turns"], "tokens": seen["sampled"], "rows": seen["rows"]},
        "end": state.end or "running" if state.reward is None else f"reward {state.reward:g}",
        "forks": ", ".join(f"{cause} {n}" for cause, n in seen["forks"].items()) or "none",
    }


def turns_of(session: Session) -> Iterator[dict[str, Any]]:
    """Yield a session's turns, each after the one that it continues, what follows that one later after both.

    ``{"number", "parent", "level", "begins", "tokens", "versions", "row", "added", "reply"}``: ``level`` counts the
    turns before it that several continue; ``begins`` says why it continues none, "" if it does; ``tokens`` were
    sampled by the weights ``versions``; ``row`` is the leaf that trains it; ``added`` and ``reply`` are parts.
    """
    rows = {turn.number: row for row, leaf in enumerate(session.tree.leaves()) for turn in leaf.turns}
    waiting = [(turn, 0) for turn in reversed(session.tree.turns) if turn.parent is None]
    while waiting:
        turn, level = waiting.pop()
        waiting += [(child, level + (len(turn.children) > 1)) for child in reversed(turn.children)]
        *messages, reply = turn.messages
        yield {
            "number": turn.number,
            "parent": turn.parent and turn.parent.number,
            "level": level,
            "begins": "" if turn.parent else turn.cause or "a new conversation",
            "tokens": len(turn.tokens),
            "versions": turn.versions,
            "row": rows[turn.number],
            "added": [part for message in messages for part in _parts(message)] or _prompt(turn, reply),
            "reply": _parts(reply),
        }


def _parts(message: Message) -> list[Part]:
    name = f"result of {message['name']}" if message["role"] == "tool" and "name" in message else message["role"]
    said = [("thinking", message.get("reasoning_content") or ""), (name, message.get("content") or "")]
    said += [("call", "{name}({arguments})".format(**each["function"])) for each in message.get("tool_calls") or ()]
    return [part for part in said if part[1]]


def _prompt(turn: Turn, reply: Message) -> Sequence[Part]:
    """Return what a turn added that was asked for with a text, or with token ids, which are counted."""
    if turn.text is None:
        return [("prompt", f"{len(turn.added)} token ids")]
    added = turn.text.removeprefix(turn.parent.text or "" if turn.parent else "")
    # the reply may have what ended it, which the turn's text lacks
    end = next(n for n in range(len(reply["content"]), -1, -1) if added.endswith(reply["content"][:n]))
    return [("prompt", added[: len(added) - end])]
