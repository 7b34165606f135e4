"""The schema of the configuration: what is refused by key, value and choices; and that its names are verl's."""

import copy
import subprocess
import sys
from typing import get_args

import pytest
from omegaconf import OmegaConf

from recipe.atropos.config import schema
from recipe.atropos.config.schema import check_schema, documented
from recipe.atropos.errors import ConfigurationError

ACTOR, ATROPOS, MODEL, ROLLOUT = (
    "actor_rollout_ref.actor",
    "trainer.atropos",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout",
)


@pytest.fixture(scope="module")
def values():
    from helpers_trainer import compose_config

    config = compose_config(f"{MODEL}.path=m", "environments={}")
    return OmegaConf.to_container(config, resolve=True)


def with_value(values, key, value):
    changed = copy.deepcopy(values)
    *path, last = key.split(".")
    at = changed
    for part in path:
        at = at[part]
    at[last] = value
    return changed


REFUSED = [
    ("data.train_batch_size", -4, "data.train_batch_size=-4: must be greater than or equal to 1"),
    ("data.train_batch_size", 0, "data.train_batch_size=0: must be greater than or equal to 1"),
    ("data.train_batch_size", "many", "data.train_batch_size=many: must be a valid integer"),
    (f"{MODEL}.lora_rank", -1, "lora_rank=-1: must be greater than or equal to 0"),
    (f"{MODEL}.path", None, "actor_rollout_ref.model.path is not set: give --model"),
    ("seed", "abc", "seed=abc: must be a valid integer"),
    ("seed", True, "seed=true: must be a valid integer"),
    ("inference.device", "gpu", "inference.device=gpu; choose one of auto, cuda, cpu"),
    ("inference.dtype", "fp16", "inference.dtype=fp16; choose one of bfloat16, float16, float32"),
    ("inference.args", 3, "inference.args=3: must be a valid dictionary"),
    ("inference.servrs", 1, "inference.servrs: no such key; did you mean inference.servers?"),
    ("environment.target", None, "environment.target=null: must be a valid string"),
    ("environment.group_size", None, "environment.group_size=null: must be a valid integer"),
    ("environment.args", 3, "environment.args=3: must be a valid dictionary"),
    (
        "environments.a",
        {"target": "m", "wieght": 2},
        "environments.a.wieght: no such key; did you mean environments.a.we",
    ),
    ("environments.a", {"weight": 0}, "environments.a.weight=0: must be greater than 0, or null"),
    ("environments.a b", {}, "environments.a b"),
    ("evaluation.every", 0, "evaluation.every=0: must be greater than or equal to 1, or null"),
    ("trainer.total_training_steps", None, "total_training_steps=null: must be a valid integer"),
    ("trainer.total_training_steps", "ten", "total_training_steps=ten: must be a valid integer"),
    ("trainer.total_training_steps", 0, "total_training_steps=0: must be greater than or equal to 1"),
    ("trainer.n_gpus_per_node", 0, "n_gpus_per_node=0: must be greater than or equal to 1"),
    ("trainer.nnodes", 0, "nnodes=0: must be greater than or equal to 1"),
    ("trainer.logger", ["wandbb"], "trainer.logger[0]=wandbb; choose one of wandb, mlflow"),
    ("trainer.resume_mode", "always", "resume_mode=always; choose one of auto, disable, resume_path"),
    (f"{ATROPOS}.max_stalenes", 1, "max_stalenes: no such key; did you mean trainer.atropos.max_staleness?"),
    (f"{ATROPOS}.max_staleness", True, "max_staleness=true: must be a valid integer, or null"),
    (f"{ATROPOS}.api_url", "localhost:8000", "api_url=localhost:8000: must match pattern"),
    (f"{ATROPOS}.timeout", float("nan"), "timeout=NaN: must be a finite number"),
    (f"{ATROPOS}.sampling_mismatch", "ignore", "sampling_mismatch=ignore; choose one of error, per_row, warn"),
    (f"{ATROPOS}.logprob_tolerance", 0, "logprob_tolerance=0: must be greater than 0, or null"),
    (f"{ATROPOS}.overlong", "cut", "overlong=cut; choose one of truncate, drop, error"),
    (f"{ATROPOS}.weight_sync.timeout", -5, "weight_sync.timeout=-5: must be greater than 0"),
    (
        f"{ACTOR}.checkpoint.save_contents",
        ["model", "hf"],
        "save_contents[1]=hf; choose one of model, optimizer, extra",
    ),
    (f"{ACTOR}.clip_ratio", -1, "clip_ratio=-1: must be greater than or equal to 0"),
    (f"{ACTOR}.optim.lr", "abc", "optim.lr=abc: must be a valid number"),
    (f"{ACTOR}.optim.lr_scheduler_type", "cosin", "lr_scheduler_type=cosin; choose one of constant, cosine"),
    (f"{ACTOR}.kl_loss_type", "low_kl", "kl_loss_type=low_kl; choose one of kl, k1, abs, mse, k2, low_var_kl"),
    (f"{ACTOR}.ppo_epochs", 0, "ppo_epochs=0: must be greater than or equal to 1"),
    (f"{ACTOR}.strategy", "megatron", "strategy=megatron; choose one of fsdp, fsdp2"),
    (f"{ROLLOUT}.temperature", 0, "temperature=0: must be greater than 0"),
    (f"{ROLLOUT}.name", "vllm", "rollout.name=vllm; choose one of sglang"),
    ("algorithm.adv_estimator", "gae", "needs a critic, which this recipe does not train; choose one of gpg, grpo"),
]


@pytest.mark.parametrize(("key", "value", "told"), REFUSED, ids=[f"{key}={value}" for key, value, _ in REFUSED])
def test_schema_refuses_by_key_value_and_choices(values, key, value, told):
    with pytest.raises(ConfigurationError) as refusal:
        check_schema(with_value(values, key, value))
    assert told in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_schema_takes_the_shipped_configuration_and_scientific_numbers(values):
    check_schema(values)
    check_schema(with_value(values, f"{ACTOR}.optim.lr", 1e-6))
    check_schema(with_value(values, "trainer.experiment_name", 2024))
    check_schema(with_value(values, "environments.sums", {"target": "m", "group_size": None, "weight": 2}))


def test_schema_reports_every_wrong_key_on_a_line_of_its_own(values):
    with pytest.raises(ConfigurationError) as refusal:
        check_schema(with_value(with_value(values, "seed", -1), "trainer.nnodes", "two"))
    assert str(refusal.value).splitlines() == [
        "seed=-1: must be greater than or equal to 0",
        "trainer.nnodes=two: must be a valid integer",
    ]


def test_schema_describes_every_key():
    lacking = [
        key
        for key, field in documented().items()
        if not (field.description or hasattr(field.annotation, "model_fields"))
    ]
    assert not lacking


def test_schema_choices_are_those_that_verl_registers():
    import torch
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, kl_penalty
    from verl.utils.tracking import Tracking

    import recipe.atropos.advantages
    import recipe.atropos.losses  # noqa: F401

    estimators, losses = schema.EXCLUDED.values()
    assert {*get_args(schema.Estimator), *estimators} == set(ADV_ESTIMATOR_REGISTRY)
    assert {*get_args(schema.PolicyLoss), *losses} == set(POLICY_LOSS_REGISTRY)
    assert set(get_args(schema.Tracker)) == set(Tracking.supported_backend)
    for name in {*get_args(schema.KL), *get_args(schema.KLLoss)}:
        assert kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name).shape == (1, 1)


def test_schema_imports_neither_torch_nor_verl():
    code = "import sys, recipe.atropos.config.schema; print([m for m in ('torch', 'verl', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
