"""Turn trees and values of continuations, in the calculator and environments over it; the policy is scripted."""

import asyncio
import random
import sys
from statistics import fmean

import pytest

from helpers import ROOT
from helpers.scripted_policy import last_said, scripted
from recipe.atropos.adapter.loading import load_environment
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.environments.calculator import CalculatorEnv
from recipe.atropos.environments.word_problems import SYNTHETIC_STEPS, gold_answer
from recipe.atropos.errors import ConfigurationError

KeysEnv = load_environment(f"{ROOT / 'benchmarks' / 'tasks' / 'credit.py'}:KeysEnv")
KEYS = vars(sys.modules[KeysEnv.__module__])["KEYS"]


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
        for values, mask, branch in zip(group["group_overrides"]["turn_values"], group["masks"], branches, strict=True):
            assert len(values) == 5 == len(list(trained_spans(mask))) + (branch[1] if branch else 0)
        assert group["scores"] == [values[-1] for values in group["group_overrides"]["turn_values"]]
        add_credit(group, Credit(lam=0.0))
        assert any(map(any, group["advantages"]))


def test_a_trees_groups_have_their_budget_on_average(keys):
    """Its size is settled before it: the group after a short one and the one after a long one are as large."""
    random.seed(0)
    budget, lengths = 150, [1, 9]  # a turn's words; one key more or less is worth 2 to 10 tokens

    def words(chat):
        return "-" * random.choice(lengths)

    groups = collected(keys(tree_roots=2, tree_tokens=budget, group_size=24, max_answer_tokens=30), words, groups=30)
    sizes = [len(group["tokens"]) for group in groups]
    assert sizes[0] == 24 and len(set(sizes[10:])) > 1, "without experience as many as there may be"
    assert all(group["group_overrides"].get("group_size", 24) == len(group["tokens"]) for group in groups)
    tokens = [sum(mask != -100 for row in group["masks"] for mask in row) for group in groups]
    assert fmean(tokens[10:]) == pytest.approx(budget, rel=0.15)


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

    for options in ({"tree_roots": 2}, {"value_continuations": 3}):
        [(name, value)] = options.items()
        with pytest.raises(ConfigurationError, match=f"--env.{name}={value} for Forgetful: .*resettable is False"):
            make_env(Forgetful, **options)
    make_env(Forgetful)
    tokens, values = {"tree_tokens": 9}, {"value_continuations": 3}
    for options in (tokens, tokens | values, values | {"tree_roots": 2}):
        with pytest.raises(ConfigurationError, match="give tree_roots, alone or with tree_tokens, or value_c"):
            keys(**options)
    with pytest.raises(ValueError, match="(?s)tree_roots.*greater than or equal to 2"):
        keys(tree_roots=1)  # its first decision would be compared with nothing
    assert "branches_at_root" not in keys().report.counts


def test_a_turns_value_is_the_mean_of_its_continuations(keys):
    """What goes on after it is counted, but not trained on; the policy presses right keys until it goes on itself."""
    env, k = keys(value_continuations=3, group_size=2, partial_scores=False), 3
    rng, turns = random.Random(1), []

    def says(chat):
        turns.append(chat)
        return presses(rng.random())(chat)

    [group] = collected(env, says)
    values, nodes = group["group_overrides"]["turn_values"], [list(trained_spans(row)) for row in group["masks"]]
    assert [len(row) for row in values] == [5, 5] == [len(spans) for spans in nodes]
    assert [row[-1] for row in values] == group["scores"]
    assert len(turns) == 2 * 5 + 2 * k * (4 + 3 + 2 + 1), "each continuation goes to its end"
    assert {round(k * (value + 1) / 2, 9) for row in values for value in row[:-1]} <= {0.0, 1.0, 2.0, 3.0}
    trained = sum(end - start for spans in nodes for start, end in spans)
    sampled = 2 * len(turns)  # a key and the end of the turn
    assert (trained, sum(group["group_overrides"]["value_tokens"])) == (20, sampled - 20)
    add_credit(group, Credit(lam=0.0))
    assert not collected(keys(), presses())[0]["group_overrides"].get("value_tokens")


def test_continuations_begin_with_the_turns_before_them(keys):
    """After the first wrong key all continuations fail, and the value says so."""
    env = keys(value_continuations=2, group_size=2, partial_scores=False)
    item, right = env.train[0], iter(range(10**6))

    def says(chat):
        if " " not in last_said(chat):
            return "="
        first = chat.count("<|im_start|>assistant") == 1
        return "?" if first and next(right) == 0 else KEYS[last_said(chat)[0]]

    async def collect():
        async with scripted(env, says):
            return (await env.collect_trajectories(item))[0]

    group = asyncio.run(collect())
    assert sorted(group["group_overrides"]["turn_values"]) == [[-1.0] * 5, [1.0] * 5]
    assert sorted(group["scores"]) == [-1.0, 1.0]


def test_calculator_values_are_of_its_own_outcome(make_env):
    """A boxed answer is right or wrong, whatever a group of right ones scores."""
    env = make_env(
        CalculatorEnv, dataset_name=SYNTHETIC_STEPS, group_size=2, max_token_length=400, train_size=9, eval_size=9,
        value_continuations=2, ensure_scores_are_not_same=False,
    )  # fmt: skip
    gold = gold_answer(env.train[env.order(0)[0]])
    [group] = collected(env, lambda chat: rf"\boxed{{{gold}}}" if "tool\n2" in chat else "<call>1+1</call>")
    assert group["group_overrides"]["turn_values"] == [[1.0, 1.0]] * 2
    answer = [*env.tokenizer.encode(rf"\boxed{{{gold}}}"), env.tokenizer.eos_token_id]
    assert group["group_overrides"]["value_tokens"] == [2 * len(answer)] * 2
