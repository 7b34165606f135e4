"""Proof that a server computes with the pushed weights: it samples, and the trainer computes the same logprobs.

A version is only a number that the server echoes. It is the same after a push that left out a tensor, and after one
that left keys of the old weights in the cache. The probe detects both: its prompt is always the same, so keys of it
that are left in the cache are reused, and the logprobs of the sampled tokens must match the trainer's.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from recipe.atropos.data.rows import Row
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.weight_sync.fleet import ServerFleet
from recipe.atropos.weight_sync.servers import WeightPushError, check_phase

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 48
_NEW_TOKENS = 16
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # nats, mean absolute difference over the new tokens


def probe_servers(
    version: int,
    urls: Sequence[str],
    adapter: str | None = None,
    *,
    fleet: ServerFleet,
    vocab_size: int,
    dtype: str,
    temperature: float,
    compute: Callable[[list[Row]], torch.Tensor],
) -> dict[str, float]:
    """Probe the servers of ``urls``; ``compute`` gives the trainer's logprobs, (B, R), of the rows' responses.

    ``adapter``: its name on the servers, if one was pushed. ``dtype``, that of the served weights, sets the tolerance
    on logprobs. Returns the largest difference of any server, its mean over tokens in nats, as a metric.

    Raises:
        WeightPushError: a server's logprobs differ from the trainer's, after which all servers are left paused, or it
            does not answer; names it.
    """
    rows = sample(urls, fleet, vocab_size, temperature, adapter)
    engine = torch.from_numpy(np.stack([row.log_probs for row in rows]))
    gaps = (compute(rows) - engine).abs().mean(-1).tolist()
    tolerance = TOLERANCE[dtype]
    wrong = [f"{row.uid} (by {gap:.2g})" for row, gap in zip(rows, gaps, strict=True) if not gap <= tolerance]
    if wrong:
        for answer in fleet.ask(lambda client: client.pause("auto"), urls).values():
            if answer is not None:
                logger.error("not paused: %s", answer)
        raise WeightPushError(
            f"servers report version {version} but compute with other weights, or with keys of older ones: "
            f"logprobs differ from the trainer's by more than {tolerance:g} nats in the mean on {', '.join(wrong)}"
        )
    return {"weight_sync/probe_gap": max(gaps)}


def sample(
    urls: Sequence[str], fleet: ServerFleet, vocab_size: int, temperature: float, adapter: str | None = None
) -> list[Row]:
    """Return what each server samples after the prompt, as a row with the engine's logprobs; ``uid``: its URL.

    The prompt is the same for every push, and from the whole vocabulary, so that many embedding rows are checked.

    Raises:
        WeightPushError: a server does not answer.
    """
    prompt = np.random.default_rng(0).integers(0, vocab_size, _PROMPT_TOKENS)
    parameters = {"temperature": temperature, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}

    async def ask(client: SGLangClient) -> Row:
        reply = await client.generate(input_ids=prompt.tolist(), sampling_params=parameters, lora_path=adapter)
        sampled = reply["meta_info"]["output_token_logprobs"]
        return Row(
            prompt=prompt,
            response=np.array([token for _, token, *_ in sampled]),
            mask=np.ones(len(sampled), dtype=bool),
            score=0.0,
            uid=client.url,
            log_probs=np.array([value for value, *_ in sampled], dtype=np.float32),
        )

    rows = fleet.ask(ask, urls)
    check_phase("probe", rows)
    return list(rows.values())
