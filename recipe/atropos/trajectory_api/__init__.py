"""A Trajectory API server: wire-compatible with atroposlib's ``run-api``, durable, ordered and exactly once.

``python -m recipe.atropos.trajectory_api --port P --data-dir D`` serves; docs/trajectory-api.md has the protocol.
"""
