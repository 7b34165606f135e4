# On a CPU, with the demonstration: docker build -t verl-atropos . && docker run --rm --shm-size=2g verl-atropos
# Not built by anybody yet. docs/gpu.md has the image for GPUs.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/verl-atropos
COPY . .
# PyTorch's CPU builds: without its index pip takes those for CUDA, of several GB.
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make env PYTHON=python3
ENV PATH=/opt/verl-atropos/.venv/bin:$PATH
CMD ["make", "demo"]
