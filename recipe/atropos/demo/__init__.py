"""Small models that are made here: policies of the demonstrations, and random models of many architectures."""
