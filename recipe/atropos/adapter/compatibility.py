"""Check an environment against the trainer and the policy: group size and length, and one tokenizer on both sides."""

import contextlib
import logging
from itertools import count
from typing import Any

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer

from recipe.atropos.adapter.recorded_calls import client_of
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.inference.client import InferenceError

logger = logging.getLogger(__name__)

_ANSWER = 10.0  # s for the server to answer
_PROBE = "Solve 12 + 7 = 19 \\boxed{19}, naïvely.\n\tdef f(x): return [x] # 日本 🙂"


def check_sizes(config: BaseEnvConfig, max_token_len: int) -> None:
    """Check an environment's group size and length (tokens) against what the trainer told the Trajectory API, its
    ``config.batch_size`` and ``max_token_len``; -1 means unknown, and passes.

    Raises:
        EnvironmentFailure: groups never fill a batch exactly, or sequences may be longer than the trainer accepts.
    """
    group_size, batch_size, api_url = config.group_size, config.batch_size, config.rollout_server_url
    length = config.max_token_length
    if batch_size > 0 and batch_size % group_size:
        fitting = ", ".join(str(n) for n in range(2, min(batch_size, 64) + 1) if batch_size % n == 0)
        raise EnvironmentFailure(
            f"--env.group_size={group_size}: groups of {group_size} never fill the trainer's batch of {batch_size} "
            f"sequences exactly (from {api_url}); give one of {fitting}, or change the trainer's batch"
        )
    if 0 < max_token_len < length:
        raise EnvironmentFailure(
            f"--env.max_token_length={length} is more than the {max_token_len} tokens that the trainer takes "
            f"(from {api_url}): longer sequences would be dropped; give --env.max_token_length={max_token_len}, or "
            "raise the trainer's prompt and response lengths"
        )


async def check_tokenizer(server: SGLangServer, tokenizer: Any, name: str) -> bool:
    """Check the environment's tokenizer, called ``name``, and the server handle's against the policy's.

    Returns False while the server does not answer; with one that does not support the request, only warns.

    Raises:
        EnvironmentFailure: one of them encodes a probe text differently from the server.
    """
    text = _PROBE
    if getattr(tokenizer, "chat_template", None):
        with contextlib.suppress(Exception):  # some templates need more than one user message
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    try:
        async with client_of(server, _ANSWER) as client:
            theirs = await client.tokenize(text)
            info = await client.model_info()
    except InferenceError as error:
        if error.status not in (400, 404, 405, 422, 501):
            return False
        logger.warning("tokenizers are not compared: %s", error)
        return True
    policy = info.get("tokenizer_path") or info.get("model_path")
    key = "model_name" if server.config.tokenizer_name == "none" else "tokenizer_name"
    handle = (f"--openai.{key}", getattr(server.config, key), server.tokenizer)
    for flag, named, used in (("--env.tokenizer_name", name, tokenizer), handle):
        ours = used.encode(text, add_special_tokens=False)
        if ours != theirs:
            i = next(i for i in count() if ours[i : i + 1] != theirs[i : i + 1])
            raise EnvironmentFailure(
                f"{flag}={named} is not the tokenizer of the policy at {client.url}, which is {policy}: they encode a "
                f"text as {ours[i : i + 5]} and {theirs[i : i + 5]}, from token {i} on; give {flag}={policy}"
            )
    return True
