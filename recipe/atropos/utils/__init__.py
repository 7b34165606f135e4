"""Tools around the trainer that it does not import."""
