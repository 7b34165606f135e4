r"""The demonstration's policy, made from scratch.

    python -m recipe.atropos.demo.policies small-policy [--seed N]

A Qwen2 of about half a million parameters with its own tokenizer, trained for a minute or two on generated word
problems (``environments.word_problems``, train split). The training data is flawed on purpose, like the texts from
which large models learn: if something is given away, lost or sold, most solutions add instead of subtracting. So the
policy can add and subtract, usually picks the wrong operation for such problems, and gets about 40% of held-out
problems right with greedy decoding. Reinforcement learning has to correct a habit, not to teach arithmetic.

Deterministic for a seed on one machine. ``ensure_small_policy`` caches the result by seed and recipe. The recipe
defines the training data; ``policies`` has other recipes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from recipe.atropos.environments.word_problems import generate
from recipe.atropos.utils.files import cache_root, replace_folder

if TYPE_CHECKING:  # imported where they are used: finding a policy in the cache must not wait for torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

Chat = list[dict[str, str]]

# ChatML, as Qwen2 has it: of all models that are made from scratch.
SPECIAL_TOKENS = PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen2's own pattern: AutoTokenizer applies it to every Qwen2 folder. Each digit is a separate token.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the policy, except the code.

    ``wrong_operation`` is the share of flawed solutions.
    """

    name: ClassVar[str] = "small-policy"
    positions: ClassVar[int] = 512  # tokens of a conversation, at most

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    steps: int = 700
    batch_size: int = 64
    learning_rate: float = 2e-3
    wrong_operation: float = 0.6
    problems: int = 20_000
    vocabulary: int = 512
    version: int = 1  # increase it when a code change alters the policy

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        """Return the training conversations: the assistant's messages are learned, without their ``given`` part."""
        return [
            [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": solution(row, rng, self.wrong_operation)},
            ]
            for row in generate("train", self.problems, seed)
        ]

    def tokenizer(self, texts: list[str]) -> PreTrainedTokenizerFast:
        """Return the policy's tokenizer, made for such texts."""
        return make_tokenizer(texts, self.vocabulary)


def shown_sum(row: dict[str, str], rng: random.Random, wrong_operation: float) -> tuple[str, str]:
    """Return ``12 + 7 = 19`` and its result; for a subtraction often the sum."""
    a, operator, b, result = re.search(r"<<(\d+)([-+])(\d+)=(\d+)>>", row["answer"]).groups()
    if operator == "-" and rng.random() < wrong_operation:
        operator, result = "+", str(int(a) + int(b))
    return f"{a} {operator} {b} = {result}", result


def solution(row: dict[str, str], rng: random.Random, wrong_operation: float) -> str:
    r"""Return the training text for a problem: ``12 + 7 = 19 \boxed{19}``."""
    shown, result = shown_sum(row, rng, wrong_operation)
    return rf"{shown} \boxed{{{result}}}"


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: lossless on any text, the problems' words one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, model_max_length=512
    )


def make_small_policy(output: Path, seed: int = 0, recipe: Recipe = Recipe()) -> None:  # noqa: B008
    """Train the policy and save it with its tokenizer in Hugging Face format."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    rng = random.Random(f"small policy, {seed}")
    chats = recipe.chats(seed, rng)
    texts = [message["content"] for chat in chats for message in chat]
    roles = {"system", "user", "assistant"} | {message["role"] for chat in chats for message in chat}
    tokenizer = recipe.tokenizer([*texts[:4000], *(f"{role}\n" for role in sorted(roles))])
    examples = [_tokenize(tokenizer, chat) for chat in chats]
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=recipe.hidden_size,
        intermediate_size=4 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # For so small a model more than two find too little to do; on busy cores, two that spin are ten times slower.
        torch.set_num_threads(2 if os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" else 1)
        model = Qwen2ForCausalLM(config).train()
        _teach(model, examples, tokenizer.pad_token_id, rng, recipe)
        torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.eval().save_pretrained(output)
    tokenizer.save_pretrained(output)


def _tokenize(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> tuple[list[int], list[int]]:
    """Return (token ids through the assistant's last end token, labels: -100 where nothing is learned)."""
    ids, labels, rendered = [], [], ""
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(chat[:number], tokenize=False, add_generation_prompt=True)
            given = message.get("given", "")
            parts = prompt.removeprefix(rendered) + given, message["content"].removeprefix(given) + END
            for text, taught in zip(parts, (False, True), strict=True):
                new = tokenizer.encode(text)
                ids += new
                labels += new if taught else [-100] * len(new)
            rendered = prompt + message["content"] + END
    return ids, labels


def _teach(model: Qwen2ForCausalLM, examples: list, pad: int, rng: random.Random, recipe: Recipe) -> None:
    """Minimize the cross-entropy on the assistant's tokens; AdamW, linear warm-up, cosine decay."""
    import torch
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, recipe.steps - warmup), eta_min=1e-4)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup), decay], [warmup]
    )
    for _ in tqdm(range(recipe.steps), desc=f"teaching {recipe.name}", mininterval=5):
        batch = rng.choices(examples, k=recipe.batch_size)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def policy_folder(seed: int, recipe: Recipe, directory: Path | None = None) -> tuple[Path, bool]:
    """Return the folder of the policy for ``seed``, and whether it has been made."""
    digest = hashlib.blake2b(json.dumps(asdict(recipe), sort_keys=True).encode(), digest_size=6).hexdigest()
    target = (directory or cache_root()) / f"{recipe.name}-{seed}-{digest}"
    return target, target.is_dir()


def ensure_small_policy(directory: Path | None = None, seed: int = 0, recipe: Recipe = Recipe()) -> Path:  # noqa: B008
    """Return the folder of the policy for ``seed``; made on first use, complete or not at all."""
    target, made = policy_folder(seed, recipe, directory)
    if not made:
        with replace_folder(target) as partial:
            make_small_policy(partial, seed, recipe)
    return target
