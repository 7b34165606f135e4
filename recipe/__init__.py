"""A regular package on purpose: some wheels install a top-level ``recipe/`` without one, which would join ours."""
