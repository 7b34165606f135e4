"""Utilities that are independent of training, and two entry points: ``debug`` and ``env_adapter``."""
