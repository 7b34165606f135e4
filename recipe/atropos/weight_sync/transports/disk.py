"""Weight transport through a folder that the trainer's rank 0 and every server can read.

A version appears completely or not at all. Only the active version is kept; a failed write leaves nothing behind.
Nothing outside the subfolder ``weight_versions`` is touched, since the folder given may hold other things.
One trainer at a time has the folder: another's version 7 would be loaded as this one's.
"""

import fcntl
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from recipe.atropos.config.transports import WeightTransport
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.utils.files import PARTIAL, remove_partial, replace_folder
from recipe.atropos.weight_sync.servers import WeightPushError, on_all
from recipe.atropos.weight_sync.transports.bucket import NamedTensors


class DiskTransport(WeightTransport, name="disk"):
    """Writes safetensors files, each closed once it holds ``bucket_size`` bytes or more."""

    def __init__(self, *, directory: str | Path, bucket_size: int, **_: object):
        self.directory = Path(directory).resolve() / "weight_versions"
        self.bucket_size = bucket_size
        self._lock: IO[bytes] | None = None

    def path(self, version: int) -> Path:
        return self.directory / f"version_{version}"

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        """Write the version. Raises WeightPushError (no space, no permission, another run's folder), and leaves nothing
        half-written.
        """
        try:
            self._take_folder()
            for left in self.directory.glob(f".version_*{PARTIAL}"):  # left by a process that was killed while writing
                remove_partial(left)
            with replace_folder(self.path(version)) as folder:
                n_files, bucket, bucket_bytes = 0, {}, 0
                for name, tensor in weights:
                    tensor = tensor.detach().to("cpu").contiguous()
                    if any(tensor.data_ptr() == other.data_ptr() for other in bucket.values()):
                        tensor = tensor.clone()  # safetensors refuses tensors that share memory, as tied ones do
                    bucket[name] = tensor
                    bucket_bytes += tensor.nbytes
                    if bucket_bytes >= self.bucket_size:
                        n_files += 1
                        _save(bucket, folder, n_files)
                        bucket, bucket_bytes = {}, 0
                if bucket:
                    _save(bucket, folder, n_files + 1)
        except (OSError, SafetensorError) as error:
            why = "another run has it" if isinstance(error, BlockingIOError) else error
            raise WeightPushError(
                f"version {version} cannot be written to {self.directory}: {why}; make room for it there, name "
                "another folder by trainer.atropos.weight_sync.directory, or set weight_sync.transport=distributed"
            ) from error

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        """Load the version on all servers. Raises WeightPushError if one cannot see or load the folder."""

        async def load(client: SGLangClient) -> None:
            try:
                await client.update_weights_from_disk(self.path(version), str(version), flush_cache=False)
            except InferenceError as error:
                if error.status is None:
                    raise
                raise WeightPushError(
                    f"{error}. Is {self.directory} a folder that this server can read? Else name one by "
                    "trainer.atropos.weight_sync.directory, or set weight_sync.transport=distributed"
                ) from error

        await on_all(clients, "deliver", load)

    @retry(
        retry=retry_if_exception_type(BlockingIOError),
        wait=wait_fixed(0.2),
        stop=stop_after_delay(30.0),  # in which the rank of a killed trainer exits
        reraise=True,
    )
    def _take_folder(self) -> None:
        """Lock the folder for as long as this object lives. Raises BlockingIOError if another one has it."""
        if self._lock is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = (self.directory / ".lock").open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, version: int) -> None:
        for other in self.directory.glob("version_*"):
            if re.fullmatch(r"version_\d+", other.name) and other != self.path(version):
                shutil.rmtree(other, ignore_errors=True)


def _save(bucket: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    save_file(bucket, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
