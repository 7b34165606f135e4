"""Our Trajectory API in a process of its own, which a test may kill and start again."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from helpers.services import group
from recipe.atropos.data.scored_group import ScoredGroup
from recipe.atropos.utils.process import free_port

REGISTRATION = {
    **{"wandb_group": "group", "wandb_project": "project", "batch_size": 8, "max_token_len": 100},
    **{"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 10},
}
ENVIRONMENT = {"max_token_length": 100, "desired_name": "env", "weight": 1.0, "group_size": 4}
_IMPATIENT = """
from recipe.atropos.trajectory_api import environments, service
environments.ALIVE_SECONDS = service.QUIET_SECONDS = 0.5
service.TRAINER_SECONDS = 1.5
from recipe.atropos.trajectory_api.__main__ import main
main()
"""


class Api:
    """``impatient``: an environment is taken for gone, and a trainer for waiting long, after half a second; a trainer
    for gone after a second and a half.
    """

    def __init__(self, folder: Path, *flags: str, secret: str = "", impatient: bool = False):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        program = ["-c", _IMPATIENT] if impatient else ["-m", "recipe.atropos.trajectory_api"]
        where = ["--port", str(self.port), "--data-dir", str(folder / "data")]
        self._command = [sys.executable, *program, *where, *flags]
        self._environment = {**os.environ, "ATROPOS_API_KEY": secret}
        self.session = requests.Session()
        self.epoch: int | None = None

    def start(self) -> "Api":
        with open(self.folder / "api.log", "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        deadline = time.monotonic() + 60
        while True:
            try:
                requests.get(self.url, timeout=5)
                return self
            except requests.RequestException:
                assert self.process.poll() is None and time.monotonic() < deadline, self.log()
                time.sleep(0.02)

    def run(self) -> subprocess.CompletedProcess:
        """Run a server that ends by itself, and return what it said."""
        return subprocess.run(self._command, capture_output=True, text=True, timeout=60, env=self._environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)

    def log(self) -> str:
        return (self.folder / "api.log").read_text()

    def get(self, path: str, **kwargs: Any) -> Any:
        reply = self.session.get(self.url + path, timeout=30, **kwargs)
        assert reply.status_code == 200, (path, reply.status_code, reply.text)
        return reply.json()

    def post(self, path: str, message: Any, status: int = 200, **headers: str) -> Any:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if path in ("/commit", "/weights") and self.epoch is not None:
            headers.setdefault("Atropos-Epoch", str(self.epoch))
        reply = self.session.post(self.url + path, json=message, headers=headers, timeout=30)
        assert reply.status_code == status, (path, reply.status_code, reply.text)
        return reply.json()

    def post_groups(self, *numbers: int, **fields: Any) -> None:
        """Post a ``group`` of each number, with further fields."""
        for number in numbers:
            self.post("/scored_data", group(number) | fields)

    def register(self, **fields: Any) -> Any:
        answer = self.post("/register", REGISTRATION | fields)
        self.epoch = answer["epoch"]
        return answer

    def batch(self, query: str = "") -> list[int] | None:
        """The numbers of a batch's groups."""
        return numbers(self.get(f"/batch{query}")["batch"])


def numbers(groups: Any) -> list[int] | None:
    """What ``group`` wrote as the score of each group, as JSON or from our client."""
    if groups is None:
        return None
    return [int((group.scores if isinstance(group, ScoredGroup) else group["scores"])[0]) for group in groups]


@contextlib.contextmanager
def running_trajectory_api(folder: Path, *flags: str, **options: Any) -> Iterator[Api]:
    """Ours, answering."""
    api = Api(folder, *flags, **options).start()
    try:
        yield api
    finally:
        if api.process.poll() is None:
            api.kill()
