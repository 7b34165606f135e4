"""Whether what the recipe replaces in other packages while they run still needs it: docs/compatibility.md lists them.

A test fails once its package does without the patch, which then goes, together with the test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer
from ray._private import ray_constants

from helpers.sampled import END, chat, ids_of

GO = {"role": "user", "content": "go"}


class Sampler:
    """A server whose replies are always these tokens."""

    def __init__(self, reply):
        self.reply, self.config = reply, APIServerConfig(model_name="policy")

    async def tokens_and_logprobs_completion(self, **kwargs):
        return kwargs["input_ids"], [self.reply], [[-0.5] * len(self.reply)], [{"type": "stop"}]


async def test_patch_of_managed_servers_is_needed(tokenizer):
    """From the second turn on, atroposlib's own prompt is not what the template and the sampled reply give."""
    reply = ids_of(tokenizer, "a", "b", END)
    managed = ManagedServer(Sampler(reply), tokenizer=tokenizer)
    await managed.chat_completion(messages=[GO], max_tokens=9)
    await managed.chat_completion(messages=[GO, {"role": "assistant", "content": "ab"}, GO], max_tokens=9)
    found = [list(node.tokens) for node in managed.get_state()["nodes"]]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    prompt = chat(tokenizer, "go")
    assert found[0][: len(prompt) + len(reply)] == prompt + reply
    assert found[-1] != prompt + reply + newline + prompt + reply


def test_patch_of_multiprocessings_names_is_needed():
    """They tell neither the run nor the process that a semaphore is of."""
    code = "from multiprocessing import process; print(process.current_process()._config['semprefix'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "/mp\n"


def test_patch_of_rays_switch_is_needed():
    """The variable has no effect after Ray is imported: a node takes another address than this machine's own."""
    code = f"""
import os
from ray._private import services
os.environ[{ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR!r}] = "0"
services.node_ip_address_from_perspective = lambda _: "another"
print(services.get_node_ip_address())
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "another\n"


def test_patch_of_load_dataset_is_needed():
    """Atropos' own GSM8K names the hub's dataset, which cannot be given as a folder."""
    if "ATROPOS_DIR" not in os.environ:
        pytest.skip("ATROPOS_DIR names no checkout of Atropos")
    file = Path(os.environ["ATROPOS_DIR"], "environments/gsm8k_server.py")
    assert 'load_dataset("gsm8k", "main"' in file.read_text()


def test_patch_of_reasoning_gyms_scorers_is_needed():
    """They run the policy's text: by ``eval``, and by sympy's ``parse_expr``."""
    code = """
import reasoning_gym
for name in ("spiral_matrix", "puzzle24"):
    task = reasoning_gym.create_dataset(name, size=1, seed=0)
    task.score_answer(f"[print({name!r})]", task[0])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "spiral_matrix\npuzzle24\n"
