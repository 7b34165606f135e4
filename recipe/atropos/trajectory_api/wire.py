"""Messages of packed groups, for client and server, and the headers that go with them.

A message of several records (``data.scored_group``) is ``ATB1``, their number (uint32), their lengths (uint64 each) and
they. ``split`` copies nothing.
"""

import itertools
import struct
from collections.abc import Sequence

from recipe.atropos.data.reasons import Reason, RefusedGroup

PACKED = "application/x-atropos-groups"  # content type of a message of records
BATCH_HEADER = "Atropos-Batch"  # number of the batch in a packed answer
EPOCH_HEADER = "Atropos-Epoch"  # of a trainer's registration, in its later requests
TICKET_HEADER = "Atropos-Ticket"  # that a post of groups closes
KEY_HEADER = "Atropos-Key"  # idempotency key of a post

_MAGIC = b"ATB1"
_PREFIX = struct.Struct("<4sI")
MAX_GROUPS = 1 << 16  # in one message


def join(records: Sequence[bytes | memoryview]) -> bytes:
    """Return a message of records."""
    return b"".join((prefix([len(record) for record in records]), *records))


def prefix(sizes: Sequence[int]) -> bytes:
    """Return what precedes records of these sizes, in bytes, in their message."""
    return _PREFIX.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)


def split(message: bytes | memoryview) -> list[memoryview]:
    """Return the records of a message.

    Raises:
        RefusedGroup: it is not a message of records.
    """
    view = memoryview(message)
    try:
        magic, count = _PREFIX.unpack_from(view)
        start = _PREFIX.size + count * 8
        if magic != _MAGIC or count > MAX_GROUPS or start > len(view):
            raise ValueError(f"it begins with {bytes(view[:8])!r}")
        lengths = struct.unpack_from(f"<{count}Q", view, _PREFIX.size)
        if start + sum(lengths) != len(view):
            raise ValueError(f"it has {len(view)} bytes instead of {start + sum(lengths)}")
    except (struct.error, ValueError) as error:
        raise RefusedGroup(Reason.MALFORMED, f"a message of packed groups cannot be read: {error}") from error
    return [view[begin:end] for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=start))]
