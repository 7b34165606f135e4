"""What a session's policy sampled, as a tree over token ids.

A turn is a reply and the ids that were put before it since its parent's reply. Guarantees:

- The ids of a path are the prompt of its last turn followed by its reply, exactly as they were sent and sampled.
- Every sampled token is trained in exactly one leaf, the first that has its turn; in the others it is context. No other
  token is trained.
- A request continues the deepest turn whose history is its beginning: its messages by what they say (``same``), token
  ids and texts of prompts literally. Of several such turns (equal requests, answered equally) it continues the one with
  most turns in its path that are literally equal (reasoning and ids of calls included), of these the last.

Shapes: a added ids, n sampled tokens, L tokens of a row.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from recipe.atropos.data.rows import IGNORED
from recipe.atropos.data.sampling import SamplingParams
from recipe.atropos.sessions.messages import Message, alike, same

NO_LOGPROB = 1.0  # of a token that is not trained (atroposlib's value)


@dataclass(eq=False, kw_only=True, slots=True)
class Asking:
    """How a turn was asked for, as it is stored. ``versions`` are the oldest and the newest that sampled it.
    ``messages`` are those since the parent; ``basis`` stands for what they all depend on, None if it was asked for with
    a prompt as it is; ``text`` is this prompt, if it was a text, and the reply as its client reads it; ``prompt`` the
    text that begins a history; ``cause`` why it begins one anew, though the session has others; ``tools`` whether its
    request had some.
    """

    versions: tuple[int, int] | None
    sampling: SamplingParams
    messages: list[Message]
    text: str | None
    cause: str | None
    basis: bytes | None = None
    tools: bool = False
    prompt: str | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class Turn(Asking):
    """A reply, whose answer has the id ``reply``: ``added`` (a,) and ``tokens`` (n,) int32, ``logprobs`` (n,) float64.
    Of its ``messages`` the reply is the last.
    """

    number: int
    reply: str
    parent: "Turn | None"
    added: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    children: list["Turn"] = field(default_factory=list)
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
            if turn is not None:
                parts.append(turn._ids)
                turn._ids = None  # a path keeps its ids once
            self._ids = np.concatenate(parts[::-1])
        return self._ids

    def history(self) -> list[Message]:
        """Return the messages up to the reply, which is the last."""
        return [message for turn in self.path() for message in turn.messages]

    @property
    def thinking(self) -> bool:
        """Whether a reply of its history has reasoning."""
        return any("reasoning_content" in turn.messages[-1] for turn in self.path())

    @property
    def repeats(self) -> bool:
        """Whether the reply makes the same calls as the one before in its history, in the same words."""
        before = self.parent.messages[-1:] if self.parent else []
        replies = [each for each in (*before, *self.messages) if each["role"] == "assistant"][-2:]
        return len(replies) == 2 and "tool_calls" in replies[1] and same(*replies)


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

    def add(self, turn: Turn) -> None:
        if turn.parent is not None:
            turn.parent.children.append(turn)
        self.turns.append(turn)

    def continued(self, messages: Sequence[Message], basis: bytes | None) -> tuple[Turn | None, int]:
        """Return the deepest turn whose history are the first of ``messages``, and how many those are."""

        equal: dict[Turn | None, int] = {None: 0}  # turns of a path

        def end(turn: Turn, at: int) -> int | None:
            there = messages[at : at + len(turn.messages)]
            equal[turn] = equal[turn.parent] + (turn.messages == there)
            return at + len(there) if turn.basis == basis and alike(turn.messages, there) else None

        return self._deepest(end, equal)

    def continued_text(self, text: str) -> Turn | None:
        """Return the turn with the longest prompt and reply that ``text`` begins with."""
        found = [turn for turn in self.turns if turn.text is not None and text.startswith(turn.text)]
        return max(found, key=lambda turn: (len(turn.text or ""), turn.number), default=None)

    def continued_ids(self, ids: np.ndarray) -> tuple[Turn | None, int]:
        """Return the deepest turn whose path ``ids``, (length,) int32, begin with, and the path's length."""

        def end(turn: Turn, at: int) -> int | None:
            middle, end = at + len(turn.added), at + len(turn.added) + len(turn.tokens)
            fits = np.array_equal(ids[at:middle], turn.added) and np.array_equal(ids[middle:end], turn.tokens)
            return end if fits else None

        return self._deepest(end, {})

    def begun(self, ids: np.ndarray) -> bool:
        """Return whether ``ids``, (length,) int32, go on after the first prompt of a history."""
        first = [turn.added for turn in self.turns if turn.parent is None]
        return any(len(each) < len(ids) and np.array_equal(ids[: len(each)], each) for each in first)

    def begun_text(self, text: str) -> bool:
        """Return whether ``text`` goes on after the first prompt of a history."""
        first = [turn.prompt for turn in self.turns if turn.prompt is not None]
        return any(text.startswith(each) and text != each for each in first)

    def _deepest(
        self, end: Callable[[Turn, int], int | None], prefer: Mapping[Turn | None, int]
    ) -> tuple[Turn | None, int]:
        """Return the turn that ends last, and where; ``end(turn, at)``: where one that begins ``at`` does, None if it
        differs; of several the one with the largest number in ``prefer``.
        """
        ends: dict[Turn | None, int] = {None: 0}
        for turn in self.turns:
            if turn.parent in ends and (found := end(turn, ends[turn.parent])) is not None:
                ends[turn] = found
        return max(reversed(ends.items()), key=lambda one: (one[1], prefer.get(one[0], 0)))

    def leaves(self) -> Iterator[Leaf]:
        """Yield the rows to train on; each turn is trained in the first that has it."""
        trained: set[int] = set()
        for last in [turn for turn in self.turns if not turn.children]:
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

    def fork_cause(self, messages: Sequence[Message]) -> str | None:
        """Return why messages that continue no turn differ from the history that is most like them.

        None: it is a conversation of its own, or one that asks something again; so is a history that was cut to a
        summary without a reply: nothing in it tells it from a second agent's of the same system prompt.
        """

        def shared(history: list[Message]) -> int:
            return len(list(itertools.takewhile(bool, map(same, history, messages))))

        histories = (turn.history() for turn in self.turns if turn.basis is not None)
        best = max(histories, key=lambda history: (shared(history), len(history)), default=[])
        common = shared(best)
        replies = any(each["role"] == "assistant" for each in messages)
        own = not replies and all(each["role"] == "system" for each in best[:common])
        if not best or own or len(best) > common == len(messages):
            return None
        if common == len(best):
            return "other"  # the same messages with other tools, or other arguments of the template
        calls = [{**each, "content": ""} for each in (best[common], messages[common]) if "tool_calls" in each]
        if len(calls) == 2 and not same(*calls):
            return "tool_call_changed"
        mine, theirs = (history[common + 1 : common + 2] for history in (best, messages))
        return "message_edited" if alike(mine, theirs) or len(messages) >= len(best) else "compaction"
