# `make quickstart` and `make test` need Python 3.11 or newer and nothing else: they set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test lint types imports slow clean

quickstart: .venv/installed
	$(BIN)/covary train recipes/quickstart.yaml out=runs/quickstart-$$(date +%Y%m%d-%H%M%S)

test: .venv/installed-dev lint types imports
	$(BIN)/python -m pytest -q -n 2 --durations=8

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/basedpyright --level error

imports: .venv/installed-dev
	$(BIN)/lint-imports --no-cache

slow: .venv/installed-dev
	$(BIN)/python -m pytest -q -m slow --durations=8

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "covary needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/installed: .venv/bin/python pyproject.toml
	@echo "installing covary and what it needs into .venv (a minute or more, mostly torch) ..."
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml
	@echo "installing covary, what it needs and what its tests need into .venv (a minute or more) ..."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch .venv/installed $@

clean:
	rm -rf .venv build dist *.egg-info
