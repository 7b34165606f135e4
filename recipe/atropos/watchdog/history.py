"""The history of a run that the watchdog's rules look at: steps, environments' reports, the API's state, the servers.

Guarantees:

- bounded: it keeps the first steps, the newest ones, and counts; a run of any length fits;
- times are those that the caller gives (seconds since 1970), so that a recorded run can be played;
- a line of a step that is there already replaces it and all later ones: a restarted trainer trains them again.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe.atropos.data.reasons import Reason
from recipe.atropos.run.record import ItemCounts

PREFIX = "atropos/alarms/"
# Mean absolute difference in nats, by SGLang's dtype: on fresh samples only kernels and rounding contribute to it.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.0104, "float16": 0.0104}

FIRST_STEPS = 20
_LAST_STEPS, _REPORTS = 1000, 2000
RECENT_ITEMS = 64  # of an environment, over which shares are computed
_RATE_SECONDS = 60.0  # over which a server's finished requests are counted
_KINDS = {"groups_sent": "sent", "groups_written": "sent", "failed": "raised", "retried": "retried"}
_Counted = tuple[float, int | None, Counter[str]]  # time, step and counts of an environment


def logprob_tolerance(given: float | None, dtype: str) -> float:
    """Return ``trainer.atropos.logprob_tolerance`` or, if it is null, the default for the served dtype."""
    return _TOLERANCE.get(dtype, _TOLERANCE["bfloat16"]) if given is None else given


@dataclass(frozen=True)
class AlarmLimits:
    """What the configuration says that rules compare with; times are in seconds."""

    logprob_tolerance: float = 1e-4
    max_staleness: int | None = None
    push_every: int = 1
    distills: bool = False  # a teacher's logprobs train groups of equal scores too
    silent_after: float = 120.0
    first_answer: float = 300.0  # until the first item or request must have ended, whose usual length is unknown

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "AlarmLimits":
        """``config``: values by dotted key, with the longest wait; what an earlier version's lacks has its default."""
        silent_after = config.get("watchdog.silent_after", cls.silent_after)
        return cls(
            logprob_tolerance=logprob_tolerance(
                config.get("trainer.atropos.logprob_tolerance"), config.get("inference.dtype", "bfloat16")
            ),
            max_staleness=config.get("trainer.atropos.max_staleness"),
            push_every=config.get("trainer.atropos.weight_sync.every", 1),
            distills=config.get("trainer.atropos.distillation.loss_coef", 0) > 0,
            silent_after=silent_after,
            first_answer=max(silent_after, config["trainer.atropos.max_wait_time"] / 2),
        )


@dataclass
class Pulse:
    """When something last moved, and how long it has rested so far while it had work; ``moves`` counts."""

    last: float
    longest: float = 0.0
    moves: int = 0

    def move(self, now: float) -> None:
        if self.moves:
            self.longest = max(self.longest, now - self.last)
        self.last, self.moves = max(self.last, now), self.moves + 1

    def rest(self, now: float) -> None:
        """Note that there is nothing to do, or that nothing can be told: silence begins now at the earliest."""
        self.last = max(self.last, now)

    def skip(self, seconds: float, now: float) -> None:
        """Note that of the silence until ``now``, so many seconds do not count."""
        self.last = min(now, self.last + seconds)

    def limit(self, limits: AlarmLimits) -> float:
        """Return the seconds of silence that are no longer usual: four times the longest so far, and a minimum."""
        return max(limits.silent_after, 4 * self.longest) if self.moves else limits.first_answer


@dataclass
class EnvironmentHistory:
    """What an environment reported. ``counts`` are over all its processes: ended items and what became of them."""

    name: str
    numbers: dict[int, int | None] = field(default_factory=dict)  # registrations, by replica
    log: str | None = None
    abandoned: str = ""  # why
    goes_on: bool = False  # though replicas of it were abandoned
    counts: Counter[str] = field(default_factory=Counter)
    pulse: Pulse = field(default_factory=lambda: Pulse(0.0))
    score: float | None = None  # mean over everything scored since the report before
    at_last_group: _Counted = (0.0, None, Counter())  # or at the first report
    recent: deque[_Counted] = field(default_factory=lambda: deque(maxlen=_REPORTS))  # empty before the first report
    _items: ItemCounts = field(default_factory=ItemCounts)

    @property
    def in_flight(self) -> int:
        return self._items.in_flight.total()

    def add(self, line: Mapping[str, Any], step: int | None) -> None:
        """Add a line of its report, at ``step``."""
        now = line["time"]
        if {"registered", "started"} & line.keys():  # a new process registers again
            self.numbers[line.get("replica", 0)] = line.get("registered")
        if not self.recent:
            self.pulse, self.at_last_group = Pulse(now), (now, step, Counter())
            self.recent.append(self.at_last_group)
        before, idle = self.counts.copy(), self.in_flight == 0
        self.counts += _outcomes(self._items.add(line))
        if "counts" not in line:
            return
        self.score = line["means"].get("score", self.score)
        if idle:
            self.pulse.rest(now)
        if self.counts != before:
            self.pulse.move(now)
        if self.counts["sent"] > before["sent"]:
            self.at_last_group = now, step, self.counts.copy()
        self.recent.append((now, step, self.counts.copy()))
        ended = "items" if self.counts["items"] else "sessions/ended"  # of programs that the run does not start
        while len(self.recent) > 2 and self.counts[ended] - self.recent[1][2][ended] >= RECENT_ITEMS:
            self.recent.popleft()


def _outcomes(counts: Mapping[str, int]) -> Counter[str]:
    """Return counts of an environment, with those that rules tell apart: sent, raised, retried, and why not sent."""
    found = Counter(counts)
    for name, n in counts.items():
        kind, _, reason = name.partition("/")
        if kind == "not_sent":
            known = reason in (Reason.EQUAL_SCORES, Reason.TOO_LONG, Reason.WRONG_SIZE)
            found[reason if known else "refused"] += n
        elif kind in _KINDS:
            found[_KINDS[kind]] += n
    return found


@dataclass
class ServerHistory:
    """One SGLang server as the gateway sees it; ``finished`` are (time, requests finished, whether it was busy)."""

    url: str
    state: str
    since: float
    pulse: Pulse
    inflight: int = 0
    error: str = ""
    finished: deque[tuple[float, int, bool]] = field(default_factory=deque)

    def add(self, status: Mapping[str, Any], now: float) -> None:
        if status["state"] != self.state:
            self.state, self.since = status["state"], now
            self.pulse.rest(now)
        done, idle = status["requests"] - status["inflight"], self.inflight == 0
        if idle:
            self.pulse.rest(now)
        if done > (self.finished[-1][1] if self.finished else 0):
            self.pulse.move(now)
        self.inflight = status["inflight"]
        self.error = status["last_error"] or ""
        self.finished.append((now, done, self.inflight > 0))
        while len(self.finished) > 2 and now - self.finished[1][0] >= _RATE_SECONDS:
            self.finished.popleft()


@dataclass
class History:
    """See the module. ``begin``: the step that this start of the run went on from."""

    limits: AlarmLimits
    begin: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_LAST_STEPS))
    environments: dict[str, EnvironmentHistory] = field(default_factory=dict)
    servers: dict[str, ServerHistory] = field(default_factory=dict)
    version: int | None = None  # the gateway's
    pushed: float = 0.0  # when that was seen first
    held: int = 0  # requests that wait for a server
    gateway_silent: float | None = None  # since when it does not answer
    behind: float | None = None  # since when its version is not the trainer's
    undone: Mapping[str, Any] | None = None  # the newest step, when a restarted trainer pushed older weights
    polled: float | None = None  # at the servers, last
    joined: bool = False  # environments join: nothing but the API tells of them
    api: Mapping[str, Any] = field(default_factory=dict)  # what /diagnose said last
    api_time: float | None = None
    queue_full: tuple[float, int] | None = None  # since when, and how many polls

    @property
    def step(self) -> int | None:
        return self.steps[-1]["step"] if self.steps else None

    def recent(self, n: int) -> list[dict[str, Any]]:
        """Return the newest ``n`` steps; none if this start has trained fewer."""
        newest = list(self.steps)[-n:]
        return newest if len(newest) == n and newest[0]["step"] > self.begin else []

    def step_at(self, time: float) -> int | None:
        """Return the newest step that was trained by then."""
        return next((step["step"] for step in reversed(self.steps) if step["time"] <= time), None)

    def environment(self, name: str) -> EnvironmentHistory:
        return self.environments.setdefault(name, EnvironmentHistory(name))

    def add_step(self, line: dict[str, Any]) -> None:
        """Add a line of ``metrics.jsonl``."""
        while self.steps and self.steps[-1]["step"] >= line["step"]:
            self.steps.pop()
        self.first = [step for step in self.first if step["step"] < line["step"]]
        if len(self.first) < FIRST_STEPS:
            self.first.append(line)
        self.steps.append(line)

    def add_report(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line of ``environments/NAME.jsonl``."""
        self.environment(name).add(line, self.step)

    def add_api(self, state: Mapping[str, Any], now: float) -> None:
        """Add what ``/diagnose`` of the Trajectory API says."""
        self.api, self.api_time = state, now
        queue = state["queue"]
        since, polls = self.queue_full or (now, 0)
        self.queue_full = (since, polls + 1) if queue["tokens"] > queue["tokens_limit"] else None

    def add_gateway(self, status: Mapping[str, Any] | None, now: float) -> None:
        """Add the gateway's status; None: it did not answer."""
        self.polled = now
        if status is None:
            self.gateway_silent = now if self.gateway_silent is None else self.gateway_silent
            return
        self.gateway_silent = None
        before, self.version, self.held = self.version, status["version"], status["held"]
        if self.version != before:
            self.pushed = now
        newest = self.steps[-1] if self.steps else None
        if before is not None and self.version is not None and self.version < before:
            self.undone = newest
        trained = newest.get("atropos/policy_version") if newest is not None and newest is not self.undone else None
        behind = trained is not None and (self.version is None or self.version < trained)
        self.behind = (now if self.behind is None else self.behind) if behind else None
        self.servers = {  # without one that has moved to another node, whose address is not used any more
            server["url"]: self.servers.get(server["url"])
            or ServerHistory(server["url"], server["state"], now, Pulse(now))
            for server in status["servers"]
        }
        for server in status["servers"]:
            self.servers[server["url"]].add(server, now)

    def servers_rest(self, now: float) -> None:
        """Note that the servers have released their memory to the trainer: nothing can be told from their silence, nor
        from that of environments, whose items wait for them. One that hangs is silent between such rests too.
        """
        rested = 0.0 if self.polled is None else now - self.polled
        self.polled = now
        self._forget_silence(now)
        for environment in self.environments.values():
            environment.pulse.skip(rested, now)

    def suspended(self, now: float) -> None:
        """Note that the machine was suspended until now: whatever is silent may have been so for no time at all."""
        self.gateway_silent = None
        self._forget_silence(now)
        for environment in self.environments.values():
            environment.pulse.rest(now)

    def _forget_silence(self, now: float) -> None:
        """Let the silence of all servers begin now."""
        self.behind = None
        for server in self.servers.values():
            server.since = now
            server.pulse.rest(now)

    def sampling(self, now: float) -> bool:
        """Return whether the servers finish the requests that they have: what hangs then is not waiting for them."""
        waiting = [server for server in self.servers.values() if server.inflight]
        if self.gateway_silent is not None or self.held:
            return False
        return not waiting or any(now - server.pulse.last < server.pulse.limit(self.limits) / 2 for server in waiting)
