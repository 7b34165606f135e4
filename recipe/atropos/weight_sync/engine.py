"""verl checkpoint engine, selected by ``actor_rollout_ref.rollout.checkpoint_engine.backend=atropos`` alone.

verl gives each rank the stream of full tensors. Gathering them is a collective, so every rank iterates to the end, even
when rank 0 fails. Only rank 0 talks to the servers, over HTTP.
"""

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from os.path import realpath
from typing import Any

import torch
from transformers import AutoConfig

from recipe.atropos.config.transports import WeightTransport, fastest_transport
from recipe.atropos.inference.client import Capabilities, SGLangClient
from recipe.atropos.tensors.format import CheckpointError, CheckpointFormat, read_shapes
from recipe.atropos.utils.hosts import is_this_host
from recipe.atropos.verl_ext.device import PrecisionType, get_device_name
from recipe.atropos.verl_ext.ranks import CheckpointEngine, CheckpointEngineRegistry
from recipe.atropos.weight_sync.names import PushedNames
from recipe.atropos.weight_sync.push import push
from recipe.atropos.weight_sync.served_model import check_model, served_path
from recipe.atropos.weight_sync.servers import WeightPushError, on_all
from recipe.atropos.weight_sync.transports.lora_adapter import AdapterTransport

logger = logging.getLogger(__name__)


@CheckpointEngineRegistry.register("atropos")
class AtroposCheckpointEngine(CheckpointEngine):
    """Pushes weights to standalone SGLang servers.

    They must serve the model of ``model_path`` (None: not compared), whose configuration may be custom code if
    ``trust_remote_code``. ``dtype``: that of the served weights; floating-point tensors are cast to it before sending,
    except those that servers hold in float32. ``transport``: its name, or "auto", the fastest that can work with all
    of ``urls``: "tensor" if trainer and servers share memory, that is on one machine, either without GPUs or
    ``colocated`` on them; else "distributed". ``directory``: for "disk"; ``bucket_size`` in bytes. ``timeout``: seconds
    for one request of a push to one server. With ``lora_rank`` and without ``lora_merge`` only the adapter is pushed;
    see ``lora_adapter``.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        urls: list[str],
        model_path: str | None = None,
        trust_remote_code: bool = False,
        transport: str = "auto",
        colocated: bool = False,
        directory: str | None = None,
        api_key: str | None = None,
        dtype: str = "bfloat16",
        pause_mode: str = "auto",
        verify: str = "version",
        timeout: float = 600.0,
        lora_rank: int = 0,
        lora_merge: bool = True,
    ):
        self.is_master = is_master
        self.model_path = model_path
        self.trust_remote_code = trust_remote_code
        self.colocated = colocated
        self._fp32: frozenset[str] = frozenset()
        self.dtype = PrecisionType.to_dtype(dtype)
        self.pause_mode = pause_mode
        self._client_options = {"api_key": api_key, "timeout": timeout}
        self._clients: dict[str, SGLangClient] = {}  # by URL, of servers that are checked
        self._pushed: str | None = None  # the version that every server had after the last push
        self._names: PushedNames | None = None  # None: not compared
        self._transport: WeightTransport
        if lora_rank and not lora_merge:
            self._transport = AdapterTransport(model_path, proven=verify == "probe")
        else:
            shared = (colocated or get_device_name() == "cpu") and all(map(is_this_host, urls))
            chosen = fastest_transport(shared) if transport == "auto" else WeightTransport.by_name[transport]
            self._transport = chosen(bucket_size=bucket_size, timeout=timeout, directory=directory)

    def expect(self, streamed: CheckpointFormat) -> None:
        """Declare that every push will send ``streamed``, and compare it with the model's checkpoint now, on rank 0.

        Raises:
            WeightNamesError, CheckpointError: they differ, or the checkpoint cannot be read.
        """
        self._fp32 = streamed.fp32
        if self.is_master and self.model_path:
            self._names = PushedNames(streamed, read_shapes(self.model_path), self.model_path)

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int,
        urls: Sequence[str],
        adapter: str | None = None,
    ) -> dict[str, float]:
        """Push all weights to the servers of ``urls`` as version ``global_steps``; ``adapter``: its name there.

        Returns metrics on rank 0, an empty dict elsewhere.

        Raises:
            WeightPushError: see ``push``, the transport and ``names``.
        """
        try:
            if not self.is_master:
                return {}
            clients = [self._clients.get(url) or SGLangClient(url, **self._client_options) for url in urls]
            await on_all(clients, "check", self._check)
            self._transport.adapter = adapter
            served, resume = self._served(weights), not self.colocated
            metrics = await push(clients, self._transport, served, global_steps, self.pause_mode, resume)
            self._pushed = str(global_steps)
            return metrics
        finally:
            deque(weights, maxlen=0)  # to the end

    async def _check(self, client: SGLangClient) -> None:
        """Check that a new or restarted server serves the model that is trained, and can be paused."""
        if client.url in self._clients and await client.weight_version() == self._pushed:
            return
        capabilities = await client.capabilities(anew=True)
        if self.model_path:
            trained = AutoConfig.from_pretrained(self.model_path, trust_remote_code=self.trust_remote_code)
            await check_model(client, trained, str(self.dtype).removeprefix("torch."))
            await self._check_names(client)
        await self._transport.check_server(client)
        if self._transport.pauses:
            self._check_pause_mode(client.url, capabilities)
        if capabilities.arguments.get("pp_size", 1) != 1:  # read in SGLang 0.5.23, scheduler_pp_mixin.py
            raise WeightPushError(
                f"{client.url} runs with pp_size={capabilities.arguments['pp_size']}, and such a server goes on "
                "generating while it is paused: start it with tp_size instead"
            )
        self._clients[client.url] = client

    def _check_pause_mode(self, url: str, capabilities: Capabilities) -> None:
        try:
            mode = capabilities.safe_pause_mode(self.pause_mode)
        except ValueError as error:
            raise WeightPushError(
                f"trainer.atropos.weight_sync.pause_mode={self.pause_mode} does not work with inference.urls={url}: "
                f"{error}"
            ) from error
        if self.pause_mode == "auto" and mode == "abort":
            logger.warning(
                "%s runs SGLang %s, which cannot flush its cache with retracted requests: each push ends the requests "
                "that run (finish_reason abort), and environments lose these groups",
                url,
                capabilities.version,
            )

    async def _check_names(self, client: SGLangClient) -> None:
        """Check that a server that loaded its checkpoint from another path has the same tensors as the trainer's."""
        path = served_path(await client.model_info())
        if self._names is None or path is None or realpath(path) == realpath(self.model_path):
            return
        try:
            served = read_shapes(path)
        except CheckpointError as error:
            logger.warning("%s: the names of its tensors cannot be compared: %s", client.url, error)
            return
        self._names.compare(served, f"{path} of {client.url}")

    def _served(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Cast to the servers' dtypes; the few small tensors that they hold in float32 come last, in one bucket."""
        late = []
        for name, tensor in weights if self._names is None else self._names.checked(weights):
            if name in self._fp32:
                late.append((name, tensor.float()))
            else:
                yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        yield from late

    def _of_engines_inside(self, *args: Any, **kwargs: Any) -> Any:
        """Reject the rest of the interface, which is for engines that run inside the inference processes."""
        raise NotImplementedError("the servers are reached over HTTP, and receive the weights themselves")

    prepare = build_topology = init_process_group = finalize = receive_weights = _of_engines_inside
