"""Tests that start servers or Ray, and tests that take long."""

from pathlib import Path

import pytest

from helpers.terminal import terminal  # noqa: F401

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
