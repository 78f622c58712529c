PYTHON ?= python3
BIN := .venv/bin
PACKAGES := .venv/lib/python3*/site-packages
# One thread a process: the processes share the cores. No AMX: some virtual machines claim to have it, and products in
# bfloat16 then end in an illegal instruction.
PYTEST := OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 $(BIN)/python -m pytest --dist=worksteal

# Bytecode is compiled once, on all cores: otherwise every command pays for it where PYTHONDONTWRITEBYTECODE is set.
define install
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[$(1)]'
	$(BIN)/python -m compileall -q -j 0 -x '/(tests|pip|setuptools|mypy|transformers/models|sympy/physics|torch/testing)/' $(PACKAGES) src > /dev/null || true
endef

.PHONY: demo test test-slow lint types docs pictures bench format release-check setup

demo: .venv/lab
	$(BIN)/lodo run bowl --quick
	$(BIN)/lodo compare mlp --data digits --steps 300 --seeds 2 --workers 0 --optimizers 'kron_lodo, torch.AdamW, torch.AdamW(lr=0.01), torch.AdamW(lr=0.1)'

test: setup
	$(MAKE) --no-print-directory --jobs=2 lint types docs
	$(PYTEST) --numprocesses=3

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

test-slow: setup
	$(PYTEST) --numprocesses=3 -m slow

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: setup
	$(BIN)/python docs/pictures.py

bench: setup
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/networks.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/kron.py
	$(BIN)/python benchmarks/divided.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/registers.py

release-check: setup
	$(BIN)/python tools/release_check.py

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: .venv/all

.venv/lab: pyproject.toml constraints.txt
	$(call install,lab)
	touch $@

.venv/all: pyproject.toml constraints.txt
	$(call install,all)
	touch $@ .venv/lab
