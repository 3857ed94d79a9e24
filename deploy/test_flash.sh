#!/usr/bin/env bash
# The suite in the environment of FlashAttention: torch 2.4.0 and vllm-flash-attn 2.6.2.
# usage: deploy/test_flash.sh VENV [pytest arguments]
#
# PyPI's torch 2.4.0 is the CUDA build: 2.5 GB of packages, 5.2 GB on disk, two minutes on a fast
# line. That is what is installed, with or without a GPU: it runs on a CPU as well, and only with
# its CUDA libraries can the real flash-attn binary be loaded and asked for its signatures.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$1
shift

PYTHON=${PYTHON:-python3} TORCH_VERSION=2.4.0 deploy/install.sh "$VENV" flash,test,test-flash
"$VENV/bin/headway" pull
# What a worker computes, and how: the rest of the product does not touch torch.
# One thread: this torch's OpenMP threads wait for each other on machines that do other things too.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
HEADWAY_FLASH_PACKAGE=required exec "$VENV/bin/python" -m pytest \
    tests/unit/workers tests/contract tests/determinism tests/property tests/gpu "$@"
