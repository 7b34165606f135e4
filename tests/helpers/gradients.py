"""Updates of real workers by plain SGD of rate 1, which move weights by the gradient, against plain transformers."""

import math
import statistics
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import ray
import torch
from verl.utils.config import omega_conf_to_dataclass

from helpers.loss import distilling
from helpers.trainer import begin_step, model_vocab, pushed_weights, random_group, running, trainer_config
from recipe.atropos.algorithm.losses import atropos_loss
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.sampling import SamplingCheck


@contextmanager
def sgd_trainer(model_path, folder, *overrides):
    """A trainer whose first model every ``Update`` starts from."""
    optimizer = {"optimizer": "SGD", "weight_decay": 0, "clip_grad": 1e9}
    options = [f"actor_rollout_ref.actor.optim.{key}={value}" for key, value in optimizer.items()]
    # Without servers a push only writes the weights.
    config = trainer_config(model_path, folder / "run", [], *options, *overrides, groups=4, size=4, lr=1)
    with running(config) as trainer:
        trainer.defaults = config.algorithm.copy()
        trainer.start = str(folder / "start")
        trainer.actor.save_checkpoint(trainer.start)
        trainer.first = Update.weights(trainer)
        yield trainer


def some_groups(model_path, seed=0):
    """13 rows in four groups of unequal sizes, two turns each; the last group has no engine logprobs."""
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, model_vocab(model_path), turns=2, size=n, prompt=10) for n in (4, 3, 4, 2)]
    for group in groups:
        group["scores"] = rng.normal(size=len(group["scores"])).tolist()
        group["inference_logprobs"] = [[v if v == 1.0 else 5 * v for v in row] for row in group["inference_logprobs"]]
    groups[3]["inference_logprobs"] = None
    groups[0]["overrides"] = [{}, {"set_advantage_to_zero": True}, {}, {}]
    return groups


class Update:
    """Weights before and after one update of the first model on ``groups``, and what the trainer said of it."""

    def __init__(self, trainer, plain, groups, algorithm=(), actor=(), distillation=None, mini_batch_size=None):
        self.plain, self.groups = plain, groups
        trainer.config.algorithm = trainer.defaults.copy()
        for key, value in dict(algorithm).items():
            target, _, name = key.rpartition(".")
            setattr(trainer.config.algorithm[target] if target else trainer.config.algorithm, name, value)
        config = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
        for key, value in dict(actor).items():
            target, _, name = key.rpartition(".")
            object.__setattr__(getattr(config, target) if target else config, name, value)
        loss = partial(atropos_loss, config=config, distillation=distillation or distilling())
        trainer.actor.set_loss_fn(loss)

        trainer.actor.load_checkpoint(trainer.start)  # updates as large as these add up to nan
        plain.load_state_dict(trainer.first)
        if mini_batch_size:
            trainer.metrics, trainer.mini_batch_size = {}, mini_batch_size
            batch, report = trainer._batch_of(groups)
        else:
            batch, report = groups_to_data_proto(groups, trainer.limits, multiple_of=16)
        assert not report.dropped and report.padding_rows == batch.non_tensor_batch["is_padding"].sum()
        assert report.padding_rows or trainer.actor.data_parallel_size() == 1, "one rank needs none in a mini-batch"
        if distillation is None:
            batch = batch.select(batch_keys=[key for key in batch.batch.keys() if not key.startswith("teacher")])
        begin_step(trainer, batch, step=1)
        if any("sampling_params" in group.get("group_overrides", {}) for group in groups):
            trainer.sampling_check = SamplingCheck(temperature=1.0, mode="per_row")
            trainer._check_sampling(batch)
        trainer._compute_log_probs(batch)
        trainer._compute_advantages(batch)
        trainer._update_actor(batch, meanwhile=trainer._describe)
        self.batch = batch
        self.metrics = trainer.metrics
        after = self.weights(trainer)
        self.gradient = {name: weight - after[name] for name, weight in trainer.first.items()}

    def rows(self):
        """Of the groups, under the plain model as it is now."""
        return rows_of(self.plain, self.groups)

    @staticmethod
    def weights(trainer):
        ray.get(trainer.actor.update_weights(1, []))
        return pushed_weights(trainer.config.run.dir, 1)


class Tokens:
    """A row of ``groups`` under the plain model: its trained positions, logits and logprobs there.

    At the temperature that it was sampled at, where the group says so.
    """

    def __init__(self, plain, group, row):
        mask = group["masks"][row]
        self.group, self.row = group, row
        self.first = next(t for t, m in enumerate(mask) if m != -100)
        self.positions = [t for t in range(len(mask)) if mask[t] != -100]
        ids = torch.tensor(group["tokens"][row])
        sampling = group.get("group_overrides", {}).get("sampling_params")
        self.logits = plain(ids[None]).logits[0].float() / (sampling[row][0]["temperature"] if sampling else 1.0)
        self.log_policy = self.logits.log_softmax(-1)
        self.log_probs = {t: self.log_policy[t - 1, ids[t]] for t in self.positions}
        self.values = {t: value.item() for t, value in self.log_probs.items()}
        engine = group["inference_logprobs"]
        self.engine = {t: engine[row][t] for t in self.positions} if engine else None
        self.zero = bool((group.get("overrides") or [{}] * 9)[row].get("set_advantage_to_zero"))


def rows_of(plain, groups):
    return [Tokens(plain, group, row) for group in groups for row in range(len(group["tokens"]))]


def group_advantages(rows, rewards=None, by_std=True):
    """GRPO over the group by its definition: one number a row, 0 where the environment says so."""
    rewards = rewards or [row.group["scores"][row.row] for row in rows]
    values = []
    for row, reward in zip(rows, rewards, strict=True):
        own = [r for other, r in zip(rows, rewards, strict=True) if other.group is row.group]
        spread = statistics.stdev(own) + 1e-6 if by_std else 1.0
        values.append(0.0 if row.zero else (reward - statistics.fmean(own)) / spread)
    return values


def assert_gradient(update, total):
    """The weights moved by the gradient of the scalar ``total``."""
    plain = update.plain
    plain.zero_grad()
    total.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert wanted.keys() == update.gradient.keys()
    norm = math.sqrt(sum(g.square().sum().item() for g in wanted.values()))
    error = math.sqrt(sum((update.gradient[name] - wanted[name]).square().sum().item() for name in wanted))
    assert norm > 1e-3 and error < 1e-3 * norm, f"gradient off by {error:.2e} of {norm:.2e}"
    assert update.metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)


def weighted(rows, coefficients):
    """Sum of coefficient x log p over the trained tokens; coefficients are lists over rows of {position: number}."""
    return sum(c[t] * row.log_probs[t] for row, c in zip(rows, coefficients, strict=True) for t in c)


def assert_per_token(update, coefficient):
    """The weights moved by ``coefficient(row, advantage)``, {position: number}, over the number of tokens; the rows."""
    rows = update.rows()
    found = [coefficient(row, advantage) for row, advantage in zip(rows, group_advantages(rows), strict=True)]
    n = sum(map(len, found))
    assert_gradient(update, weighted(rows, [{t: value / n for t, value in each.items()} for each in found]))
    return rows


def assert_logprobs(rows, found, tolerance=1e-4):
    """``found``, (B, R), has the rows' logprobs under the plain model; padding rows may follow them."""
    for row, values in zip(rows, found, strict=False):
        own = values[[t - row.first for t in row.positions]].tolist()
        assert own == pytest.approx([*row.values.values()], abs=tolerance)
