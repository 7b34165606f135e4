"""Environments of this repository by themselves, on a real server."""

import asyncio

import pytest

from recipe.atropos.adapter.completion_cache import trained_spans
from recipe.atropos.environments.gsm8k import GSM8kEnv, GSM8kEnvConfig


@pytest.mark.timeout(300)
def test_single_turn_runs_without_the_adapter(model_path, server, tmp_path):
    """Without the adapter a group is rolled out and evaluated by a real server."""
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
