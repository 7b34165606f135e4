"""Restore a group as the policy sampled it: each trained token with its logprob, weight version and parameters.

All of an environment's calls to its SGLang servers use token ids and are cached (``recorded_calls``,
``completion_cache``). Before a group is sent, each trained span is looked up:

- A reply that appears there token for token stays, with the logprobs that it was sampled with; if the environment gives
  different ones, that is counted (``other_logprobs``).
- A reply that was re-encoded from its text is replaced by the sampled tokens. What templates add to it, such as a
  newline after the end of the turn, stays and is not trained on. Advantages that are equal over the reply are carried
  over; with other per-token values, the sampled tokens are not trained on (``not_aligned``).
- A reply that the environment put into another context (``other_context``), such as another prompt or none, gets its
  own prompt back if it is the first of its sequence, since its logprobs do not hold in another. A later one stays.
- Tokens that nobody sampled, or that came from a server or route without token ids, are not trained on
  (``not_sampled``); neither is the end of a reply whose beginning was removed, as a template removes thinking
  (``partial_reply``). A group with nothing left to train on is refused, as ``partial_reply`` or ``not_sampled``.

These names, and ``retokenized``, are counts of spans in ``env.report``.

``group_overrides`` then has these lists over the group's sequences:

- ``policy_version_min`` and ``policy_version_max``: the oldest and the newest weight version among the trained tokens,
  None if one of them is unknown. SGLang 0.5.19 and later report which version sampled each token; earlier ones report
  one per reply, which holds for all its tokens, because servers are paused in mode "abort" there.
- ``sampling_params``: the distinct parameters that they were sampled with (``recipe.atropos.data.sampling``).
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

from atroposlib.envs.base import ScoredDataGroup
from transformers import PreTrainedTokenizerBase

from recipe.atropos.adapter.completion_cache import Completion, CompletionCache
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import IGNORED, trained_spans
from recipe.atropos.run.reporting import EnvReport
from recipe.atropos.utils.tasks import together

_OTHER = 1e-3  # from this difference on, a logprob counts as different from the reply's
_NOT_SAMPLED = 1.0  # the logprob that atroposlib writes where there is none
_ROUNDS = 3  # attempts to fill a group in which trajectories are None

# Per-token fields, and the default for a token without a value.
_PER_TOKEN: dict[str, Any] = {"advantages": 0.0, "ref_logprobs": 0.0, "distill_token_ids": [], "distill_logprobs": []}


@dataclass
class RestoredRow:
    """One sequence as it is sent: ``tokens``, ``masks``, ``logprobs`` and each list of ``values`` are equally long.

    ``values``: the per-token fields that the environment gave; ``replies``: those that the trained tokens come from.
    """

    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    values: dict[str, list] = field(default_factory=dict)
    replies: list[Completion] = field(default_factory=list)

    @property
    def versions(self) -> tuple[int, int] | tuple[None, None]:
        """(oldest, newest) weight version of the trained tokens; None where there are none, or one is unknown."""
        found = [reply.versions for reply in self.replies]
        return (None, None) if not found or None in found else (min(v[0] for v in found), max(v[1] for v in found))

    @property
    def sampling(self) -> list[dict[str, Any]] | None:
        """The distinct sampling parameters of the trained tokens, in the order of turns; None as for ``versions``."""
        found = [reply.sampling for reply in self.replies]
        return None if not found or None in found else [params.to_mapping() for params in dict.fromkeys(found)]

    def add(
        self,
        tokens: list[int],
        flags: list[bool] | None = None,
        logprobs: list[float] | None = None,
        values: dict[str, list] | None = None,
    ) -> None:
        """Append ``tokens``; without ``flags``, they are not trained on, and other fields not given get defaults."""
        size = len(tokens)
        self.tokens += tokens
        self.masks += [token if flag else IGNORED for token, flag in zip(tokens, flags or [False] * size, strict=True)]
        self.logprobs += logprobs or [_NOT_SAMPLED] * size
        for name, column in self.values.items():
            column += (values or {}).get(name) or [_PER_TOKEN[name]] * size


def restore(
    cache: CompletionCache,
    tokens: Sequence[int],
    masks: Sequence[int],
    logprobs: Sequence[float] | None,
    values: dict[str, Sequence],
    counts: Counter[str],
) -> RestoredRow:
    """Return a sequence as the policy sampled it, trained on at most where the environment wants it.

    ``logprobs`` and ``values`` are what the environment gives for ``tokens``; ``counts`` are of events.
    """
    ids = [int(token) for token in tokens]
    row = RestoredRow(values={name: [] for name in values})
    for piece in cache.pieces(ids, masks, logprobs):
        completion, place = piece.completion, slice(piece.start, piece.end)
        posted, flags = ids[place], [mask != IGNORED for mask in masks[place]]
        given = None if logprobs is None else list(logprobs[place])
        columns = {name: list(column[place]) for name, column in values.items()}
        if not posted:  # within a turn: as the tokens next to it
            beside = [i for i in (piece.start - 1, piece.start) if i < len(ids) and masks[i] != IGNORED]
            flags = [True] * len(beside) or [False]
            columns = {name: [column[i] for i in beside] for name, column in values.items()}
        if completion is None:
            same = piece.tokens == posted  # else a prompt's end that was encoded together with the reply
            wanted = [posted[start:end] for start, end in trained_spans(masks[place])] if same else []
            wanted = [
                span for span in (wanted if posted or not any(flags) else [piece.tokens]) if not cache.is_template(span)
            ]
            if wanted:
                counts["partial_reply" if all(map(cache.is_part, wanted)) else "not_sampled"] += 1
            row.add(piece.tokens, None, given if same else None, columns if same else None)
            continue
        if piece.tokens != posted:
            moved = _moved(cache, piece.tokens, posted, flags, columns)
            if moved is None:
                counts["not_aligned"] += 1
                row.add(piece.tokens)
                continue
            (flags, columns), given = moved, None
        if any(flags):
            completion.posted += 1
            if not piece.context:
                counts["other_context"] += 1
                if all(mask == IGNORED for mask in row.masks):
                    row = RestoredRow(values={name: [] for name in values})
                    row.add(completion.prompt.tolist())
            row.replies.append(completion)
            if piece.tokens != posted:
                counts["retokenized"] += 1
        own = completion.logprobs.tolist()
        found = list(zip(flags, given or own, own, strict=False))  # a reply that was cut short has more logprobs
        valid = [(a, b) for flag, a, b in found if flag and isinstance(a, int | float) and -math.inf < a <= 0]
        if any(abs(a - b) > _OTHER for a, b in valid):
            counts["other_logprobs"] += 1
        logprobs_here = [value if flag else _NOT_SAMPLED for flag, _, value in found]
        row.add(piece.tokens, flags, logprobs_here, columns)
    return row


def _moved(
    cache: CompletionCache, tokens: list[int], posted: list[int], flags: list[bool], columns: dict[str, list]
) -> tuple[list[bool], dict[str, list]] | None:
    """Return flags and values for sampled ``tokens`` that replace ``posted``; None if they cannot be carried over."""
    content = {flag for token, flag in zip(posted, flags, strict=False) if token not in cache.special} or set(flags)
    if len(content) > 1:
        return None
    moved = [*content] * len(tokens)
    if posted and tokens[-1] in cache.special and posted[-1] in cache.special:
        moved[-1] = flags[-1]
    if not any(moved) or not columns:
        return moved, {}
    advantages = {value for value, flag in zip(columns.get("advantages", ()), flags, strict=False) if flag}
    if len(advantages) != 1 or columns.keys() != {"advantages"}:
        return None
    return moved, {"advantages": [*advantages] * len(tokens)}


def restore_group(cache: CompletionCache, group: dict[str, Any], counts: Counter[str], env_name: str | None) -> None:
    """Restore a group as the policy sampled it, and record its origin in ``group_overrides``; see the module docstring.

    What the environment sets there itself stays. Events are added to ``counts``.

    Raises:
        RefusedGroup: nothing of it can be trained on.
    """
    rows, before = [], counts[Reason.PARTIAL_REPLY]
    for i, sequence in enumerate(group["tokens"]):
        values = {name: column for name in _PER_TOKEN if (column := _over(group, name, i)) is not None}
        logprobs = _over(group, "inference_logprobs", i)
        rows.append(restore(cache, sequence, group["masks"][i], logprobs, values, counts))
    if not any(row.replies for row in rows):
        reason = Reason.PARTIAL_REPLY if counts[Reason.PARTIAL_REPLY] > before else Reason.NOT_SAMPLED
        raise RefusedGroup(
            reason,
            f"none of its {len(rows)} sequences has a whole reply of an SGLang server of the environment; text of "
            "other origin, such as a data set's answers, is not trained on",
        )
    group |= {
        "tokens": [row.tokens for row in rows],
        "masks": [row.masks for row in rows],
        "inference_logprobs": [row.logprobs for row in rows],
    }
    for name in _PER_TOKEN:
        if group.get(name):
            group[name] = [row.values.get(name, group[name][i]) for i, row in enumerate(rows)]
    origin = {
        "policy_version_min": [row.versions[0] for row in rows],
        "policy_version_max": [row.versions[1] for row in rows],
        "sampling_params": [row.sampling for row in rows],
    } | ({"env_name": env_name} if env_name else {})
    group["group_overrides"] = origin | (group.get("group_overrides") or {})


# ---------------------------------------------------------------------- groups of single trajectories


async def collect_each(
    collect: Callable[[Any], Awaitable[tuple[Any, list]]], item: Any, group_size: int, report: EnvReport
) -> tuple[ScoredDataGroup | None, list]:
    """Replace BaseEnv's ``collect_trajectories``: keep every field, and retry trajectories that are None.

    Where one fails, the others end. If the group stays incomplete, refuse it and return None. Raises ValueError if a
    trajectory is no dict.
    """
    found: list[dict] = []
    backlog: list[Any] = []
    for _ in range(_ROUNDS):
        missing = group_size - len(found)
        for trajectory, more in await together(collect(item) for _ in range(missing)):
            backlog.extend(more)
            if isinstance(trajectory, dict):
                found.append(trajectory)
            elif trajectory is not None:
                raise ValueError(f"collect_trajectory gave a {type(trajectory).__name__}: give a dict or None")
        if len(found) == group_size:
            return group_of(found), backlog
        report.count("trajectories_missing", group_size - len(found))
    report.refuse(Reason.MISSING_TRAJECTORIES, f"{len(found)} of {group_size} after {_ROUNDS} tries")
    return None, backlog


def group_of(trajectories: Sequence[dict[str, Any]]) -> ScoredDataGroup:
    """Return one group of single trajectories, with all their fields.

    Raises:
        ValueError: some trajectories lack a field that others have, and it is not ``overrides``, which are filled in,
            or ``inference_logprobs``, which ``restore`` writes.
    """
    group = ScoredDataGroup(group_overrides={})
    for name in ("tokens", "masks", "scores", "messages", "overrides", "images", "inference_logprobs", *_PER_TOKEN):
        values = [trajectory.get(name) for trajectory in trajectories]
        lacking = sum(value is None for value in values)
        if name == "overrides" and lacking < len(values):
            values = [value or {} for value in values]
        elif 0 < lacking < len(values) and name != "inference_logprobs":  # restored from the replies
            raise ValueError(f"{lacking} of {len(values)} trajectories have no {name}, the others have: give it to all")
        group[name] = [] if lacking == len(values) else values
    for name in ("group_overrides", "generation_params"):
        for trajectory in trajectories:
            if trajectory.get(name) is not None:
                group.setdefault(name, {}).update(trajectory[name])
    return group


def group_of_nodes(nodes: Sequence[Any], scores: Sequence[float]) -> ScoredDataGroup:
    """Return one group of a managed server's sequences, as they were sampled."""
    return ScoredDataGroup(
        tokens=[list(node.tokens) for node in nodes],
        masks=[list(node.masked_tokens) for node in nodes],
        scores=list(scores),
        inference_logprobs=[list(node.logprobs) for node in nodes],
        group_overrides={},  # BaseEnv reads it before it sets its default
    )


def _over(group: ScoredDataGroup, name: str, row: int) -> Sequence | None:
    """Return a per-token field of one sequence; None if it is not given, or not for all of its tokens."""
    [column] = (group.get(name) or ())[row : row + 1] or [None]
    return column if hasattr(column, "__len__") and len(column) == len(group["tokens"][row]) else None


def chat_templates_give_lists() -> None:
    """Make ``apply_chat_template`` return token ids as a list unless asked otherwise, as in transformers 4.

    From version 5 on it returns a BatchEncoding, whose length is 2: ``tokenize_for_trainer`` then masks nothing and
    posts no tokens. Environments create their own tokenizers, so the base class is patched.
    """
    original = vars(PreTrainedTokenizerBase)["apply_chat_template"]
    if not isinstance(original, partialmethod):
        PreTrainedTokenizerBase.apply_chat_template = partialmethod(original, return_dict=False)
