# Everything runs from the virtual environment in .venv, which the first target that needs it creates.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PYTEST_ARGS ?= -n 3 --dist worksteal -q

# The tests start many processes, which compiled files make faster.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install test slow deployment lint audit demo docs notebooks dist clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## Create .venv and install the package with all extras, test and documentation tools

.venv/.installed: setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "cfl needs Python 3.11 or newer, found '$(PYTHON)'; try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/pip || "$(PYTHON)" -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,test,docs]'
	touch $@

test: install lint  ## Lint, then run the tests but those of slow and deployment (PYTEST_ARGS replaces "-n 3 --dist worksteal -q")
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_ARGS)
	@echo "Not run: tests marked slow (make slow) and federations of real processes (make deployment)."

slow: install  ## Run the tests that take long, which `make test` leaves out
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_ARGS) -m "slow and not deployment"

deployment: install  ## Test federations of real processes, which take minutes and `make test` leaves out
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -q -m deployment tests/flower

lint: install  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cfl

audit: .venv-audit/.installed  ## Look up known weaknesses of the pinned packages, which takes the network
	.venv-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

.venv-audit/.installed:
	"$(PYTHON)" -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	touch $@

demo: install  ## Compare FOT with FedAvg on a small permuted stream, into runs/demo
	$(BIN)/cfl-run compare permuted-digits --methods fedavg,fot --seeds 0 --matrix --output runs/demo

docs: install  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

notebooks: install  ## Run the notebooks of the tutorials and store their outputs
	$(BIN)/python tools/docs/execute.py docs/tutorials/*.ipynb

dist: install  ## Build and check the wheel and the sdist, into dist/
	rm -rf build dist
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:  ## Remove what the other targets made, .venv included; runs/ stays
	rm -rf .venv .venv-audit build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
