"""An Atropos environment as a ``gem.Env``."""
