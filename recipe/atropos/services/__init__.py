"""Processes that a run starts: free ports, start, health, end. Knows nothing of training."""
