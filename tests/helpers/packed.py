"""Messages of packed groups with any dtypes, counts and lengths, whether they fit together or not."""

import msgspec
import numpy as np
from hypothesis import strategies as st

from recipe.atropos.data.scored_group import FIELDS, FLOATS

_DTYPES = {"i1": "i1", "i4": "i4", "i8": "i8", "f4": "f4", "f8": "f8", "bits": "u1", "f2": "f2", "": "f8"}
_USUAL = {"lengths": "i4", "tokens": "i4", "masks": "i4", "scores": "f8", "inference_logprobs": "f4"}
_COUNTS = st.sampled_from([0, 1, 3, -1, 2**31, 2**63, 2**70])
_RAW = st.sampled_from([b"[]", b"{}", b"null", b"[[1,2],[]]", b"1e999", b'"\\ud800"', b"[{}]", b"[[[1]]]"])


@st.composite
def _odd_records(draw):
    """A record of two sequences, of which mostly one part is changed."""
    changed = draw(st.lists(st.sampled_from("lengths dtype size counts raw buffers floats env_id".split()), max_size=2))
    lengths, codes = [2, 2], dict(_USUAL)
    values = dict.fromkeys(("advantages", "other"), [1.0] * 4) | {"inference_logprobs": [-0.5, -1.0, -2.0, 0.0]}
    header: dict = {"sequences": 2, "tokens": 4, "env_id": None, "raw": {}}
    if "lengths" in changed:
        lengths = draw(st.sampled_from([[1, 3], [4], [0, 4], [5, -1], [2**31 - 1, 5], []]))
    if "floats" in changed:
        values["inference_logprobs"][1] = draw(st.sampled_from([float("nan"), float("inf"), 1.0]))
    if "buffers" in changed:
        name = draw(st.sampled_from([*_USUAL, "advantages", "other"]))
        codes = {key: code for key, code in codes.items() if key != name} | ({} if name in codes else {name: "f8"})
    if "dtype" in changed:
        codes[draw(st.sampled_from([*codes]))] = draw(st.sampled_from([*_DTYPES]))
    values |= {"lengths": lengths, "tokens": [1, 2, 3, 4], "masks": [1, -100, 3, 4], "scores": [0.5] * len(lengths)}
    buffers = []
    for name, code in codes.items():
        with np.errstate(invalid="ignore"):
            array = np.array(values[name], np.float64)
            buffers.append((np.packbits(array != 0) if code == "bits" else array.astype(_DTYPES[code])).tobytes())
    if "size" in changed and buffers:
        at = draw(st.integers(0, len(buffers) - 1))
        buffers[at] = draw(st.sampled_from([buffers[at][:-1], buffers[at] + bytes(8), b"", buffers[at][:8]]))
    if "counts" in changed:
        header[draw(st.sampled_from(["sequences", "tokens"]))] = draw(_COUNTS)
    if "env_id" in changed:
        header["env_id"] = draw(st.sampled_from([7, 2**63, -(2**63)]))
    if "raw" in changed:
        header["raw"] = {draw(st.sampled_from([*FIELDS, *FLOATS, "other"])): msgspec.Raw(draw(_RAW))}
    encoded = _json(header | {"buffers": codes})
    parts = [b"ATG1", len(encoded).to_bytes(4, "little"), encoded, bytes(-len(encoded) % 8)]
    return b"".join((*parts, *(data + bytes(-len(data) % 8) for data in buffers)))


def _json(header):
    """Numbers beyond 64 bits too, which no encoder writes."""
    text = {
        key: str(value).encode() if type(value) is int else msgspec.json.encode(value) for key, value in header.items()
    }
    return b"{" + b",".join(b'"%s":%s' % (key.encode(), value) for key, value in text.items()) + b"}"


ODD_MESSAGES = st.lists(_odd_records(), min_size=1, max_size=2).map(b"".join)
