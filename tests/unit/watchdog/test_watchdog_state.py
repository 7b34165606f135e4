"""What becomes of findings: raised once, cleared once, and counted; and what the history keeps of a run."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.demo_history import ENV, LIMITS, Demo, play
from recipe.atropos.run.record import by_alarm, left_open
from recipe.atropos.watchdog.alarms import Watchdog, account, findings
from recipe.atropos.watchdog.history import FIRST_STEPS, PREFIX, AlarmLimits, History

NOISE = 0.08  # of a step's mean score


def step(number, time=None, **values):
    return {"step": number, "time": 10.0 * number if time is None else time, "actor/lr": 1e-6} | values


def scored(name, mean, low=0.0, high=1.0):
    """An environment's metrics of scores."""
    scores = {"mean_raw_score": float(mean), "raw_score_min": low, "raw_score_max": high}
    return {f"atropos/{name}/{key}": value for key, value in scores.items()}


def fed(scores, limits=LIMITS, begin=0, **others):
    """The alarms that steps with these mean scores of an environment raise, and the history; ``others``: what each step
    has too.
    """
    watchdog, raised = Watchdog(History(limits, begin)), []
    for number, score in enumerate(scores, 1):
        watchdog.history.add_step(step(number, **scored("a", score), **others))
        raised += [change["alarm"] for change in watchdog.changes(10.0 * number) if change["state"] == "raised"]
    return raised, watchdog.history


@pytest.mark.parametrize("seed", range(3))
def test_watchdog_raises_nothing_where_noisy_scores_rise(seed):
    """By 20 points within 500 steps, soon or late, or in waves of some steps."""
    rng, t = np.random.default_rng(seed), np.arange(500)
    noise = rng.normal(0, NOISE, t.size)
    soon, late = 0.4 + 0.2 * (1 - np.exp(-t / 20)), 0.4 + 0.2 * t / t.size
    waves = np.convolve(rng.normal(0, NOISE, t.size + 4), np.ones(5) / 5**0.5, "valid")
    for scores in (soon + noise, late + noise, soon + waves):
        assert fed(scores)[0] == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("others", [{}, {"critic/score/max": 100.0, **scored("b", 95.0, high=100.0)}])
def test_watchdog_tells_flat_from_collapsed(seed, others):
    """Each environment's scores by their own range."""
    rng, t = np.random.default_rng(seed), np.arange(300)
    noise = rng.normal(0, 0.03, t.size)
    rises = 0.4 + 0.3 * (1 - np.exp(-t / 30))
    assert set(fed(0.4 + noise, **others)[0]) == {"reward_flat"}
    assert fed(0.97 + np.clip(noise, -0.03, 0.03), **others)[0] == [], "near its highest there is nothing to rise to"
    assert set(fed(np.where(t < 200, rises, 0.42) + noise, **others)[0]) == {"reward_collapsed"}
    assert fed(np.where(t < 200, rises, 0.6) + noise, **others)[0] == [], "a third of what was gained is no collapse"


@pytest.mark.parametrize(("of_b", "raised"), [(0.3, {"entropy_collapsed"}), (0.95, set())])
def test_watchdog_lets_entropy_fall_where_all_is_solved(of_b, raised):
    """Not where one of two environments is, of which no group is left to train on."""
    history = History(LIMITS)
    for number in range(1, 61):
        of_a = scored("a", 0.9) if number < 40 else {}
        history.add_step(step(number, **of_a, **scored("b", of_b), **{"actor/entropy": 1.0 if number < 40 else 0.02}))
    history.environment("a").score = 1.0
    assert {found.alarm for found in findings(history, 601.0)} == raised


def test_watchdog_tells_a_full_queue_after_three_polls():
    """One that is seen full once, before the API ends, or between two batches, is none."""
    watchdog = Watchdog(History(LIMITS))
    full = {"queue": {"groups": 9, "tokens": 11, "tokens_limit": 10}}
    watchdog.history.add_api(full, 0.0)
    watchdog.history.add_api(full, 10.0)
    assert watchdog.changes(60.0) == []
    watchdog.history.add_api(full, 61.0)
    assert [change["alarm"] for change in watchdog.changes(62.0)] == ["queue_full"]


def test_watchdog_judges_steps_of_this_start_alone():
    """The learning rate was 0 in an earlier start: its last step says nothing about this one."""
    history = History(LIMITS, begin=10)
    watchdog = Watchdog(history)
    for number in range(1, 13):
        history.add_step(step(number, **{"actor/lr": 0.0, PREFIX + "unknown_sampling": 3.0}))
        names = [change["alarm"] for change in watchdog.changes(10.0 * number)]
        assert names == (["unknown_sampling"] if number == 11 else []), number
    history.add_step(step(13, **{"actor/lr": 0.0}))
    assert [change["alarm"] for change in watchdog.changes(130.0)] == ["learning_rate_zero"]


def test_watchdog_history_follows_a_trainer_that_goes_back():
    history = History(LIMITS)
    for number in range(1, 31):
        history.add_step(step(number))
    for number in range(15, 41):
        history.add_step(step(number, time=1000.0 + number, **{"actor/lr": 2e-6}))
    assert [line["step"] for line in history.steps] == list(range(1, 41))
    assert [line["step"] for line in history.first] == list(range(1, FIRST_STEPS + 1))
    assert history.first[14]["actor/lr"] == history.steps[14]["actor/lr"] == 2e-6 != history.steps[13]["actor/lr"]


def test_watchdog_history_is_bounded():
    history, counts = History(LIMITS), {}
    for number in range(1, 3001):
        history.add_step(step(number))
        counts = {"items": 100 * number, "groups_sent": 50 * number}
        line = {"time": 5.0 * number, "step": number, "in_flight": 8, "counts": counts, "means": {}}
        history.add_report(ENV, line)
        status = {"url": "http://a", "state": "admitted", "requests": number, "inflight": 0, "last_error": None}
        history.add_gateway({"version": 1, "held": 0, "servers": [status]}, 5.0 * number)
    assert len(history.steps) == 1000 and len(history.first) == FIRST_STEPS
    assert len(history.environment(ENV).recent) < 5 and len(history.servers["http://a"].finished) < 20


def test_watchdog_counts_all_processes_of_an_environment():
    history = History(LIMITS)
    for time, line in enumerate(
        [
            {"started": True},
            {"registered": 4, "pid": 1},
            {"counts": {"items": 20, "groups_sent": 20}, "in_flight": 3, "means": {"score": 0.5}},
            {"started": True},
            {"registered": 5, "pid": 2},
            {"counts": {"items": 6, "not_sent/too_long": 6}, "in_flight": 3, "means": {}},
            {"started": True},
        ]
    ):
        history.add_report(ENV, {"time": float(time), "env": ENV, **line})
    environment = history.environment(ENV)
    assert environment.numbers == {0: None} and environment.in_flight == 0 and environment.score == 0.5
    reported = {"items": 26, "groups_sent": 20, "not_sent/too_long": 6}
    assert environment.counts == {**reported, "sent": 20, "too_long": 6}


def test_watchdog_clears_an_alarm_when_its_cause_is_gone():
    """Once; here after the first group, half a minute later."""
    demo = Demo(0)
    for line in demo.reports:
        if 60.0 < line["time"] < 120.0:
            line["counts"] = demo.reports[12]["counts"] | {"failed/KeyError": 100, "items": 681}
    raised, cleared = play(demo)
    assert (raised["alarm"], raised["state"], cleared["state"]) == ("environment_raises", "raised", "cleared")
    assert 120.0 < cleared["time"] <= 160.0 and cleared["since"] == raised["since"] <= 61.0
    assert raised["since_step"] <= raised["step"] < cleared["step"]


def test_watchdog_gives_slow_items_four_times_their_time():
    """An item may take an hour, where an item has taken one."""
    history = History(AlarmLimits(silent_after=60.0, first_answer=300.0))

    def report(time, items):
        counts = {"items": items, "groups_sent": items}
        history.add_report(ENV, {"time": time, "in_flight": 2, "counts": counts, "means": {}})

    def silent(now):
        return {change["alarm"] for change in Watchdog(history).changes(now)}

    history.add_report(ENV, {"time": 0.0, "started": True})
    report(10.0, 0)
    assert silent(300.0) == set() and silent(320.0) == {"environment_silent"}, "the first"
    for number in range(1, 4):
        report(10.0 + 100.0 * number, number)
    assert silent(310.0 + 390.0) == set() and silent(310.0 + 410.0) == {"environment_silent"}


def line(name, state, step, since_step, environment=None):
    """A line of ``alarms.jsonl``."""
    about = {"since_step": since_step, "since": 0.0, "seen": f"{step} was seen", "advice": "paint"}
    return {"time": 1.0, "step": step, "alarm": name, "environment": environment, "state": state, **about}


def test_watchdog_accounts_for_alarms_over_all_starts():
    lines = [
        line("too_long", "raised", 5, 3, "a"),
        line("too_long", "raised", 6, 6, "b"),
        line("too_long", "cleared", 8, 3, "a"),
        line("queue_full", "raised", None, None),
        line("queue_full", "cleared", 2, None),
    ]
    assert [open_["environment"] for open_ in left_open(lines)] == ["b"]
    found = account(lines, 9)
    assert {key: found["too_long"][key] for key in ("raised", "first_step", "last_step", "steps", "now")} == {
        **{"raised": 2, "first_step": 3, "last_step": 9, "steps": 6 + 4, "now": True}
    }
    assert found["queue_full"]["now"] is False and found["queue_full"]["seen"] == "2 was seen"
    # A start from the checkpoint of step 40 clears at that step what began after it.
    entry = account([line("queue_full", "raised", 48, 45), line("queue_full", "cleared", 40, 45)], 40)["queue_full"]
    assert (entry["first_step"], entry["last_step"], entry["steps"], entry["now"]) == (45, 45, 1, False)
    # An alarm of another version.
    entry = account([line("too_blue", "raised", 2, 1)], 3)["too_blue"]
    assert entry["means"] == "" and entry["advice"] == "paint" and entry["steps"] == 3


def test_watchdog_alarm_that_changed_last_comes_last():
    lines = [line("queue_full", "raised", 0, 0), line("too_long", "raised", 0, 0)]
    lines += [line("queue_full", "cleared", step, 0) for step in range(3)]
    found = by_alarm(lines)
    assert list(found) == [("too_long", None), ("queue_full", None)]
    assert found["queue_full", None] == [lines[0], *lines[2:]]


def test_watchdog_clears_after_steps_that_are_trained_again():
    """A trainer that is started again goes back to its checkpoint: five steps are counted from there."""
    watchdog = Watchdog(History(LIMITS))
    for number in range(1, 31):
        watchdog.history.add_step(step(number, **{PREFIX + "unknown_sampling": 3.0}))
        watchdog.changes(10.0 * number)
    for number in range(11, 16):
        watchdog.history.add_step(step(number, time=400.0 + number))
        changes = watchdog.changes(400.0 + number)
    assert watchdog.history.step == 15 and changes == []
    watchdog.history.add_step(step(16, time=450.0))
    assert [change["state"] for change in watchdog.changes(450.0)] == ["cleared"]


@pytest.mark.parametrize("every", [1, 4])
def test_watchdog_lets_a_server_wait_for_the_next_push(every):
    """Which is the fourth step's; a server that lacks that too is late, and so is one while no other serves."""
    history = History(replace(LIMITS, push_every=every))

    def seen(version, now, *states):
        status = {"requests": 1, "inflight": 0, "last_error": None}
        servers = [{"url": f"http://{i}", "state": state, **status} for i, state in enumerate(states)]
        history.add_gateway({"version": version, "held": 0, "servers": servers}, now)
        return [change["alarm"] for change in Watchdog(history).changes(now)]

    late, between = 2 * LIMITS.silent_after, ["server_out_of_sync"] * (every == 1)
    assert seen(4, 10.0, "admitted", "admitted") == seen(4, 11.0, "admitted", "waiting") == []
    assert seen(4, 11.0 + late, "admitted", "waiting") == between
    assert seen(8, 12.0 + late, "admitted", "waiting") == between
    assert seen(8, 12.0 + 2 * late, "admitted", "waiting") == ["server_out_of_sync"]
    assert seen(8, 13.0 + 2 * late, "down", "waiting") == ["server_out_of_sync"]


def test_watchdog_follows_a_trainer_that_begins_anew():
    """Without a checkpoint, nothing but the gateway's version tells that its steps are undone, until it has trained."""
    history = History(LIMITS)
    server = {"url": "http://a", "state": "admitted", "requests": 1, "inflight": 0, "last_error": None}

    def seen(version, *times):
        for now in times:
            history.add_gateway({"version": version, "held": 0, "servers": [server]}, now)
        return [change["alarm"] for change in Watchdog(history).changes(times[-1])]

    for number in range(1, 16):
        history.add_step(step(number, **{"atropos/policy_version": number}))
    late = 150.0 + 2 * LIMITS.silent_after
    assert seen(15, 150.0) == seen(0, 160.0, late) == []
    history.add_step(step(1, time=late, **{"atropos/policy_version": 1}))
    assert seen(0, late, late + 2 * LIMITS.silent_after) == ["server_out_of_sync"]
