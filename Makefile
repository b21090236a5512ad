.DEFAULT_GOAL := help
.PHONY: help setup demo demo-model test test-all check format clean

RUN := .venv/bin/python -m
PYTHON ?= python3
# One stamp for each build; without CUDA=... the build that is already there.
CUDA ?= $(if $(wildcard .venv/.setup-cuda),1,0)
STAMP := .venv/.setup-$(if $(filter 1,$(CUDA)),cuda,cpu)

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv and install everything (CUDA=1 for GPU machines)

$(STAMP): pyproject.toml scripts/setup_env.sh
	@CUDA='$(CUDA)' PYTHON='$(PYTHON)' bash scripts/setup_env.sh

demo-model: $(STAMP)  ## SmolLM2-135M-Instruct as a model folder in the cache
	@.venv/bin/python scripts/fetch_demo_model.py

demo: demo-model  ## train SmolLM2 with vLLM on CPU, evaluate, draw the figures (about 10 minutes after setup)
	@HF_HUB_OFFLINE=1 $(RUN) grpo_lab train --config configs/quickstart_cpu.yaml --method dapo --beta 0.05

test: demo-model  ## the quick tests, real vLLM included
	@HF_HUB_OFFLINE=1 $(RUN) pytest

test-all: demo-model  ## every test that this machine can run
	@HF_HUB_OFFLINE=1 $(RUN) pytest -m "not gpu"

check: $(STAMP)  ## format, lint, types, unit tests
	@$(RUN) ruff format --check . && $(RUN) ruff check . && $(RUN) mypy && $(RUN) pytest tests/unit tests/contracts

format: $(STAMP)  ## rewrite the code in the house format
	@$(RUN) ruff format . && $(RUN) ruff check --fix .

clean:  ## remove caches, keep .venv and runs
	@rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
