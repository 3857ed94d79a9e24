# Headway: `make serve` serves the embedded model, `make test` runs everything.
# PYTHON=python3.12 picks an interpreter, ARGS="--engines 2" goes to `headway serve`,
# TORCH_INDEX_URL=... takes torch from another package index (CPU wheels, an own mirror).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help install install-test serve test loadtest bench-cpu lint types imports stubs check clean

help:
	@sed -n '1,4s/^# //p' $(firstword $(MAKEFILE_LIST))
	@echo "targets: install serve test loadtest bench-cpu lint types imports stubs check clean"

install:
	@PYTHON=$(PYTHON) deploy/install.sh $(VENV) base

serve: install
	@exec $(BIN)/headway serve $(ARGS)

install-test:
	@PYTHON=$(PYTHON) deploy/install.sh $(VENV) test,dev,load

test: install-test
	@$(BIN)/headway pull
	$(BIN)/python -m pytest $(PYTEST_ARGS)

loadtest:
	@PYTHON=$(PYTHON) deploy/install.sh $(VENV) load
	@$(BIN)/headway loadtest quick $(ARGS)

bench-cpu: install
	$(BIN)/python -m workers.bench_cpu $(ARGS)

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-test
	$(BIN)/mypy

imports: install-test
	$(BIN)/lint-imports

stubs: install-test
	$(BIN)/python proto/generate.py --check

check: lint types imports stubs

clean:
	rm -rf $(VENV) build *.egg-info
