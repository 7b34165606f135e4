"""Hydra configuration: ``trainer.yaml`` and presets over it."""
