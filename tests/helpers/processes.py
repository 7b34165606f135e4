"""Whatever a test does, the services that it started end with it."""

from collections.abc import Iterator

import pytest

from recipe.atropos.utils.process import unstopped


@pytest.fixture(autouse=True)
def no_service_outlives_its_test() -> Iterator[None]:
    """Also those of a test that fails or times out. Services of fixtures that several tests share were there before;
    a test run that is killed takes them along, as any launcher does."""
    before = len(unstopped)
    yield
    for service in reversed(unstopped[before:]):
        service.stop(grace=5)
