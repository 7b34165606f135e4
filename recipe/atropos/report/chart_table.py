"""The charts of values over steps: which metrics, and what they mean; scores have more than metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chart:
    """``keys``: metrics by label; ``prefix``: also all metrics that start so; ``limit``: key of the configuration."""

    id: str
    title: str
    unit: str
    about: str
    keys: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    zero: bool = True  # the axis begins at 0
    log: bool = False
    limit: str = ""
    quiet: bool = False  # only series that are not 0 throughout are shown


CHARTS = (
    Chart(
        "score",
        "Score",
        "",
        "Mean score of the answers that a step was trained on. Groups whose answers all have the same score are left "
        "out of training, so “everything scored” rises earlier and higher.",
        zero=False,
    ),
    Chart(
        "heldout",
        "Held-out score",
        "",
        "Score on items that are never trained on. Its range may be another than that of the training score.",
        zero=False,
    ),
    Chart(
        "entropy",
        "Entropy",
        "nats per token",
        "How undecided the policy is. Near 0 it always gives the same answer, and can explore no longer.",
        {"entropy": "actor/entropy"},
    ),
    Chart(
        "logprobs",
        "Logprob difference",
        "nats",
        "How much the servers' logprobs of the sampled tokens differ from the trainer's. Fresh samples differ by "
        "rounding only: more means other weights, sampling parameters or kernels. Older ones differ by the "
        "updates since.",
        {
            "mean": "atropos/logprob_diff/mean",
            "mean, fresh samples": "atropos/logprob_diff/fresh_mean",
            "largest": "atropos/logprob_diff/max",
        },
        zero=False,
        log=True,
    ),
    Chart(
        "sampling",
        "Rows sampled otherwise",
        "rows per step",
        "Rows that came without sampling parameters, at another temperature than the trainer computes with, or with "
        "truncation or penalties: their logprobs are not those of the policy that is trained.",
        {
            "another temperature": "atropos/rows_with/other_temperature",
            "unknown parameters": "atropos/rows_with/unknown_sampling",
            "truncated": "atropos/rows_with/truncated_sampling",
            "penalized": "atropos/rows_with/penalized_sampling",
            "without logprobs": "atropos/rows_with/no_logprobs",
        },
        quiet=True,
    ),
    Chart(
        "kl",
        "KL",
        "nats per token",
        "How far the policy is from the one that sampled, from itself before the update, and from the reference.",
        {
            "sampling policy": "rollout_corr/kl",
            "before the update": "actor/ppo_kl",
            "reference": "actor/kl_loss",
            "reference, in the reward": "actor/reward_kl_penalty",
        },
        zero=False,
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "",
        "Size of the gradient before it is clipped; 0 means that nothing is learned from.",
        {"gradient norm": "actor/grad_norm"},
        limit="actor_rollout_ref.actor.optim.clip_grad",
    ),
    Chart("lr", "Learning rate", "", "Of the optimizer.", {"learning rate": "actor/lr"}),
    Chart(
        "clip",
        "Clipped tokens",
        "share",
        "Tokens whose probability changed more than the clip ratio allows: they give no gradient.",
        {"clipped": "actor/pg_clipfrac", "clipped below": "actor/pg_clipfrac_lower"},
        quiet=True,
    ),
    Chart(
        "length",
        "Response length",
        "tokens",
        "From the first sampled token on, as trained on. With its prompt, a row has a limit; longer ones are dropped.",
        {"mean": "response_length/mean", "longest": "response_length/max", "shortest": "response_length/min"},
    ),
    Chart(
        "cut",
        "Responses cut at the limit",
        "rows per step",
        "Rows longer than the trainer's limit, with overlong=truncate: a response's beginning is trained on, with the "
        "score of the whole; what was cut off is not.",
        {"cut": "atropos/rows_with/response_truncated"},
        quiet=True,
    ),
    Chart(
        "staleness",
        "Staleness",
        "updates",
        "How many updates older than the policy the weights were that sampled a row. A server that missed a push shows "
        "as a largest value that grows step by step, beside a low smallest one.",
        {"mean": "atropos/staleness/mean", "largest": "atropos/staleness/max", "smallest": "atropos/staleness/min"},
        limit="trainer.atropos.max_staleness",
    ),
    Chart(
        "signal",
        "Trained groups without signal",
        "share",
        "Groups whose advantages are all 0: nothing is learned from them.",
        {"share": "atropos/zero_signal_share"},
        quiet=True,
    ),
    Chart(
        "drops",
        "Rows dropped by the trainer",
        "rows per step",
        "By reason; the table of reasons says what they mean.",
        prefix="atropos/dropped/",
        quiet=True,
    ),
    Chart(
        "speed",
        "Throughput",
        "tokens/s per GPU or CPU rank",
        "Tokens of prompts and responses that a step trained on, per second of the whole step.",
        {"tokens/s": "perf/throughput"},
    ),
    Chart(
        "queue",
        "Batches ahead",
        "batches",
        "Batches that were complete when the step began; 0: the trainer waits for environments.",
        {"batches ahead": "atropos/batches_ahead"},
    ),
    Chart(
        "servers",
        "Servers removed",
        "servers",
        "Servers that did not answer when the step began.",
        {"removed": "weight_sync/servers_removed"},
        quiet=True,
    ),
)
