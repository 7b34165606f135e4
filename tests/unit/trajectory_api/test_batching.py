"""The queue's guarantees, without a service: its order, its batches, and turns."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.trajectory_api import batching
from recipe.atropos.trajectory_api.batching import UNBOUNDED, BatchRequest, Entry, Queue


def queue_of(batch_size, sizes=(), exact=False):
    """``sizes``: of groups that were posted under the tickets 1, 2, ..."""
    queue = Queue()
    queue.set_batch_size(batch_size, exact)
    for number, size in enumerate(sizes, start=1):
        queue.add(Entry(number, None, size, 10 * size, id=number, due=UNBOUNDED))
    return queue


def cut_all(queue):
    batches = []
    while (plan := queue.plan()).entries:
        queue.cut(plan)
        batches.append([entry.id for entry in plan.entries])
    return batches


def ask(queue, env, size, more=False):
    queue.ask(request := BatchRequest(env, size, more, 3, lambda: False, lambda _: None))
    return request


def next_fit(sizes, batch_size):
    """The definition: the batch of each, from 1 on."""
    batch, filled, found = 1, 0, []
    for size in sizes:
        batch, filled = (batch, filled + size) if filled + size <= batch_size else (batch + 1, size)
        found.append(batch)
    return found


SIZES = st.lists(st.integers(1, 12), max_size=40)


@given(st.integers(12, 40), SIZES)
def test_batches_are_the_order_cut_by_next_fit(batch_size, sizes):
    queue = queue_of(batch_size, sizes)
    batches = cut_all(queue)
    expected = next_fit(sizes, batch_size)
    assert [number for batch in batches for number in batch] == list(range(1, sum(map(len, batches)) + 1))
    assert [n for n, batch in enumerate(batches, 1) for _ in batch] == expected[: sum(map(len, batches))]
    left = [entry.size for entry in queue]
    assert sum(left) < batch_size and queue.sequences == sum(left) and queue.tokens == 10 * sum(left)


@given(st.integers(12, 40), SIZES, st.integers(1, 12))
def test_a_place_is_the_batch_that_will_hold_a_group(batch_size, sizes, size):
    """Whatever was cut, closed with another size, or ended without a group meanwhile."""
    queue = queue_of(batch_size, sizes)
    assert queue.place(size) == next_fit([*sizes, size], batch_size)[-1]
    cut_all(queue)
    assert queue.place(size) == next_fit([*(entry.size for entry in queue), size], batch_size)[-1]


@given(st.integers(12, 40), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=40))
def test_bound_of_a_place_holds_if_groups_are_no_larger(batch_size, tickets):
    """Tickets are asked for, and posted with that size, less or nothing: no later place moves back."""
    queue = queue_of(batch_size)
    for number, (asked, _) in enumerate(tickets, start=1):
        queue.add(Entry(number, None, asked, due=UNBOUNDED))
    places = next_fit([asked for asked, _ in tickets], batch_size)
    for number, (asked, posted) in enumerate(tickets, start=1):
        size = min(asked, posted)
        group = Entry(number, None, size, id=number, due=UNBOUNDED)
        queue.close(queue.claim(number), [group] if size else [])
    batches = cut_all(queue)
    for batch, ids in enumerate(batches, start=1):
        assert all(batch <= places[id - 1] for id in ids)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9)), min_size=4, max_size=40),  # (asked for, posted)
    st.integers(9, 20),
    st.randoms(use_true_random=False),
)
def test_the_time_of_a_post_does_not_change_a_batch(tickets, batch_size, rng):
    """Whatever is posted is of other sizes than asked for, or fails (0), in any sequence, while batches are cut."""

    def batches(sequence, cuts):
        queue, found = queue_of(batch_size), []
        for number, (asked, _) in enumerate(tickets, start=1):
            queue.add(Entry(number, None, asked, due=UNBOUNDED))
        for number in sequence:
            size = tickets[number - 1][1]
            queue.close(queue.claim(number), [Entry(number, None, size, id=number, due=UNBOUNDED)] if size else [])
            if next(cuts):
                found += cut_all(queue)
        return found + cut_all(queue)

    in_order = list(range(1, len(tickets) + 1))
    expected = batches(in_order, itertools.repeat(False))
    for _ in range(3):
        sequence = rng.sample(in_order, len(in_order))
        assert batches(sequence, iter(lambda: rng.random() < 0.8, None)) == expected


def test_an_older_group_is_not_compared_with_all_that_wait():
    """One that is queued again, among very many."""
    looks = []

    class Counted(int):
        def __lt__(self, other):
            looks.append(other)
            return int(self) < int(other)

    queue = queue_of(8)
    for id in (*range(2, 4000, 2), 4001, 1, 1001, 3999):
        looks.clear()
        queue.add(Entry(id, None, 4, id=Counted(id)))
        assert len(looks) <= 12
    assert [entry.id for entry in queue] == sorted([*range(2, 4000, 2), 4001, 1, 1001, 3999])


def test_an_open_ticket_is_waited_for_by_name():
    queue = queue_of(4, [2, 2])
    queue.environments[7].name = "gsm8k_0"
    queue.add(Entry(0, 7, 2, due=UNBOUNDED))  # begun before both
    plan = queue.plan()
    assert not plan.entries and plan.why == "waiting for groups of 1 tickets, first 0 of gsm8k_0"
    assert [entry.number for entry in plan.holding] == [0]
    queue.close(queue.claim(0))
    queue.add(Entry(3, None, 2, due=UNBOUNDED))
    assert cut_all(queue) == [[1, 2]], "one that is behind a full batch is not waited for"


def test_a_batch_is_never_cut_because_nobody_asks():
    queue = queue_of(8, [3, 3])
    assert not queue.plan().entries and "6 of 8" in queue.plan().why
    small = ask(queue, 1, 2)
    assert not queue.plan().entries, "there is room for it"
    queue.withdraw(small)
    ask(queue, 1, 3)
    assert cut_all(queue) == [[1, 2]]


def test_a_request_that_was_announced_keeps_its_turn():
    """It is no reason to cut a batch, before it has come."""
    queue = queue_of(8, [3])
    for env in (1, 2):
        queue.environments[env]
    ask(queue, 1, 3, more=True)
    first = queue.turn()
    queue.issue(first, 10, UNBOUNDED)
    queue.close(queue.claim(10), [Entry(10, 1, 3, id=10, due=UNBOUNDED)])
    assert queue.turn() is first and not first.asks_now and not queue.plan().entries
    ask(queue, 1, 3)
    assert queue.plan().entries


def test_groups_without_a_ticket_wait_for_their_turn():
    queue = queue_of(8)
    for number in (1, 2, 3):
        queue.add(Entry(number, 5, 4, id=number))
    assert not queue.plan().entries and queue.sequences == 12
    ask(queue, 6, 4)
    turns = []
    for number in (10, 11, 12):
        env = queue.turn()
        turns.append(bool(env.waiting))
        if env.waiting:
            queue.enter(env, number)
        else:
            queue.issue(env, number, UNBOUNDED)
    assert sorted(turns) == [False, True, True] and len(queue.tickets) == 1


def test_a_ticket_that_ends_without_a_group_is_refunded():
    """Also the part of it that its group does not need."""
    queue = queue_of(8)
    for env in (1, 2):
        ask(queue, env, 4)
    ticket = queue.issue(queue.environments[1], 1, UNBOUNDED)[1]
    charged = queue.environments[1].time
    queue.close(queue.claim(1))
    assert ticket.charge == charged == 8 and queue.environments[1].time == 0
    ask(queue, 1, 4)
    queue.issue(queue.environments[1], 2, UNBOUNDED)
    queue.close(queue.claim(2), [Entry(2, 1, 1, id=2, due=UNBOUNDED)])
    assert queue.environments[1].time == 2


def test_whoever_always_fails_is_refunded_by_a_batch_only():
    """Else it would be next for ever; its first group counts anew."""
    queue = queue_of(8)
    queue.add(Entry(1, 2, 4, due=UNBOUNDED))
    for number in range(2, 12):
        ask(queue, 1, 4)
        queue.issue(queue.turn(), number, UNBOUNDED)
        before = queue.environments[1].time
        queue.close(queue.claim(number))
        assert (queue.environments[1].time < before) == (number < 4)


@pytest.mark.parametrize("seed", range(20))
def test_shares_hold_whatever_has_been_before(seed):
    """Shares that changed, environments that asked for nothing, and tickets that ended without a group."""
    rng, queue = random.Random(seed), queue_of(24)
    envs = {env: rng.randint(1, 24) for env in range(3)}  # and the sizes of their groups
    had, due, tickets = dict.fromkeys(envs, 0), dict.fromkeys(envs, 0.0), []

    def issue(number):
        if (turn := queue.turn()) is not None and turn.asks:
            share = queue.shares()
            for env in envs:
                due[env] += share(queue.environments[env]) * turn.next_size
            tickets.append(queue.issue(turn, number, UNBOUNDED)[1])
            had[tickets[-1].env] += tickets[-1].size

    def end(ticket, fails):
        group = Entry(ticket.number, ticket.env, ticket.size, id=ticket.number, due=UNBOUNDED)
        queue.close(queue.claim(ticket.number), [] if rng.random() < fails else [group])
        cut_all(queue)

    for number in range(1, 300):
        for env, size in envs.items():
            if rng.random() < 0.05:
                queue.set_share(env, "", rng.choice([0.01, 1, 100]), rng.choice([0, 0, 0.33]))
            if rng.random() < 0.1 and not queue.environments[env].asks:
                ask(queue, env, size)
        issue(number)
        if tickets and rng.random() < 0.5:
            end(tickets.pop(rng.randrange(len(tickets))), fails=0.4)
    while tickets:
        end(tickets.pop(), fails=0)
    before = {env: had[env] - due[env] for env in envs}
    for number in range(300, 700):
        for env, size in envs.items():
            if not queue.environments[env].asks:
                ask(queue, env, size, more=True)
        issue(number)
        end(tickets.pop(), fails=0)
        for env, size in envs.items():
            assert abs(had[env] - due[env] - before[env]) <= 24 + 2 * size


def test_a_post_of_an_unknown_environment_closes_its_ticket():
    queue = queue_of(4)
    queue.add(Entry(1, 7, 4, due=UNBOUNDED))
    queue.close(queue.claim(1), [Entry(1, None, 4, id=1, due=UNBOUNDED)])
    assert cut_all(queue) == [[1]]


def test_a_turn_that_moves_without_an_event_plans_anew(monkeypatch):
    """The request that was announced does not come, so the next one's, which does not fit, ends the batch."""
    queue, now = queue_of(8), time.monotonic()
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: now))
    ask(queue, 1, 3, more=True)
    queue.issue(queue.turn(), 1, UNBOUNDED)
    queue.close(queue.claim(1), [Entry(1, 1, 3, id=1, due=UNBOUNDED)])
    queue.environments[1].time = -100.0
    ask(queue, 2, 8)
    assert not queue.plan().entries
    now += 1
    queue.turn()
    assert cut_all(queue) == [[1]]


@pytest.mark.parametrize("sizes", [[4, 6, 4, 6, 4], [2, 12, 6, 4, 4, 4]])
def test_a_stock_trainer_gets_exactly_a_batch(sizes):
    queue = queue_of(12, sizes, exact=True)
    for batch in cut_all(queue):
        assert sum(sizes[id - 1] for id in batch) == 12 and len({sizes[id - 1] for id in batch}) == 1
    left = [entry.size for entry in queue]
    assert all(left.count(size) * size < 12 for size in left), "none waits that could be in a batch"


def test_random_events_leave_the_counts_exact():
    rng, queue = random.Random(7), queue_of(12)
    for number in range(1, 3000):
        env = rng.randrange(3)
        if rng.random() < 0.3:
            queue.add(Entry(number, env, rng.randint(1, 6), 5, id=number))
        else:
            queue.add(Entry(number, env, rng.randint(1, 6), due=UNBOUNDED))
            if rng.random() < 0.9:
                queue.close(queue.claim(number), [Entry(number, env, rng.randint(1, 6), 5, id=number, due=UNBOUNDED)])
        if (turn := queue.turn()) is not None and turn.waiting:
            queue.enter(turn, 10**6 + number)
        cut_all(queue)
        for other in [*queue.tickets] if rng.random() < 0.1 else ():
            queue.close(queue.claim(other))
    for env, own in queue.environments.items():
        entries = [entry for entry in queue if entry.env == env]
        assert own.begun == sum(entry.size for entry in entries if entry.is_open)
        assert own.sequences == sum(entry.size for entry in entries if not entry.is_open)
    assert queue.tokens == 5 * sum(not entry.is_open for entry in queue) and queue.sizes.total() == queue.tokens // 5
