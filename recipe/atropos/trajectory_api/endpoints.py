"""Endpoints of the Trajectory API: each is one function, whose parameters are the fields of its message.

``@endpoint("POST", "/release")`` on ``async def release(service, ticket: Int, reason: str = "")`` is all that one
takes; clients use it by ``TrajectoryApiClient.call``. Its parameters after ``service`` are read from the JSON of the
body, or of a GET from the query, if it has one. Some have a meaning of their own: ``message``, a struct, is the whole
message; ``body`` is the bytes that were sent; ``caller`` is what else the request says. What the function returns is
the answer: text or an HTTP response as it is, anything else as JSON (bytes are JSON already).

Field names are those of atroposlib's API.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import msgspec
from aiohttp import web

Int = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]  # what every JSON reader has exactly
Seconds = Annotated[float, msgspec.Meta(ge=-1.7e308)]  # which NaN is not


class RequestRefused(Exception):  # noqa: N818  (the server answers it)
    """A request that cannot be served; ``status`` is the HTTP status, ``extra`` goes into the answer."""

    def __init__(self, status: int, message: str, **extra: Any):
        super().__init__(message)
        self.status = status
        self.extra = extra


class Registration(msgspec.Struct):
    """A trainer's. ``after`` (number of the last batch that is in the weights) marks one that uses numbered batches.

    ``batch_size`` is in sequences, ``max_token_len`` in tokens.
    """

    wandb_group: str | None
    wandb_project: str | None
    batch_size: Int
    max_token_len: Int
    checkpoint_dir: str | None
    save_checkpoint_interval: Int
    starting_step: Int
    num_steps: Int
    after: Int | None = None
    max_staleness: Int | None = None


class EnvRegistration(msgspec.Struct):
    """An environment's, or one of its replicas': those of one ``desired_name`` count as one environment."""

    max_token_length: Int
    desired_name: str | None
    weight: float | None
    group_size: Int
    min_batch_allocation: float | None = None
    replica: Int | None = None  # None: it has none


@dataclass(frozen=True)
class Caller:
    """What a request says beside its message: the headers' values, and whether who asked is ``gone()``."""

    path: str = ""
    epoch: int | None = None  # of a trainer's registration
    ticket: int | None = None  # that a post of groups closes
    key: str | None = None  # idempotency key
    gone: Callable[[], bool] = lambda: False
    request: web.BaseRequest | None = None


SOMEBODY = Caller()  # who says nothing


@dataclass(frozen=True)
class Endpoint:
    """``message`` is the type that is read from a request, None if nothing is; ``wants`` names all parameters.

    ``for_trainers``: it takes the trainer's key. ``with_epoch``: it takes the epoch of a trainer that uses numbered
    batches, too.
    """

    function: Callable[..., Any]
    message: type | None
    wants: frozenset[str]
    for_trainers: bool
    with_epoch: bool

    def arguments(self, body: bytes, query: Mapping[str, str], caller: Caller) -> dict[str, Any]:
        """Return the arguments of ``function`` after the service; numbers may be strings, as pydantic allows.

        Raises:
            RequestRefused: 422, naming the field.
        """
        found: dict[str, Any] = {"message": None, "body": body, "caller": caller}
        if self.message is not None:
            try:
                if query:
                    message = msgspec.convert(dict(query), self.message, strict=False)
                else:
                    message = msgspec.json.decode(body or b"{}", type=self.message, strict=False)
            except (ValueError, RecursionError) as error:
                raise RequestRefused(422, f"{self.message.__name__}: {error}") from error
            found |= {"message": message} if "message" in self.wants else msgspec.structs.asdict(message)
        return {name: found[name] for name in self.wants}


ENDPOINTS: dict[tuple[str, str], Endpoint] = {}  # by method and path


def endpoint(
    method: str,
    path: str,
    for_trainers: bool = False,
    with_epoch: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function an endpoint; see the module, and ``Endpoint``."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        types = get_type_hints(function, include_extras=True)
        given = [*inspect.signature(function).parameters.values()][1:]
        fields = [
            (one.name, types[one.name], msgspec.NODEFAULT if one.default is one.empty else one.default)
            for one in given
            if one.name not in ("message", "body", "caller")
        ]
        message = msgspec.defstruct(function.__name__, fields) if fields else types.get("message")
        wants = frozenset(one.name for one in given)
        ENDPOINTS[method, path] = Endpoint(function, message, wants, for_trainers, with_epoch)
        return function

    return add
