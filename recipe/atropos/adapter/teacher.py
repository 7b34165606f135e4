"""Teachers: fixes for Atropos' teacher distillation (``TeacherDistillationEnv``), which give the trainer what it needs;
and ``taught_logprobs``, a teacher's opinion of each sampled token, for ``environment.credit.teacher``.

``TeacherFixes`` works around what keeps such environments from running here:

- An environment whose constructor does not accept ``teacher_server_configs``, or passes its arguments on by position
  (``gsm8k_server_teacher_distill``), still gets its teacher.
- The teacher may be an SGLang server (``--teacher.server_type=sglang``); atroposlib supports only vLLM servers.
- Each position has the teacher's ``teacher_top_k`` most likely tokens (at least 1), most likely first. vLLM adds the
  sequence's own token if it is not among them; the trainer rejects positions of different sizes.
- A group whose teacher did not answer is sent without distillation fields, as in Atropos, and is counted as
  ``teacher_missing``.
- ``evaluate`` needs no teacher; ``process`` has none, and fails if one is enabled.
"""

import asyncio
import heapq
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from atroposlib.envs.base import APIServerConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer

from recipe.atropos.adapter.recorded_calls import client_of
from recipe.atropos.credit.group import CreditError, Teacher
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.inference.client import SGLangClient

TopK = tuple[list[list[int]], list[list[float]]]  # token ids and logprobs, [position][rank]


class TeacherFixes:
    """Mixin; must precede a ``TeacherDistillationEnv`` in the MRO, and follow ``AdaptedEnv``."""

    def __init__(self, config: Any, server_configs: Any, *args: Any, teacher_server_configs: Any = None, **kwargs: Any):
        wanted, config.teacher_enabled = config.teacher_enabled, False  # or the constructors in between would fail
        super().__init__(config, server_configs, *args, **kwargs)  # type: ignore[call-arg]  # BaseEnv's
        self.config.teacher_enabled = wanted
        if wanted and teacher_server_configs is not None:
            self._connect_teacher(teacher_server_configs)
        elif wanted and "process" in sys.argv[1:]:
            raise EnvironmentFailure("process asks no teacher: give --env.teacher_enabled=false, or serve")

    def _connect_teacher(self, configs: Any) -> None:
        configs = [configs] if isinstance(configs, APIServerConfig) else configs
        if isinstance(configs, list):  # the openai client rejects an empty key, upstream's default
            configs = [config.model_copy(update={"api_key": config.api_key or "x"}) for config in configs]
        first = configs[0] if isinstance(configs, list) else configs
        name = first.tokenizer_name if first.tokenizer_name not in ("", "none") else first.model_name
        self._validate_teacher_tokenizer_compatibility(name)
        self.teacher_server = ServerManager(configs, slurm=False, testing=False)
        for server in self.teacher_server.servers:
            if isinstance(server, SGLangServer):
                server.config.health_check = False
                server._get_logprobs_wrapper = partial(top_logprobs, server)

    async def _fetch_teacher_for_sequence(self, token_ids: list[int], top_k: int) -> TopK:
        found, logprobs = await super()._fetch_teacher_for_sequence(token_ids, top_k)
        return most_likely(found, logprobs, max(1, top_k))

    async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
        group = await super()._attach_teacher_distillation(group)
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        asked = self.teacher_server is not None and top_k >= 0 and not overrides.get("skip_teacher_top_k", False)
        if asked and not group.get("distill_token_ids"):
            self.report.count("teacher_missing")
        return group


def most_likely(token_ids: list[list[int]], logprobs: list[list[float]], top_k: int) -> TopK:
    """Return the ``top_k`` most likely tokens of each position, most likely first; fewer if there are no more."""
    best = [
        heapq.nlargest(top_k, zip(values, ids, strict=True)) for ids, values in zip(token_ids, logprobs, strict=True)
    ]
    return [[token for _, token in at] for at in best], [[value for value, _ in at] for at in best]


async def top_logprobs(server: SGLangServer, *, input_ids: list[int], top_k: int, **_: Any) -> dict[str, Any]:
    """Return what ``get_logprobs`` returns for vLLM: at position t the candidates for token t, none at 0.

    Raises:
        InferenceError: the request failed; names the server. atroposlib retries such a call.
    """
    meta = await _prompt_logprobs(client_of(server.config), input_ids, top_logprobs_num=max(1, top_k))
    found = meta["input_top_logprobs"]
    return {
        "prompt_tokens": list(input_ids),
        "prompt_topk_token_ids": [[token for _, token, *_ in at or ()] for at in found],
        "prompt_topk_logprobs": [[value for value, *_ in at or ()] for at in found],
    }


async def _prompt_logprobs(client: SGLangClient, ids: Sequence[int], start: int = 0, **fields: Any) -> dict[str, Any]:
    """Return ``meta_info`` of /generate, whose ``input_token_logprobs`` are those of the tokens from ``start`` on, at
    temperature 1 whatever is asked for; that of the token at ``start`` may be None."""
    fields |= {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "logprob_start_len": start}
    return (await client.generate(input_ids=list(ids), **fields))["meta_info"]


async def taught_logprobs(
    teacher: Teacher, group: dict[str, Any], item: Any, tokenizer: Any, policy: Sequence[SGLangServer]
) -> list[list[float]]:
    """Return the teacher's logprob of each token of each sequence of a group; 0 before the first that is trained.

    ``policy``: the policy's own servers, of which the first is asked if there is no other. A hint goes before all
    tokens of a sequence but a first BOS.

    Raises:
        CreditError: the function of ``hint`` raises or returns no text, the key's variable is not set, the policy has
            no server of type sglang, or the teacher has another tokenizer.
        InferenceError: the teacher did not answer.
    """
    function = teacher.function()
    try:
        key = os.environ[teacher.api_key_env] if teacher.api_key_env else None
        before = tokenizer.encode(function(item), add_special_tokens=False) if function else []
    except Exception as error:  # of the variable, or of the function
        raise CreditError(f"environment.credit.teacher={teacher}: {error!r}") from error
    if not (teacher.base_url or policy):
        raise CreditError("environment.credit.teacher: the policy has no server of type sglang; give base_url")
    client = SGLangClient(teacher.base_url, key, own=False) if teacher.base_url else client_of(policy[0].config)

    async def judged(tokens: list[int], masks: list[int]) -> list[float]:
        first = next((start for start, _ in trained_spans(masks)), len(tokens))
        at = int(tokens[:1] == [tokenizer.bos_token_id])  # of the hint
        ids, start = [*tokens[:at], *before, *tokens[at:]], max(0, len(before) + first - 1)
        found = (await _prompt_logprobs(client, ids, start))["input_token_logprobs"]
        return [0.0] * first + [value for value, *_ in found[len(found) - (len(tokens) - first) :]]

    text = tokenizer.decode(group["tokens"][0])
    if teacher.base_url and await client.tokenize(text) != tokenizer.encode(text, add_special_tokens=False):
        raise CreditError(f"environment.credit.teacher.base_url={teacher.base_url}: not the policy's tokenizer")
    return await asyncio.gather(*map(judged, group["tokens"], group["masks"]))
