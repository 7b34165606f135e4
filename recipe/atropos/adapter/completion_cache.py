"""Cache of sampled replies, which finds them again in later prompts and in posted sequences.

It keeps each reply's tokens, logprobs, context, weight versions and sampling parameters. An environment sees a reply's
text and continues with that: in the next prompt, or in a sequence that it posts. Encoded again, a text need not give
the tokens that were sampled. ``trace`` restores them, in prompts and in posted sequences by the same rule, so that a
reply appears in every later context as it was sampled:

- A reply is considered only right after its exact context, in which earlier replies are already restored.
- There it matches if its tokens follow or, up to the end of the turn (the next special token), its text, apart from
  whitespace at both ends (many environments strip it); also if the environment cut it short, continued the same turn,
  or changed only whitespace (as when it serializes a tool call's JSON again).
- If several match, those of the same item come first, then the longest text, then a reply whose exact tokens follow.
- Sampled tokens are restored whole, with the end-of-turn token, which is not duplicated if the text has it too.
- Where one token holds the end of the prompt and the beginning of the reply, as newlines merge, the text of both is
  matched, for replies of the same item, and both are restored.

A lookup is by a hash of all preceding tokens, computed for every position at once, and verified against the tokens.
"""

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from recipe.atropos.data.rows import trained_spans
from recipe.atropos.data.sampling import SamplingParams, default_temperature
from recipe.atropos.data.token_keys import key_of, keys_of

TRAINING = 16_000_000  # capacity in tokens, prompts included; about 20 bytes each
EVALUATION = 1_000_000

_TEMPLATE = 8  # tokens, at most, that a template puts behind a message
_SCANNED = 512  # keys that are looked up at once

Logprobs = Sequence[float] | None


Item = list["Completion"]  # those that were sampled for one item of an environment, by any of its tasks
ITEM: ContextVar[Item | None] = ContextVar("item", default=None)  # of the current task


@dataclass(eq=False)
class Completion:
    """One reply: its tokens (n,) and their logprobs (n,), n >= 1.

    ``texts`` are what an environment may have seen of it: with and without a stop string at the end. ``versions`` are
    the oldest and newest weight version that sampled it, ``sampling`` its request's parameters; None if unknown.
    """

    prompt: np.ndarray  # (p,) int32
    tokens: np.ndarray  # (n,) int32
    logprobs: np.ndarray  # (n,) float64
    texts: tuple[str, ...]
    versions: tuple[int, int] | None = None
    sampling: SamplingParams | None = None
    item: Item | None = None
    turn: int = 0  # position behind the prompt's last special token
    turn_key: int = 0  # ``key_of`` the tokens before it
    continued: bool = False  # a later prompt contains it
    posted: int = 0  # number of times that it was found in posted sequences

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs) >= 1, "a completion has tokens, and a logprob for each"
        self.stripped = {text.strip() for text in self.texts}


class Piece(NamedTuple):
    """``tokens`` that replace the positions ``start`` to ``end`` of a sequence.

    With a completion, they are its first sampled tokens; without, they were not sampled. ``start`` equals ``end`` for
    tokens without positions of their own: text with which an environment continued a turn, encoded after the reply.
    The end of a prompt that was encoded together with the reply may have any number of tokens.
    ``context``: whether they follow exactly the tokens that they were sampled after.
    """

    start: int
    end: int
    tokens: list[int]
    completion: Completion | None = None
    context: bool = True


class _Fit(NamedTuple):
    """A completion's match: ``kept`` of its tokens replace what is before ``end``; ``rest`` is the text after it."""

    end: int
    kept: int
    rest: str
    rank: tuple


@dataclass
class CompletionCache:
    """The newest completions, up to ``capacity`` tokens with their prompts. ``tokenizer`` is the policy's."""

    tokenizer: Any
    capacity: int = TRAINING
    _by_prompt: dict[int, deque[Completion]] = field(default_factory=dict)
    _order: deque[tuple[Completion, int]] = field(default_factory=deque)
    _size: int = 0

    def __post_init__(self) -> None:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(self.tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    # ------------------------------------------------------------------ storage

    def add(
        self,
        prompt: np.ndarray,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        text: str | None = None,
        versions: tuple[int, int] | None = None,
        sampling: SamplingParams | None = None,
    ) -> Completion:
        """Store a reply of the current item. Give the replies to one request the same ``prompt``, (p,) int32."""
        texts, item, keys = {text, self._decode(tokens)} - {None}, ITEM.get(), keys_of(prompt)
        turn = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in self.special), 0)
        completion = Completion(
            prompt,
            np.array(tokens, np.int32),
            np.array(logprobs),
            tuple(texts),
            versions,
            sampling,
            item,
            turn,
            turn_key=int(keys[turn]),
        )
        key = int(keys[-1])
        self._by_prompt.setdefault(key, deque()).append(completion)
        self._order.append((completion, key))
        self._size += len(prompt) + len(tokens)
        if item is not None:
            item.append(completion)
        while self._size > self.capacity and len(self._order) > 1:
            oldest, key = self._order.popleft()
            self._size -= len(oldest.prompt) + len(oldest.tokens)
            self._by_prompt[key].popleft()  # each deque is in insertion order
            if not self._by_prompt[key]:
                del self._by_prompt[key]
        return completion

    def __len__(self) -> int:
        return len(self._order)

    # ------------------------------------------------------------------ lookup

    def pieces(self, ids: Sequence[int], masks: Sequence[int], logprobs: Logprobs = None) -> Iterator[Piece]:
        """Yield a posted sequence's pieces by ``trace`` or, for missed trained spans, ``find_in_other_context``."""
        for piece in self.trace(ids, logprobs):
            at = piece.start
            as_posted = piece.completion is None and piece.tokens == list(ids[piece.start : piece.end])
            for start, end in trained_spans(masks[piece.start : piece.end]) if as_posted else ():
                if found := self.find_in_other_context(ids, piece.start + start, piece.start + end, logprobs):
                    if found[0].start > at:
                        yield Piece(at, found[0].start, list(ids[at : found[0].start]))
                    yield from found
                    at = found[-1].end
            if at == piece.start:
                yield piece
            elif at < piece.end:
                yield Piece(at, piece.end, list(ids[at : piece.end]))

    def restore_sampled(self, ids: Sequence[int], prefer: Collection[int] = ()) -> list[int]:
        """Return a prompt with its replies as they were sampled.

        ``prefer`` are keys (``key_of``) of sequences; replies that complete one of these are preferred.
        """
        pieces = self.trace(ids, None, prefer, prompt=True)
        for piece in pieces:
            if piece.completion is not None:
                piece.completion.continued = True
        return [token for piece in pieces for token in piece.tokens]

    def trace(
        self, ids: Sequence[int], logprobs: Logprobs = None, prefer: Collection[int] = (), prompt: bool = False
    ) -> list[Piece]:
        """Split ``ids``, in order, into pieces that were sampled and pieces that were not.

        Given ``logprobs`` for ``ids``, choose among replies with the same tokens the one that has the same logprobs.
        ``prefer``: see ``restore_sampled``; ``prompt``: ``ids`` are a prompt, which may end within a turn.
        """
        work, origin = [int(token) for token in ids], list(range(len(ids) + 1))  # origin: positions in ids
        pieces: list[Piece] = []
        whole = np.array(work, np.int32)  # all tokens so far, as they were sampled, and what is left of ``work``

        def next_from(at: int) -> tuple[int, _Fit, Completion] | None:
            """Return the first position where a completion fits, and the best one; None if there is none."""
            for low in range(done, len(keys), _SCANNED):
                for place, key in enumerate(keys[low : low + _SCANNED].tolist(), low):
                    if candidates := self._by_prompt.get(key):
                        start = at + place - done
                        there = [c for c in candidates if np.array_equal(c.prompt, whole[:place])]
                        given = None if logprobs is None else logprobs[origin[start] :]
                        if (best := self._best(there, work, start, given, prefer, prompt)) is not None:
                            return start, *best
            return None

        at = 0
        while True:
            keys, done = keys_of(whole)[:-1], len(whole) - len(work) + at
            found = next_from(at)
            until = len(work) if found is None else found[0]
            if unmerged := self._unmerge(whole, keys, done, work, origin, at, until, prompt):
                start, tail, rest, positions = unmerged
                pieces += [*_unsampled(work, origin, at, start), Piece(origin[start], positions[0], tail)]
                whole = np.append(whole[:done], np.array(work[at:start] + tail + rest, np.int32))
                work, origin, at = rest, positions, 0
                continue
            if found is None:
                return pieces + _unsampled(work, origin, at, len(work))
            start, fit, completion = found
            pieces += _unsampled(work, origin, at, start)
            sampled = completion.tokens[: fit.kept]
            rest = self.tokenizer.encode(fit.rest, add_special_tokens=False) if fit.rest else []
            head, behind = whole[: done + start - at], whole[done + fit.end - at :]
            whole = np.concatenate((head, sampled, np.array(rest, np.int32), behind))
            at = fit.end - len(rest)
            same = at > start and work[at : fit.end] == rest  # only the tokens before the rest differ
            pieces.append(Piece(origin[start], origin[at if same else fit.end], sampled.tolist(), completion))
            if not same:
                work, origin = rest + work[fit.end :], [origin[fit.end]] * len(rest) + origin[fit.end :]
                at = 0

    def _unmerge(
        self,
        whole: np.ndarray,
        keys: np.ndarray,
        done: int,
        work: list[int],
        origin: list[int],
        at: int,
        until: int,
        prompt: bool,
    ) -> tuple[int, list[int], list[int], list[int]] | None:
        """Find a reply whose first token in ``work`` holds the end of its prompt too, in a turn that ends by ``until``.

        Returns where that token is, the prompt's tokens from there on, and what is behind them, with its positions.
        """
        own = ITEM.get() or ()
        own = [c for c in own if done < len(c.prompt) and c.turn - done < until - at and keys[c.turn] == c.turn_key]
        for known in {id(completion.prompt): completion.prompt for completion in own}.values():
            size = min(len(known), len(whole))
            same = int(np.argmin(np.append(known[:size] == whole[:size], False)))
            start, tail = at + same - done, known[same:].tolist()
            end = next((i for i in range(max(at, start), len(work)) if work[i] in self.special), len(work))
            if not at <= start < end <= until or not tail or not self.special.isdisjoint(tail):
                continue
            text, first = self._decode(work[start:end]), self._decode(tail)
            turn = self.tokenizer.encode(text.removeprefix(first), add_special_tokens=False)
            rest = turn + work[end:]
            there = [completion for completion in own if completion.prompt is known]
            if text.startswith(first) and self._best(there, rest, 0, None, prompt=prompt) is not None:
                begin = end - len(os.path.commonprefix([work[start:end][::-1], turn[::-1]]))
                return start, tail, rest, [origin[begin]] * (len(rest) - len(work) + begin) + origin[begin:]
        return None

    def _best(
        self,
        candidates: Sequence[Completion],
        work: list[int],
        start: int,
        given: Logprobs,
        prefer: Collection[int] = (),
        prompt: bool = False,
    ) -> tuple[_Fit, Completion] | None:
        """Return the candidate that fits best from ``start`` on, where ``given`` begins; None if none fits.

        Those of another item, as when a group is posted later, must fit whole. Of two that fit as well, as a greedy
        baseline and a sampled reply, it is the one of the trainer's temperature.
        """
        item = ITEM.get()
        end = next((i for i in range(start, len(work)) if work[i] in self.special), len(work))
        text = self._decode(work[start:end]) if candidates else ""
        for own in (True, False):
            found = []
            for order, completion in [(i, c) for i, c in enumerate(candidates) if (c.item is item) == own]:
                fit = self._fit(completion, work, start, end, text, prompt)
                if fit is None or fit.end <= start:
                    continue
                whole, size, same_tokens = fit.rank
                if not own and (not whole or fit.rest):
                    continue  # likely a coincidence
                kept_tokens, kept_logprobs = completion.tokens[: fit.kept], completion.logprobs[: fit.kept].tolist()
                preferred = bool(prefer) and key_of(np.append(completion.prompt, kept_tokens)) in prefer
                same_logprobs = given is not None and list(given[: fit.kept]) == kept_logprobs
                # A completion that later prompts contain must be found in what is posted. Use each of the others once.
                first = -order if own and item is not None else order
                trained = completion.sampling is not None and completion.sampling.temperature == default_temperature()
                rank = (whole, size, preferred, same_tokens, same_logprobs, trained, text in completion.texts)
                found.append((fit._replace(rank=(*rank, completion.continued, -completion.posted, first)), completion))
            if found:
                return max(found, key=lambda one: one[0].rank)
        return None

    def _fit(
        self, completion: Completion, work: list[int], start: int, end: int, text: str, prompt: bool
    ) -> _Fit | None:
        """Return how a completion fits from ``start`` on, in a turn that ends at ``end`` and has ``text``.

        If an environment continues the same turn after a reply, the reply loses its end-of-turn token. The rank is (not
        cut short, the length of its text, whether its exact tokens follow).
        """
        tokens = completion.tokens.tolist()
        size = max(map(len, completion.stripped))
        if work[start : start + len(tokens)] == tokens:
            return _Fit(start + len(tokens), len(tokens), "", (True, size, True))
        kept = self.unended(tokens)
        same, dense = text.strip() in completion.stripped, "".join(text.split())
        if same or (dense and any(dense == "".join(known.split()) for known in completion.texts)):
            rank = (True, size if same else 0, False)
            if prompt and end == len(work):
                return _Fit(end, kept, "", rank) if kept else None
            return _Fit(end + (work[end : end + 1] == tokens[-1:]), len(tokens), "", rank)
        turn = text.lstrip()
        for known in sorted(completion.stripped | {t.lstrip() for t in completion.texts}, key=len, reverse=True):
            if kept and known.strip() and turn.startswith(known):
                return _Fit(end, kept, turn[len(known) :], (True, len(known.strip()), False))
        if work[start:end] == tokens[: end - start]:
            return _Fit(end, end - start, "", (False, end - start, True))
        return None

    def unended(self, tokens: list[int]) -> int:
        """Return the number of tokens before the end-of-turn token."""
        return len(tokens) - (tokens[-1] in self.special)

    def find_in_other_context(self, ids: Sequence[int], start: int, end: int, logprobs: Logprobs = None) -> list[Piece]:
        """Return a span's pieces by a reply that was sampled in another context; [] if there is none.

        The reply must be of the same item and have the span's text, or else a text that the span begins or ends with
        and that is at least half of it, as when the environment wrote the start of the answer itself.
        """
        work = [int(token) for token in ids[:end]]
        span = self._decode(work[start:]).strip()
        own = ITEM.get() or ()
        same = [completion for completion in own if span in completion.stripped] if span else []
        best = self._best(same, work, start, None if logprobs is None else logprobs[start:])
        if best is not None and best[0].rank[0] and not best[0].rest:
            fit, completion = best
            return [Piece(start, fit.end, completion.tokens[: fit.kept].tolist(), completion, context=False)]
        turn = next((i for i in range(start, end) if work[i] in self.special), end)
        text = self._decode(work[start:turn]).strip()
        parts = [
            (len(part), part, completion)
            for completion in own
            for part in completion.stripped
            if part
            and len(text) <= 2 * len(part)
            and (text.endswith(part) or text.startswith(part))
            or (turn < end and self._begun(completion, text, part))
        ]
        if not parts:
            return []
        _, part, completion = max(parts, key=lambda found: (found[0], -found[2].posted))
        tokens = completion.tokens.tolist()
        if text.endswith(part):
            first = self.tokenizer.encode(text.removesuffix(part), add_special_tokens=False)
            stop = turn + (work[turn : turn + 1] == tokens[-1:])
            return [Piece(start, start, first), Piece(start, stop, tokens, completion, context=False)]
        kept = self.unended(tokens)
        last = self.tokenizer.encode(text[len(part) :], add_special_tokens=False)
        return [Piece(start, turn, tokens[:kept], completion, context=False), Piece(turn, turn, last)] if kept else []

    def _begun(self, completion: Completion, text: str, part: str) -> bool:
        """Return whether ``text`` is what the last message of a completion's prompt begins, with ``part`` behind it."""
        begun = text.removesuffix(part).strip() if text.endswith(part) else ""
        tail = completion.prompt[-len(self.tokenizer.encode(begun)) - _TEMPLATE :]
        return bool(begun) and self._decode(tail).strip().endswith(begun)

    def is_part(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of ``tokens`` ends a longer reply of the item, as without its thinking."""
        text = self._decode(tokens).strip()
        return any(known.endswith(text) for completion in ITEM.get() or () for known in completion.stripped)

    def is_template(self, tokens: Sequence[int]) -> bool:
        """Return whether ``tokens`` are only what templates add around text: special tokens and whitespace."""
        return not self._decode(tokens).strip()

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


def _unsampled(work: list[int], origin: list[int], start: int, end: int) -> list[Piece]:
    """Return the tokens in between as pieces, separating those without positions of their own."""
    own = next((i for i in range(start, end) if origin[i + 1] > origin[i]), end)
    pieces = (Piece(origin[a], origin[b], work[a:b]) for a, b in ((start, own), (own, end)))
    return [piece for piece in pieces if piece.tokens]
