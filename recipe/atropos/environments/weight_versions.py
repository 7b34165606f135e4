"""Which weights sampled which tokens: from SGLang's replies into ``group_overrides`` of the groups that are posted.

atroposlib reads tokens and logprobs of a reply and drops the rest. An environment with ``WeightVersions`` in front of
its base class keeps the versions too, and finds each sampled span again in the sequences that it posts:

    class MyEnv(WeightVersions, BaseEnv): ...

- ``policy_version_min`` and ``policy_version_max``, lists over the group's sequences, are the oldest and the newest
  weight version among the trained tokens. A sequence with a span that no reply is known for has None: unknown is
  unknown.
- Two replies with the same tokens are told apart by their logprobs; where these are not posted, both count.
- SGLang from 0.5.19 on says which version sampled each token. Before, a reply has one version, the one at its end; that
  is true of all its tokens, because the servers are paused in mode "abort" there, and no reply spans a push.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.server_handling.sglang_server import SGLangServer

from recipe.atropos.inference.client import SGLangClient

_IGNORED = -100
NOT_PUSHED = -1  # a version, older than all: the trainer drops what such weights sampled


@dataclass(frozen=True)
class Completion:
    """One sampled answer: its logprobs, (n,), and the oldest and newest version among its tokens."""

    logprobs: tuple[float, ...]
    versions: tuple[int, int]


def versions_of(meta_info: dict[str, Any]) -> tuple[int, int] | None:
    """(oldest, newest) version of a reply's tokens; None where the server says none.

    One that is no number, as "default", is of weights that no trainer pushed: ``NOT_PUSHED``.
    """
    spans = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version")}]
    names = [span.get("version") for span in spans]
    if any(name is None for name in names):
        return None
    versions = [int(name) if str(name).isdecimal() else NOT_PUSHED for name in names]
    return min(versions), max(versions)


@dataclass
class VersionBook:
    """Completions by their tokens, the newest ``capacity`` of them."""

    capacity: int = 100_000
    _completions: OrderedDict[tuple[int, ...], list[Completion]] = field(default_factory=OrderedDict)
    _size: int = 0

    def add(self, tokens: Sequence[int], completion: Completion) -> None:
        self._completions.setdefault(tuple(tokens), []).append(completion)
        self._completions.move_to_end(tuple(tokens))
        self._size += 1
        while self._size > self.capacity:
            self._size -= len(self._completions.popitem(last=False)[1])

    def find(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> tuple[int, int] | None:
        """(oldest, newest) version over the completions that a posted span can be; None where there is none."""
        candidates = self._completions.get(tuple(tokens), [])
        if logprobs is not None:
            candidates = [c for c in candidates if c.logprobs == tuple(logprobs)]
        if not candidates:
            return None
        return min(c.versions[0] for c in candidates), max(c.versions[1] for c in candidates)

    def of_sequence(
        self, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None
    ) -> tuple[int, int] | None:
        """(oldest, newest) version among the trained tokens of a sequence; None where one span is unknown."""
        found = []
        for start, end in trained_spans(masks):
            versions = self.find(tokens[start:end], None if logprobs is None else logprobs[start:end])
            if versions is None:
                return None
            found.append(versions)
        return (min(v[0] for v in found), max(v[1] for v in found)) if found else None


def trained_spans(masks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of positions that are trained on."""
    start = None
    for position, mask in enumerate([*masks, _IGNORED]):
        if mask != _IGNORED and start is None:
            start = position
        elif mask == _IGNORED and start is not None:
            yield start, position
            start = None


def stamp(group: ScoredDataGroup, book: VersionBook, env_name: str | None = None) -> None:
    """Put versions, and the environment's name, into ``group_overrides``; what is there already stays."""
    logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
    versions = [
        book.of_sequence(tokens, masks, values or None)
        for tokens, masks, values in zip(group["tokens"], group["masks"], logprobs, strict=True)
    ]
    stamped = {
        "policy_version_min": [None if v is None else v[0] for v in versions],
        "policy_version_max": [None if v is None else v[1] for v in versions],
    }
    if env_name:
        stamped["env_name"] = env_name
    group["group_overrides"] = stamped | dict(group.get("group_overrides") or {})


async def _generate(server: SGLangServer, book: VersionBook, **kwargs: Any) -> tuple[list, list, list, list]:
    """What ``SGLangServer`` does for tokens and logprobs, by the same endpoint, and the versions into ``book``.

    Raises:
        InferenceError: naming the server; atroposlib tries such a call again.
    """
    prompt = kwargs.pop("prompt", None)
    input_ids = kwargs.pop("input_ids", None)
    if input_ids is None:
        input_ids = server.tokenizer.encode(prompt)
    if len(input_ids) >= 2 and input_ids[0] == server.tokenizer.bos_token_id == input_ids[1]:
        input_ids = input_ids[1:]  # a chat template that writes the BOS token, and a tokenizer that adds one
    kwargs.pop("model", None)
    if "max_tokens" in kwargs:
        kwargs["max_new_tokens"] = kwargs.pop("max_tokens")
    url = server.config.base_url.removesuffix("/").removesuffix("/v1")
    async with SGLangClient(url, server.config.api_key or None, timeout=server.config.timeout) as client:
        replies = await client.generate(input_ids=input_ids, sampling_params=kwargs)
    outputs, logprobs, reasons = [], [], []
    for reply in replies if isinstance(replies, list) else [replies]:
        meta_info = reply["meta_info"]
        outputs.append([token for _, token, *_ in meta_info["output_token_logprobs"]])
        logprobs.append([value for value, *_ in meta_info["output_token_logprobs"]])
        reasons.append(meta_info.get("finish_reason"))
        versions = versions_of(meta_info)
        if versions is not None:
            book.add(outputs[-1], Completion(tuple(logprobs[-1]), versions))
    return input_ids, outputs, logprobs, reasons


class WeightVersions:
    """Goes before ``BaseEnv``; see the module. Only servers of type "sglang" report versions."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.version_book = VersionBook()
        for server in self.server.servers:
            if isinstance(server, SGLangServer):
                server._tokens_and_logprobs_completion_wrapper = partial(_generate, server, self.version_book)

    async def handle_send_to_api(self, scored_data: Any, *args: Any, **kwargs: Any) -> Any:
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            if group is not None:
                stamp(group, self.version_book, self.config.wandb_name)
        return await super().handle_send_to_api(scored_data, *args, **kwargs)
