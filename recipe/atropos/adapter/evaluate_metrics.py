"""Write what an environment's ``evaluate`` reports to ``metrics.json``, in whatever way it reports it.

Some environments call ``evaluate_log``. Most only store their numbers for wandb, in ``self.eval_metrics``, or return
them, so ``evaluate`` on the command line would lose them. The adapter writes them to ``data_dir_to_save_evals`` in each
of these cases, and removes secrets from the ``evaluate_config.yaml`` that ``BaseEnv`` writes there. If ``evaluate`` is
not implemented or reports nothing, there is no ``metrics.json``, and the log says so.
"""

import logging
import numbers
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from recipe.atropos.utils.files import write_atomic
from recipe.atropos.utils.secret import without_secrets

logger = logging.getLogger(__name__)


class Evaluating:
    """Mixin of ``AdaptedEnv``; see the module docstring."""

    _logged = False

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
        if self._umask is None:
            return
        os.umask(self._umask)
        folder = self.config.data_dir_to_save_evals
        if folder is not None and (written := Path(folder) / "evaluate_config.yaml").exists():
            public = without_secrets(yaml.safe_load(written.read_text()))
            write_atomic(written, yaml.safe_dump(public, sort_keys=False).encode())


def _numbers(metrics: Any) -> dict[str, Any]:
    """Return the numeric entries of a mapping, or of a list of (name, value) pairs."""
    pairs = metrics.items() if isinstance(metrics, Mapping) else metrics if isinstance(metrics, list | tuple) else ()
    pairs = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
    return {str(name): value for name, value in pairs if isinstance(value, numbers.Number)}
