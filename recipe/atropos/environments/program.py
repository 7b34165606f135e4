"""Any program that calls a model, as an environment: ``environment.command="python agent.py"``.

A plain ``BaseEnv``. For each item it opens a group of sessions at the session server, runs the program once in each,
and sends the sessions' rows, which hold exactly the sampled tokens, with the rewards. Two ways:

- ``command``: a program in a folder of its own, with the item as JSON in ``$ATROPOS_ITEM``; the address and the
  session's key are in ``$OPENAI_BASE_URL`` and ``$OPENAI_API_KEY``, and in the same of ``$ANTHROPIC_``. The reward is
  the last line that it prints that holds one, a number or a mapping with ``reward`` (and ``metrics`` and
  ``turn_values``, if it likes) as JSON, or what ``score`` returns, ``MODULE:function(item, output)``, in a thread. Of
  what it prints the last 4 MB are read.
- ``agent``: ``MODULE:function``, an async ``agent(item, base_url, api_key)`` that returns the reward; OpenAI's clients
  want ``base_url`` with ``/v1``.

Guarantees:

- A program ends, with all that it started, when its time is over or the environment ends. Its time in training is what
  its item has left, if that is less: what the others of its group did is not lost with it.
- A session without a reward (the program fails, or gives none, as when it reaches a limit) is repeated once. If it
  fails again it is left out of the group and counted, with the cause; it is never scored 0.
- Training samples have the trainer's temperature and no truncation, whatever the program asks for; evaluation is
  greedy.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import math
import os
import shlex
import tempfile
import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from atroposlib.envs.base import ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.recorded_calls import cause_of
from recipe.atropos.data.sampling import SamplingParams, default_temperature
from recipe.atropos.environments.data_sets import load_dataset, read_jsonl
from recipe.atropos.environments.items import Item, ItemsEnv, ItemsEnvConfig
from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.sessions.client import SESSIONS_VARIABLE, Opened, SessionClient, scored_group
from recipe.atropos.sessions.counts import count_session
from recipe.atropos.utils.hosts import without_proxy
from recipe.atropos.utils.importing import named_function
from recipe.atropos.utils.process import start_service
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.tasks import awaited, guarded, in_own_thread, together

logger = logging.getLogger(__name__)

_TRIES = 2  # of a session
_POLL = 0.05  # s between two looks at a program
_ITEM_BYTES = 100_000  # Linux limits an environment variable to 128 KiB
_OUTPUT_BYTES = 4_000_000  # that are read of what a program prints: the last
_HELD_OUT = 0.2  # of the items, if no others are given
_SHARE = 0.9  # of an item's time; the rest is for what follows


class SessionsEnvConfig(ItemsEnvConfig):
    """The options of environments over items, and those of sessions."""

    sessions_url: str | None = Field(
        default_factory=lambda: os.environ.get(SESSIONS_VARIABLE),
        description="The session server; by default that of $ATROPOS_SESSIONS_URL, which the launcher sets",
    )
    time_limit: float = Field(
        600.0, gt=0, description="Seconds that a session may take, and 0.9 of worker_timeout at most"
    )
    max_turns: int | None = Field(None, ge=1, description="Replies of a session")
    max_tokens: int | None = Field(None, ge=1, description="Sampled tokens of a session")
    parallel: int | None = Field(None, ge=1, description="Sessions at once; by default 4 for each core, of an agent 64")


class SessionFailed(AtroposError):
    """A program gave no reward; the message is the cause under which its session is counted."""


class SessionsEnv(ItemsEnv):
    """Environment whose items are played in sessions, by a subclass's ``play``; see the module docstring."""

    @abstractmethod
    async def play(self, item: Item, opened: Opened) -> Any:
        """Let a program play an item in a session; return what ``read_reward`` takes. An exception fails the session.

        Raises:
            SessionFailed: with the cause to count.
        """

    async def setup(self) -> None:
        await super().setup()
        if self.config.sessions_url is None:
            raise ConfigurationError("--env.sessions_url is not set; give the address of the session server")
        # Else the clients of programs ask the proxy of the machine, if it has one.
        os.environ |= without_proxy(os.environ, urlsplit(self.config.sessions_url).hostname)
        self._sessions = SessionClient(self.config.sessions_url, os.environ.get(API_KEY_VARIABLE))
        slots = self.config.parallel or (64 if getattr(self.config, "agent", None) else 4 * (os.cpu_count() or 1))
        self._slots = asyncio.Semaphore(slots)
        self._most_items = 1 + math.ceil(slots / self.config.group_size)  # others would spend their time waiting

    # ------------------------------------------------------------------ groups

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Run a group of sessions on an item, and return their rows; None if all of them failed."""
        group, sampling = uuid.uuid4().hex, SamplingParams(temperature=default_temperature()).request()
        over = time.monotonic() + _SHARE * (self.config.worker_timeout if self.config.worker_timeout > 0 else math.inf)
        tries = [self._session(item, sampling, group, seq, over) for seq in range(self.config.group_size)]
        found = [outcome for outcome in await together(tries) if outcome is not None]
        return await self._group(found) if found else None, []

    async def _session(
        self, item: Item, sampling: dict[str, Any], group: str, seq: int, over: float = math.inf
    ) -> dict[str, Any] | None:
        """Return what the session server says of a session with a reward, None if it had none each time, or by the time
        ``over`` (of time.monotonic).
        """
        for _ in range(_TRIES):
            state = await self._run(item, sampling, over, group=group, seq=seq)
            if count_session(self.report, state):
                return state
        self.report.count("sessions/left_out")
        return None

    async def _run(self, item: Item, sampling: dict[str, Any], over: float, **place: Any) -> dict[str, Any]:
        """Run a session; return its state, with a reward or the cause as ``end``: a limit that it reached for one."""
        config = self.config
        longest = min(n for n in (config.max_token_length, self.max_token_len - 1) if n > 0)
        limits = {"turns": config.max_turns, "tokens": config.max_tokens, "context": longest}
        async with self._slots:
            limits["seconds"] = seconds = min(config.time_limit, max(over - time.monotonic(), _POLL))
            opened = await self._sessions.open(
                env=config.wandb_name or self.name, item=item, sampling=sampling, limits=limits, counted=True, **place
            )
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    result = await guarded(self.play(item, opened))
                return await self._sessions.end(opened.id, **read_reward(result))
            except Exception as error:  # an agent raises what it likes, also when it is canceled
                if asyncio.current_task().cancelling():
                    raise
                logger.warning("session %s failed: %r", opened.id, error)
                end = str(error) if isinstance(error, SessionFailed) else type(cause_of(error)).__name__
        return await self._sessions.end(opened.id, end="seconds" if limit.expired() else end)

    async def _group(self, outcomes: list[dict[str, Any]]) -> ScoredDataGroup:
        found = [(one["id"], one["reward"], await self._sessions.rows(one["id"])) for one in outcomes]
        return ScoredDataGroup(**scored_group(found, self.config.wandb_name or self.name))

    # ------------------------------------------------------------------ evaluation

    async def eval_item(self, item: Item) -> dict[str, Any]:
        """Run one session, greedily; without a score if it fails each time, which is not the same as a bad one."""
        outcome = await self._session(
            item, SamplingParams(temperature=self.eval_temperature).request(), uuid.uuid4().hex, 0
        )
        if outcome is None:
            return {"item": item}
        return {"item": item, "score": outcome["reward"], "session": outcome["id"], "turns": outcome["turns"]}

    def eval_summary(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Return the mean reward of the sessions that ended with one.

        Raises:
            SessionFailed: none did.
        """
        scores = [sample["score"] for sample in samples if "score" in sample]
        if not scores:
            raise SessionFailed(f"all {len(samples)} sessions of the evaluation failed: {self.report}")
        return {"eval/reward": sum(scores) / len(scores), "eval/failed": len(samples) - len(scores)}


class ProgramEnvConfig(SessionsEnvConfig):
    """The options of environments of sessions, and those of programs."""

    command: str | None = Field(None, description="The program, run in a folder of its own for each session")
    agent: str | None = Field(None, description="MODULE:function, an async agent(item, base_url, api_key) -> reward")
    score: str | None = Field(None, description="MODULE:function(item, output) -> reward, for a command")
    items: str | None = Field(None, description="A .jsonl file of training items, or a data set's folder or hub name")
    held_out: str | None = Field(None, description="The same for evaluation; by default a fifth of the items")


class ProgramEnv(SessionsEnv):
    """See the module docstring."""

    name = "program"
    env_config_cls = ProgramEnvConfig

    @staticmethod
    def load(config: ProgramEnvConfig) -> tuple[Sequence[Item], Sequence[Item]]:
        """Return the training items and those held out.

        Raises:
            ConfigurationError: a value is missing or wrong; names it.
        """
        if (config.command is None) == (config.agent is None):
            raise ConfigurationError("--env.command and --env.agent: give one of them")
        if config.command is not None and not shlex.split(config.command):
            raise ConfigurationError("--env.command is empty; give a program and its arguments")
        for name in ("agent", "score"):
            if (target := getattr(config, name)) is not None:
                named_function(target, f"--env.{name}")
        if config.items is None:
            raise ConfigurationError("--env.items is not set; give a .jsonl file, one item per line, or a data set")
        train = _items("items", config.items, "train")
        return parted(config, train, config.held_out and _items("held_out", config.held_out, "test"))

    async def play(self, item: Item, opened: Opened) -> Any:
        if self.config.agent:
            agent = named_function(self.config.agent, "--env.agent")
            return await agent(item, opened.base_url, opened.api_key)
        return await self._execute(item, opened)

    async def _execute(self, item: Item, opened: Opened) -> Any:
        """Run the command; return what ``score`` says of its output, or its last line that holds a reward."""
        variables = {
            API_KEY_VARIABLE: "",  # the environments' key is no program's
            "ATROPOS_ITEM": json.dumps(item),
            "OPENAI_BASE_URL": f"{opened.base_url}/v1",
            "OPENAI_API_KEY": opened.api_key,
            "ANTHROPIC_BASE_URL": opened.base_url,
            "ANTHROPIC_API_KEY": opened.api_key,
        }
        command = [os.path.expanduser(word) for word in shlex.split(self.config.command)]
        python = any(os.path.basename(word).startswith("python") for word in command)
        found = [  # what follows its -m is a module, also beside a folder of that name
            os.path.abspath(word) if os.path.exists(word) and not (python and before == "-m") else word
            for before, word in zip(["", *command], command, strict=False)
        ]
        command = found if "/" in command[0] else [command[0], *found[1:]]  # as a shell looks for a program
        scratch = tempfile.TemporaryDirectory(prefix="session-", ignore_cleanup_errors=True)
        try:
            own, log, printed = (Path(scratch.name, name) for name in ("own", "log", "output"))
            own.mkdir()
            started = asyncio.ensure_future(
                asyncio.to_thread(
                    start_service,
                    f"session {opened.id}",
                    command,
                    log_path=log,
                    output_path=printed,
                    env=variables,
                    cwd=own,
                )
            )
            try:
                service = await asyncio.shield(started)
                while (status := service.poll()) is None:
                    await asyncio.sleep(_POLL)
                output, errors = await asyncio.to_thread(lambda: [_last_part(path) for path in (printed, log)])
            finally:
                await asyncio.shield(asyncio.to_thread((await started).stop, 1.0))
        finally:
            with contextlib.suppress(OSError):  # of another user's files, as of a container
                scratch.cleanup()
        if status != 0:
            logger.warning("session %s: exit status %d: %s", opened.id, status, (output + errors)[-2000:])
            raise SessionFailed("exit_status")
        if self.config.score is not None:
            scored = await in_own_thread(named_function(self.config.score, "--env.score"), item, output)
            return await awaited(scored)
        return await asyncio.to_thread(lambda: next(filter(_holds_reward, reversed(output.split("\n"))), None))


def parted(
    config: SessionsEnvConfig, train: Sequence[Item], test: Sequence[Item] | None
) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return the items to train on and to evaluate on, as many as the options say.

    ``test`` None: a fifth of the different items is held out, by a digest of each, so that equal ones stay together.

    Raises:
        ConfigurationError: all items are equal, so that none can be held out.
    """
    if test is None:
        digests = [hashlib.blake2b(orjson.dumps(item, option=orjson.OPT_SORT_KEYS)).digest() for item in train]
        different = sorted({*digests})
        if len(different) == 1:
            raise ConfigurationError(
                f"the items are {len(train)} times {str(train[0])[:200]}: none can be held out; give others for "
                "evaluation with --env.held_out"
            )
        held_out = {*different[: max(1, int(len(different) * _HELD_OUT))]}
        test = [item for item, digest in zip(train, digests, strict=True) if digest in held_out]
        train = [item for item, digest in zip(train, digests, strict=True) if digest not in held_out]
    return train[: config.train_size], test[: config.eval_size]


def read_reward(result: Any) -> dict[str, Any]:
    """Return ``reward``, ``metrics`` and ``turn_values``, given as a number, a mapping, or JSON of one of them; metrics
    that are no finite numbers are left out, ``turn_values``, None if there are none, are checked by the session server.

    Raises:
        SessionFailed: there is no reward, or it is not a finite number.
    """
    found = json.loads(result) if isinstance(result, str) and _holds_reward(result) else result
    fields = found if isinstance(found, dict) else {"reward": found}
    if not _is_finite(fields.get("reward")):
        logger.warning("the reward is %.80r; give a finite number, or a mapping with it", fields.get("reward"))
        raise SessionFailed("no_reward")
    given = fields["metrics"] if isinstance(fields.get("metrics"), dict) else {}
    metrics = {str(name): float(value) for name, value in given.items() if _is_finite(value)}
    return {"reward": float(fields["reward"]), "metrics": metrics, "turn_values": fields.get("turn_values")}


def _last_part(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
        return io.TextIOWrapper(file, errors="replace").read()


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)  # NumPy's are Real too
    except OverflowError:
        return False


def _holds_reward(line: str) -> bool:
    try:
        found = json.loads(line) if line.lstrip()[:1] in "{-0123456789NI" else None  # many lines are no JSON
    except (ValueError, RecursionError):
        return False
    return "reward" in found if isinstance(found, dict) else isinstance(found, float) or type(found) is int


def _items(name: str, source: str, split: str) -> list[Item]:
    path = Path(source)
    if path.suffix == ".jsonl":
        try:
            items = [item for _, item in read_jsonl(path)]
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--env.{name}={source}: {error}") from error
    else:
        items = list(load_dataset(name, source, "give a .jsonl file, a folder or a name on the hub", split=split))
    for number, item in enumerate(items, 1):
        try:
            orjson.dumps(item)  # as the session server is sent it
            size = len(json.dumps(item))
        except TypeError as error:
            raise ConfigurationError(f"--env.{name}={source}: item {number} cannot be sent as JSON: {error}") from error
        if size > _ITEM_BYTES:
            raise ConfigurationError(f"--env.{name}={source}: item {number} has {size} bytes; at most {_ITEM_BYTES}")
    return items


if __name__ == "__main__":
    adapt(ProgramEnv).cli()
