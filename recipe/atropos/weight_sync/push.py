"""One push: a weight version reaches every server, or an error says which one it did not reach.

    stage -> pause -> deliver -> flush -> verify -> resume (of colocated servers by the caller, see ``colocated``)

- While the weights are staged, generation goes on with the old version: transport "disk" gathers and writes them then;
  the others gather them in buckets as they deliver, and stage the first.
- Nothing is generated between the first and the last changed tensor of a server: it is paused.
- The KV cache is flushed after the last tensor and before anything is generated, so no new token attends to keys of old
  weights; a flush that fails fails the push.
- No server reports the version before it has taken the last tensor, and generation continues only after *every* server
  has reported it.
- Before that, where it is asked for, the checksum of each of its tensors is compared with what was sent.
- An adapter by itself takes nothing away that is in use, and is delivered without a pause and a flush; see ``adapter``.
- On an error after the pause the servers are left paused: one that may have taken half of the weights never goes on.
  (Before it they go on with the old version.) A retry is a whole push; the caller's version stays what it was.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.checksums import WeightChecksums
from recipe.atropos.weight_sync.servers import WeightPushError, on_all
from recipe.atropos.weight_sync.transports.bucket import NamedTensors


class Transport(Protocol):
    """How the bytes of a version come to the servers; ``pauses``: generation stands still while they are delivered."""

    pauses: bool

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        """Whatever can be done before generation is paused; ``weights`` are read here or in ``deliver``."""

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        """Let every server, all paused if ``pauses``, load the weights and then carry the version's number.

        Raises WeightPushError, naming the server.
        """

    def release(self, version: int) -> None:
        """The version is active everywhere: what was staged before it may go."""


async def push(
    clients: Sequence[SGLangClient],
    transport: Transport,
    weights: NamedTensors,
    version: int,
    pause_mode: str,
    checksums: WeightChecksums | None = None,
    resume: bool = True,
) -> dict[str, float]:
    """Bring ``weights`` (name, full tensor) to all servers as ``version``.

    ``pause_mode`` says what running requests meet: "abort" ends them, "retract" computes their prefix anew with the new
    weights and goes on. "in_place" keeps their old keys, so that the flush, and with it the push, fails while one runs.
    ``checksums``, new ones, have every tensor of every server compared with what was sent. ``resume``: false leaves the
    servers paused.

    Returns seconds by phase and the size, as metrics under ``weight_sync/``.

    Raises:
        WeightPushError: a phase failed on a server; from the pause on, the servers are left paused.
    """
    started = time.perf_counter()
    counted = _Counted(weights if checksums is None else checksums.over(weights))
    await transport.stage(clients, counted, version)
    staged = time.perf_counter()

    if transport.pauses:
        await on_all(clients, "pause", lambda client: client.pause(pause_mode))
    await transport.deliver(clients, version)
    delivered = time.perf_counter()
    if transport.pauses:
        await on_all(clients, "flush", lambda client: client.flush_cache())
    await on_all(clients, "verify", lambda client: _verify(client, version))
    if checksums is not None:
        await on_all(clients, "compare", checksums.check)
    if resume:
        await on_all(clients, "resume", lambda client: client.resume())
    resumed = time.perf_counter()

    transport.release(version)
    return {
        "weight_sync/version": float(version),
        "weight_sync/bytes": float(counted.nbytes),
        "weight_sync/stage_s": staged - started,
        "weight_sync/deliver_s": delivered - staged,
        "weight_sync/pause_s": resumed - staged if transport.pauses else 0.0,
        "weight_sync/total_s": resumed - started,
    }


class _Counted:
    """``weights``, with their bytes added up as they pass."""

    def __init__(self, weights: NamedTensors):
        self._weights = weights
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, tensor = next(self._weights)
        self.nbytes += tensor.nbytes
        return name, tensor


async def _verify(client: SGLangClient, version: int) -> None:
    reported = await client.weight_version()
    if reported != str(version):
        raise WeightPushError(f"{client.url} reports weight version {reported!r} after a push of {version}")
