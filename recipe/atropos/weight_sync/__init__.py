"""From FSDP weights to every SGLang server. Importing this package registers the checkpoint engine "atropos" with verl.

- ``engine``: verl's seam; on each rank.
- ``push``: the protocol that every push keeps; on rank 0.
- ``names``: whether a push holds every tensor of the served checkpoint.
- ``disk``, ``distributed``, ``tensor``: the transports. ``bucket``: what the last two send.
- ``adapter``: a LoRA adapter by itself.
- ``manager``: the trainer's side; the active version.
- ``fleet``: the servers, which come and go; who of them the gateway admits.
"""

from recipe.atropos.weight_sync.engine import AtroposCheckpointEngine
from recipe.atropos.weight_sync.manager import WeightSyncManager

__all__ = ["AtroposCheckpointEngine", "WeightSyncManager"]
