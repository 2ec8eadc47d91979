# Every target sets up .venv first if it is not there: a fresh machine needs Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(READY)  ## make .venv with the pinned versions

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## see it work: teach a small model to forget
	$(BIN)/kvprune demo

test: $(READY)  ## run the tests; PYTEST_ARGS go to pytest
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

check: $(READY)  ## lint, type-check and test the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file mypy-tests.ini
	$(BIN)/lint-imports

format: $(READY)  ## format the code in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## run every benchmark; numbers and a page of ratios in benchmarks/results
	for name in gate train_step fine_tune kept_memory threads linear decode prefill memory rows; do \
	  $(BIN)/python benchmarks/$$name.py --sizes bench --save || exit 1; done
	$(BIN)/python benchmarks/page.py

docs: $(READY)  ## build the documentation site in site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python scripts/cli_docs.py
	$(BIN)/python scripts/architecture_svg.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis site .coverage
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
