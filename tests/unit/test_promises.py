"""docs/migration.md against the code, name by name."""

import ast
import json
import pkgutil
import re
import shlex

import numpy as np
import pytest
from omegaconf import OmegaConf

from helpers import ROOT
from helpers.promises import PRESETS, SMALL, code, listed, rows_of
from helpers.runs import run_of
from helpers.trainer import random_group
from recipe.atropos.config.compose import compose_config, load_config
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.config.keys import RENAMED, keys_of
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launch_services import main, parse_arguments
from recipe.atropos.launcher.environment_processes import environment_command, environment_variables
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.utils.private_process import SECRET_FLAGS

RECIPE = ROOT / "recipe" / "atropos"
MODEL = "actor_rollout_ref.model.path=m"


def in_repository(path):
    return (RECIPE / path).exists() or (ROOT / path).exists()


def defined(place):
    """Whether ``file.py:Name`` or ``file.py:Class.name`` is defined there, the latter also by a base class."""
    file, _, name = place.partition(":")
    if not (RECIPE / file).is_file():
        return False
    body = ast.parse((RECIPE / file).read_text()).body
    for part in name.split("."):
        named = [node for node in body if getattr(node, "name", None) == part]
        if not named:
            module, (owner, _, member) = file.removesuffix(".py").replace("/", "."), name.rpartition(".")
            return bool(owner) and hasattr(pkgutil.resolve_name(f"recipe.atropos.{module}:{owner}"), member)
        body = named[0].body
    return True


SAME_KEYS = """
trainer.atropos.api_url trainer.atropos.timeout trainer.atropos.use_advantages trainer.atropos.fallback_to_grpo
trainer.atropos.retry_attempts trainer.atropos.retry_delay trainer.atropos.max_wait_time algorithm.adv_estimator
actor_rollout_ref.rollout.temperature data.max_response_length
""".split()


def test_promises_of_keys_are_in_the_configuration():
    known = dict(keys_of(OmegaConf.to_container(compose_config([]))))
    free = ("environment.args.", "environment.reward_bridge.")
    assert set(SAME_KEYS) <= set(listed("Keys", "The same:")) & known.keys()
    for there, here in rows_of("Keys"):
        for key in (cell.partition("=")[0] for cell in code(here) if "." in cell):
            assert key in known or key.startswith(free), f"{there}: {key}"


def test_promises_of_renamed_keys_are_refusals_that_name_the_new():
    renamed = {old: code(here)[0] for there, here in rows_of("Keys") for old in code(there)}
    assert set(RENAMED) <= {old for old in renamed} | {old.rpartition(".")[0] for old in renamed}
    for added in ("", "+"):
        told = told_instead(*(f"{added}{old}=3" for old in renamed))
        assert [given for given, _ in told] == [f"{old}=3" for old in renamed]
        assert all(new in instead for (_, instead), new in zip(told, renamed.values(), strict=True))


def told_instead(*given):
    """What each line of the refusal names: what was given, and what to give."""
    with pytest.raises(ConfigurationError) as refusal:
        load_config([MODEL, *given])
    return [line.partition(": this key has another name here; give ")[::2] for line in str(refusal.value).splitlines()]


def test_promises_of_renamed_keys_name_each_of_them_and_no_other():
    assert told_instead("optim={lr: 1e-5, clip_grad: 1.0}", "model={strategy: fsdp2}", "advantage_clipping=null") == [
        ("optim.lr=1e-05", "actor_rollout_ref.actor.optim.lr=1e-05"),
        ("optim.clip_grad=1.0", "actor_rollout_ref.actor.optim.clip_grad=1.0"),
        ("model.strategy=fsdp2", "actor_rollout_ref.actor.strategy=fsdp2"),
        ("advantage_clipping=null", "trainer.atropos.advantage_clipping=null"),
    ]
    assert load_config([MODEL, "environment.args={lr: 3, optim: {lr: 2}}"]).environment.args.optim.lr == 2


SIZES = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu" for name in ("actor.ppo", "rollout.log_prob")]
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=false"
OF_THE_SFT_DOCUMENT = """
use_advantage_weighting: true
advantage_normalization: "batch"
advantage_clipping: [-5.0, 5.0]  # null for no clipping
model:
  strategy: "fsdp"  # or "fsdp2" for better performance
data:
  micro_batch_size_per_gpu: 1
  balance_dp_token: true
  max_response_length: 512
optim:
  clip_grad: 1.0
  lr: 1.0e-5
"""
OF_THE_VERL_DOCUMENT = """
trainer:
  atropos:
    api_url: http://localhost:9001
    timeout: 30
    use_advantages: true
    fallback_to_grpo: true
    retry_attempts: 10
    retry_delay: 0.5
    max_wait_time: 30.0
algorithm:
  adv_estimator: grpo_atropos
"""


def test_promises_of_old_files_are_kept_or_told_key_by_key(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(OF_THE_VERL_DOCUMENT)
    config = load_config([MODEL, f"config={file}"])
    assert config.trainer.atropos.api_url == "http://localhost:9001" and config.trainer.atropos.max_wait_time == 30
    set_by_it = "^trainer.atropos.api_url is not for the launcher, .* give api.host and api.port"
    with pytest.raises(ConfigurationError, match=set_by_it):
        plan_run([MODEL, f"config={file}"])
    file.write_text(OF_THE_SFT_DOCUMENT)
    told = told_instead(f"config={file}")
    assert told == [
        ("use_advantage_weighting=true", "actor_rollout_ref.actor.policy_loss.loss_mode=advantage_weighted_sft"),
        ("advantage_normalization=batch", "trainer.atropos.advantage_normalization=batch"),
        ("advantage_clipping=[-5.0, 5.0]", "trainer.atropos.advantage_clipping=[-5.0, 5.0]"),
        ("model.strategy=fsdp", "actor_rollout_ref.actor.strategy=fsdp"),
        ("data.micro_batch_size_per_gpu=1", f"{SIZES[0]} and {SIZES[1]}, with {DYNAMIC}"),
        ("data.balance_dp_token=true", "trainer.balance_batch=true"),
        ("optim.clip_grad=1.0", "actor_rollout_ref.actor.optim.clip_grad=1.0"),
        ("optim.lr=1e-05", "actor_rollout_ref.actor.optim.lr=1e-05"),
    ]
    as_told = [new for _, new in told if DYNAMIC not in new] + [f"{SIZES[0]}=1", f"{SIZES[1]}=1", DYNAMIC]
    config = load_config([MODEL, *as_told])
    check_config(config)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5 and config.trainer.atropos.advantage_clipping == [-5, 5]


def test_promises_of_values_are_taken_or_refused_by_name(tmp_path, capsys):
    for given in listed("Values", "The same:"):
        load_config([MODEL, given])
    for given in listed("Values", "Refused by name:"):
        arguments = ["--model=m", f"--run-dir={tmp_path / 'run'}", given]
        assert main(arguments) == 1
        assert f"{given} is not supported: " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_promises_of_flags_are_fields_of_the_environments(tmp_path):
    from atroposlib.envs.base import APIServerConfig

    from recipe.atropos.environments.gsm8k import GSM8kEnvConfig

    fields = {"env": GSM8kEnvConfig.model_fields, "openai": APIServerConfig.model_fields}
    config = load_config([MODEL, "preset=demo", "inference.api_key=k"])
    [spec] = environment_specs(config).values()
    run = run_of(config, tmp_path)
    launched = environment_command(run, spec, "serve", "http://api", "http://server")
    launched += json.loads(environment_variables(run, spec)[SECRET_FLAGS])
    given = listed("Flags of environments", "Set by the launcher:")
    for flag in given + [each for each in listed("Flags of environments", "Yours:") if each.startswith("--")]:
        section, _, field = flag.removeprefix("--").partition(".")
        assert section == "slurm" or field in fields[section], flag
    for flag in given:
        assert any(word == flag or word.startswith(f"{flag}=") for word in launched), flag


def test_promises_of_commands_are_programs_of_this_repository():
    for there, here in rows_of("Commands"):
        for command in code(here):
            words = shlex.split(command)
            if words[:2] == ["python", "-m"]:
                place = ROOT / words[2].replace(".", "/")
                file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
                assert file.is_file() and "__main__" in file.read_text(), command
                if words[2].endswith("launch_services"):
                    parse_arguments([{"N": "1", "G": "1"}.get(word, word) for word in words[3:]])
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            elif words[0] == "pytest":
                assert in_repository(words[1]), command
            elif "/" in command:
                assert in_repository(command), f"{there}: {command}"


def test_promises_of_files_and_names_are_there():
    assert all(in_repository(path) for path in listed("Files", "The same:"))
    for _, here in rows_of("Files"):
        assert code(here) and all(in_repository(path) for path in code(here)), here
    assert all(defined(place) for place in listed("Classes and functions", "The same:") if ".py:" in place)
    for _, here in rows_of("Classes and functions"):
        places = [place for place in code(here) if ".py:" in place]
        assert places and all(defined(place) for place in places), here


FIELDS = {
    "tokens": {"input_ids", "prompts", "responses"},
    "masks": {"response_mask"},
    "scores": {"token_level_scores"},
    "inference_logprobs": {"rollout_log_probs"},
    "advantages": {"atropos_advantages"},
    "ref_logprobs": {"ref_log_prob"},
}


def test_promises_of_fields_and_addresses_are_there():
    from atroposlib.api import app

    from recipe.atropos.data.data_proto import groups_to_data_proto
    from recipe.atropos.data.rows import RowLimits

    group = random_group(np.random.default_rng(0), vocab_size=50)
    for name in FIELDS:
        if name not in group:
            group[name] = [[-0.5] * len(row) for row in group["tokens"]]
    rows, _ = groups_to_data_proto([group], RowLimits(80, pad_token_id=0))
    assert set().union(*FIELDS.values()) <= set(rows.batch.keys())
    addresses = set(listed("Fields and addresses", "Fields of a group")) - {"/generate", "/v1"}
    assert {"/register", "/batch", "/scored_data", "/status"} == addresses <= {route.path for route in app.routes}


@pytest.mark.parametrize("preset", PRESETS)
def test_promises_of_presets_pass_what_is_checked_first(preset):
    config = load_config([f"preset={preset}"])
    check_config(config)
    assert config.environment.args.dataset_name == "openai/gsm8k" and config.run.name == preset
    check_config(load_config([f"preset={preset}", *SMALL]))
