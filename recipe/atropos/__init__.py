"""Train a policy with verl on trajectories from Atropos environments, with SGLang on the newest weights."""
