# Two commands matter: `make demo` and `make test`. Both make the environment in .venv first.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.PHONY: install demo test lint clean

install: $(STAMP)

# torch comes first and pinned: where pip knows a CPU build of that version it is taken, and nothing else is pulled in.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: install
	$(BIN)/python examples/demo.py

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .demo build *.egg-info
