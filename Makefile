# Every target works from a fresh clone: what it needs is installed into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests of one file share its servers and models, so they run in one process; the long files come first.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
PYTEST_ARGS ?=
# Live servers on a busy machine: what fails is tried once more, and named in the summary either way.
RERUNS := --reruns 1 -rRf --durations 30

.DEFAULT_GOAL := help
.PHONY: help setup models demo serve browser test test-fast gpu-check bench lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED) models  ## install into .venv, fetch and convert the built-in models

# A changed dependency installs again; anything else is already there, since the install is editable.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes, once)"
	@$(BIN)/python -m pip install -qq --upgrade --constraint constraints.txt pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[test]'
	@touch $@

# Not a stamp: the models' cache lies outside the checkout. What is there already takes a moment.
models: $(INSTALLED)  ## fetch and convert the built-in models
	@$(BIN)/longctx pull gemma3-270m smollm2-135m

demo: setup  ## read an 8K-token document on a real model and answer two questions about it
	@HF_HUB_OFFLINE=1 $(BIN)/python tools/demo.py

# Another model, port or limit: make serve SERVE_ARGS="gemma3-270m --port 9000".
SERVE_ARGS ?= smollm2-135m
serve: setup  ## an OpenAI-compatible server with a page, on http://127.0.0.1:8000
	@HF_HUB_OFFLINE=1 $(BIN)/longctx serve $(SERVE_ARGS)

browser:  ## Debian's Chromium for the tests of the page, if root may install it
	@tools/browser.sh

test: setup lint  ## lint, then every test that needs no GPU, real models included
	HF_HUB_OFFLINE=1 $(PYTEST) -m "not gpu" $(RERUNS) $(PYTEST_ARGS)

test-fast: $(INSTALLED)  ## the tests that need neither a GPU nor a real model nor ten seconds
	HF_HUB_OFFLINE=1 $(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

# With the interpreter that has torch for the GPU, from the checkout as it is: nothing is installed or fetched. Where there
# is no GPU the kernels are compiled for three of them and tried in Triton's interpreter.
gpu-check:  ## compile the GPU's kernels, check and measure them on a CUDA device if there is one, say PYTHON=python3
	@$(PYTHON) tools/gpu_check.py

# Minutes to an hour on a quiet machine; BENCH_ARGS are those of `longctx bench`.
BENCH_ARGS ?= decode gemma3-270m --lengths 1K,8K
bench: setup  ## one benchmark, say BENCH_ARGS="prefill gemma3-270m --lengths 1K,8K --against hf"
	HF_HUB_OFFLINE=1 $(BIN)/longctx bench $(BENCH_ARGS)

lint: $(INSTALLED)  ## ruff, the formatter's check, and the type checker
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python tools/typecheck.py

format: $(INSTALLED)  ## let ruff fix what it can
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

clean:  ## remove what was built; pulled models stay in their cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
