"""Credit: advantages of turns, made of an environment's outcomes and its own check of what was reached so far."""
