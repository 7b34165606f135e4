"""What ``utils.debug`` runs on a configuration or an environment."""
