PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs pictures bench format release-check setup

demo: setup
	$(BIN)/lodo run bowl --quick

test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs
	$(BIN)/python -m pytest --numprocesses=3 --dist=worksteal

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: setup
	$(BIN)/python docs/pictures.py

bench: setup
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/networks.py
	$(BIN)/python benchmarks/training.py

release-check: setup
	$(BIN)/python tools/release_check.py

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[all]'
	touch $@
