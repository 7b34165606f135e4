"""Weight transports by name: what a configuration must know of one before anything starts.

A transport is one file in ``weight_sync/transports``: a subclass of ``WeightTransport``, with its name, its limits and
its checks. ``weight_sync`` imports all of them; it is verl's ``checkpoint_engine.custom_backend_module``.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError


class WeightTransport:
    """Base of the transports: how the tensors of a version reach the servers (each an ``SGLangClient``).

    ``class Pigeon(WeightTransport, name="pigeon")`` is what ``trainer.atropos.weight_sync.transport=pigeon`` names.
    """

    by_name: ClassVar[dict[str, type["WeightTransport"]]] = {}
    pauses = True
    """Whether generation is paused while the weights are delivered."""
    uses_nccl = False
    """Whether ranks of trainer and servers form an NCCL group, where they compute on GPUs."""
    shares_memory = False
    """Whether servers on the trainer's machine open its memory by handles."""
    keeps_buckets = False
    """Whether the trainer keeps the memory of its buckets on a GPU between pushes."""
    in_requests = False
    """Whether what is loaded comes with the request that loads it, so that it may be named for an adapter, too."""
    by_rank = False
    """Whether each rank of a server takes part, which those of a data-parallel server (``dp_size``) cannot."""
    adapter: str | None = None
    """Name of the next adapter to push, where only an adapter is pushed."""

    def __init__(self, *, bucket_size: int, timeout: float, directory: str | Path):
        """Make it, on rank 0. ``bucket_size`` in bytes; ``timeout``: seconds for one request to one server."""

    def __init_subclass__(cls, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name is not None:
            cls.by_name[name] = cls

    @classmethod
    def problems(cls, config: DictConfig) -> Iterator[str]:
        """Yield why ``config`` cannot push by this transport, each with its fix."""
        yield from ()

    async def check_server(self, client: Any) -> None:
        """Raise WeightPushError if a new or restarted server cannot be pushed to."""

    async def stage(self, clients: Sequence[Any], weights: Iterator[tuple[str, Any]], version: int) -> None:
        """Do what can be done before generation is paused; ``weights`` are read here or in ``deliver``."""

    async def deliver(self, clients: Sequence[Any], version: int) -> None:
        """Make every server, all paused if ``pauses``, load the weights and then report the version.

        Raises WeightPushError, naming the server.
        """

    def release(self, version: int) -> None:
        """Clean up once the version is active on every server; here, what was staged is kept for the next one."""


def named_transport(config: DictConfig) -> type[WeightTransport] | None:
    """Return the transport that ``trainer.atropos.weight_sync.transport`` names; None for "auto".

    Raises:
        ConfigurationError: there is none of that name.
    """
    name, known = config.trainer.atropos.weight_sync.transport, WeightTransport.by_name
    if name == "auto":
        return None
    _import_transports(config)
    if name not in known:
        choices = ", ".join(["auto", *sorted(known)])
        raise ConfigurationError(f"trainer.atropos.weight_sync.transport={name}; choose one of {choices}")
    return known[name]


def fastest_transport(shared: bool) -> type[WeightTransport]:
    """Return what "auto" is; ``shared``: trainer and servers are on one machine, and share memory there."""
    return WeightTransport.by_name["tensor" if shared else "distributed"]


def gpu_transport(config: DictConfig) -> type[WeightTransport]:
    """Return the transport of weights to servers on GPUs.

    It is ``WeightTransport`` itself if trainer or servers compute on a CPU, or if only an adapter is sent.
    """
    model = config.actor_rollout_ref.model
    if "cpu" in (config.inference.device, config.trainer.device) or (model.lora_rank > 0 and not model.lora.merge):
        return WeightTransport
    _import_transports(config)
    return named_transport(config) or fastest_transport(config.inference.colocated)


def _import_transports(config: DictConfig) -> None:
    """Import them where they are needed: they import torch and verl, which takes seconds."""
    import_module(config.actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module)
