"""The commands of the main document: as they are written, but for the model's name and the device."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from test_join import told_command

from helpers.boxed_policy import ANSWERS, make_boxed_policy
from helpers.environments import gsm8k_server
from helpers.terminal import terminals
from recipe.atropos.adapter import defaults
from recipe.atropos.checkpoint.resumption import changed_keys
from recipe.atropos.config.compose import complete_config, given_keys, load_complete, load_config
from recipe.atropos.environments.gsm8k import GSM8kEnvConfig
from recipe.atropos.environments.word_problems import GSM8K, DatasetUnavailable, load_problems
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launch_services import compose_overrides, load_run_config, parse_arguments
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.sglang import GATEWAY_PORT
from recipe.atropos.launcher.startup import API_PORT, start_trainer
from recipe.atropos.run_record import read_metrics
from recipe.atropos.utils.process import free_port, port_is_free, start_service
from recipe.atropos.utils.secret import config_yaml

# ---------------------------------------------------------------------- launch_services --config FILE

OWN = """
preset: demo
trainer: {total_training_steps: 7, atropos: {max_staleness: null}}
actor_rollout_ref: {actor: {optim: {lr: 1e-5}}, model: {path: their/model}}
environment: {args: {train_size: 50}}
run: {dir: runs/theirs}
"""


def test_promises_config_file_is_over_ours_and_below_arguments(tmp_path):
    (tmp_path / "own.yaml").write_text(OWN)
    overrides = compose_overrides(parse_arguments(["--config", str(tmp_path / "own.yaml"), "--steps", "9", "seed=4"]))
    config = load_config(overrides)
    assert config.trainer.total_training_steps == 9 and config.seed == 4
    assert config.trainer.atropos.max_staleness is None and config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.environment.args.train_size == 50 and config.environment.args.system_prompt == "", "merged"
    assert "run.dir" in given_keys(overrides), "a folder of one's own: a finished run there is an error"


def test_promises_config_of_a_run_is_a_file_for_another(tmp_path, monkeypatch):
    config = load_config(["preset=two_environments", "seed=3", "trainer.atropos.max_staleness=1"])
    (tmp_path / "config.yaml").write_bytes(config_yaml(config))
    file = f"config={tmp_path / 'config.yaml'}"
    assert load_config([file]) == config
    other = load_config([file, "run.dir=other", "data.train_batch_size=32", "actor_rollout_ref.actor.clip_ratio=0.3"])
    assert other.trainer.default_local_dir == "other/checkpoints", "not the first run's"
    assert other.trainer.atropos.weight_sync.directory == "other/weights"
    actor = other.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.clip_ratio_low) == (32, 0.3)
    run = Run(config, ["preset=two_environments", "seed=3"], tmp_path)
    monkeypatch.setattr(run, "start", lambda *_, **__: None)
    inference = SimpleNamespace(urls=["http://127.0.0.1:1"], gateway="http://127.0.0.1:2")
    start_trainer(run, SimpleNamespace(url="http://127.0.0.1:3"), inference, tmp_path / "evaluated")
    complete = load_complete(tmp_path / "config.yaml")
    assert complete.inference.urls == inference.urls and complete.trainer.atropos.api_url == "http://127.0.0.1:3"
    engine = complete.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.atropos
    assert engine.urls == inference.urls, "composed with the addresses"
    before = yaml.safe_load((tmp_path / "config.yaml").read_text())
    restarted = config_yaml(complete_config(run.overrides, run.config, tmp_path), by_launcher=True)
    assert changed_keys(before, yaml.safe_load(restarted)) == [], "the same command, again"
    by_hand = tmp_path / "by_hand.yaml"
    by_hand.write_bytes(config_yaml(complete))
    assert load_config([f"config={by_hand}"]).inference.urls == inference.urls, "a trainer's own, without a launcher"
    again, _, folder, _ = load_run_config([file, "run.dir=other"])
    assert again.trainer.default_local_dir == "other/checkpoints" and again.run.dir == "other"
    assert again.trainer.atropos.weight_sync.directory == "other/weights"
    assert again.trainer.rollout_data_dir == "other/rollouts"
    assert (again.seed, again.inference.urls, again.inference.gateway) == (3, [], None) and folder.name == "other"
    assert again.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.atropos.urls == []
    own = tmp_path / "own.yaml"
    own.write_text("data: {train_batch_size: 8}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}")
    assert load_config([f"config={own}", "preset=demo"]).actor_rollout_ref.actor.ppo_mini_batch_size == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer: {total_step: 3}", "trainer.total_step: no such key; did you mean "),
        ("data: {train_files: x}", "data.train_files=x has no effect here"),
        ("actor_rollout_ref: {rollout: {prompt_length: 9}}", "prompt_length=9 has no effect .* data.max_prompt_length"),
        ("data: {train_batch_size: many}", "data.train_batch_size=many: give a whole number"),
        ("defaults: [ppo_trainer]", "own.yaml: defaults: has no effect here"),
        ("- a", "holds no mapping"),
        ("a: [", "own.yaml: while parsing .*; give a YAML file"),
        (None, "No such file"),
    ],
)
def test_promises_config_file_is_checked_as_arguments_are(tmp_path, text, told):
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=told):
        load_config(["preset=demo", f"config={tmp_path / 'own.yaml'}"])


# ---------------------------------------------------------------------- data


def test_promises_gsm8k_trains_on_gsm8k_unless_told_otherwise(monkeypatch):
    import datasets

    assert GSM8kEnvConfig().dataset_name == GSM8K == "openai/gsm8k"
    assert load_config(["preset=demo"]).environment.args.dataset_name == "synthetic"
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetUnavailable, match="dataset_name=no/such-data: .*dataset_name=FOLDER .*=synthetic"):
        load_problems("no/such-data", "train")


# ---------------------------------------------------------------------- what an environment finds out by itself


def one_server(**values):
    return APIServerConfig(**{"model_name": "no/such-model", "base_url": f"http://127.0.0.1:{free_port()}/v1"} | values)


@pytest.mark.parametrize(
    ("values", "given", "expected"),
    [
        ({"api_key": "x"}, {}, ("sglang", "the-key")),
        ({"api_key": "own"}, {"server_type": "openai"}, ("openai", "own")),
        ({"api_key": ""}, {"api_key": "flag"}, ("sglang", "")),
        ({"api_key": "", "base_url": "https://api.example.com/v1"}, {}, ("openai", "")),
        ({"api_key": "x", "server_type": "vllm"}, {}, ("vllm", "the-key")),
    ],
)
def test_promises_adapter_takes_sglang_and_the_key_and_says_so(monkeypatch, capsys, values, given, expected):
    monkeypatch.setenv("ATROPOS_API_KEY", "the-key")
    defaults._say.cache_clear()
    env = BaseEnvConfig(tokenizer_name="t", use_wandb=False)
    found_env, [found] = defaults.complete(env, [one_server(**values)], given, {}, serves=False)
    assert (found.server_type, found.api_key) == expected and found_env == env, "nobody answers: its defaults stay"
    told = capsys.readouterr().err
    assert ("--openai.server_type=sglang" in told) == (expected[0] == "sglang") and "the-key" not in told
    plain = found.base_url.startswith("http:")
    assert ("the policy stays no/such-model, and its tokenizer t" in told) == plain, told


@pytest.mark.e2e
def test_promises_environment_asks_the_server_for_the_model(server, model_path):
    servers = [APIServerConfig(model_name="no/such-model", base_url=f"{server}/v1", api_key="x")]
    env, [found] = defaults.complete(BaseEnvConfig(tokenizer_name="no/such-model"), servers, {}, {})
    assert found.model_name == env.tokenizer_name == str(model_path) and not env.use_wandb
    env, [found] = defaults.complete(BaseEnvConfig(), servers, {"model_name": "m"}, {"tokenizer_name": "t"})
    assert (found.model_name, env.tokenizer_name) == ("no/such-model", BaseEnvConfig().tokenizer_name), "as given"


@pytest.mark.e2e
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


# ---------------------------------------------------------------------- every command of the document

DEVICE = """
inference: {dtype: float32, mem_fraction_static: 0.3, args: {max_total_tokens: 65536}}
actor_rollout_ref:
  actor: {use_torch_compile: false}
data: {train_batch_size: 2}
trainer: {save_freq: -1, logger: []}
"""


@pytest.fixture
def terminal():
    with terminals() as open_one:
        yield open_one


@pytest.fixture
def folder(tmp_path):
    """Working folder of both terminals: a model, a CPU's settings, a checkout, and GSM8K in place of the hub's."""
    make_boxed_policy(tmp_path / "model")
    (tmp_path / "cpu.yaml").write_text(DEVICE)
    for name in ("openai/gsm8k", "gsm8k"):
        (tmp_path / name / "main").mkdir(parents=True)
        for split, size in (("train", 20), ("test", 2)):
            rows = [{"question": f"{split} {i}?", "answer": f"so\n#### {ANSWERS[i % 2]}"} for i in range(size)]
            (tmp_path / name / "main" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
        card = {"configs": [{"config_name": "main", "data_files": files}]}  # as the hub's has it
        (tmp_path / name / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    (tmp_path / "atropos" / "environments").mkdir(parents=True)
    shutil.copy(gsm8k_server.__file__, tmp_path / "atropos" / "environments" / "gsm8k_server.py")
    return tmp_path


def words(command):
    assert command.startswith("python ")
    return [sys.executable, *command.split()[1:]]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_promises_commands_of_the_main_document_run_as_written(terminal, folder, monkeypatch):
    """The stock environment by what the launcher prints: BaseEnv ignores the document's own --openai.base_url."""
    if not (port_is_free(API_PORT) and port_is_free(GATEWAY_PORT)):
        pytest.skip(f"port {API_PORT} or {GATEWAY_PORT} is taken, and the document names them")
    monkeypatch.setenv("ATROPOS_API_KEY", "a-key-of-ones-own")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder / "atropos")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    launch = words("python -m recipe.atropos.launch_services --model model --steps 1000 --gpus 1")
    launcher = terminal([*launch, "environment.target=null", "--config=cpu.yaml"], folder)
    launcher.wait_for(r"python environments/gsm8k_server.py serve .*\n")
    assert f'"rollout_server_url": "http://127.0.0.1:{API_PORT}"' in launcher.text
    assert f'"base_url": "http://127.0.0.1:{GATEWAY_PORT}/v1"' in launcher.text
    assert '"api_key": "a-key-of-ones-own"' in launcher.text, "the key that is given is every service's"
    url = "--env.rollout_server_url http://localhost:8000"
    commands = (
        ["bash", "-c", f"exec {told_command(launcher.text)}"],
        words(f"python -m recipe.atropos.environments.gsm8k_upstream serve {url}"),
        words(f"python -m recipe.atropos.environments.gsm8k serve {url}"),
    )
    for number, command in enumerate(commands):
        environment = terminal(command, folder)
        launcher.wait_for(f"an environment has joined, as number {number}")
        before = len(read_metrics(folder / "runs" / "default"))
        launcher.wait_for(rf"step +{before + 6}/1000")  # more than one that has left could have posted
        assert environment.process.poll() is None, environment.text
        environment.end()
    lines = read_metrics(folder / "runs" / "default")
    assert any("atropos/env_0/mean_score" in line for line in lines), "a stock environment has no name"
    assert any("atropos/gsm8k/mean_score" in line for line in lines)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_promises_launcher_trains_by_the_documents_command(terminal, folder):
    """Without ``environment.target=null`` it starts an environment itself; another one may join it all the same."""
    launch = words("python -m recipe.atropos.launch_services --model model --steps 1000 --gpus 1")
    launcher = terminal([*launch, "--config=cpu.yaml"], folder, HF_HUB_OFFLINE="1")
    launcher.wait_for(r"step +2/1000")
    assert "heldout" in launcher.text
    prompts = "".join(path.read_text() for path in (folder / "runs" / "default" / "rollouts").iterdir())
    assert "train 0?" in prompts or "train 1?" in prompts, "questions of the folder's data"


def test_promises_help_lists_every_option_of_the_document(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(option in told for option in ("--model", "--steps", "--gpus", "--config"))
