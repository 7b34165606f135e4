"""Prefix affinity: keep a conversation on the server that has its prefix in the KV cache, unless it is much busier.

Each prompt is cut into blocks, and each block's hash includes those of the blocks before it, so equal hashes mean equal
prefixes. A prompt's server is remembered under its last block; a later prompt with this block continues the whole
earlier one. So a prefix that many prompts share, such as a system prompt, binds none of them to a server, except those
whose own part is shorter than a block. (SGLang's router and verl's agent loop route by prefix or request id for the
same reason.)
"""

from collections.abc import Sequence

import numpy as np
import orjson
from cachetools import LRUCache

from recipe.atropos.inference.pool import Server

_BLOCK = 64  # bytes: 16 token ids, or 64 ASCII characters
_KNOWN = 1 << 16  # prompts; about 10 MB
_BOUND = 1.25  # times the mean number of requests in flight, plus _SLACK: consistent hashing with bounded loads
_SLACK = 2


class PrefixAffinity:
    """Remembers which server last got each prompt; evicts the least recently used."""

    def __init__(self) -> None:
        self._servers: LRUCache[int, str] = LRUCache(_KNOWN)

    def choose(self, body: bytes, servers: Sequence[Server]) -> Server:
        """Return which of ``servers``, at least one, a request with this ``body`` should go to."""
        least = min(servers, key=lambda server: (server.inflight, server.requests))
        if len(servers) == 1 or not (blocks := _blocks(body)):
            return least
        url = next((self._servers[block] for block in reversed(blocks) if block in self._servers), None)
        bound = _BOUND * sum(server.inflight for server in servers) / len(servers) + _SLACK
        chosen = next((server for server in servers if server.url == url and server.inflight < bound), least)
        self._servers[blocks[-1]] = chosen.url
        return chosen


def _blocks(body: bytes) -> list[int]:
    """Return the chained hashes of the whole blocks of a request's prompt; [] if there are none."""
    try:
        given = orjson.loads(body)
        prompt = next(given[key] for key in ("input_ids", "text", "prompt", "messages") if given.get(key))
        if isinstance(prompt, str):
            data = prompt.encode()
        elif isinstance(prompt[0], int):
            data = np.asarray(prompt, np.int32).tobytes()
        elif isinstance(prompt[0], dict):  # messages; a conversation appends to them
            data = b"".join(orjson.dumps(message) for message in prompt)
        else:  # several prompts at once
            return []
    except (ValueError, TypeError, KeyError, IndexError, StopIteration, AttributeError, OverflowError):
        return []  # the server reports the error
    blocks, before = [], 0
    for start in range(0, len(data) - _BLOCK + 1, _BLOCK):
        before = hash((before, data[start : start + _BLOCK]))
        blocks.append(before)
    return blocks
