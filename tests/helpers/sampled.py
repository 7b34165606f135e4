"""What the tests of sampled tokens share: a policy that writes the same text by many tokens, and a scripted BaseEnv."""

import asyncio
import copy
import itertools
from collections import Counter

import numpy as np
import torch
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from helpers.sglang import make_tiny_model
from random_models import CHAT_TEMPLATE, SPECIAL_TOKENS
from recipe.atropos.adapter.adapted_env import adapt
from recipe.atropos.adapter.restore import restore
from recipe.atropos.data.rows import trained_spans

I = -100  # noqa: E741
END = 2  # <|im_end|>
LETTERS = "abcde"


def make_drifting_model(path):
    """A tiny model that writes the letters a to e and pairs of them, each a token: many token lists have one text.

    It ends its turn after some ten tokens. A constant first coordinate of the embeddings makes that bias.
    """
    pairs = [a + b for a, b in itertools.product(LETTERS, repeat=2)]
    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs]
    make_tiny_model(path, seed=0, vocab_size=len(vocabulary))
    ids = {token: i for i, token in enumerate(vocabulary)}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _tokenizer(ids, [(a, b) for a, b in pairs], split).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 100.0
    liked = [END, *(ids[token] for token in (*LETTERS, *pairs, "Ġ"))]
    weights["lm_head.weight"][:, 0] = -0.5
    weights["lm_head.weight"][liked, 0] = 0.5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def merging_tokenizer():
    """One that splits text as Qwen's does, and merges newlines and pairs of letters: to tokens of lower ids."""
    merges = [*itertools.product(LETTERS, repeat=2), ("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ġ", "Ċ")]
    vocabulary = [*SPECIAL_TOKENS, *(a + b for a, b in merges), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Regex(r"[^\r\n\p{L}]?\p{L}+| ?[^\s\p{L}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), by_byte])
    return _tokenizer({token: i for i, token in enumerate(vocabulary)}, merges, split)


def _tokenizer(ids, merges, split):
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[END],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )


class Scripted(BaseEnv):
    """A BaseEnv as upstream's are; it keeps what it would post."""

    name = "scripted"

    async def setup(self): ...

    async def get_next_item(self): ...

    async def evaluate(self, *args, **kwargs): ...

    sent = None

    def keep(self, group):
        self.sent = group

    def group(self, rows, **fields):
        tokens, masks = zip(*((row["tokens"], row["masks"]) for row in rows), strict=True)
        scores = [float(i) for i in range(len(rows))]
        return ScoredDataGroup(tokens=list(tokens), masks=list(masks), scores=scores, group_overrides={}, **fields)


def sampled(cache, prompt, *parts, text=None, first=-0.5):
    """A reply of these parts to a prompt, remembered."""
    tokens = ids_of(cache.tokenizer, *parts)
    logprobs = [first - 0.01 * i for i in range(len(tokens))]
    return cache.add(np.array(prompt, np.int32), tokens, logprobs, text)


def with_bos(tokenizer):
    """One that begins each text that it encodes with a BOS token, as Llama's do."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = SPECIAL_TOKENS[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[0]} $A", special_tokens=[(SPECIAL_TOKENS[0], 0)]
    )
    return tokenizer


def make(script, model_path, url="http://127.0.0.1:1", group_size=4, server_type="sglang"):
    """``script``, adapted."""

    async def _send_scored_data_to_api(self, scored_data):
        self.keep(scored_data)

    environment = type(script.__name__, (adapt(script),), {"_send_scored_data_to_api": _send_scored_data_to_api})
    server = APIServerConfig(
        model_name=str(model_path), base_url=f"{url}/v1", api_key="x", server_type=server_type, health_check=False
    )
    config = BaseEnvConfig(tokenizer_name=str(model_path), group_size=group_size, use_wandb=False)
    return environment(config, [server])


def round_of(env, item="item"):
    """The group that one item gives, as BaseEnv handles it."""
    env.running_items["x"] = {"item": item}
    asyncio.run(env.handle_env("x"))
    return env.sent


def assert_as_sampled(group, model_path, replies=None, temperature=1.0):
    """Every trained span is a whole reply, with the logprobs that the policy gives it in the posted context.

    A reply that the environment went on after is without its end of turn. ``replies``: all there were, if known.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        spans = [tuple(tokens[a:b]) for a, b in trained_spans(masks)]
        whole = replies is None or all(span in replies or (*span, END) in replies for span in spans)
        assert whole, "a trained span is no whole reply"
        with torch.no_grad():
            scores = (model(torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)
        expected = [1.0, *(scores[i - 1, token].item() for i, token in enumerate(tokens) if i)]
        expected = [value if mask != I else 1.0 for value, mask in zip(expected, masks, strict=True)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        assert [m for m in masks if m != I] == [t for t, m in zip(tokens, masks, strict=True) if m != I]


def chat(tokenizer, *texts, add_generation_prompt=True):
    """User and assistant in turn, as token ids."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False))


def ids_of(tokenizer, *parts):
    """Strings encoded each by itself, and token ids."""
    return [i for part in parts for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]


def restored(cache, posted, masks, given=None, **values):
    """(row, counts) of a posted sequence; ``masks``: as posted, or where training on it begins."""
    counts = Counter()
    if isinstance(masks, int):
        masks = [I] * masks + posted[masks:]
    return restore(cache, posted, masks, given, values, counts), counts


def trained(row):
    return [mask for mask in row.masks if mask != I]


def three_rows(**changes):
    """A group of these tokens: 5, 6 once alone and once before 7, and 8."""
    return {
        "tokens": [[1, 2, 5, 6], [1, 2, 5, 6, 9, 7], [1, 2, 8]],
        "masks": [[I, I, 5, 6], [I, I, 5, 6, I, 7], [I, I, 8]],
        "inference_logprobs": [[1.0, 1.0, -0.1, -0.2], [1.0, 1.0, -0.3, -0.4, 1.0, -0.5], [1.0, 1.0, -0.6]],
        "scores": [0.0, 1.0, 2.0],
    } | changes
