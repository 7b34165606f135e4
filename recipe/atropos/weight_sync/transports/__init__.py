"""How a weight version travels: by files, a process group, shared memory, or as a LoRA adapter alone."""
