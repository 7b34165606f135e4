"""Environments of this repository are plain ``BaseEnv``s: they run without the adapter, and it adds the rest."""

import asyncio
import importlib

import pytest
from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.completion_cache import trained_spans
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.environments.gsm8k import GSM8kEnv, GSM8kEnvConfig
from recipe.atropos.environments.reasoning import ReasoningEnv, ReasoningEnvConfig, dataset

ENVIRONMENTS = "recipe.atropos.environments"
NAMES = ("gsm8k", "gsm8k_advantages", "calculator", "calculator_advantages", "code", "reasoning", "even_tokens")


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_has_nothing_of_the_adapter_in_its_bases(name):
    environment = load_environment(f"{ENVIRONMENTS}.{name}")
    bases = environment.__mro__[: environment.__mro__.index(BaseEnv)]
    assert all(base.__module__.startswith(ENVIRONMENTS) for base in bases), bases
    taken = [
        value for value in vars(importlib.import_module(environment.__module__)).values() if isinstance(value, type)
    ]
    assert not [cls for cls in taken if cls.__module__.startswith("recipe.atropos.adapter")]


class Logged(BaseEnv):
    """Keeps what would go to wandb."""

    async def wandb_log(self, wandb_metrics=None):
        self.logged = wandb_metrics


class LoggedEnv(ReasoningEnv, Logged):
    pass


@pytest.mark.parametrize("prepare", [lambda environment: environment, adapt], ids=["plain", "adapted"])
def test_what_an_environment_counts_and_observes_is_logged_with_and_without_the_adapter(model_path, prepare):
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
    assert env.logged == {
        "given": 1,
        "env/unreadable_answers": 2,
        "env/calls": 3,
        "train/percent_correct": 0.5,
        "eval/accuracy": 0.25,
    }
    asyncio.run(env.wandb_log())
    assert env.logged["env/unreadable_answers"] == 2 and not {"train/percent_correct", "eval/accuracy"} & set(
        env.logged
    )


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_without_the_adapter_a_group_is_rolled_out_and_evaluated_by_a_real_server(model_path, server, tmp_path):
    own = {
        "dataset_name": "synthetic",
        "train_size": 8,
        "eval_size": 3,
        "max_token_length": 250,
        "max_answer_tokens": 9,
    }
    config = GSM8kEnvConfig(
        **own, tokenizer_name=str(model_path), group_size=3, use_wandb=False, data_dir_to_save_evals=str(tmp_path)
    )
    _, [handle] = GSM8kEnv.config_init()
    handle.model_name, handle.base_url = str(model_path), f"{server}/v1"

    async def run():
        env = GSM8kEnv(config, [handle], slurm=False)
        await env.setup()
        group, backlog = await env.collect_trajectories(await env.get_next_item())
        await env.evaluate()
        return group, backlog, env.eval_metrics

    group, backlog, metrics = asyncio.run(run())
    assert backlog == [] and group["scores"] == [-1.0] * 3, "the model writes nonsense"
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        [(start, end)] = trained_spans(masks)
        assert end == len(tokens) and 1 <= end - start <= 9 and masks[start:end] == tokens[start:end]
        assert all(value < 0 for value in logprobs[start:end])
    assert metrics == [("eval/percent_correct", 0.0), ("eval/total", 3)]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3
