"""What ``verl-atropos`` can do beside training."""
