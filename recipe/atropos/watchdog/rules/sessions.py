"""Rules about agents, whose runs are sessions, each threshold beside its reason."""

from collections.abc import Iterator

from recipe.atropos.watchdog.history import EnvironmentHistory, History
from recipe.atropos.watchdog.registry import Finding, alarm

# Sessions of the recent items. One that has tools and does not need them calls none; of a policy that calls one in a
# tenth of its sessions, so many in a row call none once in 850 times.
_SESSIONS = 64
_MOST = 0.5  # of them: such a session has no reward, so the groups lose half of their rows
_SEE = "see what it does with python -m recipe.atropos inspect RUN --sessions"


@alarm(
    "agent_does_not_end",
    means="at least half of an environment's sessions reach their time limit, and have no reward",
    advice=f"{_SEE}; if it only takes long, raise environment.args.time_limit, or lower environment.args.parallel",
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
    since, step, counts = environment.recent[0] if environment.recent else (0.0, None, environment.counts)
    new = environment.counts - counts
    ended, with_tools, repeats = (new[f"session:{name}"] for name in ("ended", "with_tools", "with_repeats"))
    seconds, turns, tokens = (new[f"session:failed/{limit}"] for limit in ("seconds", "turns", "tokens"))
    looped = f"of the last {ended} sessions {turns} reached their limit of turns, {tokens} that of tokens; "
    most = max(_SESSIONS, ended) * _MOST
    seen = {
        "agent_does_not_end": seconds >= most and f"{seconds} of the last {ended} sessions reached their time limit",
        "agent_loops": max(turns + tokens, repeats) >= most and f"{looped}{repeats} repeated the same tool call",
        "agent_calls_no_tool": with_tools >= _SESSIONS
        and not new["session:with_calls"]
        and f"none of the last {with_tools} sessions with tools called one",
    }
    found = ((name, text) for name, text in seen.items() if text)
    return next((Finding(name, text, since, step, environment.name) for name, text in found), None)
