"""Source of the trainer's numbered batches, where its users were promised it; see ``sources/numbered.py``."""

from recipe.atropos.sources.numbered import DataSource, DataSourceConfig, DataSourceError

__all__ = ["DataSource", "DataSourceConfig", "DataSourceError"]
