# `make demo` and `make test` each work as the first command in a fresh clone: they need Python 3.10 or
# newer with pip, nothing else. What they make lies in .venv and in the model cache (ANYDRAFT_CACHE).

PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.10; do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; \
    then echo $$python; break; fi; done)
VENV ?= .venv
BIN := $(VENV)/bin
MODELS ?= smollm2-135m gemma3-270m
# Where PyTorch comes from: an index URL, or empty for "the CPU wheels on Linux without an NVIDIA GPU,
# pip's own index elsewhere or if those cannot be reached".
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup models llama-cpp demo test check format verify bench clean

help:
	@echo "make demo     install what is missing, fetch the models, show plain and drafted side by side"
	@echo "make test     install what is missing, fetch the models, run the tests"
	@echo "make check    style, types, import layers and the fast tests, in under a minute"
	@echo "make verify   the full identity matrix: drafted output against plain decoding (long)"
	@echo "make llama-cpp  add the second runtime (compiles for some ten minutes); its tests then run too"
	@echo "make bench    the benchmarks, short forms"
	@echo "make format   let ruff format the code"

# Some distributions package venv without ensurepip; pip can then install itself from outside.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer found; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $@ install --quiet pip; }

$(VENV)/torch.stamp: scripts/install_torch.sh constraints.txt | $(BIN)/python
	TORCH_INDEX_URL="$(TORCH_INDEX_URL)" sh scripts/install_torch.sh $(BIN)/python
	@touch $@

$(VENV)/installed.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

# Nothing is fetched or converted that is in the cache already, so this needs no stamp.
models: $(VENV)/installed.stamp
	@$(BIN)/anydraft pull $(MODELS)

setup: $(VENV)/installed.stamp

llama-cpp: $(VENV)/installed.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,llama-cpp]"

demo: models
	@$(BIN)/anydraft demo

test: models
	$(BIN)/python -m pytest -m "not verify" $(PYTEST_ARGS)

check: $(VENV)/installed.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 \
	    -m "not slow and not verify" $(PYTEST_ARGS)

verify: models
	$(BIN)/python -m pytest -m verify $(PYTEST_ARGS)

bench: models
	@set -e; for script in $(filter-out benchmarks/common.py benchmarks/interleaved.py,$(wildcard benchmarks/*.py)); do \
	    echo "== $$script"; $(BIN)/python $$script --quick; \
	done

format: $(VENV)/installed.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
