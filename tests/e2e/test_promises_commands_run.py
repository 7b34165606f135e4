"""The commands of the main document, run as they are written, but for the model and the device."""

import os
import re
import sys
import time

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

from helpers import ROOT
from helpers.boxed_policy import make_boxed_policy
from helpers.gsm8k_checkout import make_checkout, write_hub_data
from helpers.terminal import told_command
from recipe.atropos.adapter import defaults
from recipe.atropos.inference.server import sglang_python
from recipe.atropos.launcher.sglang import GATEWAY_PORT
from recipe.atropos.launcher.startup import API_PORT
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import free_port, port_is_free, start_service
from recipe.atropos.utils.secret import environments_key


def test_promises_environment_asks_the_server_for_the_model(server, model_path):
    servers = [APIServerConfig(model_name="no/such-model", base_url=f"{server}/v1", api_key="x")]
    env, [found] = defaults.complete(BaseEnvConfig(tokenizer_name="no/such-model"), servers, {}, {})
    assert found.model_name == env.tokenizer_name == str(model_path) and not env.use_wandb
    env, [found] = defaults.complete(BaseEnvConfig(), servers, {"model_name": "m"}, {"tokenizer_name": "t"})
    assert (found.model_name, env.tokenizer_name) == ("no/such-model", BaseEnvConfig().tokenizer_name), "as given"


def test_promises_wrong_key_is_an_error_that_names_the_variable(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "recipe.atropos.inference.gateway", "--servers=http://127.0.0.1:1"]
    command += [f"--port={port}", "--max-wait=0.1"]
    gateway = start_service("gateway", command, log_path=tmp_path / "log", env={"ATROPOS_API_KEY": "right"})
    try:
        while port_is_free(port):
            assert gateway.poll() is None, gateway.tail()
        with pytest.raises(defaults.WrongKey, match=f":{port}/model_info answers HTTP 401: .*ATROPOS_API_KEY"):
            defaults.served_model(f"http://127.0.0.1:{port}/v1", "wrong")
        assert defaults.served_model(f"http://127.0.0.1:{port}/v1", "right") is None, "no server to answer"
    finally:
        gateway.stop(grace=3)


KEY = "a-key-of-ones-own"
DEVICE = """
inference: {dtype: float32, mem_fraction_static: 0.3, args: {max_total_tokens: 65536}}
actor_rollout_ref:
  actor: {use_torch_compile: false}
data: {train_batch_size: 2}
trainer: {save_freq: -1, logger: []}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working folder of both terminals: a model, a CPU's settings, a checkout, and GSM8K in place of the hub's."""
    make_boxed_policy(tmp_path / "model")
    (tmp_path / "cpu.yaml").write_text(DEVICE)
    for name in ("openai/gsm8k", "gsm8k"):
        write_hub_data(tmp_path / name, test=2)
    make_checkout(tmp_path / "atropos")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cached"))  # else another folder of this name is found there
    return tmp_path


def words(command):
    assert command.startswith("python ")
    return [sys.executable, *command.split()[1:]]


def launched_at_default_ports(terminal, folder):
    """A launcher at the ports that the document names, once no other test has them."""
    launch = words("python -m recipe.atropos.launch_services --model model --steps 1000 --gpus 1")
    deadline = time.monotonic() + 1200
    while True:
        while not (port_is_free(API_PORT) and port_is_free(GATEWAY_PORT)):
            assert time.monotonic() < deadline, f"port {API_PORT} or {GATEWAY_PORT} is taken all the time"
            time.sleep(0.5)
        launcher = terminal([*launch, "environment.target=null", "--config=cpu.yaml"], folder)
        launcher.wait_for(r"python environments/gsm8k_server.py serve .*\n")
        addresses = (
            f'"rollout_server_url": "http://127.0.0.1:{API_PORT}/{environments_key(KEY)}"',
            f'"base_url": "http://127.0.0.1:{GATEWAY_PORT}/v1"',
        )
        if all(address in launcher.text for address in addresses):
            return launcher
        assert time.monotonic() < deadline, launcher.text
        launcher.end()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_promises_commands_of_the_main_document_run_as_written(terminal, folder, monkeypatch):
    """The stock environment by what the launcher prints: BaseEnv ignores the document's own --openai.base_url."""
    monkeypatch.setenv("ATROPOS_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder / "atropos")]))
    launcher = launched_at_default_ports(terminal, folder)
    assert f'"api_key": "{environments_key(KEY)}"' in launcher.text, "that of environments"
    url = "--env.rollout_server_url http://localhost:8000"
    commands = (
        ["bash", "-c", f"exec {told_command(launcher.text)}"],
        words(f"python -m recipe.atropos.environments.gsm8k_upstream serve {url}"),
        words(f"python -m recipe.atropos.environments.gsm8k serve {url}"),
    )
    run = folder / "runs" / "default"
    for number, command in enumerate(commands):
        environment = terminal(command, folder)
        launcher.wait_for(f"an environment has joined, as number {number}")
        before = len(read_metrics(run))
        try:
            launcher.wait_for_step(before + 6, run)  # more than one that has left could have posted
        except AssertionError as error:
            raise AssertionError(environment.text[-5000:]) from error
        assert environment.process.poll() is None, environment.text
        environment.end()
    lines = read_metrics(run)
    assert any("atropos/env_0/mean_score" in line for line in lines), "a stock environment has no name"
    assert any("atropos/gsm8k/mean_score" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_promises_launcher_trains_by_the_documents_command(terminal, folder):
    """Without ``environment.target=null`` it starts an environment itself; another one may join it all the same."""
    launch = words("python -m recipe.atropos.launch_services --model model --steps 1000 --gpus 1")
    launcher = terminal([*launch, "--config=cpu.yaml"], folder)
    launcher.wait_for_step(2, folder / "runs" / "default")
    assert "held-out accuracy" in launcher.text
    prompts = "".join(path.read_text() for path in (folder / "runs" / "default" / "rollouts").iterdir())
    assert "train 0?" in prompts or "train 1?" in prompts, "questions of the folder's data"


def by_hand(heading, ports):
    """The commands below a heading of the quick start, at other ports."""
    page = (ROOT / "docs/quick-start.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    text = "".join(blocks).replace("\\\n", " ").replace("recipe/atropos/inference", f"{ROOT}/recipe/atropos/inference")
    for port, other in ports.items():
        text = text.replace(f":{port}", f":{other}").replace(f"--port {port}", f"--port {other}")
    return [line.partition(" #")[0].replace("MODEL", "model") for line in text.splitlines() if line]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_promises_services_by_hand_train_to_the_end(terminal, folder, monkeypatch):
    """Each by the quick start's command; the trainer with further overrides. It leaves no folder of Hydra's."""
    monkeypatch.delenv("ATROPOS_API_KEY", raising=False)
    ports = {port: free_port() for port in (8000, 9001, 9002)}
    api, _, trainer, environment, server = by_hand("Starting the services yourself", ports)
    trainer += f" config=cpu.yaml run.dir=run trainer.total_training_steps=3 inference.gateway_port={ports[9001]}"
    trainer += " trainer.atropos.startup_timeout=900"  # SGLang has just begun its imports
    environment += f" --openai.base_url=http://127.0.0.1:{ports[9001]}/v1"
    server = server.replace(" python ", f" exec {sglang_python(None)} ")
    server = server.replace("SGLANG", "env SGLANG", 1).replace(" exec ", " ")
    started = [terminal(words(api), folder), terminal(["bash", "-c", f"exec {server}"], folder)]
    training = terminal(words(trainer), folder)
    training.wait_for("gateway http://")
    started.append(terminal(words(environment), folder))
    try:
        assert training.process.wait(1200) == 0, training.text[-5000:]
    except Exception as error:
        raise AssertionError("\n".join(each.text[-3000:] for each in (training, *started))) from error
    assert [line["step"] for line in read_metrics(folder / "run")] == [1, 2, 3]
    assert not {"outputs", "multirun", ".hydra", "main.log"} & {path.name for path in folder.iterdir()}
    for each in started:
        each.end()
