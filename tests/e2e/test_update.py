"""verl's real FSDP workers: every token's logprob, and one update, tensor by tensor, of plain SGD with rate 1, by which
the weights move by the gradient.

Each path through the algorithm is checked against coefficients that are written down here, one for each trained token:
the gradient is the sum of ``coefficient * grad log p(token)`` over plain transformers, one unpadded sequence at a time.
"""

import math
import os
import statistics

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from helpers.gradients import (
    Update,
    assert_gradient,
    assert_logprobs,
    assert_per_token,
    group_advantages,
    rows_of,
    sgd_trainer,
    some_groups,
    weighted,
)
from helpers.loss import distilling
from helpers.sglang import make_tiny_model
from helpers.trainer import model_vocab, random_group
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.verl_ext.worker_group import RankTimeout

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]


UNWEIGHTED = {"rollout_correction.rollout_is": None}


@pytest.fixture(
    scope="module",
    params=[("fsdp2", 2), pytest.param(("fsdp", 1), marks=pytest.mark.slow)],
    ids=lambda p: f"{p[0]}-world{p[1]}",
)
def trainer(request, model_path, tmp_path_factory):
    strategy, world = request.param
    options = [f"actor_rollout_ref.actor.strategy={strategy}", f"trainer.n_gpus_per_node={world}"]
    options.append("trainer.atropos.distillation.loss_coef=0.7")
    with sgd_trainer(model_path, tmp_path_factory.mktemp("sgd"), *options) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def plain(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture
def groups(model_path):
    return some_groups(model_path)


def test_a_rank_that_hangs_is_named_after_the_limit_and_goes_on(trainer, monkeypatch):
    pids = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in trainer.actor.workers])
    monkeypatch.setattr(trainer.actor, "limit", 2.0)
    last = psutil.Process(pids[-1])
    last.suspend()
    try:
        told = rf"empty_cache: no answer of rank {len(pids) - 1} of {len(pids)} within 2 s"
        with pytest.raises(RankTimeout, match=told):
            trainer.actor.empty_cache()
    finally:
        last.resume()
    monkeypatch.setattr(trainer.actor, "limit", 60.0)
    trainer.actor.empty_cache()


@pytest.mark.parametrize("turns", [1, 3], ids=["single_turn", "multi_turn"])
def test_worker_logprobs_are_those_of_transformers(trainer, plain, model_path, turns):
    """Every trained token is compared."""
    rng, vocab = np.random.default_rng(turns), model_vocab(model_path)
    groups = [random_group(rng, vocab, turns=turns, size=3, prompt=20) for _ in range(3)]
    trainer.actor.load_checkpoint(trainer.start)
    plain.load_state_dict(trainer.first)
    rows = rows_of(plain, groups)
    assert len({row.first for row in rows}) > 3, "left padding of several widths"
    batch, _ = groups_to_data_proto(groups, trainer.limits, multiple_of=16)
    batch.meta_info["temperature"] = 1.0
    assert_logprobs(rows, trainer.actor.log_probs(batch)[0]["old_log_probs"])


@pytest.mark.parametrize(
    ("loss_mode", "agg"),
    [("vanilla", agg) for agg in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")]
    + [("vanilla", "seq-mean-token-sum-norm")]
    + [("advantage_weighted_sft", agg) for agg in ("token-mean", "seq-mean-token-mean")],
)
def test_the_gradient_is_minus_advantage_on_every_trained_token(trainer, plain, groups, loss_mode, agg):
    """Padding rows change neither it nor the loss.

    Two groups have advantages of the environment's own, one in some rows only; the others the group's GRPO.
    """
    rng = np.random.default_rng(1)
    for group, chosen in ((groups[1], (0, 1, 2)), (groups[2], (0, 3))):
        lengths = [len(tokens) if i in chosen else 0 for i, tokens in enumerate(group["tokens"])]
        group["advantages"] = [rng.normal(size=length).tolist() for length in lengths]
    actor = {"policy_loss.loss_mode": loss_mode, "loss_agg_mode": agg, "loss_scale_factor": 7}
    update = Update(trainer, plain, groups, UNWEIGHTED, actor)
    rows = update.rows()
    coefficients = []
    for row, computed in zip(rows, group_advantages(rows), strict=True):
        share = {
            "token-mean": 1 / sum(len(r.positions) for r in rows),
            "token-sum": 1,
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / len(row.positions),
            "seq-mean-token-sum-norm": 1 / len(rows) / 7,
        }[agg]
        own = (row.group.get("advantages") or [[]] * 9)[row.row]
        coefficients.append({t: -share * (own[t] if own else computed) for t in row.positions})
    total = weighted(rows, coefficients)
    assert_gradient(update, total)
    at_ratio_1 = sum(value for row in coefficients for value in row.values())
    loss = at_ratio_1 if loss_mode == "vanilla" else total.item()
    assert update.metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_rows_of_a_trajectory_count_once_in_the_gradient(trainer, plain, groups, agg):
    """13 rows of 8 trajectories, over the ranks: in the baseline, and in the mean over sequences."""
    numbers = ([0, 1, 0, 0], [0, 1, 1], [2, 1, 0, 2], [1, 1])
    for group, own in zip(groups, numbers, strict=True):
        group["overrides"], group["group_overrides"] = None, {"trajectory": own}
        group["scores"] = [group["scores"][own.index(number)] for number in own]
    update = Update(trainer, plain, groups, UNWEIGHTED, {"loss_agg_mode": agg}, mini_batch_size=8)
    assert update.metrics["atropos/mini_batches"] == 1
    rows, coefficients = update.rows(), []
    for row in rows:
        own = row.group["group_overrides"]["trajectory"]
        scores = list(dict(zip(own, row.group["scores"], strict=True)).values())
        spread = statistics.stdev(scores) + 1e-6 if len(scores) > 1 else 1.0
        mean = statistics.fmean(scores) if len(scores) > 1 else 0.0
        tokens = sum(len(r.positions) for r in rows if r.group is row.group and own[r.row] == own[row.row])
        shares = {"token-mean": 1 / sum(len(r.positions) for r in rows), "seq-mean-token-mean": 1 / 8 / tokens}
        weight = shares.get(agg, 1 / 8) * (mean - row.group["scores"][row.row]) / spread
        coefficients.append(dict.fromkeys(row.positions, weight))
    assert_gradient(update, weighted(rows, coefficients))


@pytest.mark.parametrize("loss_mode", sorted(set(POLICY_LOSS_REGISTRY) - {"geo_mean", "bypass_mode"}), ids=str)
def test_every_loss_of_verl_moves_the_policy_on_atropos_rows(trainer, plain, groups, loss_mode):
    """``geo_mean`` is refused before a run starts, ``bypass_mode`` has a test of its own."""
    actor = {"policy_loss.loss_mode": loss_mode, "policy_loss.dro_beta": 0.1}
    update = Update(trainer, plain, groups, actor=actor)
    assert math.isfinite(update.metrics["actor/pg_loss"]) and 0 < update.metrics["actor/grad_norm"] < 1e3
    assert any(gradient.any() for gradient in update.gradient.values())
    assert all(torch.isfinite(gradient).all() for gradient in update.gradient.values())


def test_correction_weighs_the_gradient_with_the_truncated_ratio(trainer, plain, groups):
    """The ratio is that of the trainer's and the engine's probabilities."""
    update = Update(trainer, plain, groups, {"rollout_correction.rollout_is": "token"})
    gaps = []

    def coefficient(row, advantage):
        own = {t: row.values[t] - row.engine[t] if row.engine else 0.0 for t in row.positions}
        gaps.extend(own.values() if row.engine else ())
        return {t: -advantage * min(math.exp(gap), 2.0) for t, gap in own.items()}

    assert_per_token(update, coefficient)
    assert max(gaps) > math.log(2) and min(gaps) < math.log(0.9)
    sizes = [abs(gap) for gap in gaps]
    assert update.metrics["atropos/logprob_diff/mean"] == pytest.approx(statistics.fmean(sizes), rel=1e-3)
    assert update.metrics["atropos/logprob_diff/max"] == pytest.approx(max(sizes), rel=1e-3)
    assert update.metrics["rollout_corr/kl"] == pytest.approx(-statistics.fmean(gaps), rel=1e-3)


def rejecting(rule, threshold):
    """The algorithm that rejects tokens by a rule of verl's, and weighs none."""
    return UNWEIGHTED | {"rollout_correction.rollout_rs": rule, "rollout_correction.rollout_rs_threshold": threshold}


@pytest.mark.parametrize("padding", ["rows", "rank"])
def test_bypass_mode_has_the_gradient_of_ppo_against_the_engine(trainer, plain, groups, padding):
    """That is its only correction. Also of two rows, both on the first of two ranks: verl's own loss raises on the rank
    that has no token."""
    correction = RolloutCorrectionConfig(bypass_mode=True)
    if padding == "rank":
        keys = ("tokens", "masks", "scores", "inference_logprobs")
        groups, correction = [{key: [groups[0][key][i] for i in (0, 2)] for key in keys}], RolloutCorrectionConfig()
    algorithm = {"rollout_correction.bypass_mode": True}
    actor = {"policy_loss.loss_mode": "bypass_mode", "policy_loss.rollout_correction": correction}

    def coefficient(row, advantage):
        ratios = {t: math.exp(row.values[t] - row.engine[t]) if row.engine else 1.0 for t in row.positions}
        clipped = {t: r > 1.2 if advantage > 0 else not 0.8 <= r <= 3.0 for t, r in ratios.items()}
        return {t: 0.0 if clipped[t] else -advantage * r for t, r in ratios.items()}

    assert_per_token(Update(trainer, plain, groups, algorithm, actor), coefficient)


@pytest.fixture
def two_epochs(trainer):
    settings = trainer.config.actor_rollout_ref.actor
    settings.ppo_epochs = 2
    yield
    settings.ppo_epochs = 1


@pytest.fixture(scope="module")
def moved():
    """How far each trainer moved the weights: {number of ranks: {name: tensor}}."""
    return {}


def distance(one, other):
    """The norm of the difference of two sets of tensors, relative to the first."""
    norm = math.sqrt(sum(tensor.square().sum().item() for tensor in one.values()))
    return math.sqrt(sum((one[name] - other[name]).square().sum().item() for name in one)) / norm


def ppo(rows, advantages, old):
    """(PPO's loss over the rows by its definition, the share of tokens that it clips); ``old`` are logprobs."""
    losses, clipped = [], []
    for row, advantage, before in zip(rows, advantages, old, strict=True):
        ratios = torch.stack([(row.log_probs[t] - before[t]).exp() for t in row.positions])
        free, bounded = -advantage * ratios, -advantage * ratios.clamp(0.8, 1.2)
        loss = torch.maximum(free, bounded)
        losses.append(loss.clamp(max=-3 * advantage) if advantage < 0 else loss)
        clipped += (bounded > free).tolist()
    return torch.cat(losses).mean(), statistics.fmean(clipped)


def test_mini_batches_are_whole_groups_on_any_number_of_ranks(trainer, plain, groups, two_epochs, moved):
    """Four steps of SGD, two groups in each, against the definition, and one rank against two."""
    for group in groups:  # so that steps are small: large ones amplify the rounding of those before
        group["scores"] = [0.05 * score for score in group["scores"]]
    algorithm = UNWEIGHTED | {"norm_adv_by_std_in_grpo": False}
    update = Update(trainer, plain, groups, algorithm, mini_batch_size=8)
    start = {name: weight.clone() for name, weight in plain.state_dict().items()}
    rows = update.rows()
    advantages, old, shares = group_advantages(rows, by_std=False), [row.values for row in rows], []
    assert update.metrics["atropos/mini_batches"] == 2
    for part in 2 * (range(7), range(7, 13)):
        rows = update.rows()
        loss, clipped = ppo(*([values[i] for i in part] for values in (rows, advantages, old)))
        shares.append(clipped)
        plain.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= parameter.grad
    wanted = {name: (start[name] - weight).detach() for name, weight in plain.named_parameters()}
    assert distance(wanted, update.gradient) < 1e-3
    assert update.metrics["actor/pg_clipfrac"] == pytest.approx(statistics.fmean(shares), abs=1e-3)
    moved[trainer.actor.data_parallel_size()] = update.gradient
    one, *others = moved.values()
    assert all(distance(one, other) < 1e-5 for other in others), "rounding, of four steps"


def test_mini_batches_without_a_trained_token_take_no_step(trainer, plain, groups):
    """Of two, the first is rejected whole; of the second there stays the group that came without logprobs."""
    update = Update(trainer, plain, groups, rejecting("seq_max_k2", 1e-9), mini_batch_size=8)
    assert update.metrics["atropos/mini_batches"] == update.metrics["atropos/mini_batches_without_token"] == 1
    # The norms too: a step without a gradient, which momentum or weight decay gives an effect, would halve their mean.
    update.groups = groups[3:]
    assert_per_token(update, lambda row, advantage: dict.fromkeys(row.positions, -advantage))


def test_rejecting_every_token_moves_nothing_and_is_counted(trainer, plain, groups):
    update = Update(trainer, plain, groups[:3], rejecting("seq_max_k2", 1e-9))
    assert update.metrics["atropos/batches_without_token"] == 1
    assert not any(gradient.any() for gradient in update.gradient.values())


@pytest.fixture
def referenced(trainer, plain, groups):
    """Groups with logprobs of a reference policy that is near the policy that an update starts from."""
    rng = np.random.default_rng(2)
    plain.load_state_dict(trainer.first)  # the update before this one has moved it
    for group in groups:
        group["ref_logprobs"] = [rng.normal(size=len(tokens)).tolist() for tokens in group["tokens"]]
    for row in rows_of(plain, groups):
        for t in row.positions:
            row.group["ref_logprobs"][row.row][t] = min(0.0, row.values[t] + rng.normal(scale=0.5))
    return groups


def test_kl_in_the_loss_adds_its_gradient(trainer, plain, referenced):
    """low_var_kl: exp(ref - log p) - (ref - log p) - 1, whose derivative is 1 - exp(ref - log p)."""
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl"}
    update = Update(trainer, plain, referenced, UNWEIGHTED, actor)
    kls = []

    def coefficient(row, advantage):
        gaps = {t: row.group["ref_logprobs"][row.row][t] - row.values[t] for t in row.positions}
        kls.extend(math.exp(gap) - gap - 1 for gap in gaps.values())
        return {t: -advantage + 0.3 * (1 - math.exp(gap)) for t, gap in gaps.items()}

    assert_per_token(update, coefficient)
    assert max(kls) > 0.005, "no rounding"
    assert update.metrics["actor/kl_loss"] == pytest.approx(statistics.fmean(kls), rel=1e-3)


@pytest.mark.parametrize(
    ("use_policy_loss", "temperatures"),
    [(True, None), (False, None), (True, [0.7, 1.0, 1.5, 0.7])],
    ids=["beside", "alone", "sampling_temperatures"],
)
def test_distillation_moves_the_policy_to_the_teachers_top_k(trainer, plain, groups, use_policy_loss, temperatures):
    """In two groups of four; the gradient on the logits is policy - target, from the derivative of the KL by hand.

    Also where each row has the temperature that it was sampled at.
    """
    generator = torch.Generator().manual_seed(0)
    if temperatures:
        groups[0]["group_overrides"] = {"sampling_params": [[{"temperature": t}] for t in temperatures]}
    vocab = plain.config.vocab_size
    for group in groups[:2]:
        full = [2 * torch.randn(len(t), vocab, generator=generator).log_softmax(-1) for t in group["tokens"]]
        top = [f.log_softmax(-1).topk(5) for f in full]
        group["distill_token_ids"] = [[[]] + t.indices[1:].tolist() for t in top]
        group["distill_logprobs"] = [[[]] + t.values[1:].tolist() for t in top]
    distillation = distilling(loss_coef=0.7, use_policy_loss=use_policy_loss)
    update = Update(trainer, plain, groups, UNWEIGHTED, distillation=distillation)
    rows = update.rows()
    n = sum(len(row.positions) for row in rows)
    total = torch.tensor(0.0)
    if use_policy_loss:
        values = group_advantages(rows)
        total = weighted(rows, [dict.fromkeys(r.positions, -v / n) for r, v in zip(rows, values, strict=True)])
    for row in rows:
        for t in row.positions if "distill_token_ids" in row.group else ():
            policy = row.log_policy[t - 1].detach().exp()
            ids = torch.tensor(row.group["distill_token_ids"][row.row][t])
            mass = torch.tensor(row.group["distill_logprobs"][row.row][t]).exp()
            target = policy.clone()
            target[ids] = 0.0
            target *= (1 - mass.sum()) / target.sum()
            target[ids] = mass
            total = total + 0.7 / n * ((policy - target) * row.logits[t - 1]).sum()
    assert_gradient(update, total)
    assert update.metrics["actor/distillation_loss"] > 0
    assert ("actor/pg_loss" in update.metrics) == use_policy_loss


@pytest.mark.slow
def test_update_with_fused_kernels_is_the_plain_one(tmp_path):
    """verl's, which compute logprobs without a micro-batch's logits; with a tied head, without which they fail."""
    model_path = make_tiny_model(tmp_path / "model", seed=0, tie_word_embeddings=True)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    groups = some_groups(model_path)
    with sgd_trainer(model_path, tmp_path, "actor_rollout_ref.model.use_fused_kernels=true") as trainer:
        update = Update(trainer, plain, groups, UNWEIGHTED)
    del update.gradient["lm_head.weight"]  # the embedding's
    rows = assert_per_token(update, lambda row, advantage: dict.fromkeys(row.positions, -advantage))
    assert_logprobs(rows, update.batch.batch["old_log_probs"], 1e-5)
