"""A conversation keeps the server that has its beginning in the KV cache, unless that one is much busier than others.

Each prompt is cut into blocks, and each block's hash goes on from that of those before it, so that equal hashes mean
equal beginnings. The server of a prompt is remembered by its last block; a later prompt that has this block goes on
from the whole of it. So what many prompts share, such as a system prompt, binds nobody to a server, but for prompts
whose own part is shorter than a block. (SGLang's router and verl's agent loop keep a request with its prefix or its id
for the same reason.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import orjson

from recipe.atropos.inference.pool import Server

_BLOCK = 64  # bytes: 16 tokens, or as many letters
_KNOWN = 1 << 16  # prompts; some 10 MB
_BOUND = 1.25  # of the mean number of requests in flight, and _SLACK more: consistent hashing with bounded loads
_SLACK = 2


class PrefixAffinity:
    """Remembers which server got which prompt last; forgets those that were not used for longest."""

    def __init__(self) -> None:
        self._servers: OrderedDict[int, str] = OrderedDict()

    def choose(self, body: bytes, servers: Sequence[Server]) -> Server:
        """The one of ``servers``, at least one, that a request with this ``body`` is to go to."""
        least = min(servers, key=lambda server: (server.inflight, server.requests))
        if len(servers) == 1 or not (blocks := _blocks(body)):
            return least
        chosen = self._holder(blocks, servers) or least
        self._servers[blocks[-1]] = chosen.url
        self._servers.move_to_end(blocks[-1])
        if len(self._servers) > _KNOWN:
            self._servers.popitem(last=False)
        return chosen

    def _holder(self, blocks: list[int], servers: Sequence[Server]) -> Server | None:
        url = next((self._servers[block] for block in reversed(blocks) if block in self._servers), None)
        bound = _BOUND * sum(server.inflight for server in servers) / len(servers) + _SLACK
        return next((server for server in servers if server.url == url and server.inflight < bound), None)


def _blocks(body: bytes) -> list[int]:
    """Hashes of the whole blocks of a request's prompt, each with all before it; [] where there is none."""
    try:
        given = orjson.loads(body)
        prompt = next(given[key] for key in ("input_ids", "text", "prompt", "messages") if given.get(key))
        if isinstance(prompt, str):
            data = prompt.encode()
        elif isinstance(prompt[0], int):
            data = np.asarray(prompt, np.int32).tobytes()
        elif isinstance(prompt[0], dict):  # messages, of which later ones are added at the end
            data = b"".join(orjson.dumps(message) for message in prompt)
        else:  # several prompts at once
            return []
    except (ValueError, TypeError, KeyError, IndexError, StopIteration, AttributeError, OverflowError):
        return []  # the server says what is wrong with it
    blocks, before = [], 0
    for start in range(0, len(data) - _BLOCK + 1, _BLOCK):
        before = hash((before, data[start : start + _BLOCK]))
        blocks.append(before)
    return blocks
