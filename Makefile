# make demo     the main job on this machine: three replicas, a bucket that is a folder, one of them killed
# make test     the tests
# make check    what CI would like: ruff, pyright, import-linter, tests
# make faults   SEEDS=100000 simulated schedules on all cores
# make azurite  Microsoft's emulator of its blob store, for the az:// tests in make test-slow (needs npm)
# The first call makes .venv (Python >= 3.11) with pip as this machine has it configured; later ones start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 2000
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test test-slow azurite check lint faults clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12 ...")'
	@echo "making $(VENV) (once; about a minute and 2 GB with a CPU build of torch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install
	@$(BIN)/diloco demo

test: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

azurite: install
	npm install --no-audit --no-fund --prefix $(VENV)/azurite azurite@3

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

check: lint test

faults: install
	$(BIN)/python -m tests.sim $(SEEDS) --jobs $(JOBS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
