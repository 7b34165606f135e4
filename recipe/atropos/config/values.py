"""What a value of the configuration may be: verl's choices, numbers and their ranges, and the base of its sections."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

from recipe.atropos.algorithm.estimators import ESTIMATORS


def _declared(name: Any) -> str:
    if name not in (choices := sorted(ESTIMATORS)):
        raise PydanticKnownError("literal_error", {"expected": ", ".join(choices)})
    return name


EstimatorName = Annotated[str, PlainValidator(_declared), WithJsonSchema({"enum": sorted(ESTIMATORS)})]
# verl's names are repeated here, so that verl need not be imported; a test compares them with verl's registries.
PolicyLoss = Literal[
    "advantage_weighted_sft",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
]
KL = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLoss = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Tracker = Literal[
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "tensorboard",
    "console",
    "clearml",
    "trackio",
    "file",
    "rl_insight",
]

Text = Annotated[str, Field(min_length=1)]
Name = Text | int | float  # a name like 2024 is parsed as a number
Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
URL = Annotated[str, Field(pattern=r"^https?://.+")]
Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["bfloat16", "float16", "float32"]
TorchDtype = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16"]


class Section(BaseModel):
    """A mapping of this recipe's own keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class VerlSection(Section):
    """A mapping of verl's keys; only those named here are checked."""

    model_config = ConfigDict(extra="ignore")


def about(text: str) -> Any:
    """Return the field of a key with its meaning. Its default is in ``trainer.yaml``."""
    return Field(description=text)
