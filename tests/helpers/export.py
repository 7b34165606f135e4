"""Runs with checkpoints, without any rank; and what is exported, against what is served."""

import argparse
import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from helpers.families import Engine
from helpers.sglang import call
from helpers.trainer import compose_config
from recipe.atropos.checkpoint.export import export_checkpoint
from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.commands.export_model import add_arguments
from recipe.atropos.config.compose import resolved
from recipe.atropos.config.derived import set_derived
from recipe.atropos.launch_services import compose_overrides, parse_arguments
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.gpus import decide_device
from recipe.atropos.utils.secret import config_yaml


@pytest.fixture(scope="module")
def alone():
    """A process group of this process; verl's manager of checkpoints asks for one, and an export must not."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, make_model, alone):
    """Three checkpoints of a Qwen2, sharded by FSDP2, and the engine of the last."""
    engines = [trained(make_model("qwen2")) for _ in range(3)]
    for engine in engines:
        fully_shard(engine.module, mesh=init_device_mesh("cpu", (1,)))
    options = ["data.train_batch_size=5", "inference.api_key=s3cret", "environment.target=/home/me/my_env.py:Mine"]
    run = saved_run(tmp_path_factory.mktemp("run") / "small", configuration(make_model("qwen2"), *options), *engines)
    return run, engines[-1]


@functools.cache
def _composed(*options):  # it takes a second
    return config_yaml(compose_config("actor_rollout_ref.model.path=MODEL", "run.dir=.", *options))


def configuration(model, *options):
    """config.yaml of a run of ``model``, as the launcher writes it."""
    return _composed(*options).replace(b"MODEL", str(model).encode())


def trained(model, lora_rank=0):
    """What saves checkpoints as the trainer's engine, with other values than the model's."""
    engine = Engine(model, lora_rank)
    engine.train()
    return engine


def saved_run(folder, config, *engines, **options):
    """A run with a checkpoint of each of ``engines``, of steps 1, 2, ..."""
    run = RunDir(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_bytes(config)
    for step, engine in enumerate(engines, 1):
        with Checkpoints(run.checkpoints).saving(step, None) as checkpoint:
            engine.save_checkpoint(checkpoint / "actor", **options)
    return run


def begun_from(tmp_path, spec, *options):
    """As the launcher reads its command line."""
    arguments = parse_arguments(["--resume-from", str(spec), "--run-dir", str(tmp_path / "second"), *options])
    plan = plan_run(compose_overrides(arguments))
    assert plan.files.path == tmp_path / "second"
    plan.files.path.mkdir(exist_ok=True)
    return plan


def make_start(plan):
    """Copy the weights that a planned run starts from."""
    plan.start.make()
    plan.config.actor_rollout_ref.model.path = plan.start.base
    expected = set_derived(resolved(plan.composed))
    decide_device(expected)
    assert expected == plan.config
    return plan.config


PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34], list(range(40, 80))]
NEW_TOKENS = 32


def export_of(trainer, folder):
    """The folder of an export of what a trainer holds now, by a checkpoint of all its ranks in ``folder``."""
    run = RunDir(folder)
    checkpoint = run.checkpoints / "global_step_1"
    trainer.actor.save_checkpoint(str(checkpoint / "actor"), None, 1, None)
    run.config.write_bytes(config_yaml(trainer.config))
    export_checkpoint(run, checkpoint, run.model)
    return run.model


def served_answers(url):
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    replies = call(url, lambda client: client.generate(input_ids=PROMPTS, sampling_params=parameters), timeout=300)
    return [reply["output_ids"] for reply in replies]


def answers_of(folder, prompts=PROMPTS, tokens=NEW_TOKENS):
    """What transformers answers, greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.generation_config.eos_token_id = None  # as ignore_eos
    options = {"do_sample": False, "max_new_tokens": tokens}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return answers


def assert_export_is_what_is_served(trainer, url, pushed, folder: Path):
    """``pushed``: name and tensor of the newest push. Bit for bit those, and token for token the server's answers."""
    exported = load_file(export_of(trainer, folder) / "model.safetensors")
    assert exported.keys() == pushed.keys()
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in exported.items())
    start = load_file(Path(trainer.config.actor_rollout_ref.model.path) / "model.safetensors")
    assert any(not torch.equal(exported[name], tensor) for name, tensor in start.items() if name in exported)
    assert answers_of(folder / "model") == served_answers(url)


def arguments(*given):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(argument) for argument in given])
