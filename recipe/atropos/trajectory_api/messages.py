"""What clients send besides groups, and the errors that they get. Field names are those of atroposlib's API."""

import math
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")
Int = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]  # what every JSON reader has exactly


class RequestRefused(Exception):  # noqa: N818  (the server answers it)
    """A request that cannot be served; ``status`` is the HTTP status, ``extra`` goes into the answer."""

    def __init__(self, status: int, message: str, **extra: Any):
        super().__init__(message)
        self.status = status
        self.extra = extra


class Registration(msgspec.Struct):
    """``POST /register``. ``after`` (number of the last batch that is in the weights) marks a trainer that numbers."""

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
    """``POST /register-env``."""

    max_token_length: Int
    desired_name: str | None
    weight: float | None
    group_size: Int
    min_batch_allocation: float | None = None


class EnvIdentifier(msgspec.Struct):
    """``GET /status-env``, and ``POST /disconnect-env`` with the ``reason``, if something is wrong."""

    env_id: Int
    reason: str = ""


class Begin(msgspec.Struct):
    """``POST /begin``. ``held``: all tickets that the environment knows of; others of it are released. ``more``:
    another request follows at once, so that nobody else takes its turn meanwhile. ``ahead``: how many batches, from the
    next one on, may hold its group where there is no staleness bound.
    """

    env_id: Int
    sequences: Int | None = None
    held: list[Int] | None = None
    more: bool = False
    ahead: Int | None = None
    wait: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.wait):
            raise ValueError(f"wait={self.wait}: give seconds")


class Release(msgspec.Struct):
    """``POST /release``. ``detail``: of an item that failed, or whose group was not sent, why."""

    ticket: Int
    reason: str = "unknown"
    detail: str = ""


class BatchNumber(msgspec.Struct):
    """``POST /empty``."""

    number: Int


class Through(msgspec.Struct):
    """``POST /commit`` and ``POST /weights``."""

    through: Int


def read(body: bytes, kind: type[T]) -> T:
    """Return a message; numbers may be strings, as pydantic allows.

    Raises:
        RequestRefused: 422, naming the field.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(422, f"{kind.__name__}: {error}") from error
