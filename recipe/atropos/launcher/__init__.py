"""Start, supervise, evaluate and stop the processes of a run."""
