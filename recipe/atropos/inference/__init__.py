"""SGLang: how a server is started, on a GPU and on a CPU, and the client that controls it. Nothing here imports it."""
