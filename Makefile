# Bare `make` prints the targets. Every target installs what it needs into .venv.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: help
help: ## print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Onward needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(PYTHON) -m venv $(VENV) || { echo "No venv module: on Debian, apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@$(PY) -m pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.core: pyproject.toml | $(PY)
	@echo "installing onward into $(VENV)"
	@$(PY) -m pip install --quiet -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.core | $(PY)
	@echo "installing the test and check tools into $(VENV)"
	@$(PY) -m pip install --quiet --group test --group check
	@touch $@

$(VENV)/.bench: pyproject.toml $(VENV)/.core | $(PY)
	@$(PY) -m pip install --quiet --group bench
	@touch $@

.PHONY: demo
demo: $(VENV)/.core ## the whole path on one SQLite file, with a live page
	@$(VENV)/bin/onward demo

# Without it each of the test processes would compile every file again.
test test-more test-fast: export PYTHONDONTWRITEBYTECODE =

.PHONY: test
test: $(VENV)/.dev $(VENV)/.bench ## install and start what the tests need, then run all of them
	@$(PY) -m tests.servers.install
	@$(PY) -m pytest -n 3 --dist loadfile -m "not more"

.PHONY: test-more
test-more: $(VENV)/.dev $(VENV)/.bench ## what is long or rare: clusters, storms of two minutes, the whole benchmark
	@$(PY) -m tests.servers.install --more
	@ONWARD_STORM_S=120 $(PY) -m pytest -n 2 --dist loadfile -m "more or storm"

.PHONY: test-fast
test-fast: $(VENV)/.dev $(VENV)/.bench ## the tests that need no server and little time
	@$(PY) -m pytest -q -n 4 -m "not servers and not slow and not more"

RUNS ?= 1000
.PHONY: sim
sim: $(VENV)/.dev ## the simulator: RUNS=10000 seeds, or SEED=7 for one with its trace
	@$(PY) -m onward.testing.simulator $(if $(SEED),--seed $(SEED) --trace,--runs $(RUNS))

.PHONY: check
check: $(VENV)/.dev $(VENV)/.bench ## format, lint, types
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

.PHONY: format
format: $(VENV)/.dev ## rewrite the code in the project's format
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

.PHONY: docs
docs: $(VENV)/.dev ## write the tables of docs/settings.md again, from settings.py
	@$(PY) -m tests.docs.settings_page

.PHONY: bench
bench: $(VENV)/.bench ## measure, beside a bare client loop and the peers
	@$(PY) -m bench

.PHONY: clean
clean: ## remove the virtual environment and the caches
	@rm -rf $(VENV) .services .mypy_cache .ruff_cache .pytest_cache .hypothesis
