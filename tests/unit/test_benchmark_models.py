"""The policy of benchmarks/agents.py, and what benchmarks/models.py deals out to the architectures that it trains."""

import importlib.util
import itertools
import json
import random

from helpers import ROOT
from random_models import FAMILIES


def loaded(name):
    """By its path: the folder has names that other packages have."""
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


agents, models = loaded("agents"), loaded("models")


def test_tool_policy_reads_calls_as_it_was_taught_them():
    [row] = agents.generate("train", 1)
    taught = agents.demonstration(row, random.Random(0), 0.0)
    tokenizer = agents.ToolRecipe().tokenizer([message["content"] for message in taught])
    text = taught[1]["content"]
    assert len(tokenizer.encode(agents.OPEN)) == len(tokenizer.encode(agents.CLOSE)) == 1
    call = json.loads(text.removeprefix(agents.OPEN).removesuffix(agents.CLOSE))
    parsed = [taught[0], {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}, *taught[2:]]
    one, other = (tokenizer.apply_chat_template(chat, tokenize=False) for chat in (parsed, taught))
    assert one == other


def test_models_meet_every_pair_of_choices():
    variants = models.dealt_out(list(FAMILIES))
    assert len(variants) >= 20 and all(models.possible(family, variant) for family, variant in variants.items())
    met = set().union(*map(models.pairs, variants.values()))
    for (one, values), (other, others) in itertools.combinations(models.CHOICES.items(), 2):
        for value, beside in itertools.product(values, others):
            assert ((one, value), (other, beside)) in met
    # Those that are tried quickly have each choice.
    variants = models.dealt_out(list(FAMILIES))
    for choice, values in models.CHOICES.items():
        assert {variants[family][choice] for family in models.QUICK} == set(values)
