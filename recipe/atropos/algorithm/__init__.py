"""Algorithms: the reward bridge, advantages, losses, off-policy correction, mini-batches, and the metrics of a step."""
