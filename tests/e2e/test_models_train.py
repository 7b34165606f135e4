"""Architectures beside Qwen2, which every other test trains, in the real loop: benchmarks/models.py has them all."""

import pytest

from helpers.models_benchmark import models


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("llama", {"embeddings": "tied", "template": "dict", "pad": "no pad"}),
        ("qwen3", {"vocabulary": "larger", "template": "none"}),
    ],
)
def test_models_of_other_architectures_train(tmp_path, family, choices):
    """Three steps; after each push SGLang has the trainer's logprobs."""
    variant = {choice: values[0] for choice, values in models.CHOICES.items()} | choices
    run = models.tried(family, variant, tmp_path)
    assert run.error is None and run.figures["after"] < 1e-5, run
