"""A weight transport in a file of its own, as a user would add one: a single file that the servers read."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig
from safetensors.torch import save_file

from recipe.atropos.config.transports import WeightTransport
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.servers import on_all
from recipe.atropos.weight_sync.transports.bucket import NamedTensors


class PigeonTransport(WeightTransport, name="pigeon"):
    def __init__(self, *, directory: str | Path, **_: object):
        self.folder = Path(directory, "pigeon")

    @classmethod
    def problems(cls, config: DictConfig) -> Iterator[str]:
        if config.inference.colocated:
            yield "inference.colocated=true with trainer.atropos.weight_sync.transport=pigeon: set it to auto"

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.clone() for name, tensor in weights}, self.folder / "model.safetensors")

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        await on_all(clients, "deliver", lambda c: c.update_weights_from_disk(self.folder, version, flush_cache=False))
