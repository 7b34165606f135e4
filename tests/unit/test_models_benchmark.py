"""What benchmarks/models.py deals out to the architectures that it trains."""

import importlib.util
import itertools

from helpers import ROOT
from recipe.atropos.demo.random_models import FAMILIES

_spec = importlib.util.spec_from_file_location("models_benchmark", ROOT / "benchmarks" / "models.py")
models = importlib.util.module_from_spec(_spec)  # by its path: the folder has names that other packages have
_spec.loader.exec_module(models)


def test_models_meet_every_pair_of_choices():
    variants = models.dealt_out(list(FAMILIES))
    assert len(variants) >= 20 and all(models.possible(family, variant) for family, variant in variants.items())
    met = set().union(*map(models.pairs, variants.values()))
    for (one, values), (other, others) in itertools.combinations(models.CHOICES.items(), 2):
        for value, beside in itertools.product(values, others):
            assert ((one, value), (other, beside)) in met


def test_models_that_are_tried_quickly_have_each_choice():
    variants = models.dealt_out(list(FAMILIES))
    for choice, values in models.CHOICES.items():
        assert {variants[family][choice] for family in models.QUICK} == set(values)
