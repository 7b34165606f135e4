"""The result of ``verify-env``, and its console output."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from atroposlib.envs.base import BaseEnv
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipe.atropos.adapter.completion_cache import NOT_PUSHED
from recipe.atropos.data.rows import ConversionReport, Row

_SHOWN_IDS = 12  # at each end of a prompt or an answer
_SHOWN_TEXT = 2000  # characters of an item or a raw reply


@dataclass
class Exchange:
    """A request to the server and its reply. ``messages`` are those from which the prompt was built."""

    path: str
    request: Mapping[str, Any]
    status: int
    reply: Any
    seconds: float
    messages: list[dict[str, Any]] | None = None

    @property
    def answers(self) -> list[tuple[list[int], list[float]]]:
        """Token ids and logprobs of each choice; empty if the reply has no token ids."""
        replies = self.reply if isinstance(self.reply, list) else [self.reply]
        if self.path != "/generate" or self.status != 200:
            return []
        pairs = [reply["meta_info"].get("output_token_logprobs") or [] for reply in replies]
        return [([token for _, token, *_ in pair], [value for value, *_ in pair]) for pair in pairs]


@dataclass
class Verified:
    """The exchanges, groups and rows that resulted from one item."""

    env: BaseEnv
    item: Any
    exchanges: list[Exchange]
    returned: Any = None
    posted: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # by the environment itself
    warnings: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    report: ConversionReport = field(default_factory=ConversionReport)
    not_sampled: list[str] = field(default_factory=list)  # trained spans found in no reply
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether there are rows to train on, all sampled by the server, and no error."""
        return self.error is None and bool(self.rows) and not self.not_sampled


def show(result: Verified, console: Console, table: bool = False) -> None:
    """Print the result; ``table``: also a line for each token of the rows."""
    env, tokenizer = result.env, result.env.tokenizer
    config = env.config
    console.print(
        f"{type(env).__name__} of {type(env).__module__}: group_size {config.group_size}, tokenizer "
        f"{config.tokenizer_name}, max_token_length {config.max_token_length}",
        markup=False,
    )
    console.print(f"item: {result.item!r:.{_SHOWN_TEXT}}", markup=False)
    for number, exchange in enumerate(result.exchanges):
        console.rule(f"call {number}: what the environment asked, what the server answered", align="left")
        _show_exchange(exchange, console, tokenizer)
    console.rule("what the environment made of it", align="left")
    _show_groups(result, console)
    console.rule("what the trainer would read", align="left")
    _show_rows(result, console, tokenizer, table)
    console.rule("what was left out, and why", align="left")
    reasons = [
        *([] if result.returned else [f"collect_trajectories made {result.returned!r} of the item: no group"]),
        *(f"the environment's count {name}: {n}" for name, n in result.counts.items()),
        *(f"the log: {message}" for message in result.warnings),
        *(f"the trainer dropped {n} sequences as {reason}" for reason, n in result.report.dropped.items()),
        *(f"the trainer: {message}" for message in result.report.messages),
        *(f"{n} rows with {event}" for event, n in result.report.events.items()),
        *(f"trained on, but in no reply: {span}" for span in result.not_sampled),
    ]
    for reason in reasons or ["nothing"]:
        console.print(f"- {reason}", markup=False)
    if result.error is not None:
        console.print(Text("".join(traceback.format_exception(result.error)), style="red"))
    trained = sum(int(row.mask.sum()) for row in result.rows)
    verdict = f"{len(result.rows)} rows with {trained} trained tokens"
    if result.rows:
        verdict += ", not all of them sampled" if result.not_sampled else ", all sampled by the server"
    console.print(f"{'ok' if result.ok else 'NOT OK'}: {verdict}", markup=False)


def _show_exchange(exchange: Exchange, console: Console, tokenizer: Any) -> None:
    request = dict(exchange.request)
    ids = request.pop("input_ids", None)
    arguments = {k: v for k, v in request.items() if k not in ("messages", "prompt")}
    console.print(
        f"POST {exchange.path} {orjson.dumps(arguments).decode()}: HTTP {exchange.status} after "
        f"{exchange.seconds:.2f} s",
        markup=False,
    )
    if exchange.messages is None:
        console.print("messages: none, the environment wrote the prompt")
    for message in exchange.messages or []:
        console.print(f"  {message.get('role')}: {message.get('content')}", markup=False)
    if ids is None:
        console.print(f"prompt, as text: {request.get('prompt')}", markup=False)
    else:
        console.print(f"prompt, {len(ids)} tokens: {_brief_ids(ids)}", markup=False)
        console.print(Text(tokenizer.decode(ids), style="bright_black"))
    if not exchange.answers:
        console.print(f"answer without token ids: {exchange.reply!r:.{_SHOWN_TEXT}}", markup=False)
    for choice, (sampled, _) in enumerate(exchange.answers):
        reply = exchange.reply[choice] if isinstance(exchange.reply, list) else exchange.reply
        meta = reply["meta_info"]
        console.print(
            f"answer {choice}, {len(sampled)} tokens, {(meta.get('finish_reason') or {}).get('type')}, weight version "
            f"{meta.get('weight_version')}: {_brief_ids(sampled)}",
            markup=False,
        )
        console.print(Text(tokenizer.decode(sampled), style="green"))


def _show_groups(result: Verified, console: Console) -> None:
    returned = result.returned if isinstance(result.returned, list) else [result.returned]
    for number, group in enumerate(returned):
        became = f"scores {group['scores']}" if group else f"{group!r}, so nothing is sent"
        console.print(f"group {number}: {became}", markup=False)
    console.print(f"sent: {len(result.posted)} of {len(returned)} groups")
    for number, group in enumerate(result.posted):
        overrides = orjson.dumps(group.get("group_overrides")).decode()
        console.print(f"sent group {number}: scores {group['scores']}, group_overrides {overrides}", markup=False)


def _show_rows(result: Verified, console: Console, tokenizer: Any, table: bool) -> None:
    if not result.rows:
        console.print("no row")
        return
    console.print("grey: not trained on; green: trained on")
    for number, row in enumerate(result.rows):
        console.print(
            f"row {number} of group {row.uid}: score {row.score:g}, {len(row.prompt)} tokens of prompt, "
            f"{len(row.response)} of response, {int(row.mask.sum())} trained, "
            f"{'with' if row.log_probs is not None else 'WITHOUT'} logprobs, weight versions {row.versions[0]} to "
            f"{row.versions[1]}{' (not pushed by a trainer)' if row.versions[0] == NOT_PUSHED else ''}",
            markup=False,
        )
        response = [
            (tokenizer.decode([token]), "black on green" if trained else "bright_black")
            for token, trained in zip(row.response.tolist(), row.mask.tolist(), strict=True)
        ]
        console.print(Text.assemble((tokenizer.decode(row.prompt.tolist()), "bright_black"), *response))
        if table:
            grid = Table("position", "id", "token", "trained", "logprob")
            for at, (token, trained) in enumerate(zip(row.response.tolist(), row.mask.tolist(), strict=True)):
                logprob = f"{row.log_probs[at]:.4f}" if trained and row.log_probs is not None else ""
                cells = [str(len(row.prompt) + at), str(token), Text(repr(tokenizer.decode([token])))]
                grid.add_row(*cells, "yes" if trained else "", logprob)
            console.print(grid)


def _brief_ids(ids: Sequence[int]) -> str:
    if len(ids) <= 2 * _SHOWN_IDS:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:_SHOWN_IDS]))} ... {' '.join(map(str, ids[-_SHOWN_IDS:]))}"
