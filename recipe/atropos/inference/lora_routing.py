"""Request routing for LoRA policies: environments do not know the adapter, so the gateway names it to the servers.

- Every sampling request names the active adapter when it is sent to a server, whatever adapter it named before; a
  sampling request that cannot name one is refused, not answered by the base model.
- A running request keeps its adapter, while others begin with newer ones. A server reports one version for all, its
  newest; so the gateway gives every token of a reply the version of the adapter that sampled it.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson

ADAPTERS_KEPT = 4  # by a server: the active adapter, the next, and two with requests that began earlier
GENERATES = ("/generate", "/v1/completions", "/v1/chat/completions")
TOKENIZES = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
_SAMPLES_NOTHING = (*TOKENIZES, "/abort_request", "/flush_cache")

# In a JSON text these bytes can only be keys: within a string the quotes would be escaped.
WEIGHT_VERSION = re.compile(rb'("weight_version"\s*:\s*)"([^"]*)"')
_SPANS = re.compile(rb'("weight_versions"\s*:\s*)\[[^\]]*"end"\s*:\s*(\d+)[^\]]*\]')


class CannotName(ValueError):
    """The adapter cannot be named in a request; the message says why."""


@dataclass(frozen=True)
class AdaptedPolicy:
    """A policy ``version`` that is an adapter; ``adapter`` is its name on the servers."""

    adapter: str
    version: int

    def named_in(self, method: str, path: str, body: bytes) -> bytes:
        """Return the request's body, with the adapter's name, and no other, if it samples.

        Raises:
            CannotName: the request may sample, but the name cannot be added.
        """
        if method in ("GET", "HEAD", "OPTIONS") or path in _SAMPLES_NOTHING:
            return body
        if path not in GENERATES:
            raise CannotName(
                f"{method} {path} would be answered by the base model, without the policy's LoRA adapter: ask by "
                f"{', '.join(GENERATES)}, or train with actor_rollout_ref.model.lora.merge=true"
            )
        try:
            asked = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise CannotName(f"{method} {path} takes a JSON object: {error}") from error
        if not isinstance(asked, dict):
            raise CannotName(f"{method} {path} takes a JSON object, not {type(asked).__name__}")
        if isinstance(model := asked.get("model"), str):
            asked["model"] = model.partition(":")[0]  # of NAME:ADAPTER SGLang takes that adapter first
        return orjson.dumps(asked | {"lora_path": self.adapter})

    def stamped(self, reply: bytes) -> bytes:
        """Return the reply, or a whole line of a stream, with each version in it replaced by this one."""
        version = str(self.version).encode()
        reply = WEIGHT_VERSION.sub(rb'\g<1>"%b"' % version, reply)
        return _SPANS.sub(rb'\g<1>[{"version":"%b","start":0,"end":\g<2>}]' % version, reply)

    async def stamped_lines(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the stream, stamped; no piece ends within a line."""
        begun = b""
        async for piece in pieces:
            whole, end, begun = (begun + piece).rpartition(b"\n")
            if end:
                yield self.stamped(whole + end)
        if begun:
            yield self.stamped(begun)
