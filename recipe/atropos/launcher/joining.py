"""Environments that the launcher does not start: how they join a run, how many have joined, and what the run waits for.

Guarantees:

- the environments' key is printed only to a terminal, never to a file, a pipe or a log; the trainer's key never is;
- each environment that registers is announced, at any time;
- while no batch arrives, a line says why, after one minute and then at intervals of up to ten minutes; the trainer
  waits ``trainer.atropos.join_timeout`` seconds in total.

The Trajectory API keeps the registration of an environment that has left, and gives a new number to one that returns.
The remaining environments fill each batch; a ``min_batch_allocation`` of one that left is waited for a minute.
"""

import time
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.join_commands import for_others, how_to_join
from recipe.atropos.launcher.services import Run
from recipe.atropos.run.record import WaitingMark, update_summary
from recipe.atropos.terminal.progress import console, say
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.secret import API_KEY_VARIABLE

_FIRST_REPORT, _LONGEST_SILENCE = 60.0, 600.0  # s without a batch before the reason is printed


def check_key(config: DictConfig, shows_key: bool = True) -> None:
    """Raise ConfigurationError if the run would generate its own key and has no terminal on which to show it.

    ``shows_key``: False if the run leaves its terminal before it could.
    """
    if not config.inference.api_key and not (shows_key and console.file.isatty()):
        why = "this output is not one" if shows_key else "--detach leaves it"
        raise ConfigurationError(
            f"inference.api_key is not set, and a run shows its own key only on a terminal ({why}), so no environment "
            f"could join; set {API_KEY_VARIABLE} before the start"
        )


class Joining:
    """Counterpart of ``EnvironmentProcesses`` for environments that join; see the module. Call ``poll`` often."""

    def __init__(self, run: Run, api_url: str, gateway: str):
        self._run, self._api_url, self._gateway = run, api_url, gateway
        self._waiting = WaitingMark(run.files)
        # Registrations, in earlier starts too: the API keeps them with its store.
        self.number: int = read_json(run.files.summary, {}).get("environments_joined", 0)
        self._step: int | None = None  # the API's: the number of batches it has formed
        self._since = self._reported = time.monotonic()
        self._silence = _FIRST_REPORT

    def start(self) -> None:
        config, given = self._run.config, bool(self._run.config.inference.api_key)
        key = self._run.environments_key if console.file.isatty() else None
        urls = for_others(self._api_url, config.api.host), for_others(self._gateway, config.inference.host)
        say(how_to_join(config, *urls, key), "join")
        say(
            "this run starts no environment, so it evaluates nothing: one that joins does so by itself, every "
            "--env.steps_per_eval steps, and reports where it logs",
            "eval",
        )
        if key and not given:
            say("the key is this start's alone; set ATROPOS_API_KEY to keep one", "join")

    async def poll(self, state: Mapping[str, Any] | None = None) -> None:
        """Announce environments that have joined, and print why no batch arrives, from what the Trajectory API's
        ``/diagnose`` has answered last.
        """
        if not state:
            return
        for number in sorted(line["number"] for line in state["environments"] if "number" in line):
            if number >= self.number:
                say(f"an environment has joined, as number {number}", "join")
                self.number = number + 1
        now = time.monotonic()
        if state["batches"]["last"] != self._step or not self._waiting.is_fresh():
            self._step, self._since, self._reported, self._silence = state["batches"]["last"], now, now, _FIRST_REPORT
        elif now - self._reported >= self._silence:
            self._reported, self._silence = now, min(2 * self._silence, _LONGEST_SILENCE)
            why = f"{state['why']} (trainer.atropos.join_timeout={self._run.config.trainer.atropos.join_timeout:g} s)"
            say(f"no batch for {now - self._since:.0f} s: {why}", "join", "bold yellow")

    def stop(self) -> None:
        """Record how many joined. None is stopped: without the Trajectory API, they end or wait for another run."""
        update_summary(self._run.files.path, {"environments_joined": self.number})

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return an empty summary: their counts are unknown."""
        return {}
