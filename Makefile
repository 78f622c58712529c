PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test bench format setup

demo: setup
	$(BIN)/lodo run bowl --quick

test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses=logical --maxprocesses=4 --dist=worksteal

bench: setup
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/networks.py
	$(BIN)/python benchmarks/training.py

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[all]'
	touch $@
