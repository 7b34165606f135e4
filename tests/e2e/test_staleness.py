"""The bound on staleness, held by a real environment between a real API, a real SGLang server and the trainer."""

import re
import sys

import numpy as np
import orjson
import pytest

from helpers import ROOT
from helpers.environments import length_env
from helpers.environments.length_env import LONG, SHORT, answer_length
from helpers.services import running_api
from helpers.trainer import close, compose_config, started
from recipe.atropos.run_record import read_metrics
from recipe.atropos.utils.process import start_service

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("cluster")]

GROUPS, SIZE, STEPS = 4, 2, 5


def train(model_path, server, folder, max_staleness, paced=True):
    """(metrics of each step, the items that each step trained on, the items that were cancelled)."""
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}",
        f"inference.urls=[{server}]",
        f"run.dir={folder / 'run'}",
        f"data.train_batch_size={GROUPS}",
        f"actor_rollout_ref.rollout.n={SIZE}",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.atropos.max_wait_time=120",
        f"trainer.atropos.max_staleness={'null' if max_staleness is None else max_staleness}",
    )
    cancelled = folder / "cancelled"
    cancelled.touch()
    with running_api(folder) as api:
        config.trainer.atropos.api_url = api.url
        flags = {
            "env.rollout_server_url": api.url,
            "env.tokenizer_name": model_path,
            "env.group_size": SIZE,
            "env.total_steps": 10**6,
            "env.max_num_workers": 2 * GROUPS,
            "env.max_batches_offpolicy": 2,
            "env.cancelled_path": cancelled,
            "openai.base_url": f"{server}/v1",
            "openai.model_name": model_path,
            "slurm": "false",
        }
        if paced:
            flags["adapter.max_staleness"] = max_staleness
        program = length_env.__file__
        environment = start_service(
            "environment",
            [sys.executable, program, "serve", *(f"--{key}={value}" for key, value in flags.items())],
            log_path=folder / "environment.log",
            env={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )
        try:
            trainer = started(config)
            try:
                trainer.fit()
            except Exception as error:
                raise AssertionError(environment.tail(60)) from error
            finally:
                close(trainer)
        finally:
            environment.stop()
    items = []
    for step in range(1, STEPS + 1):
        rows = [orjson.loads(line) for line in (folder / f"run/rollouts/{step}.jsonl").read_bytes().splitlines()]
        items.append([int(re.search(r"item (\d+)", row["input"])[1]) for row in rows])
    return read_metrics(folder / "run"), items, [int(line) for line in cancelled.read_text().split()]


@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_staleness_is_bounded_and_long_answers_are_trained_on(model_path, server, tmp_path, max_staleness):
    """What began first is trained on first, whatever its length."""
    lines, items, cancelled = train(model_path, server, tmp_path, max_staleness)
    assert max(line["atropos/staleness/max"] for line in lines) == max_staleness
    assert not any(re.search("dropped|unknown_version", key) for line in lines for key in line)
    for step, (line, numbers) in enumerate(zip(lines, items, strict=True)):
        expected = range(step * GROUPS, (step + 1) * GROUPS)
        assert sorted(numbers) == sorted([*expected] * SIZE), f"step {step + 1}"
        assert line["atropos/response_length"] == np.mean([answer_length(n) for n in expected])
        assert line["atropos/rows"] == GROUPS * SIZE
    assert not {n for n in cancelled if n < STEPS * GROUPS}, "nothing that ran was cancelled"


@pytest.mark.slow
def test_staleness_without_pacing_favors_short_answers(model_path, server, tmp_path):
    """So the test above can fail: what it asks for is not so by itself."""
    lines, items, _ = train(model_path, server, tmp_path, None, paced=False)
    lengths = [line["atropos/response_length"] for line in lines[:3]]
    assert lengths[0] == SHORT and not {n for n in items[0] if answer_length(n) == LONG}, "paced, items 0 to 3"
    assert np.mean(lengths) < 0.9 * (LONG + 3 * SHORT) / 4, lengths


@pytest.mark.slow
def test_rows_beyond_the_bound_are_dropped_where_nothing_paces(model_path, server, tmp_path):
    lines, _, _ = train(model_path, server, tmp_path, 0, paced=False)
    assert all(line["atropos/staleness/max"] == 0 for line in lines)
    assert sum(line.get("atropos/dropped/stale", 0) for line in lines) > 0
