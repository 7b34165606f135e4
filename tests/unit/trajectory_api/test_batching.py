"""The queue's guarantees, for any sizes, environments and orders of events."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.atropos.trajectory_api.batching import SKIPS, WINDOW, Queue
from recipe.atropos.trajectory_api.lanes import Entry, exact_fill

NOBODY = frozenset()


def queue_of(batch_size, sizes, envs=None):
    queue = Queue()
    queue.set_batch_size(batch_size)
    for number, (size, env) in enumerate(zip(sizes, envs or itertools.repeat(None), strict=False), start=1):
        queue.add(Entry(number, env, size, 10 * size, id=number))
    return queue


def cut_all(queue, alive=NOBODY):
    batches = []
    while (plan := queue.plan(alive)).complete:
        queue.cut(plan, alive)
        batches.append(list(plan.entries))
    return batches


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([None, 0, 1, 2])), max_size=150),
)
def test_each_group_is_in_one_batch_aside_or_queued(batch_size, groups):
    queue = queue_of(batch_size, [size for size, _ in groups], [env for _, env in groups])
    batches = cut_all(queue)
    assert all(sum(entry.size for entry in batch) == batch_size for batch in batches)
    left = [entry for lane in queue.lanes.values() for entry in lane]
    everything = [entry.id for batch in batches for entry in batch]
    everything += [entry.id for entry in left] + list(queue.aside)
    assert sorted(everything) == list(range(1, len(groups) + 1))
    assert queue.groups == len(left)
    assert queue.sequences == sum(entry.size for entry in left)
    assert queue.tokens == 10 * queue.sequences
    assert all(entry.size > batch_size or entry.skipped >= SKIPS for entry in queue.aside.values())


@given(st.integers(1, 30), st.lists(st.integers(1, 12), max_size=WINDOW))
def test_a_batch_is_found_wherever_there_is_one(batch_size, sizes):
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums}
    assert queue_of(batch_size, sizes).plan(NOBODY).complete == (batch_size in sums)


@given(st.lists(st.integers(1, 9), max_size=10), st.integers(1, 30))
def test_the_fill_prefers_the_oldest(sizes, target):
    fills = [
        list(choice)
        for n in range(1, len(sizes) + 1)
        for choice in itertools.combinations(range(len(sizes)), n)
        if sum(sizes[i] for i in choice) == target
    ]
    # Of two choices, the better one has the first entry in which they differ.
    best = max(fills, key=lambda choice: [i in choice for i in range(len(sizes))], default=None)
    assert exact_fill(sizes, target) == best


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 60))
def test_groups_of_one_size_keep_their_order(size, of_a_batch, groups):
    batches = cut_all(queue_of(size * of_a_batch, [size] * groups))
    assert [entry.number for batch in batches for entry in batch] == list(
        range(1, groups // of_a_batch * of_a_batch + 1)
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.5, 1, 2, 3.7]), st.integers(1, 8)), min_size=2, max_size=6), st.data())
def test_shares_are_within_one_group_of_the_ideal(environments, data):
    batch_size = data.draw(st.integers(8, 64))
    queue = Queue()
    queue.set_batch_size(batch_size)
    for env, (weight, _) in enumerate(environments):
        queue.set_environment(env, weight, 0.0)
    numbers = itertools.count(1)

    def refill():
        for env, (_, size) in enumerate(environments):
            while queue.lanes[env].size < 3 * batch_size:
                number = next(numbers)
                queue.add(Entry(number, env, size, id=number))

    weights = sum(weight for weight, _ in environments)
    served, order = [0] * len(environments), []
    refill()
    for entry in itertools.islice(queue._in_order({}), 3 * batch_size // max(size for _, size in environments)):
        served[entry.env] += entry.size
        order.append(entry)
        for env, (weight, _) in enumerate(environments):
            assert abs(served[env] - sum(served) * weight / weights) <= max(size for _, size in environments) + 1e-6


def test_unequal_weights_over_many_batches():
    queue, numbers = Queue(), itertools.count(1)
    queue.set_batch_size(16)
    weights = {0: 1.0, 1: 2.0, 2: 5.0}
    for env, weight in weights.items():
        queue.set_environment(env, weight, 0.0)
    served = dict.fromkeys(weights, 0)
    for _ in range(100):
        for env in weights:
            while queue.lanes[env].size < 32:
                number = next(numbers)
                queue.add(Entry(number, env, 4, id=number))
        plan = queue.plan(NOBODY)
        queue.cut(plan, NOBODY)
        for entry in plan.entries:
            served[entry.env] += entry.size
        for env, weight in weights.items():
            assert abs(served[env] - sum(served.values()) * weight / 8) <= 4


def test_a_long_run_with_extreme_weights_goes_on():
    queue, numbers = Queue(), itertools.count(1)
    queue.set_batch_size(16)
    weights = {0: 0.0, 1: 1 / 3, 2: 1e6}
    for env, weight in weights.items():
        queue.set_environment(env, weight, 0.0)
        queue.lanes[env].virtual = 1e15 / 3  # as after a very long run: floats are coarse there
    for _ in range(300):
        for env in weights:
            while queue.lanes[env].size < 32:
                number = next(numbers)
                queue.add(Entry(number, env, 4, id=number))
        assert len(cut_all(queue)) > 0


def test_an_allocation_comes_first_while_its_environment_lives():
    queue = queue_of(8, [2] * 12, [0] * 12)
    queue.set_environment(1, 1.0, 0.5)
    plan = queue.plan({0, 1})
    assert not plan.complete and "environment 1" in plan.why
    assert queue.plan({0}).complete  # it is gone
    for number in (20, 21, 22):
        queue.add(Entry(number, 1, 2, id=number))
    assert [entry.env for entry in queue.plan({0, 1}).entries].count(1) >= 2


def test_allocations_beyond_a_batch_are_scaled():
    queue = queue_of(8, [2] * 16, [0, 1] * 8)
    queue.set_environment(0, 1.0, 0.9)
    queue.set_environment(1, 1.0, 0.9)
    assert [entry.env for entry in queue.plan({0, 1}).entries].count(0) == 2


def test_an_open_ticket_is_waited_for():
    queue = queue_of(4, [2, 2, 2])
    queue.add(Entry(0, None, 2))  # begun before all of them
    assert "ticket" in queue.plan(NOBODY).why
    queue.release(0)
    assert [entry.number for entry in queue.plan(NOBODY).entries] == [1, 2]


def test_the_time_of_a_post_does_not_change_a_batch():
    """Tickets are closed in any order; the batches are always those of the order in which they began."""
    for order in itertools.permutations(range(1, 7)):
        queue = Queue()
        queue.set_batch_size(4)
        for number in range(1, 7):
            queue.add(Entry(number, 0, 2))
        batches = []
        for number in order:
            queue.release(number)
            queue.add(Entry(number, 0, 2, id=number))
            batches += cut_all(queue)
        assert [[entry.number for entry in batch] for batch in batches] == [[1, 2], [3, 4], [5, 6]]


def test_what_never_fits_is_set_aside_and_comes_back():
    queue = queue_of(4, [6, 4, 3] + [4] * SKIPS)
    assert list(queue.aside) == [1]
    batches = cut_all(queue)
    assert len(batches) == 1 + SKIPS
    assert sorted(queue.aside) == [1, 3]
    queue.set_batch_size(9)
    assert not queue.aside and [entry.id for entry in queue.plan(NOBODY).entries] == [1, 3]


def test_the_cost_of_a_batch_does_not_grow_with_the_queue(monkeypatch):
    def touched(groups):
        seen = []
        queue = queue_of(16, itertools.repeat(4, groups))
        one = next(iter(queue.lanes.values()))
        original = type(one).__iter__
        monkeypatch.setattr(type(one), "__iter__", lambda lane: (seen.append(e) or e for e in original(lane)))
        queue.cut(queue.plan(NOBODY), NOBODY)
        monkeypatch.undo()
        return len(seen)

    assert touched(20_000) == touched(200)


# ---------------------------------------------------------------------- pacing


class Run:
    """A trainer and environments that begin, post and release at random; it checks each batch when it is cut.

    A negative weight is of an environment with an allocation of 0.3.
    """

    def __init__(self, seed, environments, size, of_a_batch, max_staleness, failures):
        self.random = random.Random(seed)
        self.queue = Queue()
        self.queue.set_batch_size(size * of_a_batch, bounded=True)
        for env, weight in enumerate(environments):
            self.queue.set_environment(env, abs(weight), 0.3 if weight < 0 else 0.0)
        self.envs, self.size, self.bound, self.failures = range(len(environments)), size, max_staleness, failures
        self.weights = self.last = 0
        self.begun = {}  # ticket -> the weights that it began with
        self.numbers = itertools.count(1)
        self.served = dict.fromkeys(self.envs, 0)

    def begin(self, env):
        batches = self.weights + 1 + self.bound - self.last
        if not self.queue.refuses(env, self.size, batches, {*self.envs}, {*self.envs}):
            number = next(self.numbers)
            self.begun[number] = self.weights
            self.queue.add(Entry(number, env, self.size, due=self.weights + 1 + self.bound))

    def end_one(self):
        if self.queue.tickets:
            entry = self.random.choice(list(self.queue.tickets.values()))
            self.queue.release(entry.number)
            if self.random.random() >= self.failures:
                self.queue.add(Entry(entry.number, entry.env, self.size, id=entry.number, due=entry.due))

    def cut(self):
        plan = self.queue.plan({*self.envs})
        if plan.complete:
            self.queue.cut(plan, {*self.envs})
            self.last += 1
            for entry in plan.entries:
                self.served[entry.env] += entry.size
                assert self.last - 1 - self.begun[entry.number] <= self.bound

    def crash(self):
        """The trainer goes back to a checkpoint: the weights that it pushes are older."""
        self.weights = self.random.randint(max(0, self.last - 2), self.last)

    def go(self, batches, crashes=False):
        for _ in range(200_000):
            action = self.random.random()
            if action < 0.5:
                self.begin(self.random.choice(self.envs))
            elif action < 0.9:
                self.end_one()
            elif action < 0.95:
                self.cut()
            elif crashes and action < 0.951:
                self.crash()
            else:
                self.weights = min(self.last, self.weights + 1)
            if self.last == batches:
                return
        raise AssertionError(f"stuck after {self.last} batches: {self.queue.plan({*self.envs}).why}")


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("environments", [(1.0,), (1.0, 1.0, 2.0), (1.0, -1.0, 3.0)], ids=["one", "three", "allocated"])
def test_pacing_keeps_the_bound_and_goes_on(max_staleness, environments):
    for seed in range(12):
        Run(seed, environments, 4, 6, max_staleness, failures=0.4).go(batches=40)


def test_pacing_survives_trainers_that_go_back():
    for seed in range(12):
        Run(seed, (1.0, 3.0), 4, 6, 2, failures=0.4).go(batches=40, crashes=True)


def test_pacing_shares_the_places_by_weight():
    run = Run(0, (1.0, 1.0, 2.0), 2, 12, 0, failures=0.4)
    run.go(batches=60)
    total = sum(run.served.values())
    for env, part in enumerate((0.25, 0.25, 0.5)):
        assert run.served[env] == pytest.approx(part * total, abs=0.03 * total)


def test_pacing_gives_an_idle_environments_places_to_others():
    queue = queue_of(8, [])
    queue.set_environment(0, 1.0, 0.0)
    queue.set_environment(1, 1.0, 0.0)
    for number in range(1, 3):
        assert queue.refuses(0, 2, 1, {0, 1}, {0, 1}) == ""
        queue.add(Entry(number, 0, 2))
    assert "share" in queue.refuses(0, 2, 1, {0, 1}, {0, 1})
    assert queue.refuses(0, 2, 1, {0, 1}, {0}) == ""  # the other does not ask


def test_pacing_is_not_stuck_by_sizes_that_do_not_fit():
    queue = queue_of(8, [3, 3])
    assert queue.refuses(None, 4, 1, NOBODY, NOBODY) == ""
    queue.add(Entry(9, None, 4))
    assert queue.refuses(None, 4, 1, NOBODY, NOBODY) != ""


def test_pacing_is_not_stuck_by_full_places_without_a_batch():
    queue = queue_of(8, [6, 6, 4])
    assert not queue.plan(NOBODY).complete
    assert queue.refuses(None, 2, 2, NOBODY, NOBODY) == ""
    assert queue.refuses(None, 2, 0, NOBODY, NOBODY) != "", "the weights are too old"
