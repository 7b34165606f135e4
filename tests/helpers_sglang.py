"""A real SGLang server over a model small enough for two CPU cores; for every test that needs an inference engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.server import SGLangLaunch, start_sglang, wait_until_serving
from recipe.atropos.services.process import Service

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(path: Path | str, seed: int, model_type: str = "qwen2", **config: Any) -> Path:
    """Write a random float32 model (2 layers, 128 wide, vocabulary 259) and its tokenizer into `path`; return it.

    The tokenizer has one token a byte, after the three special ones. It is a byte-level BPE because AutoTokenizer, in
    transformers 5, reads the tokenizer of any Qwen2 folder as one: a WordLevel one turns every text into no tokens at
    all, and a prompt of no tokens kills SGLang's scheduler.

    Two seeds give two models of one architecture, so one's weights can be pushed over the other's. The weights are wide
    (std 0.2) so that their greedy outputs differ. Keyword arguments change its configuration.
    """
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    path = Path(path)
    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = AutoConfig.for_model(model_type, **(settings | config))
        AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(path)

    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return path


@contextlib.contextmanager
def running_sglang(model_path: Path | str, *, timeout: float = 240.0, **launch: Any) -> Iterator[tuple[Service, str]]:
    """A healthy CPU server of `model_path` in float32, with its url; ended afterwards, with all its processes.

    Keyword arguments are those of SGLangLaunch, and `log_path` (a file beside the model by default).
    """
    log_path = launch.pop("log_path", Path(model_path).parent / "sglang.log")
    defaults = {"device": "cpu", "dtype": "float32", "max_total_tokens": 16384}
    service = start_sglang(SGLangLaunch(str(model_path), **(defaults | launch)), log_path=log_path)
    try:
        asyncio.run(wait_until_serving(service, timeout))
        yield service, service.url
    finally:
        service.stop(grace=1)  # it would take its time, and nobody waits for anything of it


def call(url: str, action: Callable[[SGLangClient], Awaitable[Any]], timeout: float = 30) -> Any:
    """What ``action`` returns of a client that is open for it alone; ``timeout`` in seconds."""

    async def inner() -> Any:
        async with SGLangClient(url, timeout=timeout) as client:
            return await action(client)

    return asyncio.run(inner())


@cache
def can_checksum(url):
    """SGLang 0.5.12 cannot, on a CPU."""
    try:
        call(url, lambda client: client.post("/weights_checker", {"action": "checksum"}))
    except InferenceError:
        return False
    return True
