# Every target works from a fresh clone: what it needs is installed into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup test test-fast lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED)  ## install into .venv

# A changed dependency installs again; anything else is already there, since the install is editable.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes, once)"
	@$(BIN)/python -m pip install -qq --upgrade --constraint constraints.txt pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[test]'
	@touch $@

test: setup lint  ## lint, then every test that needs no GPU, real models included
	HF_HUB_OFFLINE=1 $(PYTEST) -m "not gpu" $(PYTEST_ARGS)

test-fast: setup  ## the tests that need neither a GPU nor a real model nor ten seconds
	HF_HUB_OFFLINE=1 $(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

lint: setup  ## ruff, the formatter's check, and the type checker
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python tools/typecheck.py

format: setup  ## let ruff fix what it can
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

clean:  ## remove what was built; pulled models stay in their cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
