"""The bound on staleness, held between a real environment, a real API and a real SGLang server."""

import re

import pytest
from transformers import AutoTokenizer

from helpers import ROOT
from helpers.environments import length_env
from helpers.environments.length_env import answer_length
from helpers.launchers import environment_process
from helpers.scripted_trainer import ScriptedTrainer
from helpers.services import get
from helpers.sglang import call
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until

pytestmark = pytest.mark.timeout(280)

GROUPS, SIZE, STEPS = 4, 2, 5


def environment(model_path, server, folder, api_url):
    """A real environment on a Trajectory API; ``folder/cancelled`` has the items whose sampling was cancelled."""
    (folder / "cancelled").touch()
    flags = {"env.rollout_server_url": api_url, "env.tokenizer_name": model_path, "env.group_size": SIZE}
    flags |= {"env.total_steps": 10**6, "env.max_num_workers": 2 * GROUPS, "env.max_batches_offpolicy": 2}
    flags |= {"env.cancelled_path": folder / "cancelled", "openai.base_url": f"{server}/v1"}
    flags |= {"openai.model_name": model_path, "slurm": "false"}
    return environment_process(folder, length_env.__file__, flags=flags, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")


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
