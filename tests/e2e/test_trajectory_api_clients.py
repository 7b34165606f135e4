"""Our client, and the clients that exist: BaseEnv, the example trainer and the API tests of atroposlib, unchanged."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import atroposlib
import numpy as np
import pytest

from helpers.numbered_env import begin_at_once, stock_env
from helpers.services import group
from helpers.trajectory_api import ENVIRONMENT, REGISTRATION, numbers, running_trajectory_api
from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.process import port_is_free


@pytest.fixture
def api(tmp_path):
    with running_trajectory_api(tmp_path, secret="s3cret") as api:
        yield api


@pytest.fixture
async def client(api):
    async with TrajectoryApiClient(api.url, "s3cret") as client, asyncio.timeout(60):
        yield client


async def test_the_client_goes_through_a_run(client):
    answer = await client.register_env(ENVIRONMENT)
    assert answer["status"] == "wait for trainer to start"
    assert (await client.register(REGISTRATION, after=0, max_staleness=0))["epoch"] == 1
    env_id = (await client.register_env(ENVIRONMENT))["env_id"]
    assert (await client.call("GET", "/info"))["batch_size"] == 8
    assert await client.batch(after=0, wait=0.1) is None
    tickets = [await client.begin(env_id, 4) for _ in range(3)]
    assert tickets[2] is None
    waiting = asyncio.create_task(client.batch(after=0, wait=20))
    await client.post_groups([group(2) | {"env_id": env_id}], tickets[1])
    await client.release(tickets[0], "equal_scores")
    last = await client.begin(env_id, 4, wait=5)
    await client.post_groups([group(3) | {"env_id": env_id}], last)
    number, groups = await waiting
    assert (number, numbers(groups)) == (1, [2, 3])
    for one in groups:
        assert one.cut(one.tokens)[0].tolist() == [1, 2, 3] and one.cut(one.masks)[0].tolist() == [-100, -100, 3]
        assert one.env_id == env_id and one.field("messages") is None
        assert one.floats["inference_logprobs"].dtype == np.float32
    assert numbers((await client.batch(after=0)).groups) == [2, 3]
    await client.call("POST", "/commit", {"through": 1})
    await client.call("POST", "/weights", {"through": 1})
    assert await client.begin(env_id) is not None
    assert (await client.status())["current_step"] == 1
    assert (await client.status(env_id))["env_weight"] == 1.0
    await client.disconnect_env(env_id)
    assert (await client.diagnose())["queue"]["open_tickets"] == 0


async def test_the_client_tells_why_it_was_refused(api, client):
    await client.register(REGISTRATION, after=0)
    with pytest.raises(TrajectoryApiError, match="a group of 9 sequences") as refused:
        await client.post_groups([group(1, 9)])
    assert (refused.value.status, refused.value.reason) == (422, "larger_than_batch")
    for fields, reason in (({"scores": [float("nan")] * 4}, "nonfinite_scores"), ({"masks": None}, "unequal_lengths")):
        with pytest.raises(RefusedGroup) as found:
            await client.post_groups([group(1) | fields])
        assert found.value.reason == reason
    async with TrajectoryApiClient(api.url, "s3cret") as newer:
        await newer.register(REGISTRATION, after=0)
        with pytest.raises(TrajectoryApiError, match="registered later") as older:
            await client.batch(after=0)
        assert (older.value.status, older.value.answer["epoch"]) == (409, 2)
    async with TrajectoryApiClient(api.url, "wrong") as stranger:
        with pytest.raises(TrajectoryApiError, match="401"):
            await stranger.status()


async def test_the_client_gives_up_with_a_reason():
    async with TrajectoryApiClient("http://127.0.0.1:9", retry_timeout=0.3) as client:
        with pytest.raises(TrajectoryApiError, match="is the Trajectory API up") as error:
            await client.status()
        assert (error.value.status, error.value.reason) == (None, "api_unreachable")


TRAINER = """
import sys
from example_trainer.api import register_trainer
from example_trainer.config import TrainingConfig
from example_trainer.data import get_data
url = sys.argv[1]
config = TrainingConfig(model_name="x", batch_size=2, gradient_accumulation_steps=2, seq_len=64, training_steps=2,
                        atropos_url=url, save_path=sys.argv[2])
register_trainer(config)
print("registered", flush=True)
seen = []
while len(seen) < 3:
    batches, _ = get_data(2, 64, url)
    seen += batches
print("batches", len(seen), [tokens.shape for tokens, *_ in [(batch[0][0],) for batch in seen]], flush=True)
"""


def example_trainer(url, folder, _):
    return ["-c", TRAINER, url, str(folder)]


def sft_generator(url, folder, tokenizer):
    """``atropos-sft-gen``, which asks as the viewer (``view-run``) does."""
    options = ["--group-size", "2", "--tasks-per-step", "2", "--num-seqs-to-save", "6", "--tokenizer", str(tokenizer)]
    return ["-m", "atroposlib.cli.sft", str(folder / "saved.jsonl"), "--api-url", url, *options]


@pytest.mark.parametrize("program", [example_trainer, pytest.param(sft_generator, marks=pytest.mark.slow)])
async def test_a_stock_environment_and_stock_clients_run(program, api, model_path, tmp_path, monkeypatch):
    """With the secret in the address, which is all that they are told."""
    begin_at_once(monkeypatch)
    url = f"{api.url}/s3cret"
    environment = stock_env(url, model_path)
    manager = asyncio.create_task(environment.env_manager())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program(url, tmp_path, model_path)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
        manager.cancel()
        await asyncio.gather(manager, return_exceptions=True)
    output = output.decode()
    assert process.returncode == 0, output
    if program is sft_generator:
        saved = [json.loads(line) for line in (tmp_path / "saved.jsonl").read_text().splitlines()]
        assert len(saved) >= 6, output
    else:
        assert re.search(r"^batches [3-9]", output, flags=re.MULTILINE), output


async def test_a_held_stock_environment_is_answered_in_time(tmp_path, model_path, monkeypatch):
    """Nobody takes batches, its own limit is far away, and its posts are answered: none is sent again or lost."""
    begin_at_once(monkeypatch)
    with running_trajectory_api(tmp_path, "--queue-tokens", "1", "--hold-seconds", "1") as api:
        api.register(batch_size=4)
        environment = stock_env(api.url, model_path, max_batches_offpolicy=100)
        manager = asyncio.create_task(environment.env_manager())
        async with asyncio.timeout(40):
            while (await asyncio.to_thread(api.get, "/diagnose"))["received"] < 8:
                await asyncio.sleep(0.05)
        assert not manager.done(), manager.exception()
        manager.cancel()
        await asyncio.gather(manager, return_exceptions=True)
        counts, found = api.get("/diagnose")["counts"], []
        while batch := api.batch():
            found += batch
    assert not [name for name in counts if name.startswith(("repeated", "refused"))]
    assert sorted(found) == list(range(len(found))) and len(found) >= 8


def test_the_api_tests_of_atroposlib_pass(tmp_path):
    """They want port 8000: in a network of their own, where that can be had."""
    tests = Path(atroposlib.__file__).parent / "tests"
    files = [str(tests / f"test_api_{name}.py") for name in ("legacy", "compression", "messages_handling")]
    serve = f"{sys.executable} -m recipe.atropos.trajectory_api --port 8000 --data-dir {tmp_path}/data"
    script = (
        f"{serve} > {tmp_path}/log 2>&1 & server=$!; trap 'kill $server; wait $server' EXIT; "
        "for i in $(seq 200); do (echo > /dev/tcp/127.0.0.1/8000) 2> /dev/null && break; sleep 0.1; done; "
        f"{sys.executable} -m pytest -q -p no:cacheprovider -c /dev/null --rootdir {tmp_path} {' '.join(files)}"
    )
    command = ["bash", "-c", script]
    own_network = ["unshare", "-rn", "bash", "-c", "ip link set lo up; " + script]
    if subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0:
        command = own_network
    elif not port_is_free(8000):
        pytest.skip("port 8000 is taken, and this machine allows no network namespace")
    environment = {**os.environ, "ATROPOS_API_KEY": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert "36 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
