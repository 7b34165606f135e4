"""A policy that writes one text by many token lists, for what finds its replies again."""

import pytest
from transformers import AutoTokenizer

from helpers.sampled import chat, make_drifting_model
from recipe.atropos.adapter.completion_cache import ITEM, CompletionCache, Item


@pytest.fixture(scope="package")
def drifting_model(tmp_path_factory):
    return make_drifting_model(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="package")
def tokenizer(drifting_model):
    return AutoTokenizer.from_pretrained(drifting_model)


@pytest.fixture
def cache(tokenizer):
    ITEM.set(Item())
    return CompletionCache(tokenizer)


@pytest.fixture
def prompt(tokenizer):
    return chat(tokenizer, "go")
