"""Regular package on purpose: some wheels install a top-level ``recipe/`` without ``__init__.py`` that would join ours."""
