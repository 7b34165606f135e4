"""Long series on a page: short, and no spike is lost."""

import math

import pytest

from recipe.atropos.report.curves import buckets, decimated, spread


@pytest.mark.parametrize("n", [0, 1, 7, 400, 401, 12_345])
def test_buckets_cover_everything_once_and_in_order(n):
    parts = buckets(n, 400)
    assert [i for part in parts for i in range(n)[part]] == list(range(n)) and len(parts) <= 400


def test_a_short_series_is_as_it_was_and_a_nan_is_missing():
    assert decimated([1, 2, 3], [0.5, math.nan, None]) == {"x": [1, 2, 3], "y": [0.5, None, None]}


def test_a_spike_of_a_long_series_is_in_its_band():
    values = [1.0] * 10_000
    values[7_777] = 50.0
    found = decimated(range(10_000), values, limit=100)
    assert len(found["x"]) == 100 and found["x"][-1] == 9_999
    assert max(found["high"]) == 50.0 and max(found["low"]) == 1.0 and max(found["y"]) == pytest.approx(1.49)


def test_spread_has_the_first_and_the_last():
    assert spread(range(100), 3) == [0, 50, 99] and spread("ab", 5) == ["a", "b"] and spread([], 5) == []
