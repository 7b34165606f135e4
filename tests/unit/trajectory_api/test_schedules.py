"""Any environments and any trainer on the service, in virtual time: bounds, shares, full batches, and no stall."""

import asyncio
import random

import pytest

from helpers.schedules import Environment, Schedule


def drawn(seed):
    """A schedule: 1 to 6 environments of any sizes up to a batch, with failures, deaths, returns, and stock ones."""
    rng = random.Random(seed)
    batch_size = rng.choice([4, 8, 12, 16, 30, 48, 64])
    bound = rng.choice([None, 0, 0, 1, 2, 3, 4])
    larger = 0.2 if rng.random() < 0.2 else 0.0
    envs = []
    for _ in range(rng.randint(1, 6)):
        most = rng.randint(1, batch_size)
        slow = rng.choice([1.0, 4.0, 20.0])
        envs.append(
            Environment(
                sizes=(most, *(rng.randint(1, most) for _ in range(rng.choice([0, 0, 2])))),
                weight=rng.choice([0.05, 1.0, 1.0, 2.0, 9.0]),
                allocation=rng.choice([0.0, 0.0, 0.0, 0.1, 0.3]),
                workers=rng.choice([1, 2, 8, 40]),
                seconds=(0.1, slow),
                failures=rng.choice([0.0, 0.0, 0.3, 0.8]),
                larger=larger,
                stock=rng.choice([0, 0, 0, 2, 5]) * (batch_size // most + 1),
                away=(rng.uniform(5, 60), rng.uniform(1, 100)) if rng.random() < 0.3 else (1e9, 1e9),
            )
        )
    empty = rng.choice([0.0, 0.0, 0.3])
    every = rng.choice([1, 2]) if bound is None or bound > 0 else 1
    return Schedule(envs, batch_size, bound, seed=seed, empty=empty, every=every)


def play(schedule, folder, monkeypatch):
    asyncio.run(schedule.run(folder, monkeypatch))
    return schedule


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(n, marks=pytest.mark.slow) for n in range(60, 500))])
def test_any_schedule_keeps_bounds_and_goes_on(tmp_path, monkeypatch, seed):
    play(drawn(seed), tmp_path, monkeypatch)


ALWAYS = {
    "sizes_that_do_not_fit": (12, [(4, 1, 0.5), (6, 1, 0.5)]),
    "an_allocation_of_one": (24, [(3, 1, 0), (8, 1, 0.5)]),
    "large_and_small": (128, [(4, 1, 0), (64, 1, 0.75)]),
    "extreme_weights": (128, [(4, 1, 0), (64, 100, 0)]),
    "a_whole_batch": (120, [(2, 2, 0), (12, 1, 0), (120, 2, 0)]),
    "one_small_share_of_five": (48, [(16, 1, 0), (16, 1, 0), (16, 1, 0), (16, 1, 0), (16, 1, 0.77)]),
    "many": (12, [(4, 1, 0.3), (12, 1, 0.5), (12, 1, 0.19), *[(12, 1, 0)] * 6]),
}


@pytest.mark.parametrize("bound", [None, 0, 2])
@pytest.mark.parametrize("stock", [False, True], ids=["tickets", "some_stock"])
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
