"""Environments of this repository are plain ``BaseEnv``s: they run without the adapter, and it adds the rest."""

import asyncio
import importlib

import pytest
from atroposlib.envs.base import BaseEnv
from transformers import AutoTokenizer

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.environments.calculator import CalculatorEnv
from recipe.atropos.environments.gsm8k import GSM8kEnv
from recipe.atropos.environments.reasoning import ReasoningEnv, ReasoningEnvConfig, dataset
from recipe.atropos.environments.word_problems import SYNTHETIC
from recipe.atropos.errors import ConfigurationError

ENVIRONMENTS = "recipe.atropos.environments"
NAMES = ("gsm8k", "calculator", "code", "reasoning", "even_tokens")


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_has_nothing_of_the_adapter_in_its_bases(name):
    environment = load_environment(f"{ENVIRONMENTS}.{name}")
    bases = environment.__mro__[: environment.__mro__.index(BaseEnv)]
    assert all(base.__module__.startswith(ENVIRONMENTS) for base in bases), bases
    names = vars(importlib.import_module(environment.__module__)).items()
    # A reward bridge, as other tests have it, puts another class under the name ScoredDataGroup.
    classes = [value for name, value in names if isinstance(value, type) and name != "ScoredDataGroup"]
    assert not [cls for cls in classes if cls.__module__.startswith("recipe.atropos.adapter")]


@pytest.mark.parametrize("environment", [GSM8kEnv, CalculatorEnv])
def test_single_turn_needs_a_chat_template(make_env, policy, tmp_path, environment):
    """Each item would fail, and no batch would come."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    told = f"^the tokenizer {tmp_path} has no chat template, and {environment.__name__} sends messages"
    with pytest.raises(ConfigurationError, match=told):
        make_env(environment, tokenizer=tmp_path, dataset_name=SYNTHETIC, train_size=50, eval_size=20)


class Logged(BaseEnv):
    """Keeps what would go to wandb."""

    async def wandb_log(self, wandb_metrics=None):
        self.logged = wandb_metrics


class LoggedEnv(ReasoningEnv, Logged):
    pass


@pytest.mark.parametrize("prepare", [lambda environment: environment, adapt], ids=["plain", "adapted"])
def test_single_turn_logs_counts_with_and_without_adapter(model_path, prepare):
    _, [server] = LoggedEnv.config_init()
    server.model_name = str(model_path)
    env = prepare(LoggedEnv)(ReasoningEnvConfig(tokenizer_name=str(model_path), use_wandb=False), [server])
    env.train = dataset("prime_factorization", "{}", 2, 0)
    for _ in range(2):
        env.task_score("<answer>seven</answer>", env.train[0])
    for calls in (1, 2, 6):
        env.report.observe("calls", calls)
    env.percent_correct_buffer, env.eval_metrics = [1.0, 0.0], [("eval/accuracy", 0.25)]
    asyncio.run(env.wandb_log({"given": 1}))
    own = {"given": 1, "train/percent_correct": 0.5, "eval/accuracy": 0.25}
    assert env.logged == own | {"env/unreadable_answers": 2, "env/calls": 3}
    asyncio.run(env.wandb_log())
    assert env.logged["env/unreadable_answers"] == 2 and not {"train/percent_correct", "eval/accuracy"} & {*env.logged}
