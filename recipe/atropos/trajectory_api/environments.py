"""The environments that have registered: their shares, when they were last seen, and what was counted of them."""

import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from recipe.atropos.data.rows import ENV_IDS_PER_RUN
from recipe.atropos.trajectory_api.batching import LEAST_WEIGHT, Queue
from recipe.atropos.trajectory_api.endpoints import EnvRegistration, RequestRefused

ALIVE_SECONDS = 60.0  # since an environment was last seen, until its share and its tickets are released
_BLOCKS = (2**31 - 1) // ENV_IDS_PER_RUN  # of numbers of environments
_LONGEST_REASON = 300  # characters


def one_line(reason: str) -> str:
    return " ".join(reason.split())[:_LONGEST_REASON]


@dataclass
class RegisteredEnvironment:
    """One registration. ``counts`` has ``received``, ``refused/REASON`` and ``released/REASON``, in groups.

    ``failed``: items since its last group that gave none; ``failure``: why the last of them did not;
    ``left_because``: why it left, if something was wrong.
    """

    id: int
    name: str
    registration: EnvRegistration
    connected: bool = True
    key: str | None = None  # idempotency key of its registration
    seen: float = field(default_factory=lambda: time.monotonic())
    counts: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    failure: str = ""
    left_because: str = ""

    @property
    def weight(self) -> float:
        given = self.registration.weight
        return 1.0 if given is None else min(1e6, max(0.0, given))

    @property
    def minimum(self) -> float:
        return min(1.0, max(0.0, self.registration.min_batch_allocation or 0.0))

    @property
    def unit(self) -> int | str | None:
        """What counts as one environment: itself, or all replicas of its name, those of ended processes too."""
        return self.id if self.registration.replica is None else self.registration.desired_name

    @property
    def alive(self) -> bool:
        return self.connected and time.monotonic() - self.seen < ALIVE_SECONDS


class RegisteredEnvironments:
    """All registrations by number, in their order.

    Numbers are not used again, so that late groups keep their environment. A store's first one is a random multiple of
    1,000 below 2**31, so that an environment of another run, or from before a reset, is unknown here (but for one in
    two million) and registers again.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, RegisteredEnvironment] = {}
        self._first = ENV_IDS_PER_RUN * random.randrange(1, _BLOCKS)

    def __iter__(self) -> Any:
        return iter(self.by_id.values())

    def get(self, number: int) -> RegisteredEnvironment:
        """Return an environment; raise RequestRefused (404) if it is unknown."""
        if number not in self.by_id:
            raise RequestRefused(404, f"env_id={number}: no environment has registered under it; call /register-env")
        return self.by_id[number]

    def touch(self, number: int | None) -> RegisteredEnvironment | None:
        """Note that an environment lives, and return it; None if it is unknown."""
        environment = self.by_id.get(number)
        if environment is not None:
            environment.seen = time.monotonic()
        return environment

    def add(self, registration: EnvRegistration, key: str | None = None) -> RegisteredEnvironment:
        number = max(self.by_id, default=self._first - 1) + 1
        same = [one for one in self if one.registration.desired_name == registration.desired_name]
        count = max((int(one.name.rpartition("_")[2]) + 1 for one in same), default=0)  # also of the forgotten
        self.by_id[number] = RegisteredEnvironment(
            number, f"{registration.desired_name}_{count}", registration, key=key
        )
        return self.by_id[number]

    def apply_shares(self, queue: Queue) -> None:
        """Tell the queue each environment's name and share, the same for all its replicas: it has one queue, and the
        newest registration's share; its allocation holds while one of them lives.
        """
        units: dict[int | str | None, list[RegisteredEnvironment]] = {}
        for one in self:
            units.setdefault(one.unit, []).append(one)
        for replicas in units.values():
            newest = replicas[-1]
            minimum = newest.minimum if any(one.alive for one in replicas) else 0.0
            for one in replicas:
                queue.set_share(one.id, newest.name, max(newest.weight, LEAST_WEIGHT), minimum, replicas[0].id)

    def status(self, number: int, queue: Queue) -> dict[str, Any]:
        """Return what ``/status-env`` says but for the step: sizes of the queue as atroposlib counts them."""
        own = self.get(number)
        self.touch(number)
        own.connected = True
        connected = [other for other in self if other.alive]
        allocated = sum({other.unit: other.minimum for other in connected}.values())
        replicas = Counter(other.unit for other in connected)
        tokens = {one.id: one.registration.max_token_length * one.weight / replicas[one.unit] for one in connected}
        total = sum(tokens.values())
        weight = tokens[number] / total if total > 0 else 1.0
        largest = max(queue.sizes, default=1)
        group_size = max(1, own.registration.group_size)
        queued, batch_size = queue.environments[number], queue.batch_size or 0
        others = sum(
            max(0, math.ceil(other.sequences / largest) * largest - int(batch_size * other.minimum))
            for other in queue.each()
            if other is not queued
        )
        return {
            "queue_size": (queued.sequences + others) // group_size,
            "unallocated_fraction": 1.0 - min(1.0, allocated),
            "self_queue_size": queued.sequences // group_size,
            "max_group_size": largest,
            "env_weight": max(LEAST_WEIGHT, weight),
        }
