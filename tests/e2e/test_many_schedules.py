"""More of the schedules of tests/unit/trajectory_api/test_schedules.py."""

import pytest

from helpers.schedules import drawn, play

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(40, 500))
def test_any_of_many_schedules_keeps_bounds_and_goes_on(tmp_path, monkeypatch, seed):
    play(drawn(seed), tmp_path, monkeypatch)
