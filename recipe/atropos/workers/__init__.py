"""Worker groups through which the driver calls the trainer's ranks under Ray."""
