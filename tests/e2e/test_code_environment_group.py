"""A group of the code environment, with answers of a real server."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.code_environment import make_code_environment
from recipe.atropos.adapter.completion_cache import trained_spans


@pytest.mark.slow
def test_code_environment_groups_hold_what_was_sampled(model_path, server):
    """Of a real server: its tokens, with the logprobs that the model gives them, and a verdict on each answer."""
    env = make_code_environment(model_path, server)

    async def collect():
        return await env.collect_trajectories(await env.get_next_item())

    try:
        group, backlog = asyncio.run(collect())
    finally:
        env.sandbox.close()
    assert backlog == [] and group["scores"] == [-1.0] * 3, "the model writes nonsense"
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        [(start, end)] = trained_spans(masks)
        assert end == len(tokens) and 1 <= end - start <= 12 and masks[start:end] == tokens[start:end]
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for place in range(start, end):
            assert expected[place - 1, tokens[place]].item() == pytest.approx(logprobs[place], abs=1e-3)
    assert sum(n for name, n in env.report.counts.items() if name.startswith("answers/")) == 3
