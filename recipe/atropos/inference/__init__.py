"""Launch of SGLang servers on GPUs and CPUs, the client that controls them, and the gateway. Never imports SGLang."""
