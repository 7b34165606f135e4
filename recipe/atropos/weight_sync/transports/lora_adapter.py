"""Adapter-only LoRA sync: every server keeps the base weights that it started with.

    stage -> deliver -> verify -> resume        (``push``, without its pause and flush)

- Each push adds an adapter under a new name and changes no running request: a request continues with the adapter that
  it began with, and adapters never share cached keys (SGLang separates them by an id that it creates for each load). So
  there is nothing to pause and no cache to flush.
- No server reports the version before all hold the adapter. Requests use it once the gateway names it to the servers,
  which is after the push; a failed push affects no request.
- A server keeps as many adapters as it was started for, and evicts the least recently used. It waits for the requests
  of that adapter, and so does the push.

An adapter could not be replaced under the same name: SGLang waits for every request that uses the old one, including
those that a pause holds back.
"""

import base64
import pickle
from collections.abc import Sequence
from os.path import realpath
from typing import Any

import torch

from recipe.atropos.config.transports import WeightTransport
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.lora_routing import ADAPTERS_KEPT
from recipe.atropos.tensors.format import FUSED
from recipe.atropos.weight_sync.servers import WeightPushError, on_all
from recipe.atropos.weight_sync.transports.bucket import NamedTensors

_LEAST_KEPT = 3  # the active adapter, the next, and one with requests that began earlier
ADAPTER_PREFIX = "policy-"  # of the names that pushes give to adapters
_COMPUTED_AS = {part: fused for fused, parts in FUSED.items() for part in parts}


class AdapterTransport(WeightTransport):
    """Sends the adapter's tensors in the request that loads them, and so reaches servers on other machines too.

    ``model_path``: the trainer's base model; ``proven``: a probe checks each server's logprobs, so its base model may
    have another path.
    """

    pauses = False

    def __init__(self, model_path: str | None, proven: bool):
        self.model_path = model_path
        self.proven = proven
        self._tensors: dict[str, torch.Tensor] = {}

    async def stage(self, clients: Sequence[SGLangClient], weights: NamedTensors, version: int) -> None:
        """Copy A, (r, in), and B, (out, r), which includes the scaling, under PEFT's names, to the CPU; check that the
        servers have room.

        Raises:
            WeightPushError: a server has no room for the adapter.
        """
        self._tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
        await on_all(clients, "check", self._check)

    async def deliver(self, clients: Sequence[SGLangClient], version: int) -> None:
        """Load the adapter on all servers. Raises WeightPushError if one did not load it."""
        body = {
            "lora_name": self.adapter,
            "config_dict": self._config(),
            # Every rank of a server gets the same and takes its own part.
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(self._tensors)).decode()],
        }

        async def load(client: SGLangClient) -> None:
            if self.adapter in await client.adapters():  # loaded by an attempt that failed on another server
                return
            ranks = (await client.capabilities()).arguments.get("tp_size", 1)
            await client.post(
                "/load_lora_adapter_from_tensors",
                body | {"serialized_named_tensors": body["serialized_named_tensors"] * ranks},
            )

        carried = {"new_version": str(version), "abort_all_requests": False}
        await on_all(clients, "deliver", load)
        await on_all(clients, "deliver", lambda client: client.post("/update_weight_version", carried))

    def release(self, version: int) -> None:
        self._tensors = {}

    async def check_server(self, client: SGLangClient) -> None:
        """Check that a new or restarted server has the base weights and keeps adapters.

        Raises:
            WeightPushError: names the server, the problem, and the fix.
        """
        capabilities = await client.capabilities()
        arguments, info = capabilities.arguments, await client.model_info()
        if not capabilities.forgets_adapters:
            raise WeightPushError(
                f"{client.url} runs SGLang {capabilities.version}, which never lets go of an adapter that was asked "
                "for several answers at once, as environments ask: run SGLang 0.5.22 or later, or set "
                "actor_rollout_ref.model.lora.merge=true"
            )
        most = arguments.get("max_loaded_loras")
        if not arguments.get("enable_lora") or most is None or most < _LEAST_KEPT or arguments.get("dp_size", 1) != 1:
            raise WeightPushError(
                f"{client.url} keeps no adapters for actor_rollout_ref.model.lora.merge=false (enable_lora="
                f"{arguments.get('enable_lora')}, max_loaded_loras={most}, dp_size={arguments.get('dp_size', 1)}): "
                f"start it with --enable-lora --max-loras-per-batch {ADAPTERS_KEPT} --max-loaded-loras "
                f"{ADAPTERS_KEPT} and without data parallelism, or set lora.merge=true"
            )
        version = info.get("weight_version")
        if str(version).isdigit() and not any(name.startswith(ADAPTER_PREFIX) for name in await client.adapters()):
            raise WeightPushError(
                f"{client.url} has weights of version {version} that were pushed whole, not the base weights of "
                f"{self.model_path}: start it again"
            )
        served = str(info.get("model_path"))
        if self.model_path and realpath(served) != realpath(self.model_path) and not self.proven:
            raise WeightPushError(
                f"{client.url} serves {served}, the trainer's base model is {self.model_path}: whether their weights "
                "are the same cannot be seen, and they are not pushed with actor_rollout_ref.model.lora.merge=false; "
                "start it with the same path, or set trainer.atropos.weight_sync.verify=probe"
            )

    async def _check(self, client: SGLangClient) -> None:
        """Check that the server's LoRA rank and target modules can hold the adapter: else SGLang would crash."""
        arguments, config = (await client.capabilities()).arguments, self._config()
        targets, rank = arguments.get("lora_target_modules") or [], arguments.get("max_lora_rank") or 0
        lacking = _computed(config["target_modules"]) - _computed(targets)
        if rank < config["r"] or (lacking and "all" not in targets):
            wanted = f"--max-lora-rank {config['r']} --lora-target-modules {' '.join(config['target_modules'])}"
            raise WeightPushError(
                f"{client.url} has no room for the adapter: it has max_lora_rank={rank}, lora_target_modules="
                f"{sorted(targets)}; start it with {wanted}"
            )

    def _config(self) -> dict[str, Any]:
        """Return the PEFT configuration of the tensors; alpha is r, since the scaling is in B already."""
        rank = max(len(tensor) for name, tensor in self._tensors.items() if name.endswith(".lora_A.weight"))
        modules = sorted({name.split(".")[-3] for name in self._tensors})
        return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}


def _computed(modules: Sequence[str]) -> set[str]:
    return {_COMPUTED_AS.get(module, module) for module in modules}
