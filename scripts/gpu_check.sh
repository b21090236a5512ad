#!/usr/bin/env bash
# On a GPU machine with torch, transformers, accelerate and peft: what the GPU is, the tests marked gpu, and the learner's speed
# there (random weights of Qwen2.5-0.5B's shape in bf16: tokens/s, MFU, peak memory). No vLLM, hub or data needed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export HF_HUB_OFFLINE=1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.is_available())'
"$PYTHON" -m pytest -m gpu -v tests/gpu
"$PYTHON" scripts/bench/learner.py --random --dtype bfloat16 --prompts 8 --microbatch-tokens 16384 --rounds 5
