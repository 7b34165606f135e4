"""Transports for weight versions: files, a process group, shared memory, and adapter-only LoRA sync."""
