"""What each environment gets of the batches, whatever the sizes of its groups."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.trajectory_api.batching import Queue
from recipe.atropos.trajectory_api.lanes import Entry


class Busy:
    """A queue, and environments, (size, weight, allocation), that post whenever they have less than three batches."""

    def __init__(self, batch_size, environments, bounded=False):
        self.queue, self.environments, self._numbers = Queue(), environments, itertools.count(1)
        self.queue.set_batch_size(batch_size, bounded)
        for env, (_, weight, minimum) in enumerate(environments):
            self.queue.set_environment(env, weight, minimum)

    def post(self, env, size, due=0):
        self.queue.add(Entry(number := next(self._numbers), env, size, id=number, due=due))

    def batch(self, busy, alive, number=1, due=0):
        """Return the sequences that each has in a batch; ``due``: of the groups of environment 0."""
        for env in busy:
            while self.queue.lanes[env].size < 3 * self.queue.batch_size:
                self.post(env, self.environments[env][0], 0 if env else due)
        plan, parts = self.queue.plan(alive, number), [0] * len(self.environments)
        self.queue.cut(plan, alive)
        for entry in plan.entries:
            parts[entry.env] += entry.size
        return parts


def served(batch_size, environments, batches):
    """Yield what each of ``environments`` has in one batch after another, and its share of a batch."""
    stage, alive = Busy(batch_size, environments), set(range(len(environments)))
    for _ in range(batches):
        yield stage.batch(alive, alive), [batch_size * share for share in stage.queue.shares(alive, alive).values()]


@pytest.mark.parametrize(
    ("batch_size", "environments"),
    [
        (12, [(4, 1, 0.5), (6, 1, 0.5)]),
        (12, [(4, 1, 0), (6, 1, 0.5)]),
        (24, [(3, 1, 0), (8, 1, 0.5)]),
        (120, [(8, 1, 0.5), (12, 1, 0.5)]),
        (128, [(4, 1, 0), (64, 1, 0.75)]),
        (128, [(4, 1, 0), (64, 100, 0)]),
        (120, [(2, 2, 0), (12, 1, 0), (120, 2, 0)]),
        (64, [(4, 10, 0.75), (32, 0.5, 0.08), (4, 1, 0), (16, 2, 0)]),
        (12, [(4, 1, 0.3), (12, 1, 0.5), (12, 1, 0.19), *[(12, 1, 0)] * 6]),
    ],
    ids=lambda value: "-".join(str(size) for size, _, _ in value) if isinstance(value, list) else None,
)
def test_each_size_gets_its_share_though_they_do_not_fit(batch_size, environments):
    behind = [0.0] * len(environments)
    for parts, shares in served(batch_size, environments, 500):
        behind = [before + share - part for before, part, share in zip(behind, parts, shares, strict=True)]
        assert max(map(abs, behind)) <= len(environments) * batch_size


@given(st.sampled_from([6, 12, 24, 60, 64]), st.data())
def test_no_environment_is_starved_whatever_the_sizes(batch_size, data):
    """Sizes that divide the batch: each stays within as many batches of its share as there are environments."""
    sizes = st.sampled_from([size for size in range(1, batch_size + 1) if batch_size % size == 0])
    environment = st.tuples(sizes, st.sampled_from([0.01, 0.5, 1, 2, 100]), st.sampled_from([0, 0, 0.1, 0.3, 0.8]))
    environments = data.draw(st.lists(environment, min_size=2, max_size=5))
    behind = [0.0] * len(environments)
    for parts, shares in served(batch_size, environments, 30):
        behind = [before + share - part for before, part, share in zip(behind, parts, shares, strict=True)]
        assert max(map(abs, behind)) <= len(environments) * batch_size


@given(st.integers(1, 8), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 6))
def test_each_batch_has_its_allocations_if_sizes_fit(size, allocated, rest):
    """Allocations of whole groups of one size, beside an environment without one that has a larger weight."""
    batch = size * (sum(allocated) + rest + 1)
    environments = [(size, 1, groups * size / batch) for groups in allocated] + [(size, 9, 0)]
    for parts, _ in served(batch, environments, 10):
        assert all(part >= groups * size for part, groups in zip(parts[:-1], allocated, strict=True))


def test_an_allocation_of_no_whole_groups_is_rounded_to_some():
    """Three of ten sequences in groups of two: each batch has a group or two."""
    parts = [parts[0] for parts, _ in served(10, [(2, 1, 0.3), (2, 9, 0)], 500)]
    assert min(parts) == 2 and sum(parts) == pytest.approx(500 * 10 * 0.37, abs=20)


def test_an_allocation_holds_beside_an_environment_with_nothing():
    stage = Busy(8, [(2, 1, 0.5), (2, 9, 0), (2, 90, 0)])
    assert all(stage.batch({0, 1}, {0, 1, 2})[0] >= 4 for _ in range(50))


@pytest.mark.parametrize("alive", [{0, 1}, {1}], ids=["idle", "away"])
def test_an_environment_that_returns_blocks_nobody(alive):
    """One with nine tenths of the weight had nothing for 200 batches."""
    stage = Busy(128, [(4, 9, 0), (4, 1, 0)])
    assert all(stage.batch({1}, alive)[1] == 128 for _ in range(200))
    assert all(stage.batch({0, 1}, {0, 1})[1] >= 4 for _ in range(20))


def test_what_a_dead_environment_leaves_takes_no_share():
    """It had an allocation, and a group that never fits; it was started again under another number."""
    stage = Busy(40, [(4, 1, 0.6), (4, 1, 0.6), (4, 1, 0)])
    stage.post(0, 7)
    parts = [sum(each) for each in zip(*(stage.batch({1, 2}, {1, 2}) for _ in range(100)), strict=True)]
    assert parts == [0, pytest.approx(3200, abs=80), pytest.approx(800, abs=80)]


def test_tickets_with_an_allocation_leave_others_their_share():
    """Two groups of 8 are all of a batch of 16, and more than the three quarters that are allocated to them."""
    stage, both = Busy(16, [(8, 1, 0.75), (8, 1, 0)], bounded=True), {0, 1}
    others = sum(stage.batch(both, both, number, due=number + 9)[1] for number in range(100))
    assert others == pytest.approx(200, abs=32)
