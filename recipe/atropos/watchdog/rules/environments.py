"""Rules about environments that produce nothing or are silent, their teachers and agents, thresholds with reasons."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from recipe.atropos.data.reasons import Reason
from recipe.atropos.watchdog.history import RECENT_ITEMS, EnvironmentHistory, History
from recipe.atropos.watchdog.registry import (
    CLIP,
    GROUP_SIZE,
    LR,
    PROMPT,
    RESPONSE,
    STALENESS,
    TEMPERATURE,
    Finding,
    alarm,
)
from recipe.atropos.watchdog.rules.training import broken_policy

# Items in a row, none of which gives a group. Exceptions, lengths and sizes are no matter of chance, but equal scores
# are, and so is no_group, unless all sessions failed: most environments return none where scores are equal. Of a task
# on which 95% of the groups are equal, which still learns, 128 in a row are all equal once in 700 times.
_DRY, _DRY_BY_CHANCE = 16, 128
_MOST = 0.5  # of the recent items: a run whose environment loses half of them has a biased rest
# Items that failed after all retries, beside _DRY attempts: a failure of the servers is over after a retry.
_FAILED = 3
_ALL_EQUAL_STEPS, _ALL_EQUAL_GROUPS = 3, 64  # trained on, in a row; with 95% equal groups once in 27 times
_OF_COUNT: dict[str, str] = {
    "raised": "environment_raises",
    "too_long": "too_long",
    "wrong_size": "wrong_group_size",
    "equal_scores": "equal_scores",
}
_OF_AGENT = ("equal_scores", "groups_refused")  # symptoms of an agent that fails
# Sessions of the recent items. One that has tools and does not need them calls none; of a policy that calls one in a
# tenth of its sessions, so many in a row call none once in 850 times.
_SESSIONS = 64
_LIMITS = ("seconds", "turns", "tokens")  # of a session
_MOST_SESSIONS = 0.5  # of them: such a session has no reward, so the groups lose half of their rows
_SEE = "see python -m recipe.atropos inspect RUN --sessions"


@alarm(
    "environment_raises",
    means="at least half of an environment's items fail with an exception",
    advice="see the traceback in its log; python -m recipe.atropos verify-env runs it alone",
    chart="outcomes",
    cause=10,
)
@alarm(
    "environment_silent",
    means="nothing comes from an environment: it was abandoned, no longer calls the API, or none of its items ends",
    advice=(
        "see its log; environment.args.worker_timeout ends items that hang; if items only take long, raise "
        "watchdog.silent_after"
    ),
    settings=("watchdog.silent_after",),
    chart="outcomes",
    cause=20,
)
@alarm(
    "wrong_group_size",
    means="at least half of an environment's groups do not have its configured size",
    advice=(
        "let collect_trajectories return config.group_size answers, or set environment.group_size to what it returns"
    ),
    settings=(GROUP_SIZE,),
    chart="outcomes",
    cause=30,
)
@alarm(
    "too_long",
    means="at least half of an environment's groups are dropped for their length",
    advice=(
        "raise data.max_response_length or data.max_prompt_length, or let the environment ask for shorter answers "
        "(its max_tokens)"
    ),
    settings=(RESPONSE, PROMPT),
    chart="length",
    cause=40,
)
@alarm(
    "groups_refused",
    means="an environment's items end, but no group is sent, for another reason than those above",
    advice="docs/data-format.md explains the reasons; the environment's log has the first group of each",
    chart="outcomes",
)
@alarm(
    "policy_broken",
    means=(
        "updates broke the policy: all groups have equal scores since steps in which it moved far from its "
        "samples, or its entropy or gradient changed by ten times"
    ),
    advice=(
        "resume from a checkpoint before that step with a lower actor_rollout_ref.actor.optim.lr; if the answers "
        "are as good as before, look for a broken scorer"
    ),
    settings=(LR, CLIP, STALENESS),
    chart="logprobs",
    cause=60,
)
@alarm(
    "equal_scores",
    means=(
        "all groups of an environment, or most while no other is sent, have answers of equal scores: nothing is "
        "learned from such a group"
    ),
    advice=(
        "if all groups became equal at once, or scores do not fit the answers in rollouts/, look for a broken "
        "policy (actor/entropy, actor/grad_norm), then for a broken scorer; else, if the mean score is the lowest, "
        "use easier problems or a better policy; if it is the highest, harder problems; in between, problems are "
        "either too easy or too hard"
    ),
    settings=(TEMPERATURE, RESPONSE, GROUP_SIZE),
    chart="outcomes",
    cause=160,
)
def environment_findings(history: History, now: float) -> Iterator[Finding]:
    """Yield at most one finding of each environment, and one of the groups that were trained on."""
    for environment in history.environments.values():
        yield from _environment(history, environment, now)
    if history.joined:
        yield from _all_gone(history, now)
    for found in _equal_groups(history):
        yield _broken_policy_first(history, found)


def _environment(history: History, environment: EnvironmentHistory, now: float) -> Iterator[Finding]:
    if environment.abandoned:
        since, step, _ = environment.at_last_group if environment.recent else (now, history.step, None)
        yield _finding(environment, "environment_silent", environment.abandoned, since, step)
        if not environment.goes_on:
            return
    found = _dry(environment) or _mostly(environment) or _silent(history, environment, now)
    if (
        found is not None
        and not (found.alarm == "equal_scores" and history.limits.distills)
        and not (found.alarm in _OF_AGENT and agent_finding(environment))
    ):
        yield _broken_policy_first(history, found)


def _broken_policy_first(history: History, found: Finding) -> Finding:
    """Return what was found; of equal scores, the broken policy if it is the cause."""
    broken = broken_policy(history, found.since_step) if found.alarm == "equal_scores" else ""
    return replace(found, alarm="policy_broken", seen=f"{broken}; {found.seen}") if broken else found


def _dry(environment: EnvironmentHistory) -> Finding | None:
    """Nothing was sent since some time: return the reason of most of what ended."""
    since, step, counts = environment.at_last_group
    new = environment.counts - counts
    if new["raised"] >= _FAILED and new["raised"] + new["retried"] >= _DRY and 2 * new["raised"] >= new["items"]:
        text = f"no group; {new['raised']} of {new['items']} items raised: {_names(new, 'failed/')}"
        return _finding(environment, "environment_raises", text, since, step)
    causes = ("raised", "equal_scores", "too_long", "wrong_size", "refused")
    lost, name = sum(new[each] for each in causes), max(causes, key=lambda each: new[each])
    by_chance = new["equal_scores"]
    limits = sum(new[f"sessions/failed/{limit}"] for limit in _LIMITS)  # which ``agent_finding`` judges
    if not 0 < new["sessions/ended"] == sum(n for name, n in new.items() if "sessions/failed/" in name) - limits:
        by_chance += new[f"not_sent/{Reason.NO_GROUP}"]
    if lost >= _DRY_BY_CHANCE or lost - by_chance >= max(_DRY, lost / 2):
        cause = _OF_COUNT.get(name, "groups_refused") if 2 * new[name] >= lost else "groups_refused"
        text = f"no group for {new['items']} items: {_names(new, 'not_sent/', 'failed/', 'sessions/failed')}"
        if cause == "equal_scores" and environment.score is not None:
            text += f"; mean score {environment.score:.3g}"
        if cause == "equal_scores" and counts["items"]:
            text += f"; before, {counts['sent']} of {counts['items']} items gave a group"
        return _finding(environment, cause, text, since, step)
    return None


def _mostly(environment: EnvironmentHistory) -> Finding | None:
    """Groups are sent, but as many items are lost. Not for equal scores, whose share rises as a policy learns."""
    since, step, new = _recent(environment)
    for name in ("raised", "too_long", "wrong_size"):
        if new["items"] >= RECENT_ITEMS and new[name] >= _MOST * new["items"]:
            what = _names(new, "failed/") if name == "raised" else _OF_COUNT[name]
            verb = "raised:" if name == "raised" else "were not sent:"
            text = f"{new[name]} of the last {new['items']} items {verb} {what}"
            return _finding(environment, _OF_COUNT[name], text, since, step)
    return None


def _silent(history: History, environment: EnvironmentHistory, now: float) -> Finding | None:
    numbers = {number for number in environment.numbers.values() if number is not None}
    line = next((line for line in history.api.get("environments", ()) if line["env_id"] in numbers), {})
    if (unseen := line.get("replica_unseen_seconds", line.get("seen_seconds_ago", 0.0))) > history.limits.silent_after:
        since = (history.api_time or now) - unseen
        text = f"it has not called the Trajectory API for {now - since:.0f} s, but its process runs"
        return _finding(environment, "environment_silent", text, since, history.step_at(since))
    pulse = environment.pulse
    quiet = now - pulse.last
    if environment.in_flight == 0 or not history.sampling(now) or quiet <= pulse.limit(history.limits):
        return None
    usual = f", the longest such silence before was {pulse.longest:.0f} s" if pulse.longest >= 1 else ""
    text = f"none of its {environment.in_flight} items has ended for {quiet:.0f} s{usual}"
    return _finding(environment, "environment_silent", text, pulse.last, history.step_at(pulse.last))


def _all_gone(history: History, now: float) -> Iterator[Finding]:
    """Of environments that join, any may leave; a run needs one."""
    unseen = [line["seen_seconds_ago"] for line in history.api.get("environments", ()) if "seen_seconds_ago" in line]
    if unseen and min(unseen) > history.limits.silent_after:
        since = (history.api_time or now) - min(unseen)
        text = f"no environment has called the Trajectory API for {now - since:.0f} s; {len(unseen)} had joined"
        yield Finding("environment_silent", text, since, history.step_at(since))


def _equal_groups(history: History) -> Iterator[Finding]:
    """Groups of equal scores that are sent all the same, and trained on."""
    if history.limits.distills:
        return
    keys = {key for step in history.recent(1) for key in step if key.endswith("/zero_signal_share")}
    for key in sorted(keys - {"atropos/zero_signal_share"} or keys):
        name = key.removeprefix("atropos/").removesuffix("/zero_signal_share") if key.count("/") > 1 else None
        this_start = takewhile(lambda step: step["step"] > history.begin, reversed(history.steps))
        steps = list(takewhile(lambda step, key=key: step.get(key, 1.0) >= 1.0, this_start))
        groups = sum(step.get(key.replace("zero_signal_share", "groups"), 0.0) for step in steps)
        if len(steps) >= _ALL_EQUAL_STEPS and groups >= _ALL_EQUAL_GROUPS:
            text = f"all {groups:.0f} groups of the last {len(steps)} steps have equal scores (zero_signal_share=1)"
            first = steps[-1]
            earlier = [
                step[key] for step in history.steps if step["step"] < first["step"] and step.get(key) is not None
            ]
            text += f"; {earlier[-1]:.0%} in the step before" if earlier else "; from the first step on"
            yield Finding("equal_scores", text, first["time"], int(first["step"]), name, of_steps=True)


def _names(counts: Counter[str], *prefixes: str) -> str:
    """Return the reasons with these prefixes and their numbers, the most frequent first."""
    found = [(n, name) for name, n in counts.items() if name.startswith(prefixes)]
    return ", ".join(f"{name.partition('/')[2]} ({n})" for n, name in sorted(found, reverse=True)[:4])


def _recent(environment: EnvironmentHistory) -> tuple[float, int | None, Counter[str]]:
    """Return since when, and since which step, there are these counts of its newest items."""
    since, step, counts = environment.recent[0] if environment.recent else (0.0, None, environment.counts)
    return since, step, environment.counts - counts


def _finding(environment: EnvironmentHistory, alarm: str, seen: str, since: float, step: int | None) -> Finding:
    log = f"; see {environment.log}" if environment.log else ""
    return Finding(alarm, seen + log, since, step, environment.name)


@alarm(
    "teacher_missing",
    means="at least half of an environment's groups have no logprobs of their teacher",
    advice="see why in its log; start the server that environment.args.teacher or .credit.teacher names",
    chart="outcomes",
)
def teacher_findings(history: History, now: float) -> Iterator[Finding]:
    """Yield at most one finding of each environment."""
    for environment in history.environments.values():
        since, step, new = _recent(environment)
        if new["teacher_missing"] >= max(_DRY, _MOST * new["items"]):
            text = f"{new['teacher_missing']} groups of the last {new['items']} items have none"
            yield _finding(environment, "teacher_missing", text, since, step)


# ---------------------------------------------------------------- agents, whose runs are sessions


@alarm(
    "agent_does_not_end",
    means="at least half of an environment's sessions reach their time limit, and have no reward",
    advice=f"{_SEE}; if it only takes long, raise environment.args.time_limit and trainer.atropos.max_wait_time, or "
    "lower environment.args.parallel",
    chart="sessions",
    cause=95,
)
@alarm(
    "agent_loops",
    means="at least half of an environment's sessions reach their limit of turns or tokens, or repeat a tool call",
    advice=(
        f"{_SEE}; if results of tools do not reach the policy, look at the agent; if its tasks need more, raise "
        "environment.args.max_turns or max_tokens"
    ),
    chart="sessions",
    cause=14,
)
@alarm(
    "agent_calls_no_tool",
    means="none of an environment's sessions calls a tool, although their requests have tools",
    advice=(
        f"{_SEE}; if replies have calls as text, set sessions.tool_parser to their format; else say in the prompt "
        "when to call"
    ),
    chart="sessions",
    cause=16,
)
def agent_findings(history: History, now: float) -> Iterator[Finding]:
    """Yield at most one finding of each environment."""
    yield from filter(None, map(agent_finding, history.environments.values()))


def agent_finding(environment: EnvironmentHistory) -> Finding | None:
    """Return what is wrong with an environment's agent, if its recent sessions show it."""
    since, step, new = _recent(environment)
    ended, with_tools, repeats = (new[f"sessions/{name}"] for name in ("ended", "with_tools", "with_repeats"))
    seconds, turns, tokens = (new[f"sessions/failed/{limit}"] for limit in _LIMITS)
    looped = f"of the last {ended} sessions {turns} reached their limit of turns, {tokens} that of tokens; "
    most = max(_SESSIONS, ended) * _MOST_SESSIONS
    seen = {
        "agent_does_not_end": seconds >= most and f"{seconds} of the last {ended} sessions reached their time limit",
        "agent_loops": max(turns + tokens, repeats) >= most and f"{looped}{repeats} repeated the same tool call",
        "agent_calls_no_tool": with_tools >= _SESSIONS
        and not new["sessions/with_calls"]
        and f"none of the last {with_tools} sessions with tools called one",
    }
    return next((Finding(name, text, since, step, environment.name) for name, text in seen.items() if text), None)
