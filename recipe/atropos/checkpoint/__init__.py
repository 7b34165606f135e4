"""The trained model on disk: a run's checkpoints, what resumes from them, and the export in Hugging Face format."""
