"""One push: a weight version reaches every server, or an error names the servers that it did not reach.

    stage -> pause -> deliver -> flush -> verify -> resume (of colocated servers by the caller, see ``colocated``)

- While the weights are staged, generation continues with the old version. Transport "disk" gathers and writes them all
  then; "distributed" and "tensor" stage the first buckets, and gather the rest as they deliver.
- A server generates nothing between its first and its last changed tensor: it is paused.
- The KV cache is flushed after the last tensor and before generation resumes, so no new token attends to keys of old
  weights; if the flush fails, so does the push.
- No server reports the version before it has loaded the last tensor, and generation resumes only after *every* server
  has reported it.
- Adapter-only LoRA sync replaces nothing that is in use, so it needs no pause and no flush; see ``lora_adapter``.
- After an error from the pause on, the servers stay paused: one that may hold half of the weights must not generate.
  (After an earlier error they continue with the old version.) A retry is a whole push; the caller keeps its version.
"""

import time
from collections.abc import Sequence

from recipe.atropos.config.transports import WeightTransport
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.servers import WeightPushError, on_all
from recipe.atropos.weight_sync.transports.bucket import NamedTensors


async def push(
    clients: Sequence[SGLangClient],
    transport: WeightTransport,
    weights: NamedTensors,
    version: int,
    pause_mode: str,
    resume: bool = True,
) -> dict[str, float]:
    """Push ``weights`` (name, full tensor) to all servers as ``version``.

    ``pause_mode`` decides what happens to running requests: "abort" ends them; "retract" recomputes their prefix with
    the new weights and continues; "in_place" keeps their old keys, so the flush, and with it the push, fails while one
    is running. ``resume``: False leaves the servers paused.

    Returns seconds per phase and the size in bytes, as metrics under ``weight_sync/``.

    Raises:
        WeightPushError: a phase failed on a server; from the pause on, the servers are left paused.
    """
    nbytes = 0

    def counted() -> NamedTensors:
        nonlocal nbytes
        for name, tensor in weights:
            nbytes += tensor.nbytes
            yield name, tensor

    started = time.perf_counter()
    await transport.stage(clients, counted(), version)
    staged = time.perf_counter()

    if transport.pauses:
        await on_all(clients, "pause", lambda client: client.pause(pause_mode))
    await transport.deliver(clients, version)
    delivered = time.perf_counter()
    if transport.pauses:
        await on_all(clients, "flush", lambda client: client.flush_cache())
    await on_all(clients, "verify", lambda client: _verify(client, version))
    if resume:
        await on_all(clients, "resume", lambda client: client.resume())
    resumed = time.perf_counter()

    transport.release(version)
    return {
        "weight_sync/version": float(version),
        "weight_sync/bytes": float(nbytes),
        "weight_sync/stage_s": staged - started,
        "weight_sync/deliver_s": delivered - staged,
        "weight_sync/pause_s": resumed - staged if transport.pauses else 0.0,
        "weight_sync/total_s": resumed - started,
    }


async def _verify(client: SGLangClient, version: int) -> None:
    reported = await client.weight_version()
    if reported != str(version):
        raise WeightPushError(f"{client.url} reports weight version {reported!r} after a push of {version}")
