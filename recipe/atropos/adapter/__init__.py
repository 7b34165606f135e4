"""Adapter that wraps any Atropos ``BaseEnv``, so that the environment can train unmodified."""
