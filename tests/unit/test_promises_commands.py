"""What the main document says of its commands: options, files, data, and what an environment finds out by itself."""

import contextlib
import copy
import os
import shutil
import sys
import time
from collections import UserList
from urllib.parse import urlsplit

import orjson
import pytest
import torch
import wandb
import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

from helpers.disk import write_files
from helpers.runs import prepare_trainer, run_of
from helpers.services import group
from recipe.atropos import main
from recipe.atropos.adapter import defaults
from recipe.atropos.checkpoint.resumption import changed_keys, prepare_folder
from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.commands.replay import replay
from recipe.atropos.config.compose import (
    compose_config,
    differences,
    given_keys,
    load_complete,
    load_config,
    load_recorded,
)
from recipe.atropos.environments import gsm8k_upstream
from recipe.atropos.environments.gsm8k import GSM8kEnvConfig
from recipe.atropos.environments.word_problems import GSM8K, load_problems
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launch_services import compose_overrides, parse_arguments
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.run.folder import RunDir
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.process import free_port
from recipe.atropos.utils.secret import config_yaml
from recipe.atropos.workers.actor import engine_settings

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


def test_config_of_an_earlier_version_is_completed_by_defaults(tmp_path):
    config = load_config(["preset=demo", "seed=3"])
    (tmp_path / "config.yaml").write_bytes(config_yaml(config))
    older = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del older["watchdog"], older["trainer"]["atropos"]["max_staleness"]
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(older))
    with pytest.raises(ConfigurationError, match="watchdog is missing"):
        load_complete(tmp_path / "older.yaml")
    read, shipped = load_recorded(tmp_path / "older.yaml"), compose_config([])
    assert read.watchdog == shipped.watchdog
    assert read.trainer.atropos.max_staleness == shipped.trainer.atropos.max_staleness
    assert read.environment == config.environment and read.seed == 3
    assert load_recorded(tmp_path / "config.yaml") == config


@pytest.fixture
def run_file(tmp_path, model_path):
    """A function that returns ``config=FILE`` of a run of these arguments, as the launcher prepares it."""

    def prepared(*overrides):
        plan = plan_run([*overrides, f"run.dir={tmp_path}", f"actor_rollout_ref.model.path={model_path}"])
        prepare_folder(plan.files, plan.complete(), {}, plan.given())
        return f"config={plan.files.config}"

    return prepared


def test_promises_config_of_a_run_is_a_file_for_another(tmp_path, run_file, monkeypatch):
    given = ["preset=two_environments", "seed=3", "trainer.atropos.max_staleness=1"]
    file = run_file(*given)
    again = plan_run([file])
    assert (again.files.path, again.config.seed) == (tmp_path, 3), "the same run"
    plan = plan_run([file, "run.dir=other", "data.train_batch_size=32", "actor_rollout_ref.actor.clip_ratio=0.3"])
    other, atropos = plan.config, plan.config.trainer.atropos
    assert (plan.files.path.name, other.run.dir, other.seed, atropos.max_staleness) == ("other", "other", 3, 1)
    assert other.environments == again.config.environments and other.trainer.default_local_dir == "other/checkpoints"
    assert atropos.weight_sync.directory == "other/weights" and other.trainer.rollout_data_dir == "other/rollouts"
    actor = other.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.clip_ratio_low) == (32, 0.3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    longer = plan_run([file, f"trainer.total_training_steps={again.config.trainer.total_training_steps + 1}"])
    assert longer.files.path == tmp_path, "the same run, for more steps"
    for named in ("run.name=second", "+run={name: second}"):
        assert plan_run([file, named]).files.path == elsewhere / "runs/second"
    own = tmp_path / "own.yaml"
    own.write_text("run: {dir: there}")
    assert load_config([f"config={own}", "preset=demo", "run.name=second"]).run.dir == "there"
    own.write_text("data: {train_batch_size: 8}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}")
    assert load_config([f"config={own}", "preset=demo"]).actor_rollout_ref.actor.ppo_mini_batch_size == 4


def write_trained(run, batches, checkpoints, folder="checkpoints"):
    """Leave what a run has trained: the numbers of its batches, and the last batch of each checkpoint by its step."""
    lines = [orjson.dumps({"number": number, "batch": [group(number)]}) + b"\n" for number in batches]
    write_files(run, {"batches.jsonl": b"".join(lines)})
    records.import_(RunDir(run).trajectories, run / "batches.jsonl")
    for step, batch in checkpoints.items():
        with Checkpoints(run / folder).saving(step, None, batch=batch) as saved:
            (saved / "actor").mkdir()
            torch.save({"weight": torch.ones(2)}, saved / "actor/model_world_size_1_rank_0.pt")


@pytest.fixture
def replays(monkeypatch):
    """The configurations of the replays, which save what is in ``weights``."""

    def train(config):
        replays.append(config)
        shutil.copytree(replays.weights, config.trainer.default_local_dir, dirs_exist_ok=True)

    replays = UserList()
    monkeypatch.setattr("recipe.atropos.main.run", train)
    return replays


def test_promises_replay_takes_what_a_run_takes(tmp_path, run_file, replays):
    """With the keys that follow it, in Hydra's grammar, and refused where it has no effect beside the run's own."""
    actor, replays.weights = "actor_rollout_ref.actor", tmp_path / "checkpoints"
    run_file(
        "preset=demo", "trainer.total_training_steps=2", f"{actor}.use_kl_loss=true", "environment.args.api_key=secret"
    )
    write_trained(tmp_path, [1, 2], {2: 2})
    given = [f"{actor}.clip_ratio=0.3", f"++{actor}.kl_loss_coef=0.1", "run.name='a b'", "trainer.logger=[]"]
    assert replay(tmp_path, given)
    [config] = replays
    changed = config.actor_rollout_ref.actor
    assert (changed.clip_ratio, changed.clip_ratio_low, changed.clip_ratio_high) == (0.3, 0.3, 0.3)
    assert (changed.kl_loss_coef, config.run.name, config.trainer.logger) == (0.1, "a b", [])
    assert config.run.dir == str(tmp_path.with_name(f"{tmp_path.name}-replay"))
    for word, told in {
        f"{actor}.ppo_micro_batch_size_per_gpu=2": "has no effect with",
        "preset=gsm8k": "preset: no such key",
    }.items():
        with pytest.raises(ConfigurationError, match=told):
            replay(tmp_path, [word])
    RunDir(tmp_path).given.unlink()  # a replay, or a run of an earlier version, has none
    replay(tmp_path, given[1:3])
    assert replays[1].actor_rollout_ref.actor.kl_loss_coef == 0.1
    assert replays[1].run.dir == str(tmp_path.with_name(f"{tmp_path.name}-replay"))


def test_promises_replay_compares_with_the_runs_own_checkpoints(tmp_path, run_file, replays):
    """Wherever it keeps them, and though it went on from a given one, as its replay does not."""
    steps = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'elsewhere'}"]
    replays.weights = tmp_path / "elsewhere"
    write_trained(tmp_path, [1, 2], {1: 1, 2: 2}, "elsewhere")
    given = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'elsewhere/global_step_1'}"
    run_file("preset=demo", *steps, *given)
    assert replay(tmp_path, [])
    run_file("preset=demo", *given)
    with pytest.raises(ConfigurationError, match="of another run, whose batches are not here"):
        replay(tmp_path, [])


@pytest.mark.parametrize(("batches", "ready"), [([1, 2, 3], "2, 5"), ([2, 3], "none")])
def test_promises_replay_ends_at_once_if_it_cannot_compare(tmp_path, run_file, replays, batches, ready):
    """Of a run that was stopped, for example, or whose batches are deleted."""
    run_file("preset=demo", "trainer.total_training_steps=60")
    write_trained(tmp_path, batches, {2: 2, 5: 3, 25: 20})
    for steps in (60, 25):
        with pytest.raises(ConfigurationError, match=f"={steps}: .*; steps with both: {ready}$"):
            replay(tmp_path, [f"trainer.total_training_steps={steps}"])
    assert not replays


def test_promises_replay_replaces_no_other_run(tmp_path, run_file, replays):
    run_file("preset=demo", "trainer.total_training_steps=2")
    write_trained(tmp_path, [1, 2], {2: 2})
    other = RunDir(tmp_path.with_name(f"{tmp_path.name}-replay"))
    write_files(other.path, {"given.yaml": b""})
    with pytest.raises(ConfigurationError, match=f"run.dir={other.path}: it holds a run .*; give another folder"):
        replay(tmp_path, [])
    assert not replays


def test_promises_config_of_a_run_has_its_services_of_a_start(tmp_path, run_file, monkeypatch):
    """Which another run does not get: nothing of them was given."""
    file = run_file("preset=two_environments", "trainer.atropos.max_staleness=1")
    config = load_complete(tmp_path / "config.yaml")
    run = run_of(config, tmp_path, compose_config(["preset=two_environments"]))
    prepare_trainer(run, monkeypatch)
    complete, urls = load_complete(tmp_path / "config.yaml"), ["http://127.0.0.1:1"]
    assert complete.inference.urls == urls and complete.trainer.atropos.api_url == "http://127.0.0.1:3"
    assert engine_settings(complete)["urls"] == urls
    before = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert before["trainer"]["atropos"]["max_wait_time"] is None and complete.trainer.atropos.max_wait_time == 600
    older = before | {"actor_rollout_ref": copy.deepcopy(before["actor_rollout_ref"])}
    older["actor_rollout_ref"]["rollout"]["checkpoint_engine"]["engine_kwargs"] = {"atropos": {"urls": ["http://a"]}}
    assert changed_keys(older, yaml.safe_load(config_yaml(run.plan.complete()))) == [], "the same command, again"
    again = plan_run([file, "run.dir=other"]).config
    assert (again.inference.urls, again.inference.gateway) == ([], None)


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_restarted_trainer_goes_on_from_its_own_start(tmp_path, monkeypatch, skew):
    """From what this start has saved, not an earlier one, whatever the clock of the disk or of this machine says."""

    def save(step):
        with Checkpoints(tmp_path / "checkpoints").saving(step, None) as folder:
            pass
        os.utime(folder, (time.time() + skew,) * 2)

    overrides = ["preset=demo", f"run.dir={tmp_path}", "trainer.resume_mode=disable"]
    run = run_of(load_config(overrides), tmp_path, compose_config(overrides))
    save(20)
    run.files.waiting.touch()
    prepare_trainer(run, monkeypatch)
    assert not run.files.waiting.exists(), "a killed trainer's mark would say that this one waits"
    modes = [run.complete.trainer.resume_mode]
    for step in (None, 20):
        if step is not None:
            save(step)
        run.restart_policies["trainer"].start()
        modes.append(run.complete.trainer.resume_mode)
    assert modes == ["disable", "disable", "auto"]


def test_promises_config_of_a_trainer_has_its_services(tmp_path, model_path, monkeypatch):
    """Without a launcher, they are given; and a run of an earlier version says what still reads it."""
    given = [f"actor_rollout_ref.model.path={model_path}", f"run.dir={tmp_path}", "inference.urls=[http://127.0.0.1:1]"]
    monkeypatch.setattr(main, "gateway_before", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(main, "_train", lambda config: None)
    monkeypatch.setattr(main, "installed_versions", lambda python: {})
    composed = compose_config(["preset=demo", *given])
    main.train(load_config(["preset=demo", *given]), differences(composed))
    file = f"config={tmp_path / 'config.yaml'}"
    assert load_config([file]).inference.urls == ["http://127.0.0.1:1"]
    with pytest.raises(ConfigurationError, match="inference.urls is not for the launcher"):
        plan_run([file])
    with pytest.raises(ConfigurationError, match="trainer.atropos.replay is not for .* verl-atropos replay RUN"):
        plan_run(["preset=demo", "trainer.atropos.replay=runs/demo/trajectories"])
    (tmp_path / "given.yaml").unlink()
    with pytest.raises(ConfigurationError, match="a replay wrote it, without given.yaml, .* replay reads it"):
        load_config([file])


def test_promises_config_of_a_run_asks_for_the_secrets_it_hides(tmp_path, run_file):
    key = "environment.args.judge.api_key"
    file = run_file("preset=demo", f"+{key}=sk-1", "inference.api_key=sk-2", "+environment.args.secrets.shop=sk-4")
    text = (tmp_path / "given.yaml").read_text()
    assert "sk-" not in text and text.count("***") == 2
    given = ["run.dir=other", "environment.args.secrets.shop=sk-4"]
    with pytest.raises(ConfigurationError, match=rf"^{key}=\*\*\*: .* give its value, or \$\{{oc.env:NAME\}}"):
        load_config([file, *given])
    assert load_config([file, *given, f"{key}=sk-3"]).environment.args.judge.api_key == "sk-3"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer: {total_step: 3}", "trainer.total_step: no such key; did you mean "),
        ("data: {train_files: x}", "data.train_files=x has no effect here"),
        ("defaults: [ppo_trainer]", "own.yaml: defaults: has no effect here"),
        ("- a", "holds no mapping"),
        ("a: [", "own.yaml: while parsing .*; give a YAML file"),
        ("# für mich", "own.yaml: 'utf-8' codec can't decode byte 0xfc .*; give a YAML file"),
        (None, "No such file"),
    ],
)
def test_promises_config_file_is_checked_as_arguments_are(tmp_path, text, told):
    if text is not None:
        (tmp_path / "own.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=told):
        load_config(["preset=demo", f"config={tmp_path / 'own.yaml'}"])


# ---------------------------------------------------------------------- data


def test_promises_gsm8k_trains_on_gsm8k_unless_told_otherwise(monkeypatch):
    import datasets

    assert GSM8kEnvConfig().dataset_name == GSM8K == "openai/gsm8k"
    assert load_config(["preset=demo"]).environment.args.dataset_name == "synthetic"
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="dataset_name=no/such-data: .*dataset_name=FOLDER .*=synthetic"):
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
    env = BaseEnvConfig(tokenizer_name="t", use_wandb=False)
    found_env, [found] = defaults.complete(env, [one_server(**values)], given, {}, serves=False)
    assert (found.server_type, found.api_key) == expected and found_env == env, "nobody answers: its defaults stay"
    told = capsys.readouterr().err
    assert ("--openai.server_type=sglang" in told) == (expected[0] == "sglang") and "the-key" not in told
    plain = found.base_url.startswith("http:")
    assert ("the policy stays no/such-model, and its tokenizer t" in told) == plain, told


def test_promises_wandb_stays_on_for_a_login_to_its_host(monkeypatch, no_wandb_login, tmp_path, capsys):
    (tmp_path / "netrc").write_text(f"machine wb.corp.com login user password {'5' * 40}\n")
    env, servers = BaseEnvConfig(tokenizer_name="t", use_wandb=True), [one_server()]
    assert not defaults.complete(env, servers, {}, {})[0].use_wandb, "a login elsewhere is none"
    host = urlsplit(wandb.Settings().base_url).netloc
    assert f"nobody has logged in to {host} here" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_BASE_URL", "https://wb.corp.com")
    assert defaults.complete(env, servers, {}, {})[0].use_wandb


def test_promises_help_lists_every_option_of_the_document(capsys, monkeypatch):
    """And upstream's helps without a checkout."""
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(option in told for option in ("--model", "--steps", "--gpus", "--config"))
    monkeypatch.setattr(sys, "argv", ["gsm8k_upstream", "serve", "--help"])
    gsm8k_upstream.main()
    told = capsys.readouterr().out
    assert "--atropos-dir" in told and "git clone https://github.com/NousResearch/atropos" in told
    monkeypatch.setattr(sys, "argv", ["gsm8k_upstream", "serve"])
    with pytest.raises(SystemExit, match="2"):
        gsm8k_upstream.main()
