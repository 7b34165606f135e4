"""Every tensor that a server computes with, compared bit for bit with what was sent, by SGLang's own checksums.

SGLang fuses tensors as it loads them (q, k and v; gate and up) and pads the vocabulary to a multiple of 64 rows, so the
checksums here cover the same bytes: the parts concatenated, and zeros after the vocabulary. On a CPU a checksum is the
first 8 bytes of a SHA-256 (``tensor_hash`` in sglang/srt/managers/mm_utils.py). Servers with one rank on a CPU only.
"""

import hashlib
from functools import cache

import torch
from safetensors.torch import load_file

from helpers.sglang import call
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.tensors.format import FUSED

_PART_OF = {part: (fused, i) for fused, parts in FUSED.items() for i, part in enumerate(parts)}
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64


def _ranks(url):
    return call(url, lambda client: client.post("/weights_checker", {"action": "checksum"}))["ranks"]


@cache
def can_checksum(url):
    """SGLang 0.5.12 cannot, on a CPU."""
    try:
        return bool(_ranks(url))
    except InferenceError:
        return False


def differing_tensors(url, weights):
    """Names of the server's tensors that are not those of ``weights``, pairs of name and tensor."""
    [rank] = _ranks(url)
    found, sent = rank["checksums"], _digests(weights)
    # A tied tensor may be absent from the server: its digest is that of a tensor that is there.
    known = set().union(*(sent[name] for name in found.keys() & sent.keys()))
    lacking = [name for name in sent.keys() - found.keys() if not sent[name] & known]
    return sorted([*lacking, *(name for name, digest in found.items() if digest not in sent.get(name, ()))])


def _digests(weights):
    """For each tensor of a server: its digest as sent, and for a vocabulary also as padded."""
    parts, digests = {}, {}
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        parent, _, module = layer.rpartition(".")
        fused, part = _PART_OF.get(module, (module, 0))
        place = ".".join(filter(None, (parent, fused, kind)))
        parts.setdefault(place, {})[part] = tensor.detach().to("cpu").contiguous()
    for name, found in parts.items():
        tensors = [found[part] for part in sorted(found)]
        sum_ = hashlib.sha256(b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors))
        digests[name] = {sum_.hexdigest()[:16]}
        if name.endswith(_VOCABULARY):
            [tensor] = tensors
            sum_.update(bytes(-len(tensor) % _VOCABULARY_MULTIPLE * (tensor.nbytes // len(tensor))))
            digests[name].add(sum_.hexdigest()[:16])
    return digests


def assert_serves(url, folder, dtype=torch.float32):
    """The server computes with the weights of a model's folder."""
    if can_checksum(url):
        tensors = load_file(folder / "model.safetensors")
        different = differing_tensors(url, ((name, tensor.to(dtype)) for name, tensor in tensors.items()))
        assert not different, f"{url} has other values in {different}"
