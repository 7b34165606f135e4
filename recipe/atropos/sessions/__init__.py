"""Sessions: programs that call a model over HTTP, whose every sampled token is trained exactly once."""
