# Every target makes what it needs from nothing; `make` alone explains them.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
#: more arguments for what is run, as in `make test ARGS='-k cli -x'`
ARGS ?=
# as many tests at once as there are cores, each on one of them; -n0 in ARGS: one by one
SHARED_OUT = -n auto --maxprocesses=8 --dist worksteal
# those that can be run; the others are shared by them
BENCHMARKS = $(filter-out gpu_run gpu_table,\
  $(notdir $(basename $(shell grep -l __main__ benchmarks/*.py))))

.PHONY: help venv demo test soak lint format bench house docs support gpu clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## the environment in .venv, made again when pyproject.toml changes

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once: PyTorch, and what tests and examples need. A few minutes."
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check -e '.[test,dev]' \
	  | sed -un 's/^ *Downloading /  /p'
	@touch $@

demo: $(READY) ## train a small GPT in half the memory it takes, beside plain and checkpointed runs
	@$(BIN)/python examples/train_gpt.py $(ARGS)

# a process of a test imports what others have imported before: kept bytecode saves a second each
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY) ## the tests, but for those marked long; those that need a GPU are skipped without one
	$(BIN)/python -m pytest -q $(SHARED_OUT) $(ARGS)

soak: $(READY) ## long tests, and what docs/trust.md counts at full length; writes its table
	$(if $(ARGS),,$(BIN)/python -m pytest -q $(SHARED_OUT) -m "soak or long")
	cd tests && ../$(BIN)/python -m trust $(or $(ARGS),--write)

lint: $(READY) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## run every benchmark again and write its table to benchmarks/results
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; \
	  $(BIN)/python -m benchmarks.$$name; done
	@git --no-pager diff --stat -- benchmarks/results || true

house: $(READY) ## figures of the code's shape; draws docs/rooms.svg again
	@cd tests && ../$(BIN)/python support/house.py --draw ../docs/rooms.svg && ../$(BIN)/python support/house.py

docs: $(READY) ## the documentation as a site in build/site: pages, public API, a gallery of plans
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@$(BIN)/python docs/site/build.py $(ARGS)

support: $(READY) ## try the wheel with other Pythons and torches, as in ARGS='venv/bin/python'; writes docs/support.md
	@$(BIN)/python docs/site/support.py $(or $(ARGS),$(BIN)/python)

gpu: ## tests and benchmark on a GPU, in 8 minutes; nothing is installed or fetched for it
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); $$python -m benchmarks.gpu_run $(ARGS)

clean: ## remove the environment and what the tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
