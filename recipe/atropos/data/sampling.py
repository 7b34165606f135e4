"""Sampling parameters of sequences, and whether they match the distribution that the trainer computes.

The parameters are those of the request that sampled a reply. They travel with each sequence as
``group_overrides["sampling_params"]``: a list over sequences, each a list of the distinct parameters of its trained
spans, as ``SamplingParams.to_mapping`` writes them, or null if unknown.

SGLang's logprobs are of the distribution after temperature, penalties, logit bias and grammar, but before top-p, top-k
and min-p truncation. The trainer's are of the distribution after temperature only. Therefore:

- a different temperature raises ``SamplingMismatch``, is used for that row (``per_row``), or is counted (``warn``);
- logprobs are too low under truncated sampling, and those of another policy under penalized sampling. The trainer
  can compute neither: both are counted, and in mode ``error`` they raise unless
  ``trainer.atropos.allow_truncated_sampling`` is set.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from recipe.atropos.errors import AtroposError

TEMPERATURE_VARIABLE = "ATROPOS_TEMPERATURE"  # the trainer's, set by the launcher for environments

_GREEDY = 1e-6  # SGLang treats a lower temperature as greedy sampling at temperature 1
_TOP_K_ALL = 1 << 30
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias")
# Request parameters that do not affect the distribution; any other unknown parameter counts as a constraint.
_NEUTRAL = frozenset(
    "n stop stop_token_ids stop_regex max_new_tokens ignore_eos skip_special_tokens spaces_between_special_tokens"
    " no_stop_trim stream_interval sampling_seed".split()
)
_KINDS = ("truncated", "penalized")


def default_temperature() -> float:
    """Return an environment's default temperature: the trainer's, or 1 if no launcher started the environment."""
    return float(os.environ.get(TEMPERATURE_VARIABLE) or 1.0)


Whole = int | Annotated[float, msgspec.Meta(multiple_of=1)]  # other languages write 50 as 50.0


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):  # type: ignore[call-arg]
    """Parameters of SGLang's /generate that change the sampling distribution; the defaults are SGLang's.

    It is decoded from what ``to_mapping`` wrote, which always has a temperature. ``logit_bias`` maps tokens to numbers;
    ``constraints`` holds the names of other parameters given, such as ``regex``.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    top_p: float = 1.0
    top_k: Whole = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: Whole = 0
    logit_bias: dict[int, float] = {}
    constraints: tuple[str, ...] = ()

    def __hash__(self) -> int:  # a mapping has none
        return hash((self.temperature, self.top_p, self.top_k, self.constraints))

    @classmethod
    def from_request(cls, params: Mapping[str, Any]) -> "SamplingParams":
        """Build from the ``sampling_params`` of a request; null means SGLang's default.

        Raises:
            TypeError, ValueError: a value is not a number, or ``logit_bias`` is not a mapping.
        """
        given = {name: value for name, value in params.items() if value is not None and name not in _NEUTRAL}
        bias = given.pop("logit_bias", None) or {}
        values: dict[str, Any] = {"temperature": 1.0} | {
            name: int(given.pop(name)) if name in ("top_k", "min_new_tokens") else float(given.pop(name))
            for name in _NUMBERS & given.keys()
        }
        return cls(
            **values,
            logit_bias={int(token): float(value) for token, value in dict(bias).items()},
            constraints=tuple(sorted(name for name, value in given.items() if value not in ("", False, [], {}))),
        )

    @classmethod
    def from_declaration(cls, params: Mapping[str, Any]) -> "SamplingParams":
        """Build from a group's free-form ``generation_params``, reading only the numeric fields and ``logit_bias``.

        Raises:
            TypeError, ValueError: as in ``from_request``.
        """
        return cls.from_request({name: params[name] for name in (*_NUMBERS, "logit_bias") if name in params})

    def to_mapping(self) -> dict[str, Any]:
        """Return the temperature and all values that differ from SGLang's defaults, as plain values for JSON."""
        values, default = (msgspec.to_builtins(params, str_keys=True) for params in (self, _DEFAULT))
        return {name: value for name, value in values.items() if name == "temperature" or value != default[name]}

    def request(self) -> dict[str, float]:
        """Return the numeric parameters for a request, with defaults, so that no server-side default applies."""
        return {name: getattr(self, name) for name in sorted(_NUMBERS)}

    @property
    def truncated(self) -> bool:
        """Whether sampling excluded tokens that the reported logprobs still include; greedy sampling counts."""
        return self.top_p < 1 or 0 < self.top_k < _TOP_K_ALL or self.min_p > 0 or self.temperature < _GREEDY

    @property
    def penalized(self) -> bool:
        """Whether anything but temperature and truncation changed the distribution."""
        return bool(self.constraints) or any(getattr(self, name) != getattr(_DEFAULT, name) for name in _PENALTIES)

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the reported logprobs: 1 for greedy sampling."""
        return 1.0 if self.temperature < _GREEDY else self.temperature


_NUMBERS = {*SamplingParams.__struct_fields__} - {"logit_bias", "constraints"}
_DEFAULT = SamplingParams(1.0)

Sampled = tuple[SamplingParams, ...] | None  # the distinct parameters of a sequence's trained spans; None: unknown


class SamplingMismatch(AtroposError, ValueError):
    """Rows to be trained on were sampled from a different distribution than the trainer computes."""


@dataclass(frozen=True)
class SamplingCheck:
    """How to handle rows whose sampling differs from what the trainer computes, at ``temperature``."""

    temperature: float
    mode: Literal["error", "per_row", "warn"] = "error"
    allow_truncated: bool = False
    several: bool = False  # several environments, each with its own arguments

    @classmethod
    def from_config(cls, config: Any) -> "SamplingCheck":
        """Build from the full configuration."""
        atropos, temperature = config.trainer.atropos, config.actor_rollout_ref.rollout.temperature
        return cls(temperature, atropos.sampling_mismatch, atropos.allow_truncated_sampling, bool(config.environments))

    def metrics(self, rows: Sequence[Sampled], names: Sequence[str]) -> dict[str, float]:
        """Return nonzero row counts, under ``atropos/rows_with/`` and ``atropos/ENV/rows_with/``.

        Counted are ``unknown_sampling``, ``other_temperature``, ``truncated_sampling`` and ``penalized_sampling``.
        ``names`` are the names of the rows' environments.

        Raises:
            SamplingMismatch: ``mode`` forbids a row's sampling; names the environment, both values and the options.
        """
        counts: Counter[str] = Counter()
        for sampled, name in zip(rows, names, strict=True):
            if sampled is None:
                found = ["unknown_sampling"]
            else:
                kinds = [kind for kind in _KINDS if any(getattr(params, kind) for params in sampled)]
                used = {params.logprob_temperature for params in sampled}
                others = sorted(value for value in used if not math.isclose(value, self.temperature, abs_tol=1e-6))
                self._check(sampled, kinds, others, name)
                found = [f"{kind}_sampling" for kind in kinds] + ["other_temperature"] * bool(others)
            for kind in found:
                counts.update((f"atropos/rows_with/{kind}", f"atropos/{name}/rows_with/{kind}"))
        return {key: float(n) for key, n in counts.items()}

    def _check(self, sampled: tuple[SamplingParams, ...], kinds: list[str], others: list[float], name: str) -> None:
        """``kinds``: how it is sampled otherwise than by temperature; ``others``: temperatures that are not ours."""
        if self.mode == "error" and not self.allow_truncated and kinds:
            which = next(p for p in sampled if getattr(p, kinds[0])).to_mapping()
            raise SamplingMismatch(
                f"environment {name} used {kinds[0]} sampling, {which}: it is not the distribution of which "
                "SGLang reports and the trainer computes logprobs; let the environment sample without, "
                "or set trainer.atropos.allow_truncated_sampling=true to train on it as it is"
            )
        if others and self.mode == "error":
            key = f"environments.{name}.args" if self.several else "environment.args"
            raise SamplingMismatch(
                f"environment {name} sampled at temperature {others[0]:g}, but the trainer computes logprobs at "
                f"actor_rollout_ref.rollout.temperature={self.temperature:g}; set {key}.temperature="
                f"{self.temperature:g} (or what the environment calls it), or actor_rollout_ref.rollout.temperature="
                f"{others[0]:g}, or trainer.atropos.sampling_mismatch=per_row to compute each row at its own"
            )
        if self.mode == "per_row" and len({p.logprob_temperature for p in sampled}) > 1:
            found = ", ".join(f"{p.temperature:g}" for p in sampled)
            raise SamplingMismatch(
                f"environment {name} sampled the turns of one sequence at temperatures {found}; "
                "trainer.atropos.sampling_mismatch=per_row computes a row at one temperature: let the environment "
                "sample all its turns at the same"
            )

    def temperatures(self, rows: Sequence[Sampled]) -> np.ndarray | None:
        """Return each row's temperature, (B,) float32; None if all are the trainer's or the mode is not ``per_row``."""
        if self.mode != "per_row":
            return None
        found = [self.temperature if not sampled else sampled[0].logprob_temperature for sampled in rows]
        return None if set(found) == {self.temperature} else np.array(found, dtype=np.float32)
