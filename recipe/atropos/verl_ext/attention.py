"""Which attention the trainer's model computes with: FlashAttention where it is installed, else torch's own.

verl packs the rows of a micro-batch one behind the other. FlashAttention takes their boundaries; torch's scaled dot
product takes a mask over all pairs of the micro-batch's tokens, so that time and memory grow with its square.
verl's Ulysses replaces FlashAttention's entry point alone (models/transformers/monkey_patch.py): with any other
attention each rank would silently see its own part of a sequence only.
"""

import importlib.util
from pathlib import Path

from omegaconf import DictConfig, open_dict

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.gpus import device_of

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
FLASH = "flash_attention_2"
_KERNEL = "models--kernels-community--flash-attn2"  # its folder in the hub's cache; transformers' own choice


def set_attention(config: DictConfig) -> str | None:
    """Set ``attn_implementation``, unless it is given; returns what the user should know of it, if anything.

    Raises:
        ConfigurationError: FlashAttention is asked for, by name or by Ulysses, and cannot be had.
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
    """flash-attn; or kernels, with which transformers takes a compiled kernel of the hub's cache, or fetches it."""
    if importlib.util.find_spec("flash_attn"):
        return True
    if not importlib.util.find_spec("kernels"):
        return False
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE or Path(constants.HF_HUB_CACHE, _KERNEL).is_dir()


def sequence_parallel(actor: DictConfig) -> int:
    """Ranks that share a sequence: verl reads the older of the two keys first (workers/config/actor.py)."""
    older = actor.ulysses_sequence_parallel_size
    return older if older > 1 else actor.fsdp_config.ulysses_sequence_parallel_size
