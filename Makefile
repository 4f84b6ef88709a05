PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BENCH_DATA ?= bench-data
BENCH_FLAGS ?=
FUZZ_FLAGS ?=
# A module goes to one worker whole, so that what its tests share is made once; tests/conftest.py orders the modules.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test coverage fuzz lint format bench bench-curvature pages docs clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.installed  ## Install gradmerge and its development tools into .venv/.

# torch comes first and alone: the pinned version must be in place before another package asks for "some torch".
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# Tests start many programs, each of which would compile gradmerge anew.
test coverage: export PYTHONDONTWRITEBYTECODE =

test: install  ## Run the tests.
	$(PYTEST)

coverage: install  ## Run the tests and show which lines of src/ they reach, line by line in htmlcov/.
	$(PYTEST) --cov --cov-report=term --cov-report=html

fuzz: export FUZZ_INPUTS ?= 100000
fuzz: export FUZZ_KILLS ?= 200
fuzz: install  ## Mutate inputs of every kind and kill running commands (an hour; shorter with FUZZ_INPUTS=5000 FUZZ_KILLS=20).
	$(BIN)/python -m pytest -n 2 --dist load --hypothesis-show-statistics tests/fuzz

demo: install  ## Train small models on scikit-learn's digits, merge, calibrate and compare them, in demo/ (two minutes).
	$(BIN)/gradmerge demo -o demo

lint: install  ## Check style, formatting and types, of the tests too.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## Compare speed and memory with mergekit on models of 1.1 B parameters (35 GB of disk, half an hour).
	$(PYTHON) -m venv .venv-mergekit
	.venv-mergekit/bin/python -m pip install --quiet --disable-pip-version-check -c benchmarks/constraints.txt torch
	.venv-mergekit/bin/python -m pip install --quiet --disable-pip-version-check -c benchmarks/constraints.txt mergekit
	$(BIN)/python -m benchmarks.merge --data $(BENCH_DATA) --mergekit .venv-mergekit/bin/mergekit-yaml $(BENCH_FLAGS)

bench-curvature: install  ## Compare measuring curvature with a plain pass and a loop over examples (BENCH_FLAGS='--device cuda --model gpt2').
	$(BIN)/python -m benchmarks.curvature $(BENCH_FLAGS)

pages: install  ## Write the references and tables that come from the code into the pages of docs/.
	$(BIN)/python -m docs.pages

# Not --quiet: that silences warnings before --strict can count them.
docs: install  ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove everything that make has made.
	rm -rf $(VENV) .venv-mergekit $(BENCH_DATA) demo site build dist htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
