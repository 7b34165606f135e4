"""Startup and shutdown of an environment, for serve, evaluate and process alike.

- If ``setup()`` fails, the environment ends, with an error that names ``setup()``.
- What ``evaluate`` reports is written to ``metrics.json`` in ``data_dir_to_save_evals``, whether it calls
  ``evaluate_log``, stores it for wandb in ``self.eval_metrics``, or returns it. If it reports nothing, there is no such
  file, and the log says so. Secrets are removed from the ``evaluate_config.yaml`` that ``BaseEnv`` writes there.
- A tokenizer other than the policy's ends it; checked at startup, or once the server answers.
- However it ends, it disconnects from the Trajectory API, closes the files that it wrote, finishes wandb's run and
  writes the last line of its report, with the items still in flight; every wait has a timeout.
- In a process of its own (``cli``): SIGTERM ends it just as the end of its work does; see ``utils.process_exit``.
"""

import asyncio
import contextlib
import logging
import numbers
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import wandb
import yaml
from atroposlib.envs.server_handling.sglang_server import SGLangServer

from recipe.atropos.adapter.recorded_calls import client_of, sglang_servers
from recipe.atropos.errors import EnvironmentFailure, expected_failure
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.utils.files import write_atomic
from recipe.atropos.utils.process_exit import TERMINATED, exit_anyway, set_work
from recipe.atropos.utils.secret import without_secrets

logger = logging.getLogger(__name__)

_DISCONNECT_SECONDS = 3.0
_WANDB_SECONDS = {True: 3.0, False: 30.0}  # True: after SIGTERM
_FRUITLESS = 200  # items in a row without a group written, after which ``process`` fails
_POLL = 1.0  # s between two checks of the report
_ASK_SERVER = 10.0  # s between two attempts to compare tokenizers
_ANSWER = 10.0  # s for the server to answer
_PROBE = "Solve 12 + 7 = 19 \\boxed{19}, naïvely.\n\tdef f(x): return [x] # 日本 🙂"


class Lifecycle:
    """Mixin of ``AdaptedEnv``; see the module docstring."""

    owns_process = False  # set by ``cli``: the environment then handles signals and children
    _logged = False  # evaluate has called evaluate_log
    __uncompared: Sequence[SGLangServer] = ()  # servers whose tokenizer is not known yet

    async def setup(self) -> None:
        try:
            await super().setup()
        except Exception as error:
            error.add_note(f"in setup() of {self.report.name}; nothing was started")
            raise
        self.__uncompared = sglang_servers(self.server)
        await self.__compare_tokenizers()

    async def env_manager(self) -> None:
        await self.__to_the_end(super().env_manager)

    async def process_manager(self) -> None:
        await self.__to_the_end(self.__process)

    async def __process(self) -> None:
        """Run BaseEnv's ``process_manager``, but fail after ``_FRUITLESS`` items in a row without a group written;
        BaseEnv's would retry forever.
        """
        get_next_item, report, in_a_row, written = self.get_next_item, self.report, 0, 0

        async def counted() -> Any:
            nonlocal in_a_row, written
            before, written = written, report.counts["groups_written"]
            in_a_row = 0 if written > before else in_a_row + 1
            if in_a_row > _FRUITLESS:
                raise EnvironmentFailure(
                    f"{report.name}: of {_FRUITLESS} items in a row no group was written: {report}"
                )
            report.count("items")
            return await get_next_item()

        self.get_next_item = counted
        await super().process_manager()
        if (written := report.counts["groups_written"]) < self.n_groups_to_process:
            logger.warning("%s: %d of %d groups written: %s", report.name, written, self.n_groups_to_process, report)

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log ``metrics`` as ``BaseEnv`` does; NumPy scalars are accepted too."""
        self._logged = True
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}
        await super().evaluate_log(plain, *args, **kwargs)

    async def _run_evaluation(self) -> None:
        """Do what ``BaseEnv._run_evaluate`` does, and write the metrics to a file."""
        self._remove_secrets()
        await self.setup()
        started = time.time()
        try:
            returned = await self.evaluate()
        except NotImplementedError as error:
            if traceback.extract_tb(error.__traceback__)[-1].name != "evaluate":
                raise  # raised by something that evaluate calls
            logger.warning("%s: evaluate is not implemented", type(self).__name__)
            return
        if self._logged:
            return
        if found := _numbers(getattr(self, "eval_metrics", None)) or _numbers(returned):
            await self.evaluate_log(found, start_time=started, end_time=time.time())
        else:
            logger.warning("%s: evaluate reports nothing", type(self).__name__)

    def _remove_secrets(self) -> None:
        """Let others read what BaseEnv has written, without its secrets."""
        if self._umask is None:
            return
        os.umask(self._umask)
        folder = self.config.data_dir_to_save_evals
        if folder is not None and (written := Path(folder) / "evaluate_config.yaml").exists():
            public = without_secrets(yaml.safe_load(written.read_text()))
            write_atomic(written, yaml.safe_dump(public, sort_keys=False).encode())

    async def _run_evaluate(self) -> None:
        await self.__to_the_end(self._run_evaluation)

    async def __to_the_end(self, work: Callable[[], Awaitable[None]]) -> None:
        task, code = asyncio.current_task(), 1
        beside = asyncio.create_task(self.__beside())
        beside.add_done_callback(lambda beside: beside.cancelled() or task.cancel())
        if self.owns_process:
            set_work(task)
        try:
            await work()
            code = 0
        except asyncio.CancelledError:
            if beside.done() and not beside.cancelled():
                raise beside.exception() from beside.exception().__cause__
            code = TERMINATED
            raise
        finally:
            if self.owns_process:
                exit_anyway(code)
            beside.cancel()
            await self.__leave(code, sys.exception())

    async def __beside(self) -> None:
        """Run alongside the environment; an error here ends it."""
        asked = time.monotonic()
        while True:
            await asyncio.sleep(_POLL)
            self.report.in_flight = len(self.running_items)
            self.report.poll(self.curr_step)
            if self._failure is not None:
                raise EnvironmentFailure(str(self._failure)) from self._failure
            if self.__uncompared and time.monotonic() - asked > _ASK_SERVER:
                await self.__compare_tokenizers()
                asked = time.monotonic()

    async def __compare_tokenizers(self) -> None:
        own = self.tokenizer, self.config.tokenizer_name
        self.__uncompared = [server for server in self.__uncompared if not await check_tokenizer(server, *own)]

    async def __leave(self, code: int, error: BaseException | None) -> None:
        self._stop_items()
        self.report.in_flight = len(self.running_items)
        reason = expected_failure(error) or repr(error) if isinstance(error, Exception) else ""
        await _within(_DISCONNECT_SECONDS, self._disconnect(reason))
        self.report.write(self.curr_step, at_once=True)
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
        if wandb.run is not None:
            await _within(_WANDB_SECONDS[code == TERMINATED], asyncio.to_thread(wandb.finish))


async def _within(seconds: float, what: Coroutine[Any, Any, None]) -> None:
    try:
        await asyncio.wait_for(what, seconds)
    except Exception as error:
        logger.warning("at the end: %r", error)


def _numbers(metrics: Any) -> dict[str, Any]:
    """Return the numeric entries of a mapping, or of a list of (name, value) pairs."""
    pairs = metrics.items() if isinstance(metrics, Mapping) else metrics if isinstance(metrics, list | tuple) else ()
    pairs = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
    return {str(name): value for name, value in pairs if isinstance(value, numbers.Number)}


async def check_tokenizer(server: SGLangServer, tokenizer: Any, name: str) -> bool:
    """Check the environment's tokenizer, called ``name``, and the server handle's against the policy's.

    Returns False while the server does not answer; with one that does not support the request, only warns.

    Raises:
        EnvironmentFailure: one of them encodes a probe text differently from the server.
    """
    text = _PROBE
    if getattr(tokenizer, "chat_template", None):
        with contextlib.suppress(Exception):  # some templates need more than one user message
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    try:
        client = client_of(server.config, _ANSWER)
        theirs, info = await client.tokenize(text), await client.model_info()
    except InferenceError as error:
        if error.status not in (400, 404, 405, 422, 501):
            return False
        logger.warning("tokenizers are not compared: %s", error)
        return True
    policy = info.get("tokenizer_path") or info.get("model_path")
    key = "model_name" if server.config.tokenizer_name == "none" else "tokenizer_name"
    for flag, named, used in (
        ("--env.tokenizer_name", name, tokenizer),
        (f"--openai.{key}", getattr(server.config, key), server.tokenizer),
    ):
        ours = used.encode(text, add_special_tokens=False)
        if ours != theirs:
            i = len(os.path.commonprefix([ours, theirs]))
            raise EnvironmentFailure(
                f"{flag}={named} is not the tokenizer of the policy at {client.url}, which is {policy}: they encode a "
                f"text as {ours[i : i + 5]} and {theirs[i : i + 5]}, from token {i} on; give {flag}={policy}"
            )
    return True
