# The whole tool set: run, test, lint, docs, bench. Each makes the environment first, once.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 2

.PHONY: run test lint docs bench slow clean

run: $(STAMP)
	$(BIN)/loopscope run mod_arithmetic --preset quick --strategy stride target \
		--with-hooks observers --hook-csv --hook-jsonl --overwrite

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m docs.generate

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
