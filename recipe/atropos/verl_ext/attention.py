"""Attention implementation of the trainer's model: FlashAttention if it is installed, else torch's own.

verl packs the rows of a micro-batch into one sequence. FlashAttention takes their boundaries; torch's scaled dot
product takes a mask over all pairs of the micro-batch's tokens, so time and memory grow quadratically with its length.
verl's Ulysses replaces only FlashAttention's entry point (models/transformers/monkey_patch.py): with any other
attention, each rank would silently attend only to its own part of a sequence.
"""

import importlib.util
from pathlib import Path

from omegaconf import DictConfig, open_dict

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.gpus import device_of

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
FLASH = "flash_attention_2"
_KERNEL = "models--kernels-community--flash-attn2"  # its folder in the hub's cache; the kernel that transformers uses


def set_attention(config: DictConfig) -> str | None:
    """Set ``attn_implementation`` unless it is given; return a warning for the user, or None.

    Raises:
        ConfigurationError: FlashAttention is requested by name, or needed by Ulysses, and is not available.
    """
    actor, given = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.override_config
    on_gpu, installed = device_of(config) == "cuda", _flash_is_installed()
    chosen = given.get("attn_implementation") or (FLASH if on_gpu and installed else "sdpa")
    is_flash = "flash" in chosen
    if is_flash and not on_gpu:
        raise ConfigurationError(f"{KEY}={chosen} needs a GPU; leave it out, or set it to sdpa")
    if chosen == FLASH and not installed:
        raise ConfigurationError(
            f"{KEY}={chosen}: neither flash-attn nor kernels is installed, or kernels has none in the hub's cache and "
            "HF_HUB_OFFLINE is set; pip install kernels (compiled), or flash-attn (to compile), or leave it out"
        )
    ranks = sequence_parallel(actor)
    if ranks > 1 and not is_flash:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={ranks} with {KEY}={chosen}: verl divides "
            "sequences by FlashAttention alone; pip install kernels, or set it to 1"
        )
    with open_dict(given):
        given.attn_implementation = chosen
    if is_flash or not on_gpu:
        return None
    tokens = actor.ppo_max_token_len_per_gpu
    return (
        f"attention by {chosen}: with a mask of {tokens:,} x {tokens:,} tokens (actor.ppo_max_token_len_per_gpu), "
        f"{tokens**2 / 2**20:,.0f} MiB or more, and slower than FlashAttention; pip install kernels"
    )


def _flash_is_installed() -> bool:
    """Return whether flash-attn is installed, or kernels, which gets a compiled kernel from the hub or its cache."""
    if importlib.util.find_spec("flash_attn"):
        return True
    if not importlib.util.find_spec("kernels"):
        return False
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE or Path(constants.HF_HUB_CACHE, _KERNEL).is_dir()


def sequence_parallel(actor: DictConfig) -> int:
    """Return how many ranks share a sequence; verl reads the older of the two keys first (workers/config/actor.py)."""
    older = actor.ulysses_sequence_parallel_size
    return older if older > 1 else actor.fsdp_config.ulysses_sequence_parallel_size
