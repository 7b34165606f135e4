"""Which tickets may begin: the staleness bound, shares, groups without tickets, and that nothing waits for ever."""

import itertools
import random

import pytest

from recipe.atropos.trajectory_api.batching import Queue
from recipe.atropos.trajectory_api.lanes import Entry
from recipe.atropos.trajectory_api.pacing import refuses

NOBODY = frozenset()


def queue_of(batch_size, sizes, weights=(), due=9):
    """``sizes``: of groups that were begun with tickets."""
    queue = Queue()
    queue.set_batch_size(batch_size, bounded=True)
    for env, weight in enumerate(weights):
        queue.set_environment(env, weight, 0.0)
    for number, size in enumerate(sizes, start=1):
        queue.add(Entry(number, None, size, id=number, due=due))
    return queue


class Run:
    """A trainer and environments that begin, post and release at random; it checks each batch when it is cut.

    A negative weight is of an environment with an allocation of 0.3. ``stock``: the weight of another environment,
    which posts without tickets and always has three batches queued.
    """

    def __init__(self, seed, environments, size, of_a_batch, max_staleness, failures, stock=None):
        self.random = random.Random(seed)
        self.queue = Queue()
        self.queue.set_batch_size(size * of_a_batch, bounded=True)
        self.envs, self.size, self.bound, self.failures = range(len(environments)), size, max_staleness, failures
        self.stock = None if stock is None else len(environments)
        for env, weight in enumerate([*environments, *([] if stock is None else [stock])]):
            self.queue.set_environment(env, abs(weight), 0.3 if weight < 0 else 0.0)
        self.weights = self.last = 0
        self.begun = {}  # ticket -> the weights that it began with
        self.numbers = itertools.count(1)
        self.served = dict.fromkeys(self.queue.lanes, 0)

    def refuses(self, env):
        batches = range(self.last + 1, self.weights + 2 + self.bound)
        return refuses(self.queue, env, self.size, batches, {*self.queue.lanes}, {*self.envs})

    def begin(self, env):
        if not self.refuses(env):
            number = next(self.numbers)
            self.begun[number] = self.weights
            self.queue.add(Entry(number, env, self.size, due=self.weights + 1 + self.bound))

    def end_one(self):
        if self.queue.tickets:
            entry = self.random.choice(list(self.queue.tickets.values()))
            self.queue.release(entry.number)
            if self.random.random() >= self.failures:
                self.queue.add(Entry(entry.number, entry.env, self.size, id=entry.number, due=entry.due))

    def post_stock(self):
        while self.stock is not None and self.queue.queued(self.stock) < 3 * self.queue.batch_size:
            number = next(self.numbers)
            self.queue.add(Entry(number, self.stock, self.size, id=number))

    def cut(self):
        plan = self.queue.plan({*self.envs}, self.last + 1, {*self.envs})
        if plan.complete:
            self.queue.cut(plan, {*self.envs})
            self.last += 1
            for entry in plan.entries:
                self.served[entry.env] += entry.size
                assert not entry.due or self.last - 1 - self.begun[entry.number] <= self.bound

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
                self.post_stock()
            if self.last == batches:
                return
        raise AssertionError(f"stuck after {self.last} batches: {self.queue.plan({*self.envs}, self.last + 1).why}")


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("environments", [(1.0,), (1.0, 1.0, 2.0), (1.0, -1.0, 3.0)], ids=["one", "three", "allocated"])
@pytest.mark.parametrize("stock", [None, 1.0], ids=["", "stock"])
def test_pacing_keeps_the_bound_and_goes_on(max_staleness, environments, stock):
    for seed in range(6):
        Run(seed, environments, 4, 6, max_staleness, failures=0.4, stock=stock).go(batches=40)


def test_pacing_survives_trainers_that_go_back():
    for seed in range(6):
        Run(seed, (1.0, 3.0), 4, 6, 2, failures=0.4).go(batches=40, crashes=True)


def test_pacing_shares_the_places_by_weight():
    run = Run(0, (1.0, 1.0, 2.0), 2, 12, 0, failures=0.4)
    run.go(batches=60)
    total = sum(run.served.values())
    for env, part in enumerate((0.25, 0.25, 0.5)):
        assert run.served[env] == pytest.approx(part * total, abs=0.03 * total)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("weight", [0.05, 1.0, 9.0])
def test_stock_groups_and_tickets_share_by_weight(max_staleness, weight):
    """However many groups without tickets are queued, they get their weight's part, and no more."""
    run = Run(0, (1.0, 1.0), 2, 12, max_staleness, failures=0.2, stock=weight)
    run.go(batches=200)
    total = sum(run.served.values())
    assert run.served[run.stock] == pytest.approx(weight / (2 + weight) * total, abs=0.05 * total)


@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_a_slow_stock_environment_leaves_tickets_the_rest(weight):
    """It posts one group a batch: the others' groups begin together, not one by one."""
    queue, numbers = queue_of(128, (), (1.0, weight)), itertools.count(1)
    for batch in range(1, 40):
        queue.add(Entry(number := next(numbers), 1, 4, id=number))
        while not refuses(queue, 0, 4, range(batch, batch + 1), {0, 1}, {0}):
            queue.add(Entry(next(numbers), 0, 4, due=batch))
        assert len(queue.tickets) >= 28
        for ticket in list(queue.tickets.values()):
            queue.release(ticket.number)
            queue.add(Entry(ticket.number, 0, 4, id=ticket.number, due=batch))
        queue.cut(queue.plan({0, 1}, batch, {0}), {0, 1})


def test_a_stock_backlog_leaves_tickets_their_allocation():
    queue = queue_of(16, (), (1.0, 1.0))
    queue.set_environment(1, 1.0, 0.5)
    for number in range(1, 50):
        queue.add(Entry(number, 0, 4, id=number))
    for number in range(100, 106):
        assert refuses(queue, 1, 4, range(1, 3), {0, 1}, {1}) == ""
        queue.add(Entry(number, 1, 4, due=2))
    assert "without tickets have their part" in refuses(queue, 1, 4, range(1, 3), {0, 1}, {1})


def test_tickets_get_what_stock_environments_leave():
    queue = queue_of(16, (), (1.0, 1.0))
    queue.add(Entry(1, 0, 4, id=1))
    for number in range(2, 5):
        assert refuses(queue, 1, 4, range(1, 2), {0, 1}, {1}) == ""
        queue.add(Entry(number, 1, 4, id=number, due=1))
    plan = queue.plan({0, 1}, 1)
    assert plan.complete and {entry.number for entry in plan.entries} == {1, 2, 3, 4}


def test_what_is_due_comes_before_stock_groups():
    """Four groups were begun while nothing else was queued; then a backlog comes, which would get half."""
    queue = queue_of(8, [4] * 4, (1.0,), due=2)
    for number in range(10, 50):
        queue.add(Entry(number, 0, 4, id=number))
    for batch in (1, 2):
        plan = queue.plan(NOBODY, batch)
        queue.cut(plan, NOBODY)
        assert [entry.number for entry in plan.entries] == [2 * batch - 1, 2 * batch]
    assert queue.plan(NOBODY, 3).complete


def test_pacing_gives_an_idle_environments_places_to_others():
    queue = queue_of(8, (), (1.0, 1.0))
    for number in range(1, 3):
        assert refuses(queue, 0, 2, range(1, 2), {0, 1}, {0, 1}) == ""
        queue.add(Entry(number, 0, 2, due=1))
    assert "share" in refuses(queue, 0, 2, range(1, 2), {0, 1}, {0, 1})
    assert refuses(queue, 0, 2, range(1, 2), {0, 1}, {0}) == ""  # the other does not ask


def test_pacing_is_not_stuck_by_an_idle_environments_groups():
    queue = queue_of(8, (), (1.0, 1.0))
    queue.add(Entry(1, 1, 2, id=1, due=1))
    for number in range(2, 5):
        assert refuses(queue, 0, 2, range(1, 2), {0, 1}, {0}) == ""
        queue.add(Entry(number, 0, 2, id=number, due=1))
    assert queue.plan(NOBODY, 1).complete


def test_pacing_is_not_stuck_by_sizes_that_do_not_fit():
    queue = queue_of(8, [3, 3])
    assert refuses(queue, None, 4, range(1, 2), NOBODY, NOBODY) == ""
    queue.add(Entry(9, None, 4, due=1))
    assert refuses(queue, None, 4, range(1, 2), NOBODY, NOBODY) != ""


def test_pacing_is_not_stuck_by_full_places_without_a_batch():
    queue = queue_of(8, [6, 6, 4])
    assert not queue.plan(NOBODY, 1).complete
    assert refuses(queue, None, 2, range(1, 3), NOBODY, NOBODY) == ""
    assert refuses(queue, None, 2, range(1, 1), NOBODY, NOBODY) != "", "the weights are too old"


def test_sizes_set_aside_take_no_places():
    queue = queue_of(8, [3] * 3)
    assert queue.make_room(NOBODY, 1) == {3: 3}
    for number in (10, 11):
        assert refuses(queue, None, 4, range(1, 2), NOBODY, NOBODY) == ""
        queue.add(Entry(number, None, 4, due=1))
    assert refuses(queue, None, 4, range(1, 2), NOBODY, NOBODY) == "8 of 8 sequences that may begin have"
