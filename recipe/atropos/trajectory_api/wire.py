"""Messages of packed groups, for client and server, and the headers that go with them.

A message of several records (``data.scored_group``) is an array of them in MessagePack. ``split`` copies nothing.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from recipe.atropos.data.reasons import Reason, RefusedGroup

PACKED = "application/x-atropos-groups"  # content type of a message of records
BATCH_HEADER = "Atropos-Batch"  # number of the batch in a packed answer
EPOCH_HEADER = "Atropos-Epoch"  # of a trainer's registration, in its later requests
TICKET_HEADER = "Atropos-Ticket"  # that a post of groups closes
KEY_HEADER = "Atropos-Key"  # idempotency key of a post

_MAX_GROUPS = 1 << 16  # in one message
_decode = msgspec.msgpack.Decoder(Annotated[list[memoryview], msgspec.Meta(max_length=_MAX_GROUPS)]).decode


def join(records: Sequence[bytes]) -> bytes:
    """Return a message of records."""
    return msgspec.msgpack.encode(records)


def split(message: bytes) -> list[memoryview]:
    """Return the records of a message.

    Raises:
        RefusedGroup: it is not a message of records.
    """
    try:
        return _decode(message)
    except msgspec.MsgspecError as error:
        raise RefusedGroup(Reason.MALFORMED, f"a message of packed groups cannot be read: {error}") from error
