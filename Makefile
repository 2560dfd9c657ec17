# Every target makes its own .venv and installs what it needs; the only assumptions are Python 3.11 or 3.12, a C compiler and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One test worker per core that this process may use, at least two.
WORKERS := $(shell $(PYTHON) -c 'import os; print(max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')
# One torch thread a test worker: as many threads as cores, and sums in the same order everywhere. Tests of several
# processes share one pool, so that all of them go to one worker. Compiled modules are kept, whatever the environment
# says: tests start some hundreds of processes.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

# The Python of `make test-gpu`; one that has torch for GPUs and GPU_NEEDS needs nothing installed: GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_NEEDS := fsspec hypothesis numba numpy pyarrow pytest safetensors tokenizers torch xdist xxhash
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests)

.PHONY: help quickstart test test-slow test-gpu lint bench docs wheel clean
help:
	@echo "make quickstart   raw files -> evaluated model -> runs/quickstart/report.html"
	@echo "make test         all tests but the slow ones; make test-slow runs those"
	@echo "make test-gpu     tests that need a GPU, and every parallel plan on NCCL; GPU_PYTHON=python3 installs nothing"
	@echo "make lint         ruff and mypy"
	@echo "make bench NAME=x run benchmarks/x.py with its peers; the last line is JSON"
	@echo "make docs         write docs/reference and build the site into site/"
	@echo "make wheel        build the wheel and the source distribution into dist/"

# Torch first and pinned: a looser request could replace the build that this machine offers.
$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "ropewalk needs Python 3.11 or 3.12; name one with: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch first; a minute or two)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e '.[train,evaluate]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@$(PIP) -e '.[train,evaluate,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.train
	@$(PIP) -e '.[train,evaluate,docs]'
	@touch $@

quickstart: $(VENV)/.train
	@$(BIN)/ropewalk quickstart

test: $(VENV)/.dev
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(VENV)/.dev
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m slow

# One process: the tests share the GPU, and the pool of ranks. Only the files that have such tests are imported.
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)
	@$(GPU_PYTHON) -c 'import sys, importlib.util as u; lacks = [n for n in sys.argv[1:] if not u.find_spec(n)]; sys.exit("make test-gpu: $(GPU_PYTHON) lacks " + " ".join(lacks) if lacks else 0)' $(GPU_NEEDS)
	@$(GPU_PYTHON) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "make test-gpu: torch sees no GPU; on a machine with one: make test-gpu GPU_PYTHON=python3")'
	@$(TEST_ENV) PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy ropewalk

bench: $(VENV)/.train
	@test -n "$(NAME)" || { echo "name one: make bench NAME=step (see benchmarks/)"; exit 2; }
	@$(BIN)/python benchmarks/$(NAME).py $(ARGS)

docs: $(VENV)/.docs
	@$(BIN)/python -m ropewalk.flow.reference docs/reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site"

wheel: $(VENV)/.dev
	@$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) site build dist
