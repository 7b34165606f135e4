"""Adapter settings that a launcher passes as flags ``--adapter.NAME=VALUE``, next to the environment's own flags."""

from pydantic import BaseModel, ConfigDict, Field, Json

from recipe.atropos.credit.group import Credit

PREFIX = "--adapter."


class AdapterSettings(BaseModel):
    """Settings of the adapter; all are optional, and an environment without a launcher uses the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups_in_flight: int | None = Field(None, ge=1, description="max_num_workers, where the environment has BaseEnv's")
    report: str | None = Field(None, description="File that a line of counts is added to every few seconds")

    credit: Json[Credit] | None = Field(None, description="How tokens get advantages, as JSON; see credit.group.Credit")

    def flags(self) -> list[str]:
        """Return the settings that differ from their defaults, as command-line flags."""
        return [
            f"{PREFIX}{name}={value}" for name, value in self.model_dump(exclude_defaults=True, round_trip=True).items()
        ]
