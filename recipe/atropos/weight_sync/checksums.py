"""Comparison of every tensor on a server with what was sent, by SGLang's checksums of its loaded weights.

SGLang fuses tensors as it loads them (q, k and v; gate and up) and pads the vocabulary to a multiple of 64 rows, so the
checksums here cover the same bytes: the parts concatenated, and zeros after the vocabulary. On a CPU a checksum is the
first 8 bytes of a SHA-256 (``tensor_hash`` in sglang/srt/managers/mm_utils.py).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from recipe.atropos.checkpoint.format import FUSED
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.weight_sync.names import some
from recipe.atropos.weight_sync.servers import WeightPushError
from recipe.atropos.weight_sync.transports.bucket import NamedTensors

_PART_OF = {part: (fused, i) for fused, parts in FUSED.items() for i, part in enumerate(parts)}
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64
_ALTERNATIVE = "set trainer.atropos.weight_sync.verify=probe"


@dataclass
class _Sum:
    """Running hash of one tensor of the server, and the number of parts added so far."""

    sha256: Any = field(default_factory=hashlib.sha256)
    parts: int = 0
    shape: torch.Size = torch.Size()
    row_bytes: int = 0


class WeightChecksums:
    """Expected checksums of a server, computed from the tensors that pass through ``over``."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def over(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._add(name, tensor)
            yield name, tensor

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor. Raises WeightPushError if parts of a fused tensor come in another order than SGLang's."""
        layer, _, kind = name.rpartition(".")
        parent, _, module = layer.rpartition(".")
        fused, part = _PART_OF.get(module, (module, 0))
        target = self._sums.setdefault(".".join(filter(None, (parent, fused, kind))), _Sum())
        if target.parts != part:
            raise WeightPushError(f"no checksum can be computed with {name} out of its order: {_ALTERNATIVE}")
        raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        target.sha256.update(memoryview(raw.numpy()))
        target.parts, target.shape = part + 1, tensor.shape
        target.row_bytes = tensor.nbytes // max(1, len(tensor)) if tensor.dim() else 0

    async def check(self, client: SGLangClient) -> None:
        """Raise WeightPushError if tensors differ (names them) or the server's cannot be compared (says why)."""
        try:
            reply = await client.post("/weights_checker", {"action": "checksum"})
        except InferenceError as error:
            if error.status is None:
                raise
            raise WeightPushError(
                f"{error}: {client.url} cannot compute checksums of its weights; {_ALTERNATIVE}"
            ) from error
        if "ranks" not in reply:
            raise WeightPushError(f"{client.url} cannot compute checksums of its weights; {_ALTERNATIVE}")
        device = (await client.capabilities()).arguments.get("device")
        if len(reply["ranks"]) != 1 or device != "cpu":
            raise WeightPushError(
                f"{client.url} runs on {len(reply['ranks'])} ranks of device {device}; checksums are compared with one "
                f"on a CPU: {_ALTERNATIVE}"
            )
        found = reply["ranks"][0]["checksums"]
        sent = {name: _digests(name, total) for name, total in self._sums.items()}
        wrong = [name for name, digest in found.items() if name in sent and digest not in sent[name]]
        if missing := sorted(found.keys() - sent.keys()):
            raise WeightPushError(f"{client.url} has tensors that were not sent: {some(missing)}; is it another model?")
        # A tied tensor may be absent from the server: its digest is that of a tensor that is there.
        known = set().union(*(sent[name] for name in found))
        if surplus := [name for name in sorted(sent.keys() - found.keys()) if not sent[name] & known]:
            raise WeightPushError(f"{client.url} has no tensors {some(surplus)}, which were sent; is it another model?")
        if wrong:
            raise WeightPushError(f"{client.url} has other values than were sent in {some(wrong)}")


def _digests(name: str, total: _Sum) -> set[str]:
    """Return the digest of the tensor as sent and, for a vocabulary, as SGLang pads it with rows of zeros."""
    digests = {total.sha256.hexdigest()[:16]}
    if name.endswith(_VOCABULARY):
        filled = total.sha256.copy()
        filled.update(bytes(-total.shape[0] % _VOCABULARY_MULTIPLE * total.row_bytes))
        digests.add(filled.hexdigest()[:16])
    return digests
