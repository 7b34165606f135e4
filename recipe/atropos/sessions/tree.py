"""What a session's policy sampled, as a tree over token ids.

A turn is a reply and the ids that were put before it since its parent's reply. Guarantees:

- The ids of a path are the prompt of its last turn followed by its reply, exactly as they were sent and sampled.
- Every sampled token is trained in exactly one leaf, the first that has its turn; in the others it is context. No other
  token is trained.
- A request continues the deepest turn whose history is its beginning: its messages by what they say (``digest``), token
  ids and texts of prompts literally. Of several such turns (equal requests, answered equally) it continues the last.

Shapes: a added ids, n sampled tokens, L tokens of a row.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from recipe.atropos.data.rows import IGNORED
from recipe.atropos.data.sampling import SamplingParams

NO_LOGPROB = 1.0  # of a token that is not trained (atroposlib's value)


class Said(NamedTuple):
    """What identifies a message: 16 bytes for what it says; 16 for that and all before it; its role, or "calls" for an
    assistant's with tool calls.
    """

    digest: bytes
    key: bytes
    kind: str


@dataclass(eq=False, slots=True)
class Turn:
    """A reply, whose answer has the id ``reply``: ``added`` (a,) and ``tokens`` (n,) int32, ``logprobs`` (n,) float64.

    ``versions`` are the oldest and the newest that sampled it. ``said`` are the messages since the parent, the reply
    last, and ``message_count`` the number of those of the path; ``text`` is the prompt and the reply, if it was asked
    for with a text; ``cause`` why it begins a history anew, though the session has others; ``tools`` whether its
    request had some.
    """

    number: int
    reply: str
    parent: "Turn | None"
    added: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: tuple[int, int] | None
    sampling: SamplingParams
    said: tuple[Said, ...] = ()
    text: str | None = None
    thinking: bool = False
    cause: str | None = None
    tools: bool = False
    children: list["Turn"] = field(default_factory=list)
    message_count: int = 0
    _ids: np.ndarray | None = field(default=None, repr=False)  # of the newest turn that goes on from here

    def path(self) -> list["Turn"]:
        """Return the turns from the first of this history to this one."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> np.ndarray:
        """Return prompt and reply, (length,) int32."""
        turn, parts = self, []
        while turn is not None and turn._ids is None:
            parts += [turn.tokens, turn.added]
            turn = turn.parent
        if parts:
            known = [turn._ids] if turn is not None else []
            self._ids = np.concatenate(known + parts[::-1])
            if turn is not None:
                turn._ids = None  # a path keeps its ids once
        return self._ids

    @property
    def repeats(self) -> bool:
        """Whether the reply makes the same calls as the one before in its history, in the same words."""
        said = (*(self.parent.said[-1:] if self.parent else ()), *self.said)
        replies = [each for each in said if each.kind in ("assistant", "calls")][-2:]
        return len(replies) == 2 and replies[1].kind == "calls" and replies[0].digest == replies[1].digest

    def prompt(self) -> np.ndarray:
        """Return the ids that the reply was sampled after, (length - n,) int32."""
        return self.ids()[: -len(self.tokens)]


@dataclass(frozen=True)
class Leaf:
    """A row to train on: ``tokens`` (L,) int32, ``masks`` (L,) int32, IGNORED where they are not trained in this leaf,
    ``logprobs`` (L,) float64; ``turns`` are those that it trains.
    """

    tokens: np.ndarray
    masks: np.ndarray
    logprobs: np.ndarray
    turns: tuple[Turn, ...]

    @property
    def versions(self) -> tuple[int | None, int | None]:
        """The oldest and the newest weight version among the trained tokens; None if one of them is unknown."""
        known = [turn.versions for turn in self.turns]
        if None in known:
            return None, None
        return min(oldest for oldest, _ in known), max(newest for _, newest in known)

    @property
    def spans(self) -> list[Turn]:
        """The last turn of each run of trained tokens; where nothing was added, a turn goes on with the one before."""
        goes_on = [len(turn.added) == 0 for turn in self.turns[1:]]
        return [turn for turn, more in zip(self.turns, [*goes_on, False], strict=True) if not more]

    @property
    def sampling(self) -> list[SamplingParams]:
        """The distinct parameters that the trained tokens were sampled with."""
        return list(dict.fromkeys(turn.sampling for turn in self.turns))


class Tree:
    """The turns of a session, in the order in which they were added."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._after: dict[bytes, list[Turn]] = defaultdict(list)  # by the key of their reply

    def add(self, turn: Turn) -> None:
        turn.message_count = len(turn.said)
        if turn.parent is not None:
            turn.parent.children.append(turn)
            turn.message_count += turn.parent.message_count
        self.turns.append(turn)
        if turn.said:
            self._after[turn.said[-1].key].append(turn)

    def continued(self, said: Sequence[Said]) -> Turn | None:
        """Return the deepest turn whose messages are the first of ``said``."""
        turns = (self._after.get(one.key) for one in reversed(said))
        return next((found[-1] for found in turns if found), None)

    def continued_text(self, text: str) -> Turn | None:
        """Return the turn with the longest prompt and reply that ``text`` begins with."""
        found = [turn for turn in self.turns if turn.text is not None and text.startswith(turn.text)]
        return max(found, key=lambda turn: (len(turn.text or ""), turn.number), default=None)

    def continued_ids(self, ids: np.ndarray) -> Turn | None:
        """Return the deepest turn whose path ``ids``, (length,) int32, begin with."""
        deepest, at, level = None, 0, [turn for turn in self.turns if turn.parent is None]
        while True:
            for turn in reversed(level):
                middle, end = at + len(turn.added), at + len(turn.added) + len(turn.tokens)
                if np.array_equal(ids[at:middle], turn.added) and np.array_equal(ids[middle:end], turn.tokens):
                    deepest, at, level = turn, end, turn.children
                    break
            else:
                return deepest

    def leaves(self) -> Iterator[Leaf]:
        """Yield the rows to train on; each turn is trained in the first that has it."""
        trained: set[int] = set()
        for last in self.turns:
            if last.children:
                continue
            tokens, masks, logprobs, own = [], [], [], []
            for turn in last.path():
                new = turn.number not in trained
                own += [turn] * new
                trained.add(turn.number)
                tokens += [turn.added, turn.tokens]
                masks += [np.full_like(turn.added, IGNORED), turn.tokens if new else np.full_like(turn.tokens, IGNORED)]
                logprobs += [
                    np.full(len(turn.added), NO_LOGPROB),
                    turn.logprobs if new else np.full(len(turn.tokens), NO_LOGPROB),
                ]
            yield Leaf(np.concatenate(tokens), np.concatenate(masks), np.concatenate(logprobs), tuple(own))

    def fork_cause(self, said: Sequence[Said]) -> str | None:
        """Return why messages that continue no turn differ from the history that is most like them.

        None: it is a conversation of its own, or one that asks something again; so is a history that was cut to a
        summary without a reply: nothing in it tells it from a second agent's of the same system prompt.
        """
        best: list[Said] = []
        common = 0
        for turn in self.turns:
            history = [each for one in turn.path() for each in one.said]
            same = len(os.path.commonprefix([[one.digest for one in history], [one.digest for one in said]]))
            if (same, len(history)) > (common, len(best)):
                best, common = history, same
        replies = any(each.kind in ("assistant", "calls") for each in said)
        own = not replies and all(each.kind == "system" for each in best[:common])
        if common == len(said) or not best or own:
            return None
        if common == len(best):
            return "other"  # the same messages with other tools, or other arguments of the template
        if best[common].kind == said[common].kind == "calls":
            return "tool_call_changed"
        mine, theirs = (history[common + 1 : common + 2] for history in (best, said))
        goes_on = [one.digest for one in mine] == [one.digest for one in theirs]
        return "message_edited" if goes_on or len(said) >= len(best) else "compaction"


def identified(messages: Iterable[tuple[bytes, str]], root: bytes) -> list[Said]:
    """Return what identifies messages, given (digest, kind) of each; ``root`` stands for what they all depend on."""
    found, key = [], root
    for digest, kind in messages:
        key = hashlib.blake2b(key + digest, digest_size=16).digest()
        found.append(Said(digest, key, kind))
    return found
