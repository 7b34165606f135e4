"""Rules about agents, whose runs are sessions, each threshold beside its reason."""

from collections.abc import Iterator

from recipe.atropos.watchdog.history import EnvironmentHistory, History
from recipe.atropos.watchdog.registry import Finding, alarm

# Sessions of the recent items. One that has tools and does not need them calls none; of a policy that calls one in a
# tenth of its sessions, so many in a row call none once in 850 times.
_SESSIONS = 64
_MOST = 0.5  # of them: such a session has no reward, so the groups lose half of their rows
_SEE = "see what it does: python -m recipe.atropos inspect RUN --sessions, and --session ID"


@alarm(
    "agent_does_not_end",
    means="at least half of an environment's sessions are ended by their time limit, and have no reward",
    advice=(
        f"{_SEE}; if it only takes long, raise environment.args.time_limit, or lower environment.args.parallel where "
        "sessions wait for each other; let it set time limits to what it calls"
    ),
    chart="sessions",
    cause=95,
)
@alarm(
    "agent_loops",
    means=(
        "at least half of an environment's sessions reach their limit of turns or tokens, or make the same tool call "
        "again and again"
    ),
    advice=(
        f"{_SEE}; if results of tools do not reach the policy, or do not change, look at the agent; if its tasks need "
        "more, raise environment.args.max_turns or environment.args.max_tokens"
    ),
    chart="sessions",
    cause=14,
)
@alarm(
    "agent_calls_no_tool",
    means="none of an environment's sessions calls a tool, although their requests have tools",
    advice=(
        f"{_SEE}; if replies have calls as text, set sessions.tool_parser to their format; if they have none, say in "
        "the prompt when to call, or use a policy that was trained to"
    ),
    chart="sessions",
    cause=16,
)
def agent_findings(history: History, now: float) -> Iterator[Finding]:
    """Yield at most one finding of each environment."""
    for environment in history.environments.values():
        yield from agent_finding(environment)


def agent_finding(environment: EnvironmentHistory) -> Iterator[Finding]:
    """Yield what is wrong with an environment's agent, if its recent sessions show it."""
    if not environment.recent:
        return
    since, step, counts = environment.recent[0]
    new = environment.counts - counts
    ended, with_tools = new["session:ended"], new["session:with_tools"]
    turns, tokens, seconds = (new[f"session:failed/{limit}"] for limit in ("turns", "tokens", "seconds"))
    repeats, most = new["session:with_repeats"], max(_SESSIONS, ended) * _MOST
    if seconds >= most:
        text = f"{seconds} of the last {ended} sessions reached their limit of seconds"
        yield Finding("agent_does_not_end", text, since, step, environment.name)
    elif max(turns + tokens, repeats) >= most:
        text = f"of the last {ended} sessions {turns} reached their limit of turns, {tokens} that of tokens; "
        text += f"{repeats} repeated the same tool call"
        yield Finding("agent_loops", text, since, step, environment.name)
    elif with_tools >= _SESSIONS and not new["session:with_calls"]:
        text = f"none of the last {with_tools} sessions with tools called one"
        yield Finding("agent_calls_no_tool", text, since, step, environment.name)
