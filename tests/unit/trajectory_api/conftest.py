"""A service of the Trajectory API in the test's process and folder."""

import pytest

from helpers.trajectory_service import open_service


@pytest.fixture
async def service(tmp_path):
    async with open_service(tmp_path) as service:
        yield service
