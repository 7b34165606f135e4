"""What advantages for each turn save: ``verl-atropos credit``, or ``verl-atropos credit --run runs/NAME --step N``

Without a run it is predicted, on a task small enough to enumerate: see ``credit.microscope``. With one it is measured
on rows of a recorded batch: how noisy the policy gradient is with the batch's advantages, and with those of outcome
GRPO. The run must have kept its batches (``api.retention=all``, the default).
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.credit import microscope
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import find_run


def gradient_noise(policy: Any, rows: Any, groups: Sequence[str], temperature: float) -> float:
    """Return the trace of the covariance of the mean of n groups' policy gradients, over the squared norm of what it
    estimates, both without bias: the noise in the mean's own squared norm is taken off.

    It is 0 for equal gradients, infinite if the mean does not exceed its noise, NaN if all are 0. A group's is that of
    the sum of advantage times logprob over its trained tokens.
    """
    import torch  # here: it takes seconds

    batch, total, squares, n = rows.batch, torch.zeros(()), 0.0, len(groups)
    for uid in groups:
        policy.zero_grad()
        for row in (rows.non_tensor_batch["uid"] == uid).nonzero()[0].tolist():
            there, advantages = batch["attention_mask"][row].bool(), batch["advantages"][row]
            tokens, advantages = batch["input_ids"][row][there], advantages[there[-len(advantages) :]]
            logits = policy(tokens[None]).logits[0, -len(advantages) - 1 : -1] / temperature
            logprobs = logits.log_softmax(-1).gather(-1, tokens[-len(advantages) :, None])[:, 0]
            (logprobs * advantages).sum().backward()
        gradient = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])
        total, squares = total + gradient / n, squares + gradient.square().sum() / n
    variance = (squares - total.square().sum()) / (n - 1)
    signal = total.square().sum() - variance
    return (variance / signal.clamp(min=0.0)).item()


def measure(files: RunDir, step: int, limit: int, model: str | None) -> None:
    """Print the noise of both gradients over the whole groups among a step's first ``limit`` rows, and their ratio.

    Raises:
        ConfigurationError: these are less than two groups, or there is no model at ``model``, by default the run's.
    """
    from transformers import AutoModelForCausalLM

    from recipe.atropos.config.compose import load_recorded, with_values
    from recipe.atropos.report.token_view import origin_of_advantages, rows_of_step

    own = {"run.dir": str(files.path), "actor_rollout_ref.model.trust_remote_code": False}
    config = with_values(load_recorded(files.config), own | ({MODEL_KEY: model} if model else {}))
    outcome = {"algorithm.adv_estimator": "grpo_atropos", "trainer.atropos.use_advantages": False}
    outcome |= {"trainer.atropos.fallback_to_grpo": True}
    given, outcomes = rows_of_step(config, step), rows_of_step(with_values(config, outcome), step)
    uids, path = given.non_tensor_batch["uid"], config.actor_rollout_ref.model.path
    groups = sorted({*uids[:limit]} - {*uids[limit:]}, key=int)
    if len(groups) < 2:
        raise ConfigurationError(f"--rows={limit} holds {len(groups)} whole groups of step {step}; give more, for two")
    policy, temperature = AutoModelForCausalLM.from_pretrained(path), config.actor_rollout_ref.rollout.temperature
    own, grpo = (gradient_noise(policy.float(), rows, groups, temperature) for rows in (given, outcomes))
    print(f"step {step}, {len(groups)} groups, policy {path}; variance of the mean gradient over its squared norm:")
    origins = {origin_of_advantages(config, given, row) for row in np.flatnonzero(np.isin(uids, groups))}
    for name, value in (("; ".join(sorted(origins)), own), ("outcome GRPO", grpo), ("ratio", own / grpo)):
        print(f"  {name:<40}{value:>10.4g}")


def main(argv: Sequence[str]) -> int:
    if not any(word.startswith("--run") for word in argv):
        return microscope.main(argv)
    parser = argparse.ArgumentParser(prog="verl-atropos credit", description="Measure the noise of a step's gradient.")
    parser.add_argument("--run", required=True, help="folder of a run, or its name below runs/")
    parser.add_argument("--step", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--rows", type=int, default=64, help="sequences to measure on, in whole groups; default: %(default)s"
    )
    parser.add_argument("--model", help="the policy; default: the one that the run began with")
    options = parser.parse_args(argv)
    measure(find_run(options.run), options.step, options.rows, options.model)
    return 0
