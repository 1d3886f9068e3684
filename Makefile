# `make demo` and `make test` set up .venv by themselves. PYTHON=python3.12 picks another interpreter for it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
TYPED := build/typecheck
LAID_OUT := build/imports
JOBS ?= 2

# Tests that measure time run by themselves, after the others. pytest exits with 5 when it collected nothing, which is no failure here.
define pytest
$(BIN)/python -m pytest -m "($(1)) and not alone" -n $(JOBS) --dist loadfile $(ARGS) || [ $$? -eq 5 ]
$(BIN)/python -m pytest -m "($(1)) and alone" $(ARGS) || [ $$? -eq 5 ]
endef

.PHONY: help venv demo test test-slow test-exhaustive faults check lint types imports format bench docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

venv: $(STAMP) ## create .venv and install the pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing the pinned dependencies into $(VENV) (some minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,demo]'
	@touch $@

demo: $(STAMP) ## plan a small GPT, train it on 4 local ranks, compare with one process
	@$(BIN)/python examples/train_gpt.py --ranks 4 $(ARGS)

test: $(STAMP) ## the tests, JOBS=2 at a time (ARGS=… goes to pytest)
	$(call pytest,not slow and not exhaustive)

test-slow: $(STAMP) ## the tests that take minutes
	$(call pytest,slow and not exhaustive)

test-exhaustive: $(STAMP) ## the rest of the products of models and options, and some long tests, which neither test nor test-slow runs
	$(call pytest,exhaustive)

faults: $(STAMP) ## train under faults of ranks, machines and disks; a table of steps lost and seconds to go on
	$(BIN)/python -m pytest tests/faults

check: lint types imports ## ruff, mypy and import-linter

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# autopar.passes and autopar.cost_model lie outside autopar/ and an editable install maps them in with an import hook, which static
# checkers do not run. So mypy is shown a tree of links that has the installed layout; sed turns its paths back into real ones.
types: $(STAMP)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/autopar
	@for part in autopar/* passes cost_model; do ln -s ../../../$$part $(TYPED)/autopar/; done
	$(BIN)/mypy $(TYPED)/autopar examples benchmarks | sed -E 's#$(TYPED)/(autopar/(passes|cost_model)/)#\1#; s#^autopar/(passes|cost_model)/#\1/#; s#$(TYPED)/##'

# import-linter does not follow links.
imports: $(STAMP)
	@rm -rf $(LAID_OUT) && mkdir -p $(LAID_OUT) && cp -r autopar $(LAID_OUT)/ && cp -r passes cost_model $(LAID_OUT)/autopar/
	@cd $(LAID_OUT) && PYTHONPATH=. $(abspath $(BIN))/python -c 'from importlinter.cli import lint_imports_command as run; run()' --no-cache --no-logo --config $(abspath pyproject.toml) || \
	{ echo "an import goes against the layers in pyproject.toml"; exit 1; }

format: $(STAMP) ## rewrite the sources in the style that check asks for
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP) ## planning time and memory; overhead of a step; a slow link; tensor modes; time against memory; planning all together; a sweep; accuracy; rehearsals
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/verify.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/slowed_link.py
	$(BIN)/python benchmarks/modes.py
	$(BIN)/python benchmarks/frontier.py
	$(BIN)/python benchmarks/joint.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/accuracy.py --published --here
	$(BIN)/python benchmarks/rehearsal.py

docs: $(DOCS_STAMP) ## build the pages of docs/ into build/site; a broken link is an error
	$(BIN)/zensical build --strict --clean
	@echo "open build/site/index.html, or run $(BIN)/zensical serve"

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean: ## remove what was built, .venv included
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .cache
