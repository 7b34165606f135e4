"""The commands of ``verl-atropos`` other than training."""
