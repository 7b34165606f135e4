"""Adapter settings that a launcher passes as flags ``--adapter.NAME=VALUE``, next to the environment's own flags."""

from pydantic import BaseModel, ConfigDict, Field

PREFIX = "--adapter."
STALL_TIMEOUT = 120.0


class AdapterSettings(BaseModel):
    """Settings of the adapter; all are optional, and an environment without a launcher uses the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_staleness: int | None = Field(None, ge=0, description="Bound that generation is paced by, in updates")
    stall_timeout: float = Field(
        STALL_TIMEOUT, gt=0, description="Seconds without a new version or room, until a batch is taken for lost"
    )
    groups_in_flight: int | None = Field(None, ge=1, description="max_num_workers, where the environment has BaseEnv's")
    report: str | None = Field(None, description="File that a line of counts is added to every few seconds")

    def flags(self) -> list[str]:
        """Return the settings that differ from their defaults, as command-line flags."""
        return [f"{PREFIX}{name}={value}" for name, value in self.model_dump(exclude_defaults=True).items()]
