# Everything a person needs: `make demo` and `make test` set the environment up by themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STEPS ?= 30
SEED ?= 0
# Torch is installed alone, first. Where the default index serves the CUDA build of torch, say where the CPU build is:
#   make setup TORCH_PIP_ARGS="--index-url URL-OF-YOUR-CPU-INDEX"     (or set PIP_EXTRA_INDEX_URL in the environment)
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=

export HF_HUB_OFFLINE = 1
export DO_NOT_TRACK = 1
# Hundreds of processes are started: without byte code each would compile anew all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-fast lint fmt down clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv and install everything; nothing to do when the lock files have not changed
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_PIP_ARGS="$(TORCH_PIP_ARGS)" bash scripts/setup.sh

demo: setup  ## services, a run of STEPS steps, its report
	$(BIN)/rl360 demo --steps $(STEPS) --seed $(SEED)

test: setup  ## unit and property tests, those of Megatron-core and the trainer, then those with real services
	$(BIN)/python -m pytest tests/unit -n 2 --dist loadfile --no-loadscope-reorder -m "not contract and not chaos" $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/property -n 2 $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/contract/test_train*.py tests/contract/test_weights*.py -n 2 --dist loadfile $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/contract tests/chaos --ignore-glob='*/test_train*' --ignore-glob='*/test_weights*' \
		-n 2 --dist loadgroup --no-loadscope-reorder --durations=40 $(PYTEST_ARGS)

test-fast: setup  ## unit and property tests only
	$(BIN)/python -m pytest tests/unit tests/property -m "not contract and not chaos" $(PYTEST_ARGS)

lint: setup  ## formatting, lint rules, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fmt: setup  ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

down:  ## stop all services; says what it checked
	@test ! -x $(BIN)/rl360 || $(BIN)/rl360 down

clean: down  ## stop, then delete the environment and all local state
	rm -rf $(VENV) .rl360 .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
