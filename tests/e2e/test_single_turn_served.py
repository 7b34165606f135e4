"""Environments of this repository by themselves, on a real server."""

import asyncio

import pytest

from helpers.code_environment import make_code_environment
from helpers.sampled import assert_as_sampled
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.environments.gsm8k import GSM8kEnv, GSM8kEnvConfig

pytestmark = pytest.mark.timeout(300)


async def rolled_out(env):
    return await env.collect_trajectories(await env.get_next_item())


def check_sampled(model_path, collected, most):
    """A group has the server's tokens, at most so many, with the logprobs that the model gives them."""
    group, backlog = collected
    assert backlog == [] and group["scores"] == [-1.0] * 3, "the model writes nonsense"
    assert_as_sampled(group, model_path)
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        [(start, end)] = trained_spans(masks)
        assert end == len(tokens) and 1 <= end - start <= most


async def test_single_turn_runs_without_the_adapter(model_path, server, tmp_path):
    """Without the adapter a group is rolled out and evaluated by a real server."""
    sizes = {"train_size": 8, "eval_size": 3, "max_token_length": 250, "max_answer_tokens": 9, "group_size": 3}
    names = {"dataset_name": "synthetic", "tokenizer_name": str(model_path), "data_dir_to_save_evals": str(tmp_path)}
    _, [handle] = GSM8kEnv.config_init()
    handle.model_name, handle.base_url = str(model_path), f"{server}/v1"
    env = GSM8kEnv(GSM8kEnvConfig(**names, **sizes, use_wandb=False), [handle], slurm=False)
    await env.setup()
    collected = await rolled_out(env)
    await env.evaluate()
    check_sampled(model_path, collected, most=9)
    assert env.eval_metrics == [("eval/percent_correct", 0.0), ("eval/total", 3)]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_code_environment_groups_hold_what_was_sampled(model_path, server):
    """There is a verdict on each answer."""
    env = make_code_environment(model_path, server)
    try:
        collected = asyncio.run(rolled_out(env))
    finally:
        env.sandbox.close()
    check_sampled(model_path, collected, most=12)
    assert sum(n for name, n in env.report.counts.items() if name.startswith("answers/")) == 3
