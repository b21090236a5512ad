#!/usr/bin/env bash
# On a GPU machine with torch, transformers, accelerate and peft: what the GPU is, and the tests marked gpu on it.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.is_available())'
"$PYTHON" -m pytest -m gpu -v tests/gpu
