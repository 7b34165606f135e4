"""Adapter settings that a launcher passes as flags ``--adapter.NAME=VALUE``, next to the environment's own flags."""

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationInfo, field_validator

from recipe.atropos.credit.group import Credit

PREFIX = "--adapter."
WARNING = "warning: "  # before what ``--check`` prints for the user of an environment that can start


class AdapterSettings(BaseModel):
    """Settings of the adapter; all are optional, and an environment without a launcher uses the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups_in_flight: int | None = Field(None, ge=1, description="max_num_workers, where the environment has BaseEnv's")
    report: str | None = Field(None, description="File that a line of counts is added to every few seconds")
    replica: int | None = Field(None, ge=0, description="Which replica of the environment this process is, from 0 on")
    replicas: int = Field(1, ge=1, description="Processes that share the environment's items", validate_default=True)
    credit: Json[Credit] | None = Field(None, description="How tokens get advantages, as JSON; see credit.group.Credit")

    @field_validator("replicas")
    @classmethod
    def _has_replica(cls, replicas: int, others: ValidationInfo) -> int:
        replica = others.data.get("replica")
        if replica is None and replicas > 1 or replica is not None and replica >= replicas:
            raise ValueError(f"with {PREFIX}replica={replica}: give 0 to {replicas - 1}")
        return replicas

    def flags(self) -> list[str]:
        """Return the settings that differ from their defaults, as command-line flags."""
        return [
            f"{PREFIX}{name}={value}" for name, value in self.model_dump(exclude_defaults=True, round_trip=True).items()
        ]
