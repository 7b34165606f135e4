"""Pushes of FSDP weights to all SGLang servers.

Importing this package registers verl's checkpoint engine "atropos" and the transports.

- ``engine``: the interface to verl; runs on each rank.
- ``push``: the protocol of every push; runs on rank 0.
- ``names``: checks that a push holds every tensor of the served checkpoint.
- ``disk``, ``distributed``, ``tensor``: the transports. ``bucket``: what the last two send.
- ``lora_adapter``: adapter-only LoRA sync.
- ``manager``: the trainer's side; tracks the active version.
- ``fleet``: which servers answer, and which of them the gateway admits.
"""

from importlib import import_module
from pkgutil import iter_modules

from recipe.atropos.weight_sync import engine, transports  # noqa: F401  (the engine registers itself)

for module in iter_modules(transports.__path__, f"{transports.__name__}."):
    import_module(module.name)
