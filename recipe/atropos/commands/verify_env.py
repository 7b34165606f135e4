"""Roll out one group with a real SGLang server, and show what each side saw: ``verl-atropos verify-env``.

- The environment is adapted as in a run. Each call that the adapter sends to the server is shown with its replies,
  whichever of atroposlib's methods the environment uses; those that it cannot send are counted as ``plain_route``.
- Nothing is posted anywhere. What would have been posted is read as the trainer reads it (``data.reading``).
- Whatever is dropped from the group is reported, by the environment's counts and warnings or by the trainer's.
"""

import argparse
import asyncio
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import Any

import orjson
from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from rich.console import Console
from rich.text import Text
from transformers import AutoConfig

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.adapter.recorded_calls import MESSAGES
from recipe.atropos.commands.inspect import token_table
from recipe.atropos.config.compose import given_values
from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rows import ConversionReport, Row, RowLimits, trained_spans
from recipe.atropos.errors import ConfigurationError, expected_failure
from recipe.atropos.gem.stepped_env import configured, next_item, roll_out
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.sampled import NOT_PUSHED, SampledReply
from recipe.atropos.utils.files import printable
from recipe.atropos.utils.process_exit import exit_anyway
from recipe.atropos.utils.secret import API_KEY_VARIABLE

_MOST_WARNINGS = 10_000  # then the earlier ones are forgotten
_SHOWN_IDS = 12  # at each end of a prompt or an answer
_SHOWN_TEXT = 2000  # characters of an item
_THREADS_SECONDS = 5.0  # for the environment's threads to end


@dataclass
class RecordedExchange:
    """A call to the server and its replies: none if it failed. ``messages``: those from which the prompt was built."""

    prompt: list[int]
    params: Mapping[str, Any]
    messages: list[dict[str, Any]] | None = None
    answers: list[SampledReply] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0


@dataclass
class Verified:
    """The exchanges, groups and rows that resulted from one item."""

    env: BaseEnv
    item: Any
    exchanges: list[RecordedExchange]
    returned: Any = None
    posted: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    report: ConversionReport = field(default_factory=ConversionReport)
    not_sampled: list[str] = field(default_factory=list)  # trained spans found in no reply
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether there are rows to train on, all sampled by the server, and no error."""
        return self.error is None and bool(self.rows) and not self.not_sampled


async def verify(
    target: str, model: str | None, url: str | None, overrides: Mapping[str, Any], timeout: float = 300.0
) -> Verified:
    """Roll out and score one item of ``target``; ``timeout``: seconds for setup and rollout together.

    ``model`` is the folder or name of the policy, ``url`` its server's address; None selects the environment's own. The
    server's key is $ATROPOS_API_KEY. What the environment raises is stored in the result, and so is a TimeoutError.

    Raises:
        EnvironmentTargetError, ConfigurationError: there is no such environment, or its configuration is invalid.
        InferenceError: the server does not answer.
    """
    environment = adapt(load_environment(target))
    own = {} if model is None else {"tokenizer_name": model}
    try:
        config = configured(environment, {"use_wandb": False, **overrides, **own})
    except ValueError as error:
        raise ConfigurationError(f"{target}: {error}") from error
    if url is None:
        _, servers = environment.config_init()
        server = servers[0] if isinstance(servers, list) else servers
        url = getattr(server, "base_url", None) or "http://localhost:9001"
    url = url.rstrip("/").removesuffix("/v1")
    api_key = os.environ.get(API_KEY_VARIABLE) or "x"
    await SGLangClient(url, os.environ.get(API_KEY_VARIABLE), timeout=10.0).model_info()
    server = APIServerConfig(
        model_name=config.tokenizer_name,
        tokenizer_name=config.tokenizer_name,
        base_url=f"{url}/v1",
        api_key=api_key,
        server_type="sglang",
        health_check=False,
    )
    env = environment(config=config, server_configs=[server], slurm=False, testing=False)
    posted: list[dict[str, Any]] = []

    async def keep(groups: list[Any], ticket: int | None) -> None:
        posted.extend(orjson.loads(orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY)) for group in groups)

    env._post = keep
    env.max_token_len = config.max_token_length + 1  # as ``get_server_info`` sets it
    result = Verified(env, None, _record_calls(env), posted=posted)
    warnings = BufferingHandler(_MOST_WARNINGS)
    warnings.setLevel(logging.WARNING)
    logging.getLogger().addHandler(warnings)
    try:
        async with asyncio.timeout(timeout) as limit:
            await env.setup()
            result.item = await next_item(env)
            result.returned = await roll_out(env, result.item)
            if result.returned:
                await env.handle_send_to_api(result.returned, result.item)
    except Exception as error:
        result.error = error
        if limit.expired():
            error.add_note(f"not done within --timeout={timeout:g} s")
    finally:
        logging.getLogger().removeHandler(warnings)
    result.warnings = [*dict.fromkeys(record.getMessage() for record in warnings.buffer)]
    vocabulary = AutoConfig.from_pretrained(config.tokenizer_name).get_text_config().vocab_size
    limits = RowLimits(config.max_token_length, pad_token_id=0, vocab_size=vocabulary)
    result.rows, result.report = read_groups(posted, limits)
    result.not_sampled = list(_not_sampled(posted, result.exchanges, env.tokenizer))
    return result


def _record_calls(env: BaseEnv) -> list[RecordedExchange]:
    """Record the adapter's calls to the environment's servers in the list returned."""
    exchanges: list[RecordedExchange] = []
    sample = env._calls.sample

    async def record(
        server: SGLangServer, ids: list[int], params: dict[str, Any], timeout: float | None
    ) -> list[SampledReply]:
        messages, begun = MESSAGES.get(), time.monotonic()
        exchange = RecordedExchange(
            ids, env._calls.with_temperature(params), messages and [dict(message) for message in messages]
        )
        exchanges.append(exchange)
        try:
            exchange.answers = await sample(server, ids, params, timeout)
            return exchange.answers
        except Exception as error:  # whatever it is, it is shown
            exchange.error = error
            raise
        finally:
            exchange.seconds = time.monotonic() - begun

    env._calls.sample = record
    return exchanges


def _not_sampled(
    groups: Sequence[Mapping[str, Any]], exchanges: Sequence[RecordedExchange], tokenizer: Any
) -> Iterator[str]:
    """Yield the trained spans that occur in no reply with the same logprobs."""
    answers = [answer for exchange in exchanges for answer in exchange.answers]
    for number, group in enumerate(groups):
        logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
        for row, (tokens, masks, values) in enumerate(zip(group["tokens"], group["masks"], logprobs, strict=True)):
            for start, end in trained_spans(masks):
                given = values and values[start:end]
                if not any(_occurs_in(tokens[start:end], given, each.tokens, each.logprobs) for each in answers):
                    text = tokenizer.decode(tokens[start:end])
                    yield f"group {number}, sequence {row}, positions {start} to {end - 1}: {text!r:.200}"


def _occurs_in(tokens: list[int], logprobs: list[float] | None, sampled: list[int], own: list[float]) -> bool:
    size = len(tokens)
    return any(
        sampled[at : at + size] == tokens and (not logprobs or logprobs == own[at : at + size])
        for at in range(len(sampled) - size + 1)
    )


# ---------------------------------------------------------------------- what is printed


def show(result: Verified, console: Console, table: bool = False) -> None:
    """Print the result to a console without markup; ``table``: also a line for each token of the rows."""
    env, tokenizer = result.env, result.env.tokenizer
    config = env.config
    console.print(
        f"{type(env).__name__} of {type(env).__module__}: group_size {config.group_size}, tokenizer "
        f"{config.tokenizer_name}, max_token_length {config.max_token_length}",
    )
    console.print(f"item: {result.item!r:.{_SHOWN_TEXT}}")
    for number, exchange in enumerate(result.exchanges):
        console.rule(f"call {number}: what the environment asked, what the server answered", align="left")
        _show_exchange(exchange, console, tokenizer)
    console.rule("what the environment made of it", align="left")
    _show_groups(result, console)
    console.rule("what the trainer would read", align="left")
    _show_rows(result, console, tokenizer, table)
    console.rule("what was left out, and why", align="left")
    reasons = [
        *([] if result.returned or result.error else [f"collect_trajectories made {result.returned!r}: no group"]),
        *(f"the environment's count {name}: {n}" for name, n in env.report.counts.items()),
        *(f"the log: {message}" for message in result.warnings),
        *(f"the trainer dropped {n} sequences as {reason}" for reason, n in result.report.dropped.items()),
        *(f"the trainer: {message}" for message in result.report.messages),
        *(f"{n} rows with {event}" for event, n in result.report.events.items()),
        *(f"trained on, but in no reply: {span}" for span in result.not_sampled),
    ]
    for reason in reasons or ["nothing"]:
        console.print(f"- {reason}")
    if result.error is not None:
        why = expected_failure(result.error) or "".join(traceback.format_exception(result.error))
        console.print(Text(why, style="red"))
    trained = sum(int(row.mask.sum()) for row in result.rows)
    verdict = f"{len(result.rows)} rows with {trained} trained tokens"
    if result.rows:
        verdict += ", not all of them sampled" if result.not_sampled else ", all sampled by the server"
    console.print(f"{'ok' if result.ok else 'NOT OK'}: {verdict}")


def _show_exchange(exchange: RecordedExchange, console: Console, tokenizer: Any) -> None:
    params = orjson.dumps(exchange.params, default=repr).decode()
    console.print(f"sampled with {params} in {exchange.seconds:.2f} s")
    if exchange.messages is None:
        console.print("messages: none, the environment wrote the prompt")
    for message in exchange.messages or []:
        console.print(printable(f"  {message.get('role')}: {message.get('content')}"))
    console.print(f"prompt, {len(exchange.prompt)} tokens: {_brief_ids(exchange.prompt)}")
    console.print(Text(printable(tokenizer.decode(exchange.prompt)), style="bright_black"))
    if not exchange.answers:
        console.print(f"no answer: {exchange.error or 'canceled'}")
    for choice, answer in enumerate(exchange.answers):
        versions = "unknown" if answer.versions is None else " to ".join(map(str, dict.fromkeys(answer.versions)))
        console.print(
            f"answer {choice}, {len(answer.tokens)} tokens, {answer.finish.get('type')}, weight version {versions}: "
            f"{_brief_ids(answer.tokens)}",
        )
        console.print(Text(printable(tokenizer.decode(answer.tokens)), style="green"))


def _show_groups(result: Verified, console: Console) -> None:
    returned = result.returned if isinstance(result.returned, list) else [result.returned]
    for number, group in enumerate(returned):
        scored = isinstance(group, dict) and "scores" in group
        became = f"scores {group['scores']}" if scored else f"{group!r:.{_SHOWN_TEXT}}, so nothing is sent"
        console.print(f"group {number}: {became}")
    console.print(f"sent: {len(result.posted)} of {len(returned)} groups")
    for number, group in enumerate(result.posted):
        overrides = orjson.dumps(group.get("group_overrides")).decode()
        console.print(f"sent group {number}: scores {group['scores']}, group_overrides {overrides}")


def _show_rows(result: Verified, console: Console, tokenizer: Any, table: bool) -> None:
    if not result.rows:
        console.print("no row")
        return
    console.print("gray: not trained on; green: trained on")
    for number, row in enumerate(result.rows):
        console.print(
            f"row {number} of group {row.uid}: score {row.score:g}, {len(row.prompt)} tokens of prompt, "
            f"{len(row.response)} of response, {int(row.mask.sum())} trained, "
            f"{'with' if row.log_probs is not None else 'WITHOUT'} logprobs, weight versions {row.versions[0]} to "
            f"{row.versions[1]}{' (not pushed by a trainer)' if row.versions[0] == NOT_PUSHED else ''}",
        )
        tokens = [
            {
                "position": len(row.prompt) + at,
                "id": token,
                "text": tokenizer.decode([token]),
                "trained": trained,
                "logprob": row.log_probs[at] if trained and row.log_probs is not None else None,
            }
            for at, (token, trained) in enumerate(zip(row.response.tolist(), row.mask.tolist(), strict=True))
        ]
        response = (
            (printable(token["text"]), "black on green" if token["trained"] else "bright_black") for token in tokens
        )
        console.print(Text.assemble((printable(tokenizer.decode(row.prompt.tolist())), "bright_black"), *response))
        if table:
            console.print(token_table(tokens, ["logprob"]))


def _brief_ids(ids: Sequence[int]) -> str:
    if len(ids) <= 2 * _SHOWN_IDS:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:_SHOWN_IDS]))} ... {' '.join(map(str, ids[-_SHOWN_IDS:]))}"


# ---------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", required=True, help="MODULE:Class, FILE.py or FILE.py:Class")
    parser.add_argument("--model", help="folder or name of the policy; default: the environment's own tokenizer")
    parser.add_argument("--url", help="its SGLang server or gateway; default: the environment's own")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for the whole check; default: %(default)g"
    )
    parser.add_argument("--table", action="store_true", help="also one line per token")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the environment's configuration")


def main(given: argparse.Namespace) -> int:
    """Return exit status 0 only if the rows of one item can be trained on and were sampled by the server."""
    overrides = dict(given_values(given.overrides))
    with asyncio.Runner() as runner:
        result = runner.run(verify(given.env, given.model, given.url, overrides, given.timeout))
        show(result, Console(highlight=False, markup=False), given.table)
        leaving = exit_anyway(status := 0 if result.ok else 1, _THREADS_SECONDS)  # closing the runner waits for them
    leaving.cancel()
    return status
