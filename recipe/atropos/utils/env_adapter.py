"""Run any unmodified Atropos environment: ``python -m recipe.atropos.utils.env_adapter``; see ``adapter/cli.py``."""

from recipe.atropos.utils.importing import gc_disabled

with gc_disabled():
    from recipe.atropos.adapter.cli import CHECK, adapt, main, run
    from recipe.atropos.adapter.loading import EnvironmentTargetError, load_environment

__all__ = ["CHECK", "EnvironmentTargetError", "adapt", "load_environment", "main", "run"]

if __name__ == "__main__":
    main()
