"""Every posted sequence knows the weights that sampled it, or says that it does not."""

from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.sampled import I, three_rows
from helpers.sglang import make_tiny_model
from recipe.atropos.adapter.completion_cache import CompletionCache
from recipe.atropos.adapter.restore import restore_group
from recipe.atropos.inference.sampled import versions_of


def spans(*versions):
    return [{"version": version, "start": 2 * i, "end": 2 * i + 2} for i, version in enumerate(versions)]


@pytest.mark.parametrize(
    ("meta_info", "expected"),
    [
        ({"weight_version": "3", "weight_versions": spans("3")}, (3, 3)),
        ({"weight_version": "4", "weight_versions": spans("2", "4")}, (2, 4)),
        ({"weight_version": "7"}, (7, 7)),
        ({"weight_version": "default"}, (-1, -1)),
        ({"weight_version": None, "weight_versions": []}, None),
        ({}, None),
    ],
    ids=["one", "spans", "old_server", "never_pushed", "empty", "silent"],
)
def test_weight_versions_are_read_by_token(meta_info, expected):
    assert versions_of(meta_info) == expected


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


@pytest.fixture
def cache(tokenizer):
    cache = CompletionCache(tokenizer)
    first, second = np.array([1, 2], np.int32), np.array([1, 2, 5, 6, 9], np.int32)
    cache.add(first, [5, 6], [-0.1, -0.2], versions=(1, 1))
    cache.add(first, [5, 6], [-0.3, -0.4], versions=(3, 4))
    cache.add(second, [7], [-0.5], versions=(2, 2))
    cache.add(first, [8], [-0.6])
    return cache


def stamp(group, cache, env_name=None):
    restore_group(cache, group, counts := Counter(), env_name)
    return counts


def test_weight_versions_of_a_sequence_are_oldest_and_newest(cache):
    group = three_rows()
    stamp(group, cache, "math")
    overrides = group["group_overrides"]
    assert overrides.pop("sampling_params") == [None] * 3  # the cache was not told
    assert overrides == {"policy_version_min": [1, 2, None], "policy_version_max": [1, 4, None], "env_name": "math"}


def test_weight_versions_are_none_where_one_is_unknown(cache):
    cache.add(np.array([1, 2], np.int32), [8, 8], [-0.6, -0.7])
    group = three_rows(
        tokens=[[1, 2, 5, 6, 3], [1, 2, 8, 8], [1, 2, 5]],
        masks=[[I, I, 5, 6, 3], [I, I, 8, 8], [I, I, 5]],
        inference_logprobs=[[1.0, 1.0, -0.1, -0.2, -0.3], [1.0, 1.0, -0.6, -0.7], [1.0, 1.0, -0.1]],
    )
    assert stamp(group, cache)["not_sampled"] == 1
    assert group["masks"][0] == [I, I, 5, 6, I]
    assert group["group_overrides"]["policy_version_min"] == [1, None, 1]  # the last was cut short


def test_what_the_environment_says_itself_stays(cache):
    group = three_rows(group_overrides={"env_name": "own", "policy_version_min": [9, 9, 9], "difficulty": 2})
    stamp(group, cache, "math")
    overrides = group["group_overrides"]
    assert overrides["env_name"] == "own" and overrides["policy_version_min"] == [9, 9, 9]
    assert overrides["difficulty"] == 2 and overrides["policy_version_max"] == [1, 4, None]
