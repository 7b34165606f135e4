"""Leaves that know nothing of training, and two entry points: ``debug`` and ``env_adapter``."""
