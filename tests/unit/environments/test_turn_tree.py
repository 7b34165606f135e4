"""Turn trees of the calculator and of the environments over it, with a scripted policy behind a real managed server."""

import asyncio
import random
from statistics import fmean

import pytest

from helpers import ROOT
from helpers.scripted_policy import last_said, scripted
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.errors import ConfigurationError

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


def test_a_trees_groups_have_their_budget_on_average(keys):
    """Its size is settled before it: the group after a short one and the one after a long one are as large."""
    random.seed(0)
    budget, lengths = 150, [1, 9]  # a turn's words; one key more or less is worth 2 to 10 tokens

    def words(chat):
        return "-" * random.choice(lengths)

    groups = collected(keys(tree_roots=2, tree_tokens=budget, group_size=24, max_answer_tokens=30), words, groups=60)
    sizes = [len(group["tokens"]) for group in groups]
    assert sizes[0] == 24 and len(set(sizes[20:])) > 1, "without experience as many as there may be"
    assert all(group["group_overrides"].get("group_size", 24) == len(group["tokens"]) for group in groups)
    tokens = [sum(mask != -100 for row in group["masks"] for mask in row) for group in groups]
    assert fmean(tokens[20:]) == pytest.approx(budget, rel=0.15)


def test_a_trees_budget_leaves_its_roots(keys):
    groups = collected(keys(tree_roots=3, tree_tokens=1), presses(), groups=3)
    assert [len(group["tokens"]) for group in groups] == [6, 3, 3]


def test_branches_of_rewritten_turns_begin_at_the_problem(keys):
    """A template that changes earlier turns leaves nothing to go on after; that is counted."""
    env = keys(tree_roots=2)
    env.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last or m.role != 'assistant' else 'x' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    [group] = collected(env, presses())
    assert not any(group["group_overrides"].get("branches", [])) and env.report.counts["branches_at_root"] == 4


def test_a_turn_tree_is_refused_where_there_can_be_none(keys, make_env):
    """By the name of the option, before anything is sampled."""

    class Forgetful(KeysEnv):
        resettable = False

    with pytest.raises(ConfigurationError, match="tree_roots=2: Forgetful cannot return to a turn"):
        make_env(Forgetful, tree_roots=2)
    with pytest.raises(ConfigurationError, match="tree_tokens=9: give --env.tree_roots"):
        keys(tree_tokens=9)
    assert "branches_at_root" not in keys().report.counts
