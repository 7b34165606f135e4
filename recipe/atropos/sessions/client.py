"""Client of the session server, for environments: open a session, end it, read its rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, JsonClient

SESSIONS_VARIABLE = "ATROPOS_SESSIONS_URL"  # the session server's address, which the launcher sets for environments
_AWAY_SECONDS, _CALL_SECONDS = 120.0, 300.0


class SessionError(AtroposError, RuntimeError):
    """The session server refuses a request, or does not answer; the message names it."""


class Opened(NamedTuple):
    """A session. A program needs ``base_url`` (for OpenAI's clients with /v1) and ``api_key``, which opens it alone,
    and ``renderer``, a configuration of the package renderers, if it writes the chat format itself.
    """

    id: str
    base_url: str
    api_key: str
    renderer: dict[str, Any] = {}


def scored_group(outcomes: Sequence[tuple[str, float, dict[str, Any]]], env: str) -> dict[str, Any]:
    """Return the scored group of sessions, given as (id, reward, rows); their rows are of one trajectory each.

    It has ``turn_values`` if all of them have some, but those of a single turn, for which the reward is enough.
    """
    group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    overrides: dict[str, Any] = {"trajectory": [], "sessions": []}
    for number, (session, reward, rows) in enumerate(outcomes):
        size = len(rows["tokens"])
        for name, values in rows.items():
            (group if name in group else overrides).setdefault(name, []).extend(values)
        group["scores"] += [reward] * size
        overrides["trajectory"] += [number] * size
        overrides["sessions"] += [session] * size
    silent = any(rows["turn_values"][0] is None and sum(map(len, rows["turn_numbers"])) > 1 for *_, rows in outcomes)
    given = overrides.pop("turn_values")
    if any(given) and not silent:
        overrides["turn_values"] = [values or [None] for values in given]
    group["group_overrides"] = overrides | {"group_size": len(outcomes), "env_name": env}
    return group


class SessionClient(JsonClient):
    """``key`` is the environments'. A server may be away for two minutes, as while it is started again."""

    def __init__(self, url: str, key: str | None):
        super().__init__(url, key, _CALL_SECONDS)

    async def open(self, **fields: Any) -> Opened:
        """Open a session; ``fields``: see ``SessionRequest``. If the answer is lost, one stays unused."""
        return Opened(**await self._ask("POST", "/sessions", fields))

    async def end(self, session: str, **result: Any) -> dict[str, Any]:
        """End a session, by its reward or by ``end``, the reason why it failed; return its state and what happened."""
        return await self._ask("POST", f"/sessions/{session}/reward", result)

    async def rows(self, session: str) -> dict[str, Any]:
        """Return its rows to train on; see ``Session.rows``."""
        return await self._ask("GET", f"/sessions/{session}/rows")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            return await self.call_until_answered(_AWAY_SECONDS, method, path, body)
        except InferenceError as error:
            raise SessionError(str(error)) from error
