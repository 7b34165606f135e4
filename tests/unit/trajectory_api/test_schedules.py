"""Any environments and any trainer on the service, in virtual time: bounds, shares, full batches, and no stall."""

import pytest

from helpers.schedules import Environment, Schedule, drawn, play


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_keeps_bounds_and_goes_on(tmp_path, monkeypatch, seed):
    play(drawn(seed), tmp_path, monkeypatch)


def test_an_environment_that_always_fails_stops_nobody(tmp_path, monkeypatch):
    envs = [Environment((4,), workers=1000, failures=1.0, seconds=(1, 1)), Environment((4,), seconds=(1, 1))]
    play(Schedule(envs, 16, 0, batches=6), tmp_path, monkeypatch)


ALWAYS = {
    "sizes_that_do_not_fit": (12, [(4, 1, 0.5), (6, 1, 0.5)]),
    "an_allocation_of_one": (24, [(3, 1, 0), (8, 1, 0.5)]),
    "large_and_small": (128, [(4, 1, 0), (64, 1, 0.75)]),
    "extreme_weights": (128, [(4, 1, 0), (64, 100, 0)]),
    "a_whole_batch": (120, [(2, 2, 0), (12, 1, 0), (120, 2, 0)]),
    "one_small_share_of_five": (48, [(16, 1, 0), (16, 1, 0), (16, 1, 0), (16, 1, 0), (16, 1, 0.77)]),
    "many": (12, [(4, 1, 0.3), (12, 1, 0.5), (12, 1, 0.19), *[(12, 1, 0)] * 6]),
}


@pytest.mark.parametrize(("bound", "stock"), [(None, False), (0, True), (2, False)], ids=["all", "some_stock", "bound"])
@pytest.mark.parametrize(("batch_size", "environments"), ALWAYS.values(), ids=ALWAYS)
def test_whoever_always_asks_has_its_share(tmp_path, monkeypatch, batch_size, environments, bound, stock):
    """Within one group and one batch, counted from the sixth batch on, since they do not begin to ask at one moment.

    ``some_stock``: the first one posts without tickets, and always has five batches queued.
    """
    envs = [
        Environment((size,), weight, part, workers=10**6, stock=stock and n == 0 and 5 * batch_size // size)
        for n, (size, weight, part) in enumerate(environments)
    ]
    schedule = play(Schedule(envs, batch_size, bound, batches=40), tmp_path, monkeypatch)
    for ahead, size in schedule.deviations(after=5):
        assert abs(ahead) <= batch_size + size + 1e-6


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_shares_hold_once_an_environment_has_left(tmp_path, monkeypatch, bound):
    """The third has none beside the first two, but for what they leave; that must cost it nothing later."""
    leaves = Environment((4,), allocation=0.5, workers=2, seconds=(1, 6), away=(120, 1e8))
    envs = [leaves, Environment((4,), allocation=0.5, workers=60), Environment((4,), workers=60)]
    schedule = play(Schedule(envs, 16, bound, batches=80, seed=1), tmp_path, monkeypatch)
    later = [schedule.groups[id].env for number in range(41, 81) for id in schedule.cut[number]]
    assert (len(later), later.count(leaves.id)) == (160, 0)
    assert abs(later.count(envs[2].id) - 40) <= 5, "a quarter, but for one batch and one group"


def test_hung_items_hold_no_batch_long_where_pushes_are_rare(tmp_path, monkeypatch):
    """Each is released, also where the batches since the last push are in no weights; none while the trainer trains."""
    env = Environment((4,), seconds=(1, 1), hung=0.1)
    schedule = play(Schedule([env], 16, 2, batches=30, every=3), tmp_path, monkeypatch)
    released = schedule.service.counts["released/hung"]
    assert released >= 5 and "released/equal_scores" not in schedule.service.counts, "none took WORKER_SECONDS"
