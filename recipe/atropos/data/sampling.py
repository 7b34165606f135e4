"""What a sequence was sampled with, and whether that is the distribution that the trainer computes.

The request that sampled a reply says with which parameters. They travel with each sequence as
``group_overrides["sampling_params"]``: a list over sequences, each a list of the distinct parameters of its trained
spans, as ``SamplingParams.to_mapping`` writes them, or null where they are unknown.

SGLang's logprobs are of the distribution after temperature, penalties, logit bias and grammar, before top-p, top-k and
min-p cut it off. The trainer computes that of the temperature alone. So

- another temperature is a ``SamplingMismatch``, or is computed with (``per_row``), or is counted (``warn``);
- truncated sampling has logprobs that are too low, and penalized sampling those of another policy. Neither can be
  computed with here; both are counted, and an error unless they are allowed.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from recipe.atropos.errors import AtroposError

TEMPERATURE_VARIABLE = "ATROPOS_TEMPERATURE"  # the launcher tells environments the trainer's

_GREEDY = 1e-6  # SGLang takes a temperature below this for greedy sampling at temperature 1
_TOP_K_ALL = 1 << 30
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias")
# What a request may say without an effect on the distribution; whatever else it says counts as a constraint.
_NEUTRAL = frozenset(
    "n stop stop_token_ids stop_regex max_new_tokens ignore_eos skip_special_tokens spaces_between_special_tokens"
    " no_stop_trim stream_interval sampling_seed".split()
)
_KINDS = ("truncated", "penalized")


def default_temperature() -> float:
    """At which an environment samples where it names none: the trainer's, or 1 where no launcher started it."""
    return float(os.environ.get(TEMPERATURE_VARIABLE) or 1.0)


@dataclass(frozen=True)
class SamplingParams:
    """What changes the distribution of a request to SGLang's /generate; the defaults are SGLang's.

    ``logit_bias`` holds (token, bias); ``constraints`` the names of what else was given, such as ``regex``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraints: tuple[str, ...] = ()

    @classmethod
    def from_request(cls, params: Mapping[str, Any]) -> "SamplingParams":
        """Of the ``sampling_params`` of a request; null means SGLang's default.

        Raises:
            TypeError, ValueError: a value that is no number, or a ``logit_bias`` that is no mapping.
        """
        given = {name: value for name, value in params.items() if value is not None and name not in _NEUTRAL}
        bias = given.pop("logit_bias", None) or {}
        values: dict[str, Any] = {
            name: int(given.pop(name)) if name in ("top_k", "min_new_tokens") else float(given.pop(name))
            for name in _NUMBERS & given.keys()
        }
        if values.get("top_k", 0) >= _TOP_K_ALL:
            del values["top_k"]
        return cls(
            **values,
            logit_bias=tuple(sorted((int(token), float(value)) for token, value in dict(bias).items())),
            constraints=tuple(sorted(name for name, value in given.items() if value not in ("", False, [], {}))),
        )

    @classmethod
    def from_declaration(cls, params: Mapping[str, Any]) -> "SamplingParams":
        """Of a group's ``generation_params``, in which environments may note anything: by the names of this class.

        Raises:
            TypeError, ValueError: as ``from_request``.
        """
        return cls.from_request({name: params[name] for name in (*_NUMBERS, "logit_bias") if name in params})

    @classmethod
    def from_mapping(cls, mapping: Any) -> "SamplingParams":
        """What ``to_mapping`` wrote.

        Raises:
            ValueError: it is no mapping with a temperature, has an unknown name, or a value that is no such number.
        """
        if not isinstance(mapping, Mapping) or "temperature" not in mapping:
            raise ValueError(f"{mapping!r} is no mapping with a temperature")
        unknown = sorted(map(str, mapping.keys() - {field.name for field in fields(cls)}))
        if unknown:
            raise ValueError(f"{unknown[0]} is none of {', '.join(field.name for field in fields(cls))}")
        for name in _NUMBERS & mapping.keys():
            value = mapping[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}, not a finite number")
        if mapping["temperature"] < 0:
            raise ValueError(f"temperature is {mapping['temperature']!r}; it must be 0 or more")
        constraints = mapping.get("constraints") or ()
        if isinstance(constraints, str) or not all(isinstance(name, str) for name in constraints):
            raise ValueError(f"constraints is {constraints!r}, not a list of names")
        try:
            found = cls.from_request({name: value for name, value in mapping.items() if name != "constraints"})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"logit_bias is {mapping.get('logit_bias')!r}, not a mapping of tokens to numbers"
            ) from error
        return cls(**{**asdict(found), "logit_bias": found.logit_bias, "constraints": tuple(sorted(constraints))})

    def to_mapping(self) -> dict[str, Any]:
        """The temperature, and what is not SGLang's default; plain values for JSON."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.logit_bias:
            found["logit_bias"] = {str(token): value for token, value in self.logit_bias}
        if self.constraints:
            found["constraints"] = list(self.constraints)
        return {"temperature": self.temperature, **found}

    def request(self) -> dict[str, float]:
        """The numbers for a request, defaults too, so that no default of the server's own applies."""
        return {name: getattr(self, name) for name in sorted(_NUMBERS)}

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut off that the reported logprobs still have in their sum; greedy sampling included."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.temperature < _GREEDY

    @property
    def penalized(self) -> bool:
        """Whether anything but temperature and truncation changed the distribution."""
        return bool(self.constraints) or any(getattr(self, name) != getattr(_DEFAULT, name) for name in _PENALTIES)

    @property
    def logprob_temperature(self) -> float:
        """Of the reported logprobs: 1 for greedy sampling."""
        return 1.0 if self.temperature < _GREEDY else self.temperature


_NUMBERS = {field.name for field in fields(SamplingParams)} - {"logit_bias", "constraints"}
_DEFAULT = SamplingParams()

Sampled = tuple[SamplingParams, ...] | None  # the distinct parameters of a sequence's trained spans; None: unknown


class SamplingMismatch(AtroposError, ValueError):
    """Rows that are to be trained on were sampled from another distribution than the trainer computes."""


@dataclass(frozen=True)
class SamplingCheck:
    """How rows are taken that were not sampled as the trainer, at ``temperature``, computes them."""

    temperature: float
    mode: Literal["error", "per_row", "warn"] = "error"
    allow_truncated: bool = False
    several: bool = False  # environments, each with arguments of its own

    @classmethod
    def from_config(cls, config: Any) -> "SamplingCheck":
        """Of the whole configuration."""
        atropos, temperature = config.trainer.atropos, config.actor_rollout_ref.rollout.temperature
        several = bool(config.environments)
        return cls(temperature, atropos.sampling_mismatch, atropos.allow_truncated_sampling, several)

    def metrics(self, rows: Sequence[Sampled], names: Sequence[str]) -> dict[str, float]:
        """Counts of rows, under ``atropos/rows_with/`` and ``atropos/ENV/rows_with/``, those above 0 only.

        ``unknown_sampling``, ``other_temperature``, ``truncated_sampling`` and ``penalized_sampling``. ``names`` are
        those of the rows' environments.

        Raises:
            SamplingMismatch: what ``mode`` does not allow; names environment, both values and the options to set.
        """
        counts: Counter[str] = Counter()
        for sampled, name in zip(rows, names, strict=True):
            if sampled is None:
                found = ["unknown_sampling"]
            else:
                self._check(sampled, name)
                found = ["other_temperature"] if self._others(sampled) else []
                found += [f"{kind}_sampling" for kind in _KINDS if _any(sampled, kind)]
            for kind in found:
                counts.update((f"atropos/rows_with/{kind}", f"atropos/{name}/rows_with/{kind}"))
        return {key: float(n) for key, n in counts.items()}

    def _others(self, sampled: tuple[SamplingParams, ...]) -> list[float]:
        found = {params.logprob_temperature for params in sampled}
        return sorted(value for value in found if not math.isclose(value, self.temperature, abs_tol=1e-6))

    def _check(self, sampled: tuple[SamplingParams, ...], name: str) -> None:
        for kind in _KINDS:
            if self.mode == "error" and not self.allow_truncated and _any(sampled, kind):
                which = next(p for p in sampled if getattr(p, kind)).to_mapping()
                raise SamplingMismatch(
                    f"environment {name} used {kind} sampling, {which}: it is not the distribution of which "
                    "SGLang reports and the trainer computes logprobs; let the environment sample without, "
                    "or set trainer.atropos.allow_truncated_sampling=true to train on it as it is"
                )
        others = self._others(sampled)
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
        """(B,) float32, each row's own; None where all rows are at the trainer's, or the mode is not ``per_row``."""
        if self.mode != "per_row":
            return None
        found = [self.temperature if not sampled else sampled[0].logprob_temperature for sampled in rows]
        return None if set(found) == {self.temperature} else np.array(found, dtype=np.float32)


def _any(sampled: tuple[SamplingParams, ...], kind: str) -> bool:
    return any(getattr(params, kind) for params in sampled)
