# `make demo` and `make test` need Python >= 3.11 and make, nothing else: they set up .venv themselves.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV   := .venv
PY     := $(VENV)/bin/python
# Python compiles what it imports; pip would compile all there is, which takes longer than to install it.
PIP    := $(PY) -m pip --disable-pip-version-check --no-input install --no-compile -c constraints.txt
export PYTHONDONTWRITEBYTECODE =
# One thread per test worker: two workers with two threads each would fight for the cores. Tests with processes of their
# own are among them: while those wait for one another, the other worker has something to do.
TESTS  := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

BENCHMARKS_MAY := arg-type assignment import-not-found import-untyped misc operator return-value type-var union-attr \
	unused-ignore var-annotated

.PHONY: help demo test parity lint docs clean setup tools

help:
	@echo "make demo    train a small model that sees, hears and reads, on this machine's CPU, and write a report"
	@echo "make test    ruff, mypy and all tests"
	@echo "make parity  every parallel plan compared with one process; writes docs/parity.md"
	@echo "make lint    ruff and mypy only"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove .venv and everything built"

demo: setup
	@$(VENV)/bin/cornstarch train --restart

test: lint
	@echo "==> Tests"
	@$(TESTS)

parity: tools
	@OMP_NUM_THREADS=1 $(PY) -m tests.parity

lint: tools
	@echo "==> ruff"
	@$(PY) -m ruff check .
	@echo "==> mypy"
	@$(PY) -m mypy
	@# Benchmarks have no tests: at least every name that they use must exist.
	@$(PY) -m mypy $(patsubst %,--disable-error-code=%,$(BENCHMARKS_MAY)) benchmarks/*.py

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(VENV).unfinished build dist site runs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

setup: $(VENV)/.ready

tools: $(VENV)/.tools

# $(VENV).unfinished stands beside the environment while it is being made. If it is still there at the start, an
# earlier set-up was interrupted and nothing inside can be trusted: begin afresh.
$(VENV)/.ready: pyproject.toml constraints.txt
	@python=""; \
	for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: Cornstarch needs Python 3.11 or newer; found $$(python3 --version 2>/dev/null || echo none). Install it, then run make again." >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "error: $$python has no venv module; install it (Debian and Ubuntu: apt install python3-venv), then run make again." >&2; exit 1; \
	fi; \
	if [ -e $(VENV).unfinished ] || ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	  echo "==> Creating $(VENV) with $$("$$python" --version)"; \
	  touch $(VENV).unfinished; \
	  "$$python" -m venv --clear $(VENV) || exit 1; \
	fi; \
	touch $(VENV).unfinished
	@echo "==> Installing torch (the largest part)"
	@# First and pinned by itself, so that no other package can ask for another build of it.
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "==> Installing Cornstarch"
	@$(PIP) -e .
	@rm -f $(VENV).unfinished
	@touch $@

$(VENV)/.tools: pyproject.toml constraints.txt | $(VENV)/.ready
	@echo "==> Installing what tests and checks need"
	@$(call more,dev)

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.ready
	@echo "==> Installing the documentation tools"
	@$(call more,docs)

# Install an extra; if that is interrupted, the environment is not ready any more.
more = rm $(VENV)/.ready && touch $(VENV).unfinished && $(PIP) -e ".[$(1)]" && rm $(VENV).unfinished \
	&& touch $(VENV)/.ready && touch $@
