"""Any environment of verifiers, as it is: ``environment.target=examples/agents/verifiers_env.py``.

``environment.args.taskset`` is what follows ``vf-eval`` on a command line: the name of a taskset, and flags of its
environment, of the selected tasks and of sampling, such as ``gsm8k-v1 --env.agent.runtime.type subprocess``.
``environment.python`` is an interpreter that has the taskset and verifiers 0.4.0.

- Episodes are played by verifiers' own server, with the taskset's harness, tools and rewards, in a process of its own,
  which is started again if it ends.
- Its train client renders the prompts, and is told each session's address and key; a session holds exactly the tokens
  that were sampled. A model that ``renderers`` does not know by name has every turn rendered anew there, which goes on
  with the session's row where the ids come out equal; else it is counted as a fork.
- An episode that is not whole, or has no reward, fails its session, under the name of its last error.
"""

import asyncio
import atexit
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from recipe.atropos.environments.program import SessionFailed, SessionsEnv, SessionsEnvConfig, parted
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.sessions.client import Opened
from recipe.atropos.utils.process import start_service
from recipe.atropos.utils.secret import API_KEY_VARIABLE

logger = logging.getLogger(__name__)

_SERVER = """
import json, logging, pathlib, sys
from verifiers.v1.serve import serve_env
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "env.json").read_text())
serve_env(max_workers=1, address=f"ipc://{folder}/socket", config_data=config)
"""
_FLAGS = {"env", "select", "sampling"}  # of vf-eval; the others are of its own runs
_POLL = 1.0  # s between two polls of the server

Item = Any  # a task's data, as JSON


class VerifiersEnvConfig(SessionsEnvConfig):
    """The options of environments of sessions, and those of verifiers' tasksets."""

    taskset: str | None = Field(None, description="A taskset's name and flags, as for vf-eval")
    held_out: str | None = Field(None, description="The same for evaluation; by default a fifth of the tasks")


class VerifiersEnv(SessionsEnv):
    """See the module docstring."""

    name = "verifiers"
    env_config_cls = VerifiersEnvConfig

    @staticmethod
    def load(config: VerifiersEnvConfig) -> tuple[Sequence[Item], Sequence[Item]]:
        """Return the training tasks and those held out. Raises ConfigurationError: an option is wrong; names it."""
        test = None if config.held_out is None else _tasks("held_out", config.held_out)
        return parted(config, _tasks("taskset", config.taskset), test)

    async def setup(self) -> None:
        await super().setup()
        self._asked = _read("taskset", self.config.taskset)
        self._starting, self._server, self._client = asyncio.Lock(), None, None
        await self._serve()

    async def _serve(self) -> None:
        """Start verifiers' server, if it does not run, and wait until it answers. Raises ServiceFailed if it ends."""
        from verifiers.v1.serve import EnvClient, env_config_data

        async with self._starting:
            if self._server is not None and self._server.poll() is None:
                return
            self._folder = TemporaryDirectory(prefix="verifiers-")  # for its socket, whose path must be short
            folder = Path(self._folder.name)
            (folder / "env.json").write_text(json.dumps(env_config_data(self._asked.env)))
            command = [sys.executable, "-c", _SERVER, str(folder)]
            path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}"  # uv may be there
            self._server = await asyncio.to_thread(
                start_service,
                "verifiers",
                command,
                log_path=folder / "log",
                # The environments' key is no program's; and uv's programs would be compiled anew in every episode.
                env={"PATH": path, API_KEY_VARIABLE: "", "PYTHONDONTWRITEBYTECODE": ""},
            )
            self._client = EnvClient(f"ipc://{folder}/socket")
            atexit.register(self._client.ctx.destroy, linger=0)  # else the interpreter waits for its socket for ever
            while not await self._client.health(_POLL):
                if self._server.poll() is not None:
                    raise self._server.failure("did not start")

    async def play(self, item: Item, opened: Opened) -> dict[str, Any]:
        from verifiers.v1.clients import TrainClientConfig

        await self._serve()
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        chat = {"renderer": opened.renderer, "renderer_model_name": self.config.tokenizer_name}
        client = TrainClientConfig(base_url=f"{opened.base_url}/v1", headers=headers, **chat)
        server, run = self._server, self._client.run(client, "policy", self._asked.sampling, item)
        running = asyncio.ensure_future(run)
        try:
            while not (await asyncio.wait([running], timeout=_POLL))[0]:
                if server.poll() is not None:
                    raise SessionFailed("server_ended")
            episode = running.result()
        finally:
            running.cancel()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or len(episode.traces) != 1:
            logger.warning("session %s: %d traces, %s", opened.id, len(episode.traces), errors)
            raise SessionFailed(errors[-1].type if errors else "several_traces")
        [trace] = episode.traces
        scored = trace.rewards and None not in trace.rewards.values()
        return {"reward": trace.reward if scored else None, "metrics": trace.metrics}


def _read(name: str, words: str | None) -> Any:
    """Return what vf-eval reads in an option. Raises ConfigurationError: it cannot be used; names it."""
    try:
        from pydantic_config import cli
        from verifiers.v1.cli.resolve import narrow_config, with_positional_taskset
        from verifiers.v1.configs.cli.eval import EvalConfig

        arguments = with_positional_taskset(shlex.split(words or ""))
        found = cli(narrow_config(EvalConfig, arguments), args=arguments)
    except (Exception, SystemExit) as error:  # a taskset's module raises what it likes
        raise ConfigurationError(f"--env.{name}={words}: {error}") from error
    if not found.env.taskset.id:
        raise ConfigurationError(f"--env.{name}={words}: give the name of a taskset, and flags as for vf-eval")
    if others := sorted(found.model_fields_set - _FLAGS):
        raise ConfigurationError(f"--env.{name}: --{others[0]} has no effect here; give flags of {sorted(_FLAGS)}")
    return found


def _tasks(name: str, words: str | None) -> list[Item]:
    asked = _read(name, words)
    from verifiers.v1.utils.loaders import load_taskset

    tasks = load_taskset(asked.env.taskset).select(asked.select)
    if not tasks.bounded:
        raise ConfigurationError(
            f"--env.{name}={words}: the taskset has no end; say how many tasks with --select.limit"
        )
    return [task.data.model_dump(mode="json") for task in tasks]
