"""Atropos' own GSM8K environment through the adapter, without a network: its file where ATROPOS_DIR names a checkout,
and always one of its shape. The server is a real one, of a policy that is right in half of its answers."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import orjson
import pytest
from transformers import AutoTokenizer

from helpers.adapter_cli import run_adapter
from helpers.boxed_policy import ANSWERS, make_boxed_policy
from helpers.gsm8k_checkout import MODULE, make_checkout, write_problems
from helpers.launchers import environment_process
from helpers.services import get
from helpers.sglang import call, make_tiny_model
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until

BATCH, SIZE = 8, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_boxed_policy(tmp_path_factory.mktemp("model") / "boxed")


@pytest.fixture(scope="module")
def server_url(server, model):
    call(server, lambda client: client.update_weights_from_disk(model, "0"))
    return server


@pytest.fixture(params=["shaped", pytest.param("real", marks=pytest.mark.slow)])
def checkout(request, tmp_path):
    if request.param == "real":
        folder = os.environ.get("ATROPOS_DIR", "")
        if not (Path(folder) / "environments" / "gsm8k_server.py").is_file():
            pytest.skip("ATROPOS_DIR names no checkout of Atropos")
        return Path(folder)
    return make_checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_problems(tmp_path_factory.mktemp("data"))


def flags_of(checkout, data, model, server_url, api_url="http://127.0.0.1:1"):
    flags = {"atropos-dir": checkout, "data-dir": data, "env.tokenizer_name": model, "env.group_size": SIZE}
    flags |= {"env.rollout_server_url": api_url, "env.max_token_length": 1200}
    flags |= {"openai.base_url": f"{server_url}/v1", "openai.model_name": model, "openai.server_type": "sglang"}
    return flags


def options(*arguments):
    return [f"--{key}={value}" for key, value in flags_of(*arguments).items()]


@pytest.mark.timeout(240)
def test_gsm8k_upstream_serves_groups_that_were_sampled(checkout, data, model, server_url, tmp_path):
    """It serves until it is terminated."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    report = tmp_path / "report.jsonl"
    with running_trajectory_api(tmp_path) as api:
        api.register(batch_size=BATCH, max_token_len=1500)
        assert api.batch() is None
        flags = flags_of(checkout, data, model, server_url, api.url) | {"adapter.report": report, "env.total_steps": -1}
        with environment_process(tmp_path, "-m", MODULE, flags=flags, HF_HUB_OFFLINE="1") as service:
            batches = [until(lambda: get(f"{api.url}/batch")["batch"], 120, service) for _ in range(2)]
            os.kill(service.pid, signal.SIGTERM)
            assert service.process.wait(20) == 143 and "left running" not in service.tail(), service.tail()
    for group in (group for batch in batches for group in batch):
        assert set(group["scores"]) == {1.0, -1.0} and len(group["tokens"]) == SIZE
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            trained = [token for token, mask in zip(tokens, masks, strict=True) if mask != -100]
            assert tokenizer.decode(trained) in [rf"\boxed{{{answer}}}<|im_end|>" for answer in ANSWERS]
            sampled = sum(value for value, mask in zip(logprobs, masks, strict=True) if mask != -100)
            assert math.isclose(sampled, math.log(0.5), abs_tol=1e-3), "all but the number is certain"
        assert group["group_overrides"]["policy_version_min"] == [0] * SIZE, "stamped"
    counts = orjson.loads(report.read_bytes().splitlines()[-1])["counts"]
    # Answers to the posts of both batches but the first group may have been on their way.
    assert counts["items"] >= counts["groups_sent"] >= 1


def test_it_evaluates_and_processes_too(checkout, data, model, server_url, tmp_path):
    flags = options(checkout, data, model, server_url)
    status, output = run_adapter(
        tmp_path, "evaluate", *flags, "--env.data_dir_to_save_evals=evaluated", module=MODULE, HF_HUB_OFFLINE="1"
    )
    assert status == 0, output
    found = orjson.loads((tmp_path / "evaluated" / "metrics.json").read_bytes())["results"]["all"]
    samples = (tmp_path / "evaluated" / "samples.jsonl").read_text().splitlines()
    correct = [json.loads(sample)["correct"] for sample in samples]
    assert len(correct) == 6 and found["eval/percent_correct"] == sum(correct) / 6
    written = ["--env.total_steps=3", "--env.data_path_to_save_groups=groups.jsonl"]
    status, output = run_adapter(tmp_path, "process", *flags, *written, module=MODULE, HF_HUB_OFFLINE="1")
    assert status == 0, output
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert len(lines) == 3 and all(len(json.loads(line)["tokens"]) == SIZE for line in lines)


@pytest.mark.parametrize("flag", ["--env.tokenizer_name", "--openai.model_name"])
def test_gsm8k_upstream_refuses_another_tokenizer(data, model, model_path, server_url, tmp_path, flag):
    """The message has both names and the fix."""
    other = make_tiny_model(tmp_path / "other", seed=0)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = [*options(make_checkout(tmp_path / "checkout"), data, model, server_url), f"{flag}={other}"]
    status, output = run_adapter(tmp_path, "evaluate", *flags, module=MODULE)
    expected = f"error: {flag}={other} is not the tokenizer of the policy at {server_url}, which is {model_path}: "
    assert status == 1 and output.splitlines()[-1].startswith(expected), output
    assert output.endswith(f"give {flag}={model_path}\n")


def test_gsm8k_checkout_or_data_that_is_missing_is_named(tmp_path):
    """Before anything is started."""
    checkout, data = make_checkout(tmp_path / "checkout"), write_problems(tmp_path / "data")
    (tmp_path / "half").mkdir()
    shutil.copy(data / "train.jsonl", tmp_path / "half")
    for flags, expected in (
        ([], "no checkout of Atropos is on PYTHONPATH"),
        (["--atropos-dir", "/nowhere"], "--atropos-dir /nowhere: no checkout of Atropos"),
        (["--atropos-dir", str(checkout), "--data-dir=/nowhere"], "dataset '/nowhere': no /nowhere/train.jsonl"),
        (["--atropos-dir", str(checkout), "--data-dir", "half"], "half/test.jsonl"),
    ):
        status, output = run_adapter(tmp_path, "serve", *flags, module=MODULE)
        assert status == 2 and expected in output and "Traceback" not in output, output
