"""Environments over a policy that was hardly taught, without a server, and what the managed server gives them."""

import asyncio

import pytest
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.managed_server import SequenceNode

from recipe.atropos.demo.policies import CalculatorRecipe
from recipe.atropos.demo.small_policy import make_small_policy

IGNORED = -100


@pytest.fixture(scope="package")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    make_small_policy(path, recipe=CalculatorRecipe(steps=1, problems=200, batch_size=4))
    return str(path)


@pytest.fixture
def make_env(policy):
    """``make_env(environment, **options)``: one that is set up; ``tokenizer``: another than the policy's."""

    def make(environment, tokenizer=policy, **options):
        config = environment.env_config_cls(tokenizer_name=str(tokenizer), use_wandb=False, **options)
        server = APIServerConfig(
            model_name=policy, base_url="http://127.0.0.1:1/v1", api_key="x", server_type="sglang", health_check=False
        )
        env = environment(config, [server])
        asyncio.run(env.setup())
        return env

    return make


@pytest.fixture
def node():
    """``node(env, *turns, prompt=3)``: a conversation whose turns the policy sampled, a tool's words between them."""

    def node(env, *turns, prompt=3):
        tokens, masks = [5] * prompt, [IGNORED] * prompt
        for number, turn in enumerate(turns):
            between = env.tokenizer.encode("tool\n") if number else []
            said = [*env.tokenizer.encode(turn), env.tokenizer.eos_token_id]
            tokens += between + said
            masks += [IGNORED] * len(between) + said
        logprobs = [1.0 if mask == IGNORED else -0.5 for mask in masks]
        return SequenceNode(full_text="", tokens=tokens, masked_tokens=masks, logprobs=logprobs)

    return node
