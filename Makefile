# Headway: `make serve` serves the embedded model, `make test` runs everything.
# PYTHON=python3.12 picks an interpreter, ARGS="--engines 2" goes to `headway serve`,
# TORCH_INDEX_URL=... takes torch from another package index (CPU wheels, an own mirror).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PEERS ?=
PYTEST_ARGS ?=

.PHONY: help install install-test serve test test-flash test-gpu test-cluster loadtest chaos bench-cpu bench-gpu lint types imports stubs check clean

help:
	@sed -n '1,4s/^# //p' $(firstword $(MAKEFILE_LIST))
	@echo "targets: install serve test test-flash test-gpu test-cluster loadtest chaos bench-cpu bench-gpu lint types imports stubs check clean"

install:
	@PYTHON=$(PYTHON) deploy/install.sh $(VENV) base

serve: install
	@exec $(BIN)/headway serve $(ARGS)

install-test:
	@PYTHON=$(PYTHON) deploy/install.sh $(VENV) test,dev,load,kernels

# Tests that only compute share the cores; those that take time or start processes have them alone.
COMPUTING := $(addprefix tests/,arch contract determinism property replay sim unit)

test: install-test
	@$(BIN)/headway pull
ifeq ($(strip $(PYTEST_ARGS)),)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(COMPUTING)
	$(BIN)/python -m pytest --durations 20 $(addprefix --ignore=,$(COMPUTING))
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

# In an environment of its own, .venv-flash: FlashAttention's wheels need torch 2.4.0 (5 GB on disk).
test-flash:
	@PYTHON=$(PYTHON) deploy/test_flash.sh .venv-flash $(PYTEST_ARGS)

# Skips, with the reason, where there is no GPU.
test-gpu: install-test
	$(BIN)/python -m pytest tests/gpu tests/contract $(PYTEST_ARGS)

# Four hosts in network namespaces, `ray up` by ssh between them; needs root, iproute2 and Debian.
test-cluster: install-test
	HEADWAY_TEST_CLUSTER=1 $(BIN)/python -m pytest -s tests/netns $(PYTEST_ARGS)

loadtest:
	@PYTHON=$(PYTHON) deploy/install.sh $(VENV) load
	@$(BIN)/headway loadtest quick $(ARGS)

chaos: install-test
	$(BIN)/python -m tests.chaos $(ARGS)

# PEERS="--vllm-python P --openvino-python P --openvino-model DIR" adds the peers that are installed.
bench-cpu: install
	$(BIN)/python -m workers.bench_cpu $(ARGS)
	$(BIN)/headway bench cpu $(PEERS)

bench-gpu: install
	$(BIN)/python -m workers.bench_gpu $(ARGS)

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
