"""What tests of losses share."""

import pytest
import torch

from recipe.atropos.algorithm import losses


@pytest.fixture
def several_chunks(monkeypatch):
    """Few positions at a time, so that there are several chunks of them."""
    monkeypatch.setattr(losses, "_CHUNK", 3)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)
