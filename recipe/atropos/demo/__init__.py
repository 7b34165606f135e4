"""Small models that are made locally: policies of the demonstrations."""
