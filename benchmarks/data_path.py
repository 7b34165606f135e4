"""Speed of the path from scored data to an update: ``python benchmarks/data_path.py [--quick]``.

Two measurements, each compared with a straightforward implementation on the same data; medians of alternating runs:

1. ScoredData -> DataProto. 64 groups of 8 sequences of 2,048 tokens with every per-token field of the API.
   Ours: ``groups_to_data_proto``. Reference: the same contract, including validation, as loops over tokens and lists
   that become tensors at the end. Both must give equal tensors. Target: 5 times as fast.
2. Actor update on responses of heavy-tailed length (lognormal, median a quarter of the configured maximum), by verl's
   real FSDP worker under Ray. Ours: the batch as the trainer makes it, padding removed. Reference: every response
   padded to ``data.max_response_length`` with tokens that the model computes on and the loss ignores; same worker,
   mini-batch and tokens per micro-batch. The learning rate is 0, and both must give the same loss and gradient norm.
   Target: 2 times as fast.
"""

import argparse
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from recipe.atropos.config.compose import compose_config
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import IGNORED, RowLimits
from recipe.atropos.demo.small_policy import make_tokenizer
from recipe.atropos.main import fill_in, ray_options
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.utils.gpus import decide_device, platform_variables
from recipe.atropos.utils.local_ray import start_ray
from recipe.atropos.verl_ext.batch import DataProto

GROUPS, GROUP_SIZE, SEQUENCE_LENGTH = 64, 8, 2048  # the conversion's batch
VOCABULARY = 512
SIGMA = 1.0  # of the logarithm of the response lengths
LOSS_TOLERANCE, GRAD_NORM_TOLERANCE = 1e-5, 1e-4  # absolute; relative
TARGETS = {"conversion_ratio": ">= 5", "update_ratio": ">= 2"}


@dataclass(frozen=True)
class Compared:
    """Seconds of every run of one measurement."""

    ours: list[float]
    reference: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.ours), statistics.median(self.reference)

    @property
    def ratio(self) -> float:
        ours, reference = self.medians
        return reference / ours


def compare(ours: Callable[[], Any], reference: Callable[[], Any], runs: int) -> Compared:
    """Time both in alternation, after one warm-up run each."""
    seconds: dict[Callable[[], Any], list[float]] = {ours: [], reference: []}
    for _ in range(runs + 1):
        for function, times in seconds.items():
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return Compared(seconds[ours][1:], seconds[reference][1:])


# -------------------------------------------------------------------- 1. ScoredData -> DataProto


def make_group(rng: np.random.Generator, lengths: Sequence[tuple[int, int]], span: float = 0.0) -> dict[str, Any]:
    """Return a group in the API's format. ``lengths`` are (prompt, response) in tokens.

    A share ``span`` in the middle of each response is the environment's: masked, between two trained turns.
    """
    group: dict[str, Any] = {key: [] for key in ("tokens", "masks", "inference_logprobs", "advantages")}
    for prompt, response in lengths:
        length, middle, half = prompt + response, prompt + response // 2, int(span * response / 2)
        tokens = rng.integers(3, VOCABULARY, length).tolist()
        trained = np.arange(length) >= prompt
        trained[middle - half : middle + half] = False
        group["tokens"].append(tokens)
        group["masks"].append([t if keep else IGNORED for t, keep in zip(tokens, trained, strict=True)])
        group["inference_logprobs"].append(np.where(trained, -rng.exponential(size=length), 1.0).tolist())
        group["advantages"].append(rng.normal(size=length).tolist())
    return group | {"scores": rng.normal(size=len(lengths)).tolist(), "env_id": 0}


def plain_rows(groups: Sequence[Mapping[str, Any]], limits: RowLimits) -> list[dict[str, list]]:
    """Apply the row contract token by token, to groups that have every field; return a dict of lists per row.

    Raises:
        ValueError: lengths differ, a token is outside the vocabulary, or a score, advantage or logprob is not finite.
    """
    rows = []
    for group in groups:
        fields = [group[key] for key in ("tokens", "masks", "inference_logprobs", "advantages", "scores")]
        for tokens, masks, logprobs, advantages, score in zip(*fields, strict=True):
            if not len(tokens) == len(masks) == len(logprobs) == len(advantages):
                raise ValueError("lengths differ")
            if not math.isfinite(score):
                raise ValueError(f"score {score}")
            for token in tokens:
                if not 0 <= token < limits.vocab_size:
                    raise ValueError(f"token {token}")
            for advantage in advantages:
                if not math.isfinite(advantage):
                    raise ValueError(f"advantage {advantage}")
            first = next((position for position, mask in enumerate(masks) if mask != IGNORED), 0)
            if first == 0:
                continue  # nothing to train on, or no prompt
            end = min(len(tokens), limits.max_length)
            row = {
                "prompt": tokens[:first],
                "response": tokens[first:end],
                "mask": [],
                "logprobs": [],
                "advantages": [],
                "scores": [0.0] * (end - first),
            }
            valid = True
            for position in range(first, end):
                trained = masks[position] != IGNORED
                row["mask"].append(1 if trained else 0)
                row["logprobs"].append(logprobs[position] if trained else 0.0)
                row["advantages"].append(advantages[position] if trained else 0.0)
                if trained:
                    last = position - first
                    if not math.isfinite(logprobs[position]):
                        raise ValueError(f"logprob {logprobs[position]}")
                    valid = valid and logprobs[position] <= 0
            row["scores"][last] = score
            if not valid:
                row["logprobs"] = [0.0] * (end - first)
            rows.append(row)
    return rows


def plain_batch(groups: Sequence[Mapping[str, Any]], limits: RowLimits) -> dict[str, torch.Tensor]:
    """Return the tensors of ``groups_to_data_proto``, by name and with its shapes, from padded lists."""
    rows = plain_rows(groups, limits)
    prompt_width = max(len(row["prompt"]) for row in rows)
    width = max(len(row["response"]) for row in rows)
    integers = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
    floats = ("token_level_scores", "atropos_advantages", "rollout_log_probs")
    lists: dict[str, list[list]] = {name: [] for name in integers + floats}
    for row in rows:
        left, right = prompt_width - len(row["prompt"]), width - len(row["response"])
        prompt = [limits.pad_token_id] * left + row["prompt"]
        response = row["response"] + [limits.pad_token_id] * right
        attention_mask = [0] * left + [1] * (len(row["prompt"]) + len(row["response"])) + [0] * right
        position_ids, position = [], -1
        for attended in attention_mask:
            position += attended
            position_ids.append(position if attended else 0)
        lists["prompts"].append(prompt)
        lists["responses"].append(response)
        lists["input_ids"].append(prompt + response)
        lists["attention_mask"].append(attention_mask)
        lists["position_ids"].append(position_ids)
        lists["response_mask"].append(row["mask"] + [0] * right)
        lists["token_level_scores"].append(row["scores"] + [0.0] * right)
        lists["atropos_advantages"].append(row["advantages"] + [0.0] * right)
        lists["rollout_log_probs"].append(row["logprobs"] + [0.0] * right)
    return {name: torch.tensor(lists[name], dtype=torch.int64) for name in integers} | {
        name: torch.tensor(lists[name], dtype=torch.float32) for name in floats
    }


def measure_conversion(runs: int) -> Compared:
    """Measure part 1, on a batch whose rows are kept whole."""
    rng = np.random.default_rng(0)
    limits = RowLimits(max_length=2048, pad_token_id=0, vocab_size=VOCABULARY)
    groups = []
    for _ in range(GROUPS):
        prompt = int(rng.integers(256, 640))
        groups.append(make_group(rng, [(prompt, SEQUENCE_LENGTH - prompt)] * GROUP_SIZE, span=0.1))

    ours, _ = groups_to_data_proto(groups, limits)
    for name, expected in plain_batch(groups, limits).items():
        assert ours.batch[name].dtype == expected.dtype and torch.equal(ours.batch[name], expected), f"{name} differs"
    return compare(lambda: groups_to_data_proto(groups, limits), lambda: plain_batch(groups, limits), runs)


# -------------------------------------------------------------------- 2. actor update


@dataclass(frozen=True)
class UpdateSizes:
    """Sizes of the actor update; lengths in tokens. A micro-batch holds two of the longest rows."""

    groups: int
    max_response_length: int
    max_prompt_length: int = 64

    @property
    def micro_batch_tokens(self) -> int:
        return 2 * (self.max_prompt_length + self.max_response_length)


@dataclass(frozen=True)
class Outcome:
    """What an update reports."""

    loss: float
    grad_norm: float

    def equals(self, other: "Outcome") -> bool:
        same_norm = math.isclose(self.grad_norm, other.grad_norm, rel_tol=GRAD_NORM_TOLERANCE)
        return same_norm and abs(self.loss - other.loss) <= LOSS_TOLERANCE


def response_lengths(rows: int, longest: int) -> list[int]:
    """Return lengths of a lognormal with its median at a quarter of ``longest``, clipped at ``longest``.

    They are its quantiles, evenly spaced, so that the tail does not depend on a seed.
    """
    normal = statistics.NormalDist(math.log(longest / 4), SIGMA)
    lengths = [math.exp(normal.inv_cdf((i + 0.5) / rows)) for i in range(rows)]
    return [min(longest, max(1, round(length))) for length in lengths]


def make_model(folder: Path) -> Path:
    """Write a random Qwen2 of half a million parameters and a tokenizer into ``folder``."""
    tokenizer = make_tokenizer(["a tokenizer of single bytes is enough"], VOCABULARY)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.1,  # wide enough for logprobs that depend on the context
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def running_trainer(folder: Path, sizes: UpdateSizes) -> Iterator[RayGRPOAtroposTrainer]:
    """Yield a trainer with its worker under Ray, whose updates leave the weights unchanged; Ray ends with it."""
    model = make_model(folder / "model")
    overrides = [
        f"run.dir={folder / 'run'}",
        "trainer.logger=[]",
        "ray_kwargs.ray_init.num_cpus=2",
        "+ray_kwargs.ray_init.log_to_driver=false",
        f"+ray_kwargs.ray_init.logging_level={logging.ERROR}",
        "inference.urls=[http://127.0.0.1:1]",  # nothing is generated and nothing pushed
        f"data.train_batch_size={sizes.groups}",
        f"data.max_prompt_length={sizes.max_prompt_length}",
        f"data.max_response_length={sizes.max_response_length}",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={sizes.micro_batch_tokens}",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.actor.optim.weight_decay=0",
    ]
    config = compose_config(overrides)
    decide_device(config)
    os.environ |= platform_variables(config)  # as the trainer does; ``ray_options`` hands them to the workers
    fill_in(config)
    try:
        start_ray(**ray_options(config))
        trainer = RayGRPOAtroposTrainer(config=config, tokenizer=AutoTokenizer.from_pretrained(model))
        trainer.init_workers()
        yield trainer
    finally:
        ray.shutdown()


def make_batch(trainer: RayGRPOAtroposTrainer, sizes: UpdateSizes) -> DataProto:
    """Return a batch as the trainer makes it, with advantages, and with old logprobs slightly off the policy's.

    So the loss depends on the logprob of every trained token.
    """
    rng = np.random.default_rng(0)
    lengths = rng.permutation(response_lengths(sizes.groups * GROUP_SIZE, sizes.max_response_length))
    assert abs(np.median(lengths) * 4 / sizes.max_response_length - 1) < 0.02, np.median(lengths)
    groups = []
    for responses in lengths.reshape(sizes.groups, GROUP_SIZE).tolist():
        prompt = int(rng.integers(sizes.max_prompt_length // 2, sizes.max_prompt_length + 1))
        groups.append(make_group(rng, [(prompt, response) for response in responses]))
    batch, report = groups_to_data_proto(groups, trainer.limits, multiple_of=trainer.mini_batch_size)
    assert (report.rows, report.padding_rows) == (len(lengths), 0)

    mask = batch.batch["response_mask"]
    batch.meta_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
    old_log_probs = trainer.actor.log_probs(batch)[0]["old_log_probs"]
    noise = torch.from_numpy(rng.normal(0.0, 0.1, mask.shape)).float()
    batch.batch["old_log_probs"] = (old_log_probs + noise) * mask
    batch.batch["advantages"] = torch.from_numpy(rng.normal(1.0, 1.0, (len(batch), 1))).float() * mask
    return batch


def pad_to_maximum(batch: DataProto, limits: RowLimits, longest: int) -> DataProto:
    """Return the rows with attended, untrained pad tokens after every response, to ``longest`` tokens."""
    tensors = batch.batch
    prompts, width = tensors["prompts"], tensors["responses"].shape[1]
    missing = longest - width

    def widened(name: str, fill: int = 0) -> torch.Tensor:
        return torch.nn.functional.pad(tensors[name], (0, missing), value=fill)

    responses = widened("responses", limits.pad_token_id)
    attention_mask = widened("attention_mask", 1)
    attention_mask[:, prompts.shape[1] :] = 1
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            **{name: widened(name) for name in ("response_mask", "rollout_log_probs", "old_log_probs", "advantages")},
        },
        non_tensors=batch.non_tensor_batch,
        meta_info=batch.meta_info | {"global_token_num": attention_mask.sum(-1).tolist()},
    )


def update(trainer: RayGRPOAtroposTrainer, batch: DataProto) -> Outcome:
    """Run one update of the actor, by the trainer's own code."""
    trainer.metrics, trainer.timing_raw, trainer.global_steps = {}, {}, 1
    trainer._update_actor(batch, meanwhile=lambda _: None)
    return Outcome(float(trainer.metrics["actor/pg_loss"]), float(trainer.metrics["actor/grad_norm"]))


@dataclass(frozen=True)
class Update:
    """Results of part 2: times, the outcome of every run (in the same order), and properties of the rows."""

    seconds: Compared
    ours: list[Outcome]
    reference: list[Outcome]
    lengths: list[int]  # of the responses
    tokens: tuple[int, int]  # that the model computes on: ours, reference

    @property
    def same(self) -> bool:
        """Whether all runs agree; a loss near zero, which shows nothing, does not count."""
        first = self.ours[0]
        return abs(first.loss) > 0.1 and all(first.equals(other) for other in self.ours + self.reference)


def measure_update(sizes: UpdateSizes, runs: int) -> Update:
    """Measure part 2."""
    with tempfile.TemporaryDirectory() as folder, running_trainer(Path(folder), sizes) as trainer:
        batch = make_batch(trainer, sizes)
        padded = pad_to_maximum(batch, trainer.limits, sizes.max_response_length)
        ours: list[Outcome] = []
        reference: list[Outcome] = []
        seconds = compare(
            lambda: ours.append(update(trainer, batch)), lambda: reference.append(update(trainer, padded)), runs
        )
    lengths = batch.batch["response_mask"].sum(-1).tolist()
    tokens = tuple(int(rows.batch["attention_mask"].sum()) for rows in (batch, padded))
    return Update(seconds, ours, reference, lengths, tokens)


# -------------------------------------------------------------------- the report


def print_table(conversion: Compared, updates: Update, sizes: UpdateSizes, runs: Mapping[str, int]) -> None:
    (tokens, padded_tokens), lengths = updates.tokens, updates.lengths
    print(f"medians of {runs['conversion']} conversions and {runs['update']} updates, after one each that warms up\n")
    print(f"{'':<34}{'ours':>10}{'reference':>12}{'ratio':>8}")
    for name, compared in (("ScoredData -> DataProto, s", conversion), ("actor update, s", updates.seconds)):
        ours, reference = compared.medians
        print(f"{name:<34}{ours:>10.3f}{reference:>12.3f}{compared.ratio:>8.2f}")
    print(f"{'  tokens computed on':<34}{tokens:>10,}{padded_tokens:>12,}{padded_tokens / tokens:>8.2f}")
    print(f"{'  loss':<34}{updates.ours[-1].loss:>10.6f}{updates.reference[-1].loss:>12.6f}")
    print(f"{'  gradient norm':<34}{updates.ours[-1].grad_norm:>10.6f}{updates.reference[-1].grad_norm:>12.6f}\n")
    print(
        f"conversion: {GROUPS} groups of {GROUP_SIZE} sequences of {SEQUENCE_LENGTH:,} tokens, equal tensors\n"
        f"update: {len(lengths)} responses of {min(lengths)} to {max(lengths)} tokens, median "
        f"{statistics.median(lengths):g}, mean {statistics.mean(lengths):.0f}; maximum {sizes.max_response_length}\n"
        f"loss and gradient norm of all runs: {'the same' if updates.same else 'DIFFERENT'}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, a smaller batch for the actor")
    parser.add_argument("--smoke", action="store_true", help="the smallest size: whether it runs")
    arguments = parser.parse_args()
    runs, sizes = {"conversion": 15, "update": 7}, UpdateSizes(groups=8, max_response_length=1024)
    if arguments.quick:
        runs, sizes = {"conversion": 15, "update": 5}, UpdateSizes(groups=4, max_response_length=512)
    if arguments.smoke:
        runs, sizes = {"conversion": 1, "update": 1}, UpdateSizes(groups=4, max_response_length=256)

    conversion = measure_conversion(runs["conversion"])
    updates = measure_update(sizes, runs["update"])
    print_table(conversion, updates, sizes, runs)

    (convert_s, plain_s), (update_s, padded_s) = conversion.medians, updates.seconds.medians
    figures = {
        "conversion_s": round(convert_s, 4),
        "conversion_plain_s": round(plain_s, 4),
        "conversion_ratio": round(conversion.ratio, 2),
        "update_s": round(update_s, 4),
        "update_padded_s": round(padded_s, 4),
        "update_ratio": round(updates.seconds.ratio, 2),
        "token_ratio": round(updates.tokens[1] / updates.tokens[0], 2),
        "median_length_over_maximum": round(statistics.median(updates.lengths) / sizes.max_response_length, 3),
        "loss": updates.ours[-1].loss,
        "loss_padded": updates.reference[-1].loss,
        "same_loss": updates.same,
    }
    ok = conversion.ratio >= 5 and updates.seconds.ratio >= 2 and updates.same
    print(json.dumps({"name": "data_path", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
