"""verl's checkpoint-engine seam: chosen by ``actor_rollout_ref.rollout.checkpoint_engine.backend=atropos`` alone.

verl gives each rank the stream of full tensors. Gathering them is a collective, so every rank iterates to the end, also
when rank 0 fails; rank 0 alone talks to the servers, over HTTP.
"""

from collections.abc import Generator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.torch_dtypes import PrecisionType

from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.disk import DiskTransport
from recipe.atropos.weight_sync.push import Transport, push

TRANSPORTS = {"disk": DiskTransport}


@CheckpointEngineRegistry.register("atropos")
class AtroposCheckpointEngine(CheckpointEngine):
    """Pushes to SGLang servers that were started by themselves.

    ``urls``: the servers. ``dtype``: what they serve in; floating-point tensors are cast to it before they travel.
    ``directory``: for transport "disk". ``timeout``: seconds for one request of a push to one server.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        urls: list[str],
        transport: str = "disk",
        directory: str | None = None,
        api_key: str | None = None,
        dtype: str = "bfloat16",
        pause_mode: str = "retract",
        timeout: float = 600.0,
    ):
        if transport not in TRANSPORTS:
            raise ValueError(f"trainer.atropos.weight_sync.transport={transport!r}; choose one of {sorted(TRANSPORTS)}")
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.urls = list(urls)
        self.dtype = PrecisionType.to_dtype(dtype)
        self.pause_mode = pause_mode
        self._client_options = {"api_key": api_key, "timeout": timeout}
        self._transport: Transport = TRANSPORTS[transport](directory, bucket_size)

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Push all weights as version ``global_steps``; metrics on rank 0, an empty dict elsewhere.

        Raises:
            WeightPushError, OSError: see ``push`` and the transport.
        """
        if not self.is_master:
            _exhaust(weights)
            return {}
        try:
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(SGLangClient(url, **self._client_options)) for url in self.urls
                ]
                return await push(clients, self._transport, self._served(weights), global_steps, self.pause_mode)
        finally:
            _exhaust(weights)

    def _served(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    # The rest of the interface is for engines that run inside the inference processes, which this one does not.
    def prepare(self) -> dict[str, Any]:
        raise NotImplementedError("the servers are reached over HTTP; nothing to prepare")

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the servers are reached over HTTP; there is no topology")

    def init_process_group(self, **kwargs: Any) -> None:
        raise NotImplementedError("the servers are reached over HTTP; there is no process group")

    def finalize(self) -> None:
        raise NotImplementedError("the servers are reached over HTTP; nothing to finalize")

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise NotImplementedError("SGLang's own server receives the weights")


def _exhaust(weights: Iterator[Any]) -> None:
    for _ in weights:
        pass
