"""The trained model on disk: a run's checkpoints, resumption from them, and export in Hugging Face format."""
