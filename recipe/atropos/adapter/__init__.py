"""Everything that is interposed into a ``BaseEnv``, so that any Atropos environment trains as it is."""
