"""Atropos environments that come with the recipe, and wrappers around others. None of them imports the trainer."""
