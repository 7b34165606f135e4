"""The bound on staleness, held between a real environment, a real API and a real SGLang server."""

import contextlib
import re
import sys

import numpy as np
import orjson
import pytest
from transformers import AutoTokenizer

from helpers import ROOT
from helpers.environments import length_env
from helpers.environments.length_env import LONG, SHORT, answer_length
from helpers.scripted_trainer import ScriptedTrainer
from helpers.services import get, running_api
from helpers.sglang import call
from helpers.trainer import compose_config, running
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until
from recipe.atropos.run.record import read_metrics
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.utils.process import start_service

pytestmark = pytest.mark.timeout(280)

GROUPS, SIZE, STEPS = 4, 2, 5


@contextlib.contextmanager
def environment(model_path, server, folder, api_url, program=(length_env.__file__,)):
    """A real environment on a Trajectory API; ``folder/cancelled`` has the items whose sampling was cancelled."""
    (folder / "cancelled").touch()
    flags = {
        "env.rollout_server_url": api_url,
        "env.tokenizer_name": model_path,
        "env.group_size": SIZE,
        "env.total_steps": 10**6,
        "env.max_num_workers": 2 * GROUPS,
        "env.max_batches_offpolicy": 2,
        "env.cancelled_path": folder / "cancelled",
        "openai.base_url": f"{server}/v1",
        "openai.model_name": model_path,
        "slurm": "false",
    }
    service = start_service(
        "environment",
        [sys.executable, *program, "serve", *(f"--{key}={value}" for key, value in flags.items())],
        log_path=folder / "environment.log",
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield
    except Exception as error:
        raise AssertionError(service.tail(60)) from error
    finally:
        service.stop()


def train(model_path, server, folder, api, max_staleness, *program, steps=STEPS):
    """(metrics of each step, the items that each step trained on) with the environment of ``program``."""
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}",
        f"inference.urls=[{server}]",
        f"run.dir={folder / 'run'}",
        f"data.train_batch_size={GROUPS}",
        f"actor_rollout_ref.rollout.n={SIZE}",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={steps}",
        "trainer.atropos.max_wait_time=120",
        f"trainer.atropos.max_staleness={'null' if max_staleness is None else max_staleness}",
    )
    with environment(model_path, server, folder, api.url, *program):
        config.trainer.atropos.api_url = api.url
        with running(config) as trainer:
            trainer.fit()
    items = []
    for step in range(1, steps + 1):
        rows = [orjson.loads(line) for line in (folder / f"run/rollouts/{step}.jsonl").read_bytes().splitlines()]
        items.append([int(re.search(r"item (\d+)", row["input"])[1]) for row in rows])
    return read_metrics(folder / "run"), items


def item_of(tokenizer, group):
    """The number in a group's prompt."""
    prompt = [token for token, mask in zip(group["tokens"][0], group["masks"][0], strict=True) if mask == -100]
    return int(re.search(r"item (\d+)", tokenizer.decode(prompt))[1])


@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_staleness_is_bounded_and_long_answers_are_trained_on(model_path, server, tmp_path, max_staleness):
    """What started first is trained on first, whatever its length, by a trainer that only pushes."""
    tokenizer, staleness = AutoTokenizer.from_pretrained(model_path), []

    def push(version):
        call(server, lambda client: update(client, str(version)))

    async def update(client, version):
        await client.pause("auto")  # what runs would keep its keys, and a flush fails
        await client.update_weights_from_disk(model_path, version)
        await client.resume()

    push(0)
    with running_trajectory_api(tmp_path) as api, environment(model_path, server, tmp_path, api.url):
        trainer = ScriptedTrainer(api.url, GROUPS * SIZE, max_staleness, max_token_len=2048)
        for step in range(1, STEPS + 1):
            groups = until(trainer.groups, 90, told=lambda: get(f"{api.url}/diagnose")["why"])
            items = [item_of(tokenizer, group) for group in groups]
            assert sorted(items) == [*range((step - 1) * GROUPS, step * GROUPS)], f"step {step}"
            for item, group in zip(items, groups, strict=True):
                sampled = [sum(mask != -100 for mask in masks) for masks in group["masks"]]
                assert sampled == [answer_length(item)] * SIZE
                oldest = group["group_overrides"]["policy_version_min"]
                staleness += [step - 1 - version for version in oldest]
            push(step)
            trainer.push()
    assert max(staleness) == max_staleness and len(staleness) == STEPS * GROUPS * SIZE
    cancelled = [int(line) for line in (tmp_path / "cancelled").read_text().split()]
    assert not {item for item in cancelled if item < STEPS * GROUPS}, "nothing that ran was cancelled"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_staleness_without_pacing_favors_short_answers(model_path, server, tmp_path):
    """So the test above can fail: what it asks for is not so by itself."""
    stock = ("-c", "from helpers.environments.length_env import LengthEnv; LengthEnv.cli()")
    with running_api(tmp_path) as api:
        lines, items = train(model_path, server, tmp_path, api, None, stock)
    lengths = [line["atropos/response_length"] for line in lines[:3]]
    assert lengths[0] == SHORT and not {n for n in items[0] if answer_length(n) == LONG}, "paced, items 0 to 3"
    assert np.mean(lengths) < 0.9 * (LONG + 3 * SHORT) / 4, lengths


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_rows_beyond_the_bound_are_dropped_where_nothing_paces(model_path, server, tmp_path, monkeypatch):
    """Without the bound, the API lets two batches begin before the first is trained on."""
    register = TrajectoryApiClient.register
    monkeypatch.setattr(TrajectoryApiClient, "register", lambda self, fields, after, _: register(self, fields, after))
    with running_trajectory_api(tmp_path) as api:
        lines, _ = train(model_path, server, tmp_path, api, 0, steps=3)
    assert all(line["atropos/staleness/max"] == 0 for line in lines)
    assert sum(line.get("atropos/dropped/stale", 0) for line in lines) > 0
