"""The counts behind paced generation: how much may begin, who posts next, and that nobody waits for ever."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.services import group
from helpers.trainer import compose_config
from recipe.atropos.adapter.completion_cache import NOT_PUSHED
from recipe.atropos.adapter.flags import UsageError, take_settings
from recipe.atropos.adapter.pace import Pace
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits, VersionLimits
from recipe.atropos.launcher.preflight import ConfigurationError, check_config

SIZE = 4  # sequences of a group
CANCELLED = 13  # turns: an item that takes just so long is cancelled
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"


class Training:
    """A trainer over one queue: each ``batch`` of sequences is an update, each ``every`` updates a push.

    What is older than ``max_staleness`` is left out; of a batch that this leaves empty nothing is trained.
    """

    def __init__(self, batch, every=1, version=0, max_staleness=None):
        self.batch, self.every, self.max_staleness = batch, every, max_staleness
        self.queue = []  # (environment, item, version at its begin), in the order of their posts
        self.taken = 0  # groups
        self.dropped = []  # versions at which a group was dropped
        self.version = self.pushed = version
        self.staleness = []

    async def step(self, patience=6000):
        """The next update; fails where no batch comes within so many turns of the event loop."""
        groups = self.batch // SIZE
        for _ in range(patience):
            if len(self.queue) >= self.taken + groups:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError(f"deadlock before update {self.version + 1}")
        ages = [self.version - began for *_, began in self.queue[self.taken : self.taken + groups]]
        self.taken += groups
        fit = [age for age in ages if self.max_staleness is None or 0 <= age <= self.max_staleness]
        self.dropped += [self.version] * (len(ages) - len(fit))
        if not fit:
            return await self.step(patience)
        self.staleness += fit
        await asyncio.sleep(0)
        self.version += 1
        if self.version % self.every == 0:
            self.pushed = self.version


async def environment(training, pace, share, items, workers, name="env", patience=None, fill_in=None):
    """What ``Paced`` makes of BaseEnv's manager; ``items`` yields (turns that it takes, groups that come of it).

    ``share`` is a function where other environments leave and return, and ``fill_in`` the patience with what they lack.
    """
    running, number, expected, in_order, idle = set(), 0, SIZE, [], 0

    async def work(number, ticket, began, duration, groups):
        for _ in range(duration):
            await asyncio.sleep(0)
        if groups is None:
            raise RuntimeError("a worker that fails")
        if groups:
            await pace.turn(ticket)
            in_order.append(number)
            assert in_order == sorted(in_order), "posted in the order of their begin"
            count = pace.fitting(ticket, [SIZE] * groups)
            assert count == groups or groups > 1, "a group that began has a place"
            await asyncio.sleep(0)
            training.queue += [(name, number, began)] * count
            pace.posted(ticket, SIZE * count)

    def ended(ticket, task):
        running.discard(task)
        pace.end(ticket)
        assert task.cancelled() or task.exception() is None or "a worker that fails" in str(task.exception())

    try:
        while True:
            pace.set_share(share() if callable(share) else share)
            if pace.version != training.pushed:
                pace.set_version(training.pushed, SIZE * (len(training.queue) - training.taken))
                idle = 0
            idle = 0 if pace.room or pace.oldest else idle + 1
            if patience and idle > patience:
                pace.grant()
            missing = training.batch - SIZE * (len(training.queue) - training.taken)
            if fill_in and idle > fill_in and 0 < missing < training.batch:
                pace.grant(missing * pace.share / training.batch)
            while pace.room and len(running) < workers + pace.waiting:
                duration, groups = next(items)
                assert pace.begun < pace.limit
                ticket = pace.begin(expected)
                task = asyncio.create_task(work(number, ticket, training.pushed, duration, groups))
                task.add_done_callback(lambda task, ticket=ticket: ended(ticket, task))
                running.add(task)
                number, expected = number + 1, SIZE * (groups or expected // SIZE)
                if duration == CANCELLED:  # as a worker that ran out of time, or was cancelled before it ran at all
                    task.cancel()
            await asyncio.sleep(0)
    finally:
        for task in running:
            task.cancel()


def simulate(*coroutines, main):
    async def run():
        others = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            async with asyncio.timeout(60):
                await main
                assert not any(other.done() for other in others), "an environment has ended"
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(run())


async def steps(training, count):
    for _ in range(count):
        await training.step()


def cycle(items):
    while True:
        yield from items


durations = st.integers(0, 15)
one_or_none = st.one_of(st.just(1), st.sampled_from([1, 1, 0, None]))


def with_a_group(items):
    """A policy of which nothing ever comes trains nobody."""
    return any(groups and duration != CANCELLED for duration, groups in items)


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.tuples(durations, one_or_none), min_size=1, max_size=20).filter(with_a_group),
    max_staleness=st.integers(0, 3),
    groups=st.integers(1, 6),
    workers=st.integers(1, 8),
    every=st.integers(1, 4),
    first=st.integers(0, 5),
)
@example(items=[(15, 1)] + [(0, 1)] * 19, max_staleness=0, groups=4, workers=1, every=1, first=0)
def test_pace_keeps_order_and_bound(items, max_staleness, groups, workers, every, first):
    """Every step trains on what began next and at most max staleness updates ago."""
    max_staleness = max(max_staleness, every - 1)
    training = Training(groups * SIZE, every, first * every)
    pace = Pace(max_staleness)
    paced = environment(training, pace, groups * SIZE, cycle(items), workers)
    simulate(paced, main=steps(training, 9))
    assert max(training.staleness) <= max_staleness and min(training.staleness) >= 0
    trained = [number for _, number, _ in training.queue]
    assert trained == sorted(set(trained))
    fruitful = [n for n in range(trained[-1] + 1) if items[n % len(items)][1] and items[n % len(items)][0] != CANCELLED]
    assert trained == fruitful, "what began first is trained on first; nothing that gave a group is left out"


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.tuples(durations, st.sampled_from([1, 2, 3, 0, None])), min_size=1, max_size=12).filter(
        with_a_group
    ),
    max_staleness=st.integers(0, 2),
    groups=st.integers(1, 6),
    workers=st.integers(1, 8),
)
def test_items_of_several_groups_keep_the_bound(items, max_staleness, groups, workers):
    training = Training(groups * SIZE)
    simulate(environment(training, Pace(max_staleness), groups * SIZE, cycle(items), workers), main=steps(training, 9))
    # An item takes places for as many groups as the one before it gave; only its last ones may be one batch later.
    assert max(training.staleness) <= max_staleness + 1 if groups == 1 else max(training.staleness) <= max_staleness


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.tuples(durations, st.just(1)), min_size=2, max_size=20).filter(with_a_group),
    max_staleness=st.integers(0, 2),
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    groups=st.integers(1, 7),
)
def test_environments_that_share_a_batch_always_fill_it(items, max_staleness, weights, groups):
    training = Training(groups * SIZE)
    environments = [
        environment(
            training,
            Pace(max_staleness),
            groups * SIZE * weight / sum(weights),
            cycle(items[i:] + items[:i]),
            workers=4,
            name=i,
        )
        for i, weight in enumerate(weights)
    ]
    simulate(*environments, main=steps(training, 12))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(2, 6),
    part=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    leaves=st.integers(0, 60),
    away=st.one_of(st.none(), st.integers(50, 600)),
    duration=st.integers(0, 8),
)
@example(groups=4, part=2, max_staleness=0, leaves=9, away=None, duration=3)
@example(groups=4, part=2, max_staleness=2, leaves=40, away=100, duration=0)
def test_pace_fills_in_for_an_environment_that_left(groups, part, max_staleness, leaves, away, duration):
    """And where it returns, each has its share again. Never for long is more on its way than the bound allows."""
    batch, part = groups * SIZE, min(part, groups - 1)
    training = Training(batch)
    there, changed = True, asyncio.Event()

    def rest():
        return batch - part * SIZE if there else batch

    def leaver(name):
        return environment(training, Pace(max_staleness), part * SIZE, cycle([(duration, 1)]), workers=20, name=name)

    async def come_and_go():
        nonlocal there
        task = asyncio.create_task(leaver("first"))
        for _ in range(leaves):
            await asyncio.sleep(0)
        task.cancel()
        there = False
        for _ in range(away or 0):
            await asyncio.sleep(0)
        there = away is not None
        changed.set()
        await (leaver("second") if there else asyncio.Event().wait())

    async def step():
        await training.step()
        for _ in range(30):  # the environments are faster
            await asyncio.sleep(0)

    async def main():
        while not changed.is_set():
            await step()
        for number in range(30):
            await step()
            assert number < 15 or len(training.queue) <= (training.version + 1 + max_staleness) * groups

    stays = environment(training, Pace(max_staleness), rest, cycle([(1, 1)]), workers=20, name="stays", fill_in=300)
    simulate(stays, come_and_go(), main=main())
    names = [name for name, *_ in training.queue[training.taken - 10 * groups : training.taken]]
    assert names.count("stays") / len(names) == pytest.approx(rest() / batch, abs=0.15)


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.tuples(durations, one_or_none), min_size=1, max_size=20).filter(with_a_group),
    max_staleness=st.integers(0, 2),
    back=st.integers(0, 3),
    lost=st.integers(0, 2),
    noticed=st.booleans(),
)
def test_a_trainer_that_goes_on_from_a_checkpoint_is_fed_again(items, max_staleness, back, lost, noticed):
    """Whether or not the environment saw the last version before, and with batches that the old one took with it."""
    groups = 3
    training = Training(groups * SIZE, max_staleness=max_staleness)
    pace = Pace(max_staleness)

    async def main():
        await steps(training, 4)
        while noticed and pace.version != training.pushed:
            await asyncio.sleep(0)
        training.taken = min(len(training.queue), training.taken + lost * groups)
        training.version = training.pushed = training.version - back
        await steps(training, 10)

    simulate(environment(training, pace, groups * SIZE, cycle(items), workers=4, patience=300), main=main())
    assert max(training.dropped, default=0) <= 4 - back + max_staleness + 4, "no drops once the old branch is gone"


def test_pace_begins_anew_where_the_version_goes_down():
    """Where the version goes down only what is in flight or begins a batch counts."""
    pace = Pace(0)
    pace.set_share(4 * SIZE)
    for version in (5, 6):
        pace.set_version(version)
        for _ in range(4):
            ticket = pace.begin(SIZE)
            if version == 5:
                pace.posted(ticket, SIZE)
    pace.set_version(3, queued=5 * SIZE)
    assert pace.begun == (4 + 1) * SIZE and pace.limit == 4 * SIZE and not pace.room
    assert pace.fitting(ticket, [SIZE]) == 1, "what is in flight is posted"
    pace.set_version(4)
    assert pace.limit == 8 * SIZE and pace.room


def test_a_changed_share_counts_from_the_present_version_on():
    pace = Pace(1)
    pace.set_share(16)
    assert not pace.room, "nothing begins before the version is known"
    pace.set_version(5)
    assert pace.limit == 32
    pace.set_version(8)
    assert pace.limit == 80
    pace.set_share(8)
    assert pace.limit == 48 + 2 * 8
    pace.set_version(9)
    assert pace.limit == 48 + 3 * 8


@pytest.mark.parametrize(("flag", "expected"), [("--adapter.max_staleness=3", 3), ("--adapter.report=f", None)])
def test_the_bound_is_a_flag_of_the_adapter(flag, expected):
    arguments = ["serve", flag, "--env.group_size=2"]
    settings = take_settings(arguments)
    assert settings.max_staleness == expected and arguments == ["serve", "--env.group_size=2"]
    assert settings.flags() == [flag] and take_settings(arguments) is None


@pytest.mark.parametrize("value", ["-1", "2.5", "none"])
def test_another_bound_is_refused_by_name(value):
    with pytest.raises(UsageError, match=f"--adapter.max_staleness={value}: Input should be"):
        take_settings([f"--adapter.max_staleness={value}"])


def versioned(number, oldest, newest):
    return group(number) | {
        "group_overrides": {"policy_version_min": oldest, "policy_version_max": newest, "env_name": "math"}
    }


def test_pace_rows_out_of_bounds_are_dropped_and_counted():
    """Rows that are too old or from the future are dropped and counted for their environment."""
    groups = [versioned(0, [5, 3, 2, None], [5, 6, 5, None]), versioned(1, [6, 7, 4, 4], [6, 7, 7, 6])]
    expected = {
        None: ({"future_version": 2}, [5, 3, 2, None, 6, 4]),
        2: ({"future_version": 2, "stale": 2, "unknown_version": 1}, [5, 6, 4]),
        0: ({"future_version": 2, "stale": 4, "unknown_version": 1}, [6]),
    }
    for max_staleness, (dropped, kept) in expected.items():
        rows, report = groups_to_data_proto(groups, RowLimits(10, 10, 0), 4, VersionLimits(6, max_staleness))
        assert report.dropped == dropped and report.rows == len(kept)
        real = ~rows.non_tensor_batch["is_padding"]
        assert rows.non_tensor_batch["policy_version_min"][real].tolist() == kept
        for reason, count in dropped.items():
            assert report.metrics()[f"atropos/math/dropped/{reason}"] == count


@pytest.mark.parametrize("max_staleness", [None, 0, 9])
def test_pace_rows_of_unpushed_weights_are_never_trained_on(max_staleness):
    """What weights sampled that nobody pushed is never trained on."""
    groups = [versioned(0, [6, NOT_PUSHED, NOT_PUSHED, 6], [6, NOT_PUSHED, 6, 6])]
    _, report = groups_to_data_proto(groups, RowLimits(10, 10, 0), 1, VersionLimits(6, max_staleness))
    assert report.dropped == {"not_pushed": 2} and report.rows == 2


def test_a_batch_of_which_nothing_is_fresh_is_empty():
    rows, report = groups_to_data_proto([versioned(0, [1] * 4, [1] * 4)], RowLimits(10, 10, 0), 1, VersionLimits(9, 2))
    assert rows is None and report.dropped == {"stale": 4}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("max_staleness=-1", "max_staleness=-1: give 0 or more"),
        ("max_staleness=1.5", "max_staleness=1.5: give a whole number"),
        ("max_staleness=true", "max_staleness=true: give a whole number"),
        ("max_staleness=2 trainer.atropos.weight_sync.every=4", "max_staleness=2 with weight_sync.every=4: .*for ever"),
        ("max_staleness=3 trainer.atropos.weight_sync.every=4", None),
        ("max_staleness=0", None),
    ],
)
def test_pace_bound_that_would_deadlock_is_refused(overrides, expected):
    """A bound under which training would wait for ever is refused."""
    options = [
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    ]
    config = compose_config(*options, *f"trainer.atropos.{overrides}".split())
    if expected is None:
        return check_config(config)
    with pytest.raises(ConfigurationError, match=expected):
        check_config(config)
