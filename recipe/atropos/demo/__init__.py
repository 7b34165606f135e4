"""Small models that are made locally: policies of the demonstrations, and random models of many architectures."""
