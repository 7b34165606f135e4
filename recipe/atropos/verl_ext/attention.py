"""Attention implementation of the trainer's model: FlashAttention if it is installed, else torch's own.

verl packs the rows of a micro-batch into one sequence. FlashAttention takes their boundaries; torch's scaled dot
product takes a mask over all pairs of the micro-batch's tokens, so time and memory grow quadratically with its length:
without FlashAttention, micro-batches are smaller unless their size is given.
verl's Ulysses replaces only FlashAttention's entry point (models/transformers/monkey_patch.py): with any other
attention, each rank would silently attend only to its own part of a sequence.
"""

import importlib.util
from importlib import metadata

from omegaconf import DictConfig, open_dict
from packaging.requirements import Requirement

from recipe.atropos.errors import ConfigurationError

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
FLASH = "flash_attention_2"
INSTALL = "pip install --no-build-isolation flash-attn==2.8.3.post2"  # its build needs the torch that is installed
_TOKENS, _TOKENS_SQUARED = 16384, 4096  # of a micro-batch, with FlashAttention and without


def set_attention(config: DictConfig) -> str | None:
    """Set ``attn_implementation`` and the tokens of a micro-batch unless they are given; return a warning, or None.

    Raises:
        ConfigurationError: FlashAttention is requested by name, or needed by Ulysses, and is not available; the
            installed package ``kernels`` breaks transformers.
    """
    _check_kernels()
    actor, given = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.override_config
    on_gpu, installed = config.trainer.device == "cuda", flash_is_installed()
    chosen = given.get("attn_implementation") or (FLASH if on_gpu and installed else "sdpa")
    is_flash = "flash" in chosen
    if is_flash and not on_gpu:
        raise ConfigurationError(f"{KEY}={chosen} needs a GPU; leave it out, or set it to sdpa")
    if chosen == FLASH and not installed:
        raise ConfigurationError(f"{KEY}={chosen}: flash-attn is not installed; {INSTALL}, or leave it out")
    ranks = sequence_parallel(actor)
    if ranks > 1 and not is_flash:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={ranks} with {KEY}={chosen}: verl divides "
            f"sequences by FlashAttention alone; {INSTALL}, or set it to 1"
        )
    with open_dict(given):
        given.attn_implementation = chosen
    set_micro_batches(config, is_flash)
    if is_flash or not on_gpu:
        return None
    tokens = actor.ppo_max_token_len_per_gpu
    return (
        f"attention by {chosen}: with a mask of {tokens:,} x {tokens:,} tokens (actor.ppo_max_token_len_per_gpu), "
        f"{tokens**2 / 2**20:,.0f} MiB or more, and slower than FlashAttention; {INSTALL}"
    )


def set_micro_batches(config: DictConfig, is_flash: bool) -> None:
    """Set the tokens of a micro-batch where they are null."""
    actor, logprobs = config.actor_rollout_ref.actor, (config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref)
    if actor.ppo_max_token_len_per_gpu is None:
        longest = config.data.max_prompt_length + config.data.max_response_length
        actor.ppo_max_token_len_per_gpu = max(_TOKENS if is_flash else _TOKENS_SQUARED, longest)
    for part in logprobs:  # null in a stored configuration, where the interpolation of the actor's key was resolved
        if part.log_prob_max_token_len_per_gpu is None:
            part.log_prob_max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu


def flash_is_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _check_kernels() -> None:
    """Refuse a package ``kernels`` that transformers does not take: it then fails at every model."""
    try:
        found = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    wanted = [each for each in map(Requirement, metadata.requires("transformers") or ()) if each.name == "kernels"]
    if wanted and found not in wanted[0].specifier:
        raise ConfigurationError(
            f"kernels=={found} is installed, and transformers {metadata.version('transformers')} takes "
            f"kernels{wanted[0].specifier} and fails at every model: pip uninstall kernels"
        )


def sequence_parallel(actor: DictConfig) -> int:
    """Return how many ranks share a sequence; verl reads the older of the two keys first (workers/config/actor.py)."""
    older = actor.ulysses_sequence_parallel_size
    return older if older > 1 else actor.fsdp_config.ulysses_sequence_parallel_size
