"""docs/papers.md: its keys give the gradient of each paper's formula, which is written here by hand, one row at a time.

A row has the trained tokens' logprobs: ``new``, which the gradient is for, ``old``, ``engine`` and ``ref``, (T,) each.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_kl_controller

from helpers.loss import distilling, in_the_loss, loss_of, unpadded
from helpers.promises import code, tables
from helpers.trainer import actor_of, configured, random_group
from recipe.atropos.algorithm.advantages import RunningMoments, add_advantages
from recipe.atropos.credit.group import Credit, add_credit
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.errors import ConfigurationError

VOCAB = 50
PAGE = tables("papers.md")
KEYS = {row[0].partition(",")[0]: tuple(code(row[2])) for row in PAGE["Losses"]}
TURN_KEYS = {row[0].partition(",")[0]: code(row[2]) for row in PAGE["Turns"]}
OF_ONE_GROUP = {"DAPO", "CISPO"}  # with several the page says a difference


def sampled_groups(count):
    rng = np.random.default_rng(3)
    groups = [random_group(rng, VOCAB, turns=2, size=4) for _ in range(count)]
    for group in groups:
        group["scores"] = rng.normal(size=4).tolist()
    return groups


def drawn(data, spread):
    """Logprobs of the four policies, (B, R); ratios differ by more than any clip of the page, both ways."""
    generator = torch.Generator().manual_seed(1)
    found = {"engine": data.batch["rollout_log_probs"].double()}
    for name, other in (("old", "engine"), ("new", "old"), ("ref", "new")):
        noise = torch.randn(data.batch["responses"].shape, generator=generator, dtype=torch.float64)
        noise = noise * spread if name == "ref" else noise
        found[name] = found[other] + noise * data.batch["response_mask"]
    return found


@functools.cache
def trained(keys, count, spread=0.5):
    """The gradient of the loss by each trained token, flat, through advantages, correction and verl's loss."""
    config = configured(*keys)
    data, report = groups_to_data_proto(sampled_groups(count), RowLimits(200, 0, vocab_size=VOCAB))
    assert not report.dropped
    policies = drawn(data, spread)
    data.batch["old_log_probs"], data.batch["ref_log_prob"] = policies["old"].float(), policies["ref"].float()
    controller = get_kl_controller(config.algorithm.kl_ctrl)
    mask = data.batch["response_mask"].bool()
    add_advantages(data, config.algorithm, config.trainer.atropos, RunningMoments(), controller)
    new = policies["new"].float().requires_grad_()
    batch, flat = unpadded(data, new)
    loss, _ = loss_of(actor_of(*keys), distilling(), batch, torch.zeros(1, len(flat), VOCAB), flat)
    [gradient] = torch.autograd.grad(loss, new)
    return gradient[mask].double()


def by_hand(formula, count, spread=0.5):
    """The same gradient of minus the paper's objective."""
    groups = sampled_groups(count)
    data, _ = groups_to_data_proto(groups, RowLimits(200, 0, vocab_size=VOCAB))
    policies, mask, rows = drawn(data, spread), data.batch["response_mask"].bool(), []
    scores = [score for group in groups for score in group["scores"]]
    for i, kept in enumerate(mask):
        row = {name: values[i][kept].clone() for name, values in policies.items()}
        row["new"].requires_grad_()
        rows.append(SimpleNamespace(**row, score=scores[i], group=int(data.non_tensor_batch["uid"][i])))
    return -torch.cat(torch.autograd.grad(formula(rows), [row.new for row in rows]))


def others(rows, row):
    return [each for each in rows if each.group == row.group]


def grpo_advantage(rows, row):
    scores = [each.score for each in others(rows, row)]
    return (row.score - np.mean(scores)) / np.std(scores, ddof=1)


def clipped(ratio, advantage, low=0.2, high=0.2):
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def mean(values):
    return sum(values) / len(values)


def grpo(rows, cap=None):
    def of(row):
        x = row.ref - row.new
        surrogate = clipped((row.new - row.old).exp(), grpo_advantage(rows, row))
        return (surrogate - 0.04 * (x.exp() - x - 1).clamp(max=cap or torch.inf)).mean()

    return mean([of(row) for row in rows])


def dapo(rows):
    parts = [clipped((row.new - row.old).exp(), grpo_advantage(rows, row), 0.2, 0.28).sum() for row in rows]
    return sum(parts) / sum(len(row.new) for row in rows)


def dr_grpo(rows):
    def of(row):
        advantage = row.score - np.mean([each.score for each in others(rows, row)])
        return clipped((row.new - row.old).exp(), advantage).sum()

    return mean([of(row) for row in rows])


def gspo(rows):
    def of(row):
        ratio = (row.new.sum() - row.old.sum()).exp() ** (1 / len(row.new))
        return clipped(ratio, grpo_advantage(rows, row), 3e-4, 4e-4)

    return mean([of(row) for row in rows])


def cispo(rows):
    def of(row):
        weight = (row.new - row.old).exp().clamp(max=2.0).detach()
        return (weight * grpo_advantage(rows, row) * row.new).sum()

    return sum(of(row) for row in rows) / sum(len(row.new) for row in rows)


def tis(rows):
    def of(row):
        weight = (row.old - row.engine).exp().clamp(max=2.0)
        return (weight * clipped((row.new - row.old).exp(), grpo_advantage(rows, row))).sum()

    return sum(of(row) for row in rows) / sum(len(row.new) for row in rows)


def icepop(rows):
    def of(row):
        k = (row.old - row.engine).exp()
        weight = torch.where((k >= 0.5) & (k <= 5.0), k, 0.0)
        return (weight * clipped((row.new - row.old).exp(), grpo_advantage(rows, row))).mean()

    return mean([of(row) for row in rows])


def reinforce_plus_plus(rows):
    raw = []
    for row in rows:
        kl = (row.old - row.ref).tolist()
        raw.append(torch.tensor([row.score - 0.01 * sum(kl[t:]) for t in range(len(kl))]))
    all_of_them = torch.cat(raw)
    normed = [(each - all_of_them.mean()) / all_of_them.std() for each in raw]
    return mean([clipped((row.new - row.old).exp(), a).mean() for row, a in zip(rows, normed, strict=True)])


def rloo(rows):
    def reward(row):
        return row.score - 0.03 * (row.old - row.ref).sum()

    def of(row):
        baseline = mean([reward(each) for each in others(rows, row) if each is not row])
        return (reward(row) - baseline) * row.new.sum()

    return mean([of(row) for row in rows])


FORMULAS = {
    "GRPO": grpo,
    "DAPO": dapo,
    "Dr. GRPO": dr_grpo,
    "GSPO": gspo,
    "CISPO": cispo,
    "TIS": tis,
    "IcePop": icepop,
    "REINFORCE++": reinforce_plus_plus,
    "RLOO": rloo,
}


def test_papers_of_the_page_have_a_formula_here():
    assert list(KEYS) == list(FORMULAS) and list(TURN_KEYS) == ["GiGPO", "VinePPO", "MT-GRPO"]


@pytest.mark.parametrize("paper", FORMULAS)
def test_papers_keys_give_the_gradient_of_its_formula(paper):
    count = 1 if paper in OF_ONE_GROUP else 3
    wanted = by_hand(FORMULAS[paper], count)
    torch.testing.assert_close(trained(KEYS[paper], count), wanted, atol=1e-5, rtol=1e-3)
    assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize("paper", sorted(OF_ONE_GROUP))
def test_papers_of_several_groups_share_the_divisor(paper):
    """The tokens of the mini-batch, as the page says, where the paper has each group's."""
    torch.testing.assert_close(trained(KEYS[paper], 3), by_hand(FORMULAS[paper], 3), atol=1e-5, rtol=1e-3)


def test_papers_kl_of_grpo_is_capped_as_the_page_says():
    far = {"count": 3, "spread": 3.0}  # exp(x) - x - 1 is above 10 for many tokens
    found = trained(KEYS["GRPO"], **far)
    torch.testing.assert_close(found, by_hand(functools.partial(grpo, cap=10.0), **far), atol=1e-5, rtol=1e-3)
    assert not torch.allclose(found, by_hand(grpo, **far), atol=1e-2)


def test_papers_constant_of_dr_grpo_divides():
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"
    keys = tuple(key.replace(mode, mode + "-norm") for key in KEYS["Dr. GRPO"])
    found = trained((*keys, "actor_rollout_ref.actor.loss_scale_factor=7"), 3)
    torch.testing.assert_close(found, by_hand(dr_grpo, 3) / 7, atol=1e-5, rtol=1e-3)


def value_of(keys, key):
    return OmegaConf.select(configured(*keys), key)


@pytest.mark.parametrize(("paper", "key"), [(paper, key) for paper, keys in KEYS.items() for key in keys])
def test_papers_need_each_of_their_keys(paper, key):
    """Without it the gradient is another one, unless the page gives what is the default."""
    name, without = key.partition("=")[0], tuple(each for each in KEYS[paper] if each != key)
    if key.endswith("=true"):  # a switch, whose coefficient is given too
        with pytest.raises(ConfigurationError, match="has no effect with " + name):
            configured(*without)
        return
    same = value_of(without, name) == value_of(KEYS[paper], name)
    assert not same or paper in ("TIS", "IcePop"), "a key that the page need not give"
    with_all = trained(KEYS[paper], 3)
    assert torch.allclose(trained(without, 3), with_all, atol=1e-6 * with_all.abs().max().item()) == same


def episodes(scores, **overrides):
    """A group of rows of two turns, of which the second has two tokens."""
    size = len(scores)
    return {
        "tokens": [[5, 6, 7, 8, 9]] * size,
        "masks": [[-100, 6, -100, 8, 9]] * size,
        "scores": scores,
        "inference_logprobs": [[1.0, -1.0, 1.0, -1.0, -1.0]] * size,
        "group_overrides": overrides,
    }


def by_turn(first, second):
    """Advantages of tokens from those of the two turns, (N,) each."""
    return [[0.0, float(a), 0.0, float(b), float(b)] for a, b in zip(first, second, strict=True)]


def credit_of(paper):
    [key] = [each for each in TURN_KEYS[paper] if each.startswith("environment.credit=")]
    return Credit.parse(OmegaConf.to_object(configured(key).environment.credit), "environment.credit")


def credited(group, credit):
    add_credit(group, credit)
    return np.array(group["advantages"])[:, [1, 3]]


def normalized(scores):
    return (scores - scores.mean()) / scores.std(ddof=1)


SCORES = np.array([1.0, -1.0, 0.5, 2.0])


TURNS = np.array([0.75, 0.25, 0.5, 0.0])
STATES = [["start", "a"], ["start", "a"], ["start", "b"], ["start", "start"]]


def gigpo(gamma=1.0, omega=1.0):
    """Each state's turns are compared at any depth, that of the last row's second too; b was seen once."""
    returns = np.stack([gamma * SCORES, SCORES], axis=1)
    step = np.zeros((4, 2))
    for state in "start", "a":
        here = np.array(STATES) == state
        step[here] = normalized(returns[here])
    return normalized(SCORES)[:, None] + omega * step


def vineppo(gamma=1.0):
    """The turns' values, and V of the prompt: the mean of the three other answers."""
    prompt = gamma * (SCORES.sum() - SCORES) / 3
    return np.stack([gamma * TURNS - prompt, SCORES - TURNS], axis=1)


def mt_grpo(coef=1.0):
    """The first turn's rewards are ``TURNS``, the second's their halves backwards."""
    turns = np.stack([normalized(TURNS), normalized(TURNS[::-1] / 2)], axis=1)
    return normalized(SCORES)[:, None] + coef * turns


SENT = {
    "GiGPO": (gigpo, {"turn_states": STATES}),
    "VinePPO": (vineppo, {"turn_values": np.stack([TURNS, 9 * TURNS], axis=1).tolist()}),
    "MT-GRPO": (mt_grpo, {"turn_values": np.stack([TURNS, TURNS[::-1] / 2], axis=1).tolist()}),
}


@pytest.mark.parametrize("paper", SENT)
def test_papers_credit_is_the_papers_and_reaches_the_loss(paper):
    formula, overrides = SENT[paper]
    group, credit = episodes(SCORES.tolist(), **overrides), credit_of(paper)
    found = credited(group, credit)
    assert credit.mix == 0.0 and credit.gamma == credit.weight == 1.0
    np.testing.assert_allclose(found, formula(), atol=1e-5)
    arrived = in_the_loss([group], VOCAB).advantages
    np.testing.assert_allclose(arrived, by_turn(*formula().T), atol=1e-4)


@pytest.mark.parametrize(
    ("paper", "keys", "wanted"),
    [
        ("GiGPO", {"gamma": 0.5, "weight": 0.25}, lambda: gigpo(gamma=0.5, omega=0.25)),
        ("VinePPO", {"gamma": 0.5}, lambda: vineppo(gamma=0.5)),
        ("MT-GRPO", {"weight": 0.5}, lambda: mt_grpo(coef=0.5)),
        ("MT-GRPO", {"mix": 0.25}, lambda: 0.75 * mt_grpo() + 0.25 * normalized(SCORES)[:, None]),
    ],
)
def test_papers_credit_takes_the_papers_parameters(paper, keys, wanted):
    credit = Credit.model_validate(credit_of(paper).model_dump(exclude_defaults=True) | keys)
    np.testing.assert_allclose(credited(episodes(SCORES.tolist(), **SENT[paper][1]), credit), wanted(), atol=1e-5)
