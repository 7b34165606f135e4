"""Turn trees of the calculator and of the environments over it, with a scripted policy behind a real managed server."""

import asyncio
import random

import pytest

from helpers import ROOT
from helpers.scripted_policy import last_said, scripted
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.data.rows import trained_spans

KeysEnv = load_environment(f"{ROOT / 'benchmarks' / 'tasks' / 'credit.py'}:KeysEnv")


@pytest.fixture
def keys(make_env):
    """Makes an environment of four keys; its policy presses each one at random."""

    def make(**options):
        plain = {"steps": 4, "max_turns": 5, "system_prompt": "", "max_token_length": 400, "eval_size": 4}
        return make_env(KeysEnv, **{**plain, "group_size": 6, "partial_scores": True, **options})

    return make


def collected(env, say, groups=1):
    """The groups of the first items."""

    async def collect():
        async with scripted(env, say):
            return [(await env.collect_trajectories(await env.get_next_item()))[0] for _ in range(groups)]

    return asyncio.run(collect())


def presses(seed=0):
    rng = random.Random(seed)
    return lambda chat: rng.choice("+-*") if " " in last_said(chat) else "="


def test_keys_may_be_a_turn_tree(keys):
    """Branches are told, and values are of all turns, those of the branch's source included."""
    random.seed(0)
    for group in collected(keys(tree_roots=3), presses(), groups=4):
        branches = group["group_overrides"]["branches"]
        assert branches[:3] == [None] * 3 and any(branches)
        for values, masks, branch in zip(
            group["group_overrides"]["turn_values"], group["masks"], branches, strict=True
        ):
            assert len(values) == 5 == len(list(trained_spans(masks))) + (branch[1] if branch else 0)
        assert group["scores"] == [values[-1] for values in group["group_overrides"]["turn_values"]]
        add_credit(group, Credit(lam=0.0))
        assert any(map(any, group["advantages"]))
