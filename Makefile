# `make VENV= PYTHON=python3 ...` uses that Python as it is: for machines that have the packages and no network.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
FUZZ_SECONDS ?= 300

ifeq ($(strip $(VENV)),)
PY := PYTHONPATH=$(CURDIR)/src $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test check fmt bench gpu-test fuzz faults clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv with everything (TORCH=... chooses another torch)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install $(TORCH)
	$(PY) -m pip install -e '.[dev]'
	@touch $@

demo: $(READY) ## train, kill, resume, compare bit for bit with a run that was never stopped
	$(PY) -m thinpoint.demo

test: $(READY) ## all tests that need no GPU
	$(PY) -m pytest -m "not gpu" -n auto --dist worksteal

check: $(READY) ## format, lint, types, layers
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

fmt: $(READY) ## format the sources
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(READY) ## ratio and throughput beside torch.save, zstd, ZipNN and DCP on a model trained here; on a GPU nvCOMP too
	$(if $(READY),$(PY) -m pip install -q -e '.[bench]')
	$(PY) bench/compare.py --make
	@$(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || \
	  { echo "bench: no CUDA device on this machine; the GPU was not measured"; exit 0; } && \
	  $(PY) -m bench.gpu --out bench-gpu

gpu-test: $(READY) ## tests that need a CUDA device, and those of the kernels compiled instead of interpreted
	@$(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || \
	  { echo "gpu-test: no CUDA device on this machine; no GPU test was run"; exit 0; } && \
	  $(PY) -m pytest -m gpu && $(PY) -m pytest tests/device -m "not gpu"

fuzz: $(READY) ## hostile files against the reader, FUZZ_SECONDS=300
	$(PY) fuzz/fuzz_reader.py --seconds $(FUZZ_SECONDS)

faults: $(READY) ## the disk fails, tears, fills, or the process is killed at every operation of a save
	$(PY) tests/checkpoint/faults.py
	$(PY) tests/checkpoint/chaos.py

clean: ## remove what the targets above made
	rm -rf .venv build dist demo-run bench-gpu .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
