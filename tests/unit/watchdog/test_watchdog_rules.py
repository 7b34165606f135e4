"""Each cause, put into a recorded run, raises its alarm and no other; runs as they were raise none."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from helpers.demo_history import ENV, LIMITS, Demo, play, sglang
from recipe.atropos.watchdog.alarms import ALARMS, findings
from recipe.atropos.watchdog.history import PREFIX, History

T = 100.0  # when the fault begins, at about step 33
SEEDS = (0, 1, 2)


def played(fault, limits=LIMITS, **options):
    """What is raised in a run with this fault."""
    demo = Demo(0)
    fault(demo)
    return play(demo, limits, **options)


def history_of(steps, reports=(), begin=0):
    history = History(LIMITS, begin)
    for line in steps:
        history.add_step(line)
    for line in reports:
        history.add_report(ENV, line)
    return history


def late(demo):
    return [line for line in demo.steps if line["time"] > T]


def change(demo, **values):
    """Set values of all steps from T on, with / for __."""
    for line in late(demo):
        line.update({key.replace("__", "/"): value for key, value in values.items()})


def ends(demo, **counts):
    """From T on, for a minute, so many items more end every 5 s; without ``groups_sent`` no group is sent."""
    demo.cut(T, 70.0)
    for second in range(5, 65, 5):
        demo.report(T + second, **counts)


equal_scores = partial(ends, items=16, not_sent__equal_scores=16)
stale_samples = partial(change, atropos__received=512.0, atropos__dropped__stale=384.0)
learning_rate_zero = partial(change, actor__lr=0.0)
all_rows_clipped = partial(change, atropos__rows_with__response_truncated=126.0)
clipped_by_the_environment = partial(change, response_length__min=32, response_length__max=32)
# A little more than a tenth of them.
rows_too_long = partial(
    change, atropos__received=200.0, atropos__dropped__overlong_response=15.0, atropos__dropped__overlong_prompt=6.0
)
# The samples of step 1 were fresh, and agreed.
off_policy_samples = partial(change, atropos__logprob_diff__mean=0.52, actor__lr=3e-4)


def agent_ends(demo, **counts):
    """A fault of an agent, each of whose sessions calls a tool and gets a reward before; 8 are a group."""
    for line in demo.reports:
        n = 8 * line.get("counts", {}).get("items", 0)
        line.get("counts", {}).update({f"sessions/{each}": n for each in ("ended", "with_tools", "with_calls")})
    called = {"sessions__with_tools": counts["sessions__ended"], "sessions__with_calls": 90}
    ends(demo, **{"items": 16} | called | counts)


def equal_groups_are_sent(demo):
    for line in late(demo):
        line.update({"atropos/zero_signal_share": 1.0, f"atropos/{ENV}/zero_signal_share": 1.0})


def policy_broken(demo):
    """By the last update before groups become equal: at a learning rate 100 times as high, as recorded."""
    equal_scores(demo)
    demo.steps[-1] |= {"atropos/logprob_diff/mean": 0.82, "actor/entropy": 0.15}


def policy_broken_and_trained_on(demo):
    """Its equal groups are sent; entropy shows it, since all samples are fresh."""
    equal_groups_are_sent(demo)
    for line in demo.steps:
        line.update({"atropos/logprob_diff/mean": 0.0, "atropos/logprob_diff/fresh_mean": 0.0})
    late(demo)[0]["actor/entropy"] = 4.0
    demo.cut(late(demo)[7]["time"], 0.0)


def environment_hangs(demo):
    """Its items do not end, and ask no server."""
    demo.cut(T, 200.0)
    demo.report(T, in_flight=16)
    demo.gateway = lambda now: {"version": demo.step_at(now), "held": 0, "servers": [sglang(requests=9)]}


def environment_blocks(demo):
    """Its process runs, and no longer calls the API."""
    demo.cut(T, 100.0)
    demo.report(T, in_flight=0)
    healthy = demo.api
    demo.gateway = lambda now: {"version": demo.step_at(now), "held": 0, "servers": [sglang(requests=9)]}

    def api(now):
        state = healthy(now)
        for line in state["environments"]:
            line["seen_seconds_ago"] = max(0.5, now - T)
        return state

    demo.api = api


def servers(demo, *states, held=0, behind=0):
    """From T on the gateway has these servers; before, healthy ones of the same number."""

    def gateway(now):
        healthy = [sglang(requests=20 * int(now + 60), inflight=4, number=i) for i in range(len(states))]
        found = [{**each, **state(now)} for each, state in zip(healthy, states, strict=True)]
        version = demo.step_at(min(now, T)) if behind else demo.step_at(now)
        return {"version": version, "held": held if now > T else 0, "servers": found if now > T else healthy}

    demo.gateway = gateway


def server_down(demo):
    servers(demo, lambda now: {}, lambda now: {"state": "down", "last_error": "connection refused"})


def server_paused(demo):
    """The environment's items wait for it: that is not their fault."""
    demo.cut(T, 100.0)
    demo.report(T, in_flight=16)
    servers(demo, lambda now: {"requests": 20 * int(T + 60) + 8, "inflight": 8})


def server_slow(demo):
    demo.lengthen(60)
    servers(demo, lambda now: {}, lambda now: {"requests": int(20 * (T + 60) + 2 * (now - T))})


def gateway_silent(demo):
    demo.cut(T, 100.0)
    demo.report(T, in_flight=16)
    healthy = demo.gateway
    demo.gateway = lambda now: healthy(now) if now < T else None


def server_left_out(demo):
    demo.lengthen(30)
    servers(demo, lambda now: {}, lambda now: {"state": "waiting", "inflight": 0})


def server_with_other_weights(demo):
    demo.lengthen(30)
    error = "it reports weight version 'default', not 33: it was restarted, or given other weights"
    servers(demo, lambda now: {"state": "down", "last_error": error}, lambda now: {})


def server_behind(demo):
    servers(demo, lambda now: {}, behind=1)


def queue_full(demo):
    healthy = demo.api
    full = {"queue": {"groups": 9000, "tokens": 64_000_001, "tokens_limit": 64_000_000}}
    demo.api = lambda now: healthy(now) | (full if now > T else {})


def step_alarm(name, value, **values):
    return partial(change, **{PREFIX + name: value}, **values)


def logprob_difference_of_fresh_samples(demo):
    demo.steps[0] |= {PREFIX + "logprob_difference": 0.3, "atropos/logprob_diff/fresh_mean": 0.3}


def logprob_difference_without_fresh_samples(demo):
    for line in demo.steps:
        line.pop("atropos/logprob_diff/fresh_mean", None)
    change(demo, atropos__logprob_diff__mean=0.4)


def score(demo, line, value):
    for key in ("atropos/mean_score", "atropos/mean_raw_score", f"atropos/{ENV}/mean_raw_score"):
        line[key] = value


def reward_flat(demo):
    """Its scores are those of the first 14 steps again and again, in other orders."""
    demo.lengthen(240)
    rng = np.random.default_rng(0)
    values = [line["atropos/mean_score"] for line in demo.steps[:14]]
    again = np.concatenate([rng.permutation(values) for _ in range(len(demo.steps) // 14)])
    for line, value in zip(demo.steps[14:], again, strict=False):
        score(demo, line, float(value))
    for line in demo.reports:
        line.get("means", {}).update(score=0.1)


def reward_collapsed(demo):
    for line in demo.steps[45:]:
        score(demo, line, -0.6 + 0.02 * (line["step"] % 5))


def entropy_collapsed(demo):
    change(demo, actor__entropy=0.002)
    for line in demo.reports:
        line.get("means", {}).update(score=0.1)


REACHED_LIMITS = {"sessions__failed__turns": 60, "sessions__failed__tokens": 50}
FAULTS = {
    "equal_scores": [equal_scores, equal_groups_are_sent],
    "environment_raises": [
        partial(ends, items=4, failed__ValueError=4, retried__ValueError=12),
        # Groups are sent all the same.
        partial(ends, items=24, groups_sent=8, not_sent__equal_scores=2, failed__KeyError=14),
    ],
    "too_long": [partial(ends, items=8, not_sent__too_long=7, not_sent__equal_scores=1)],
    "overlong_rows": [rows_too_long],
    "policy_broken": [policy_broken, policy_broken_and_trained_on],
    "wrong_group_size": [partial(ends, items=8, not_sent__wrong_size=8)],
    "groups_refused": [
        partial(ends, items=8, not_sent__malformed=8),
        partial(ends, items=16, not_sent__no_group=16),
        # 24 items, of which no session could begin
        partial(agent_ends, items=2, sessions__ended=32, sessions__failed__exit_status=32, not_sent__no_group=2),
    ],
    "teacher_missing": [partial(ends, items=20, groups_sent=20, teacher_missing=16)],
    "agent_does_not_end": [
        # Each failed session is run twice; some groups are sent all the same, of fewer rows.
        partial(agent_ends, sessions__ended=200, sessions__failed__seconds=104, groups_sent=16),
        partial(agent_ends, sessions__ended=256, sessions__failed__seconds=256, not_sent__no_group=16),
    ],
    "agent_loops": [
        partial(agent_ends, sessions__ended=190, **REACHED_LIMITS, not_sent__no_group=16),
        partial(agent_ends, sessions__ended=128, sessions__with_repeats=100, not_sent__equal_scores=16),
    ],
    "agent_calls_no_tool": [
        partial(agent_ends, sessions__ended=128, sessions__with_calls=0, not_sent__equal_scores=12, groups_sent=4)
    ],
    "environment_silent": [environment_hangs, environment_blocks],
    "server_unhealthy": [server_down, server_paused, server_slow, gateway_silent],
    "server_out_of_sync": [server_left_out, server_with_other_weights, server_behind],
    "queue_full": [queue_full],
    "stale_samples": [stale_samples],
    **{
        name: [step_alarm(name, 3.0)]
        for name in ("empty_batches", "unknown_sampling", "truncated_sampling", "penalized_sampling")
    },
    "other_temperature": [step_alarm("other_temperature", 128.0)],
    "gradient_not_finite": [step_alarm("gradient_not_finite", None, actor__grad_norm=None)],
    "logprob_difference": [logprob_difference_of_fresh_samples, logprob_difference_without_fresh_samples],
    "off_policy_samples": [off_policy_samples],
    "learning_rate_zero": [learning_rate_zero],
    "all_rows_clipped": [all_rows_clipped, clipped_by_the_environment],
    "reward_flat": [reward_flat],
    "reward_collapsed": [reward_collapsed],
    "entropy_collapsed": [entropy_collapsed],
}


def test_watchdog_has_a_fault_for_every_alarm():
    assert FAULTS.keys() == ALARMS.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for name, faults in FAULTS.items() for fault in faults],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_watchdog_raises_for_a_fault_its_alarm_alone(fault, name, seed):
    demo = Demo(seed)
    fault(demo)
    lines = play(demo)
    assert {line["alarm"] for line in lines} == {name}, lines
    raised, *others = lines
    assert raised["state"] == "raised" and not any(line["state"] == "raised" for line in others), "once"
    assert raised["advice"] == ALARMS[name].advice and any(digit.isdigit() for digit in raised["seen"])
    assert raised["since"] <= raised["time"]
    if name not in ("logprob_difference", "reward_flat"):
        assert raised["since"] >= T - 30.0, "it begins when the fault does, or a few steps before it is certain"
        assert raised["time"] > T


def stale_after_two_good_steps(demo):
    """So many of the third one's that they are most of all three."""
    change(demo, atropos__received=1512.0, atropos__dropped__stale=1384.0)
    demo.steps = [line for line in demo.steps if line["time"] <= late(demo)[0]["time"]]


@pytest.mark.parametrize(
    "fault",
    [
        *(equal_groups_are_sent, stale_samples, stale_after_two_good_steps, rows_too_long),
        *(off_policy_samples, logprob_difference_without_fresh_samples, learning_rate_zero),
        *(all_rows_clipped, clipped_by_the_environment),
        *(step_alarm("unknown_sampling", 3.0), reward_collapsed, entropy_collapsed),
    ],
)
def test_watchdog_dates_a_fault_from_its_first_bad_step(fault):
    """However late it looks; what is not finite, null in JSON, is not bad."""
    demo = Demo(0)
    demo.steps[demo.steps.index(late(demo)[0]) - 1] |= {"atropos/logprob_diff/mean": None, "actor/entropy": None}
    onset = 46 if fault is reward_collapsed else late(demo)[0]["step"]
    fault(demo)
    [found] = [found for found in findings(history_of(demo.steps), T) if found.of_steps]
    assert found.since_step == onset
    assert found.since == next(line["time"] for line in demo.steps if line["step"] == onset)


def test_watchdog_dates_a_fault_by_what_it_saw_last():
    """A logprob difference by fresh samples, a silent server by its last answer."""
    demo = Demo(0)
    for line in demo.steps:
        if line["step"] % 2:
            line |= {PREFIX + "logprob_difference": 0.3, "atropos/logprob_diff/fresh_mean": 0.3}
        else:
            line.pop("atropos/logprob_diff/fresh_mean", None)
    [found] = findings(history_of(demo.steps, begin=3), T)
    assert (found.alarm, found.since_step) == ("logprob_difference", 5), "the first of this start"
    demo = Demo(0)
    server_paused(demo)
    [raised] = play(demo)
    assert raised["since_step"] == demo.step_at(raised["since"]) <= demo.step_at(T) + 1
    demo = Demo(0)
    queue_full(demo)
    [raised] = play(demo)
    assert raised["since_step"] == demo.step_at(raised["since"]) < raised["step"]


no_reward = partial(agent_ends, sessions__ended=256, sessions__failed__exit_status=256, not_sent__no_group=16)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (equal_scores, "items gave a group"),
        (equal_groups_are_sent, "0% in the step before"),
        (off_policy_samples, "updates old at actor/lr=0.0003, above 0.25; fresh samples agree (step 1)"),
        (logprob_difference_without_fresh_samples, "above 0.25; no sample was fresh"),
        (logprob_difference_of_fresh_samples, "0.3 nats in the mean over fresh samples"),
        (no_reward, "failed/exit_status ("),
        (policy_broken, "samples differ from the policy by 0.82 nats; no group for "),
        (policy_broken_and_trained_on, "actor/entropy=4, 0.063 in the first step; all "),
    ],
)
def test_watchdog_says_the_cause_that_it_sees(fault, says):
    """Of a difference: age and learning rate where fresh samples agree, the servers where they do not."""
    assert says in played(fault)[0]["seen"]


def test_watchdog_suspects_policy_and_servers_first():
    before, _, after = ALARMS["equal_scores"].advice.partition("broken policy")
    assert not before.count("scorer") and "broken scorer" in after.partition("easier problems")[0]
    demo = Demo(0)
    off_policy_samples(demo)
    logprob_difference_of_fresh_samples(demo)
    assert {line["alarm"] for line in play(demo)} == {"logprob_difference"}


@pytest.mark.parametrize("few", [{"sessions__with_calls": 1}, {"sessions__with_calls": 0, "sessions__with_tools": 0}])
def test_watchdog_lets_an_agent_call_no_tool_at_times(few):
    """Or never, where its requests have none."""
    assert played(partial(agent_ends, sessions__ended=128, groups_sent=16, **few)) == []


@pytest.mark.parametrize("reason", ["solved", "earlier", "servers"])
def test_watchdog_does_not_call_a_policy_broken(reason):
    """If it scores near its highest, if it moved long before, or if the servers sample from other weights."""
    demo = Demo(0)
    policy_broken(demo)
    if reason == "solved":
        for line in demo.reports:
            line.get("means", {}).update(score=0.99)
    elif reason == "earlier":
        demo.steps[-1] |= {"atropos/logprob_diff/mean": 0.01}
        demo.steps[-12]["atropos/logprob_diff/mean"] = 0.82
    else:
        demo.steps[-1] |= {PREFIX + "logprob_difference": 0.8, "atropos/logprob_diff/fresh_mean": 0.8}
    assert "policy_broken" not in {line["alarm"] for line in play(demo)}


def test_watchdog_says_nothing_of_a_gain_that_never_was():
    """Scores that fall from what they were at the start have collapsed too."""
    demo = Demo(0)
    for line in demo.steps:
        score(demo, line, (0.3 if line["step"] < 46 else -0.6) + 0.02 * (line["step"] % 5))
    [raised] = play(demo)
    assert (raised["alarm"], raised["since_step"]) == ("reward_collapsed", 46)
    assert "gained" not in ALARMS["reward_collapsed"].means and "0.34 at the start" in raised["seen"]


@pytest.mark.parametrize("seed", SEEDS)
def test_watchdog_raises_nothing_in_the_demonstration(seed):
    """Nor as it goes on, with scores that stay where they are."""
    demo = Demo(seed)
    demo.lengthen(480)
    assert len(demo.steps) == 540 and play(demo) == []


def test_watchdog_names_an_abandoned_environment():
    demo = Demo(0)
    history = history_of(demo.steps[:30], [line for line in demo.reports if line["time"] < T])
    assert findings(history, T) == []
    history.environment(ENV).abandoned = "it was abandoned after 3 restarts"
    [found] = findings(history, T)
    assert (found.alarm, found.environment) == ("environment_silent", ENV) and "3 restarts" in found.seen


def test_watchdog_knows_joined_environments_by_the_api_alone():
    """One that has left is no alarm while another is there."""
    demo = Demo(0)
    demo.cut(T, 100.0)
    lines = [{"env_id": number, "name": f"e_{number}", "alive": False} for number in range(2)]

    def api(now, other=0.5):
        seen = {0: max(0.5, now - 20.0), 1: other}
        present = [line | {"seen_seconds_ago": seen[line["env_id"]]} for line in lines]
        return {**Demo.api(demo, now), "environments": present}

    demo.api = api
    assert play(demo, joined=True) == []
    demo.api = lambda now: api(now, max(0.5, now - T))
    [raised] = play(demo, joined=True)
    assert raised["alarm"] == "environment_silent" and raised["environment"] is None
    assert "2 had joined" in raised["seen"]


def test_watchdog_rests_while_servers_are_offloaded():
    """Their requests wait for the trainer, however long it takes, and so do the items of the environments."""
    demo = Demo(0)
    server_paused(demo)
    history = history_of((), demo.reports)
    history.add_gateway(demo.gateway(0.0), 0.0)
    for now in range(0, 390, 5):
        history.servers_rest(float(now))
        assert findings(history, float(now)) == []
    assert [found.alarm for found in findings(history, 390.0 + LIMITS.silent_after)] == ["server_unhealthy"]


def test_watchdog_forgets_a_server_that_moved_to_another_node():
    """The gateway, started again with its new address, lists the old one no more."""
    history, down = History(LIMITS), sglang("down")
    for servers, alarms in (([down], ["server_unhealthy"]), ([sglang(number=1)], [])):
        for now in (1.0, 2.0 + LIMITS.silent_after):
            history.add_gateway({"version": 1, "held": 0, "servers": servers}, now)
        assert [found.alarm for found in findings(history, now)] == alarms


def test_watchdog_sees_an_environment_hang_between_rests():
    """Each step offloads the servers, and another environment keeps the steps coming."""
    demo = Demo(0)
    environment_hangs(demo)
    history, raised = history_of((), [line for line in demo.reports if line["time"] <= T + 10]), {}
    status = {"version": 1, "held": 0, "servers": []}
    for now in map(float, range(int(T) + 15, 1000, 5)):
        if now % 60 < 20:
            history.servers_rest(now)
        else:
            history.add_gateway(status, now)
        for found in findings(history, now):
            raised.setdefault((found.alarm, found.environment), now)
    assert raised.keys() == {("environment_silent", ENV)}
    assert raised["environment_silent", ENV] > T + LIMITS.silent_after + 15, "of each minute, 20 s do not count"


def test_watchdog_with_a_teacher_expects_equal_scores():
    """Its logprobs train groups of equal scores as well."""
    for fault in (equal_scores, equal_groups_are_sent):
        assert played(fault, replace(LIMITS, distills=True)) == []


def test_watchdog_takes_old_samples_for_stale_without_a_bound():
    demo = Demo(0)
    change(demo, atropos__staleness__mean=12.0)
    assert play(demo) == [], "of max_staleness it is the user's choice"
    [raised] = play(demo, replace(LIMITS, max_staleness=None))
    assert raised["alarm"] == "stale_samples" and "12.0 updates old" in raised["seen"]
    assert play(demo, replace(LIMITS, max_staleness=None, push_every=8)) == []
