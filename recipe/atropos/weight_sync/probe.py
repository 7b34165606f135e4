"""Proof that a server computes with the pushed weights: it samples, and the trainer computes the same logprobs.

A version is only a number that the server echoes. It is the same after a push that left out a tensor, and after one
that left keys of the old weights in the cache. The probe detects both: its prompt is always the same, so keys of it
that are left in the cache are reused, and the logprobs of the sampled tokens must match the trainer's.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from recipe.atropos.data.rows import Row
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.weight_sync.fleet import ServerFleet
from recipe.atropos.weight_sync.servers import WeightPushError

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 48
_NEW_TOKENS = 16
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # nats, mean absolute difference over the new tokens


@dataclass(frozen=True)
class Probe:
    """Probe of a push's servers; ``dtype``, that of the served weights, sets the tolerance on logprobs."""

    fleet: ServerFleet
    vocab_size: int
    dtype: str
    temperature: float

    @property
    def prompt(self) -> list[int]:
        """Token ids, the same for every push; from the whole vocabulary, so that many embedding rows are checked."""
        return np.random.default_rng(0).integers(0, self.vocab_size, _PROMPT_TOKENS).tolist()

    def verify(
        self, version: int, urls: Sequence[str], compute: Callable[[list[Row]], torch.Tensor]
    ) -> dict[str, float]:
        """Probe the servers of ``urls``; ``compute`` gives the trainer's logprobs, (B, R), of the rows' responses.

        Returns the largest difference of any server, its mean over tokens in nats, as a metric.

        Raises:
            WeightPushError: a server's logprobs differ from the trainer's; names it. All servers are left paused.
            InferenceError: a server does not answer.
        """
        rows = self.ask(urls)
        engine = torch.from_numpy(np.stack([row.log_probs for row in rows]))
        gaps = (compute(rows) - engine).abs().mean(-1).tolist()
        tolerance = TOLERANCE[self.dtype]
        wrong = [f"{row.uid} (by {gap:.2g})" for row, gap in zip(rows, gaps, strict=True) if not gap <= tolerance]
        if wrong:
            for answer in self.fleet.ask(lambda client: client.pause("auto"), urls).values():
                if answer is not None:
                    logger.error("not paused: %s", answer)
            raise WeightPushError(
                f"servers report version {version} but compute with other weights, or with keys of older ones: "
                f"logprobs differ from the trainer's by more than {tolerance:g} nats in the mean on {', '.join(wrong)}"
            )
        return {"weight_sync/probe_gap": max(gaps)}

    def ask(self, urls: Sequence[str]) -> list[Row]:
        """Return what each server samples after the prompt, as a row with the engine's logprobs; ``uid``: its URL.

        Raises:
            InferenceError: a server does not answer.
        """
        rows = list(self.fleet.ask(self._sample, urls).values())
        for row in rows:
            if isinstance(row, InferenceError):
                raise row
        return rows

    async def _sample(self, client: SGLangClient) -> Row:
        parameters = {"temperature": self.temperature, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
        reply = await client.generate(
            input_ids=self.prompt, sampling_params=parameters, lora_path=self.fleet.next_adapter
        )
        sampled = reply["meta_info"]["output_token_logprobs"]
        return Row(
            prompt=np.array(self.prompt),
            response=np.array([token for _, token, *_ in sampled]),
            mask=np.ones(len(sampled), dtype=bool),
            score=0.0,
            uid=client.url,
            log_probs=np.array([value for value, *_ in sampled], dtype=np.float32),
        )
