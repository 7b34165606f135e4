"""The queue's guarantees, for any sizes, environments and orders of events."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.trajectory_api.batching import SKIPS, Queue
from recipe.atropos.trajectory_api.lanes import Entry, Line, exact_fill

NOBODY = frozenset()


def queue_of(batch_size, sizes, envs=None, bounded=False):
    queue = Queue()
    queue.set_batch_size(batch_size, bounded)
    for number, (size, env) in enumerate(zip(sizes, envs or itertools.repeat(None), strict=False), start=1):
        queue.add(Entry(number, env, size, 10 * size, id=number))
    return queue


def cut_all(queue, alive=NOBODY, number=1):
    batches = []
    while (plan := queue.plan(alive, number + len(batches))).complete:
        queue.cut(plan, alive)
        batches.append(list(plan.entries))
    return batches


def numbers(batches):
    return [[entry.number for entry in batch] for batch in batches]


def sums(sizes):
    """What choices of ``sizes`` have."""
    found = 1
    for size in sizes:
        found |= found << size
    return {total for total in range(found.bit_length()) if found >> total & 1}


# ---------------------------------------------------------------------- each batch


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([None, 0, 1, 2]), st.integers(0, 3)), max_size=150),
    st.booleans(),
)
def test_each_group_is_in_one_batch_or_queued(batch_size, groups, bounded):
    queue = queue_of(batch_size, (), bounded=bounded)
    for number, (size, env, due) in enumerate(groups, start=1):
        queue.add(Entry(number, env, size, 10 * size, id=number, due=due))
    batches = cut_all(queue)
    assert all(sum(entry.size for entry in batch) == batch_size for batch in batches)
    left = list(queue)
    assert sorted([entry.id for batch in batches for entry in batch] + [entry.id for entry in left]) == list(
        range(1, len(groups) + 1)
    )
    aside = queue.aside
    assert queue.groups == len(left) - sum(aside.values())
    assert queue.sequences == sum(entry.size for entry in left if entry.size not in aside)
    assert queue.sequences == sum(queue.queued(env) for env in queue.lanes)
    assert queue.tokens == 10 * sum(entry.size for entry in left), "what is set aside counts against the limit"
    assert aside == {size: n for size, n in Counter(entry.size for entry in left).items() if queue.is_aside(size)}


@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([None, 0, 1]), st.integers(0, 3), st.integers(1, 90)), max_size=8
    ),
    st.booleans(),
)
def test_while_any_groups_make_a_batch_batches_come(batch_size, groups, bounded):
    """Whatever else is queued, and however much of it."""
    queue, numbers = queue_of(batch_size, (), bounded=bounded), itertools.count(1)
    for size, env, due, n in groups:
        for number in itertools.islice(numbers, n):
            queue.add(Entry(number, env, size, id=number, due=due))
    cut_all(queue)
    assert batch_size not in sums(entry.size for entry in queue)


@pytest.mark.parametrize(
    ("batch_size", "sizes", "batches"),
    [
        (8, [(3, 0)] * 70 + [(4, 0)] * 100, 50),
        (32, [(5, 0)] * 400 + [(8, 1)] * 96, 24),
        (32, [(24, 0)] * 300 + [(16, 1)] * 96, 48),
        (8, [(12, 0)] * 99 + [(4, 0)] * 2, 1),
    ],
    ids=["one_lane", "two_lanes", "half_of_a_batch", "larger_than_a_batch"],
)
def test_what_cannot_be_placed_is_never_waited_for(batch_size, sizes, batches):
    queue = queue_of(batch_size, *zip(*sizes, strict=True))
    assert len(cut_all(queue)) == batches


def shortest(order, batch_size):
    """The definition: the choice with the earliest entries in the shortest beginning that has one."""
    for end in range(len(order) + 1):
        if batch_size in sums(entry.size for entry in order[:end]):
            return [order[i] for i in exact_fill([entry.size for entry in order[:end]], batch_size)]
    return []


@given(st.integers(1, 30), st.lists(st.integers(1, 12), max_size=60))
def test_a_batch_is_in_the_shortest_beginning_that_has_one(batch_size, sizes):
    queue = queue_of(batch_size, sizes)
    for batch in itertools.chain(cut_all(queue_of(batch_size, sizes)), [[]]):
        assert [entry.number for entry in batch] == [entry.number for entry in shortest(list(queue), batch_size)]
        if batch:
            queue.cut(queue.plan(NOBODY, 1), NOBODY)


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


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3), st.sampled_from(["add", "remove"])), max_size=200))
def test_a_line_is_in_order_whatever_comes_and_goes(events):
    line, entries = Line(), []
    for number, size, event in events:
        if event == "add" and number not in [entry.number for entry in entries]:
            entries.append(Entry(number, None, size, id=size and number))
            line.add(entries[-1])
        elif event == "remove" and entries:
            line.remove(entries.pop(number % len(entries)))
        assert list(line) == sorted(entries, key=lambda entry: entry.key)
        assert list(line.without({2})) == [entry for entry in line if entry.size != 2] and bool(line) == bool(entries)


# ---------------------------------------------------------------------- time


TICKETS = st.lists(
    st.tuples(st.sampled_from([0, 1, 2]), st.integers(1, 8), st.integers(0, 9)),  # (environment, asked for, posted)
    min_size=4,
    max_size=40,
)


@pytest.mark.parametrize("bounded", [False, True])
@given(TICKETS, st.integers(4, 16), st.sampled_from([0.0, 0.4]), st.randoms(use_true_random=False))
def test_the_time_of_a_post_does_not_change_a_batch(bounded, tickets, batch_size, minimum, rng):
    """Whatever is posted is of other sizes than asked for, or fails (0), in any order, while batches are cut."""

    def batches(order, cuts):
        queue = queue_of(batch_size, (), bounded=bounded)
        for env, weight in enumerate((1.0, 2.5, 0.3)):
            queue.set_environment(env, weight, minimum if env == 1 else 0.0)
        for number, (env, asked, _) in enumerate(tickets, start=1):
            queue.add(Entry(number, env, asked, due=number))
        found = []
        for number in order:
            queue.release(number)
            env, _, posted = tickets[number - 1]
            if posted:
                queue.add(Entry(number, env, posted, id=number, due=number))
            if next(cuts):
                found += cut_all(queue, {0, 1, 2}, 1 + len(found))
        return numbers(found + cut_all(queue, {0, 1, 2}, 1 + len(found)))

    in_order = list(range(1, len(tickets) + 1))
    expected = batches(in_order, itertools.repeat(False))
    for _ in range(3):
        order = rng.sample(in_order, len(in_order))
        assert batches(order, iter(lambda: rng.random() < 0.8, None)) == expected


@given(TICKETS, st.integers(4, 16), st.randoms(use_true_random=False))
def test_with_a_bound_the_time_of_a_ticket_does_not_either(tickets, batch_size, rng):
    """Tickets begin in one order, before or after batches of earlier ones are cut."""

    def batches(ahead):
        queue, found, open_ = queue_of(batch_size, (), bounded=True), [], []
        for number, (env, asked, _) in enumerate(tickets, start=1):
            queue.add(Entry(number, env, asked, due=number))
            open_.append(number)
            while open_ and (len(open_) > ahead or number == len(tickets)):
                ended = open_.pop(rng.randrange(len(open_)))
                queue.release(ended)
                env, _, posted = tickets[ended - 1]
                if posted:
                    queue.add(Entry(ended, env, posted, id=ended, due=ended))
                found += cut_all(queue, NOBODY, 1 + len(found))
        return numbers(found)

    assert batches(0) == batches(3) == batches(len(tickets))


def test_an_open_ticket_is_waited_for():
    queue = queue_of(4, [2, 2, 2])
    queue.add(Entry(0, None, 2))  # begun before all of them
    assert "ticket" in queue.plan(NOBODY, 1).why
    queue.release(0)
    assert [entry.number for entry in queue.plan(NOBODY, 1).entries] == [1, 2]


def test_a_ticket_behind_a_complete_batch_is_not_waited_for():
    queue = queue_of(4, [2, 2])
    queue.add(Entry(3, None, 2))
    assert [entry.number for entry in queue.plan(NOBODY, 1).entries] == [1, 2]


# ---------------------------------------------------------------------- shares


@given(st.lists(st.tuples(st.sampled_from([0.5, 1, 2, 3.7]), st.integers(1, 8)), min_size=2, max_size=6), st.data())
def test_no_environment_is_more_than_a_group_ahead(environments, data):
    batch_size = data.draw(st.integers(8, 64))
    queue = queue_of(batch_size, ())
    for env, (weight, _) in enumerate(environments):
        queue.set_environment(env, weight, 0.0)
    numbers, served = itertools.count(1), [0.0] * len(environments)
    for env, (_, size) in enumerate(environments):
        while queue.lanes[env].size < 3 * batch_size:
            queue.add(Entry(number := next(numbers), env, size, id=number))
    for entry in itertools.islice(queue._in_order(NOBODY, 1, NOBODY, ()), 3 * batch_size // 8):
        served[entry.env] += entry.size / environments[entry.env][0]
        assert served[entry.env] <= min(served) + entry.size / environments[entry.env][0] + 1e-6


def test_unequal_weights_over_many_batches():
    queue, numbers = queue_of(16, ()), itertools.count(1)
    weights = {0: 1.0, 1: 2.0, 2: 5.0}
    for env, weight in weights.items():
        queue.set_environment(env, weight, 0.0)
    served = dict.fromkeys(weights, 0)
    for batch in range(100):
        for env in weights:
            while queue.lanes[env].size < 32:
                queue.add(Entry(number := next(numbers), env, 4, id=number))
        plan = queue.plan(NOBODY, batch)
        queue.cut(plan, NOBODY)
        for entry in plan.entries:
            served[entry.env] += entry.size
        for env, other in itertools.permutations(weights, 2):
            assert served[env] / weights[env] <= served[other] / weights[other] + 4 / weights[env] + 1e-6


def test_a_long_run_with_extreme_weights_serves_all():
    queue, numbers = queue_of(16, ()), itertools.count(1)
    weights = {0: 1e3, 1: 1 / 3, 2: 1e6}
    served = dict.fromkeys(weights, 0)
    for env, weight in weights.items():
        queue.set_environment(env, weight, 0.0)
    for batch in range(2000):
        for env in weights:
            while queue.lanes[env].size < 32:
                queue.add(Entry(number := next(numbers), env, 4, id=number))
        plan = queue.plan(NOBODY, batch)
        queue.cut(plan, NOBODY)
        for entry in plan.entries:
            served[entry.env] += entry.size
    assert served[0] == pytest.approx(32, abs=8) and 0 < served[1] <= 8
    assert max(abs(lane.behind) for lane in queue.lanes.values()) < 100, "floats stay exact"


@pytest.mark.parametrize("alive", [NOBODY, {0, 1}], ids=["away", "alive"])
def test_an_environment_that_was_idle_has_arrears_of_one_batch(alive):
    queue, numbers = queue_of(8, ()), itertools.count(1)
    for env in (0, 1):
        queue.set_environment(env, 1.0, 0.0)
    for _ in range(50):
        for _ in range(2):
            queue.add(Entry(number := next(numbers), 0, 4, id=number))
        assert len(cut_all(queue, alive)) == 1
    for _ in range(20):
        for env in (0, 1):
            queue.add(Entry(number := next(numbers), env, 4, id=number))
    envs = [entry.env for batch in cut_all(queue, alive) for entry in batch]
    assert envs[:12].count(0) >= 4 and abs(envs.count(0) - envs.count(1)) <= 3


def test_an_allocation_comes_first_while_its_environment_lives():
    queue = queue_of(8, [2] * 12, [0] * 12)
    queue.set_environment(1, 1.0, 0.5)
    plan = queue.plan({0, 1}, 1)
    assert not plan.complete and "environment 1" in plan.why
    assert queue.plan({0}, 1).complete  # it is gone
    for number in (20, 21, 22):
        queue.add(Entry(number, 1, 2, id=number))
    assert [entry.env for entry in queue.plan({0, 1}, 1).entries].count(1) >= 2


def test_an_allocation_of_groups_that_do_not_fit_blocks_nobody():
    queue = queue_of(8, [3] * 9 + [4] * 60, [1] * 9 + [0] * 60)
    queue.set_environment(1, 1.0, 0.9)
    assert len(cut_all(queue, {0, 1})) == 30 and 3 in queue.aside


def test_allocations_beyond_a_batch_are_scaled():
    queue = queue_of(8, [2] * 16, [0, 1] * 8)
    queue.set_environment(0, 1.0, 0.9)
    queue.set_environment(1, 1.0, 0.9)
    assert [entry.env for entry in queue.plan({0, 1}, 1).entries].count(0) == 2


# ---------------------------------------------------------------------- what is set aside


def test_sizes_that_are_passed_over_are_set_aside_until_they_fit():
    queue = queue_of(8, [12, 3, 3] + [4] * 2 * SKIPS)
    assert queue.aside == {12: 1}
    noted = []
    while (plan := queue.plan(NOBODY, 1)).complete:
        noted.append(queue.cut(plan, NOBODY))
    assert noted == [{}] * (SKIPS - 1) + [{3: 2}] and queue.aside == {3: 2, 12: 1} and queue.sequences == 0
    queue.add(Entry(99, None, 5, id=99))
    assert [entry.number for entry in queue.plan(NOBODY, 1).entries] == [2, 99]
    for number in range(100, 99 + 2 * SKIPS, 2):
        assert 3 in queue.aside
        queue.cut(queue.plan(NOBODY, 1), NOBODY)
        queue.add(Entry(number, None, 5, id=number))
        queue.add(Entry(number + 1, None, 3, id=number + 1))
    queue.cut(queue.plan(NOBODY, 1), NOBODY)
    assert queue.aside == {12: 1} and queue.sequences == 3, "its size counts again"


def test_another_batch_size_queues_again_what_was_set_aside():
    queue = queue_of(4, [6, 3, 6])
    assert queue.aside == {6: 2} and queue.groups == 1
    queue.set_batch_size(9)
    assert not queue.aside and queue.groups == 3
    assert [entry.id for entry in queue.plan(NOBODY, 1).entries] == [1, 2]


def test_room_is_made_where_sizes_that_do_not_fit_are_all():
    """What counts as queued is then less than a batch, so that environments, which stop at some batches, go on."""
    queue = queue_of(8, [3] * 8 + [4], [0] * 9)
    plan = queue.plan(NOBODY, 1)
    assert plan.stuck and "sizes [3, 4]" in plan.why
    assert queue.make_room(NOBODY, 1) == {3: 8} and queue.queued(0) == 4
    assert queue.make_room(NOBODY, 1) == {}
    queue.add(Entry(20, 0, 4))
    assert not queue.plan(NOBODY, 1).stuck, "a ticket is open"
    queue.release(20)
    queue.add(Entry(20, 0, 4, id=20))
    assert [entry.number for entry in queue.plan(NOBODY, 1).entries] == [9, 20]


@pytest.mark.parametrize("bounded", [False, True])
def test_batches_come_though_environments_stop_at_three(bounded):
    """Two groups in three have sizes that fit into no batch, or rarely."""
    for seed in range(20):
        rng = random.Random(seed)
        queue, batch_size = queue_of(0, ()), rng.randint(6, 40)
        queue.set_batch_size(batch_size, bounded)
        sizes = [rng.randint(1, batch_size + 3), rng.randint(batch_size // 2, batch_size), rng.choice([1, batch_size])]
        batches, number, waits = 0, 0, 0
        while batches < 40:
            number += 1
            env = rng.randrange(2)
            if queue.queued(env) < 3 * batch_size if env in queue.lanes else True:
                queue.add(Entry(number, env, rng.choice(sizes), id=number))
            batches += len(cut_all(queue))
            if queue.plan(NOBODY, 1).stuck and rng.random() < 0.1:
                queue.make_room(NOBODY, 1)
            waits += 1
            assert waits < 20_000, (seed, sizes, batch_size, batches, queue.plan(NOBODY, 1).why)


def test_room_is_made_only_where_nothing_else_helps():
    for queue in (queue_of(8, [4, 4]), queue_of(8, [3, 3]), queue_of(8, [12, 12])):
        assert queue.make_room(NOBODY, 1) == {}


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize("sizes", [[4], [3, 5, 7, 4], [3]], ids=["one_size", "sizes", "no_batch"])
@pytest.mark.parametrize("bounded", [False, True])
def test_the_cost_of_a_batch_does_not_grow_with_the_queue(monkeypatch, sizes, bounded):
    seen = []
    original = Line.without

    def counted(line, left_out):
        for entry in original(line, left_out):
            seen.append(entry)
            yield entry

    def touched(groups):
        queue = queue_of(16, ())
        for number, size in enumerate(itertools.islice(itertools.cycle(sizes), groups), start=1):
            queue.add(Entry(number, number % 3, size, id=number, due=number % 2 * 3))
        queue.set_batch_size(16, bounded)
        seen.clear()
        for batch in range(1, 4):
            plan = queue.plan(NOBODY, batch)
            if plan.complete:
                queue.cut(plan, NOBODY)
        return len(seen)

    monkeypatch.setattr(Line, "without", counted)
    few = touched(200)
    assert touched(20_000) <= few <= 3 * 3 * 16 * (1 + sum(1 / size for size in sizes)) * 2


def test_posts_far_ahead_of_a_slow_ticket_cost_nothing(monkeypatch):
    queue = queue_of(16, ())
    queue.add(Entry(1, 0, 4))
    for number in range(2, 10_000):
        queue.add(Entry(number, 0, 4))
        queue.release(number)
    [run] = queue.lanes[0].line._runs.values()
    assert len(run._entries) <= 40


def test_random_events_leave_the_counts_exact():
    rng, queue = random.Random(7), queue_of(12, (), bounded=True)
    for number in range(1, 3000):
        entry = Entry(number, rng.randrange(3), rng.randint(1, 6), due=rng.choice([0, number]))
        queue.add(entry)
        if rng.random() < 0.9:
            queue.release(number)
            queue.add(Entry(number, entry.env, rng.randint(1, 6), id=number, due=entry.due))
        if rng.random() < 0.3:
            cut_all(queue, NOBODY, number)
        for other in [*queue.tickets] if rng.random() < 0.1 else ():
            queue.release(other)
    for env, lane in queue.lanes.items():
        own = [entry for entry in queue if entry.env == env]
        assert lane.begun == sum(entry.size for entry in own if entry.is_open)
        assert lane.groups == Counter(entry.size for entry in own if not entry.is_open)
        assert lane.ticketed == Counter(entry.size for entry in own if not entry.is_open and entry.due)
