"""Which registration at the Trajectory API is whose process.

The API gives every registration a number and never says which process it belongs to; only by that number can the
registration of a process that was killed be taken back. An environment with ``Registered`` in front of its base class
adds it to the file that ``ATROPOS_ENV_REPORT`` names, as a line ``{"time", "env", "pid", "registered": NUMBER}``, once
it has learnt from the trainer's sizes that it fits.
"""

import os
import time

from recipe.atropos.adapter.reporting import VARIABLE
from recipe.atropos.utils.files import append_line


class Registered:
    """Goes before ``BaseEnv``; see the module."""

    async def get_server_info(self) -> None:
        await super().get_server_info()
        path = os.environ.get(VARIABLE)
        if path:
            line = {"time": time.time(), "env": self.config.wandb_name, "pid": os.getpid(), "registered": self.env_id}
            append_line(path, line)
