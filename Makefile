# Everything a checkout needs: `make run`, `make test`. Each target sets itself up.
PYTHON ?= python3
BIN := .venv/bin
COMPILED := src/polybus/scan src/polybus/edges/http src/polybus/edges/tcp src/polybus/log/journal \
    src/polybus/services src/polybus/services/sessions
SOURCES := $(foreach one,$(COMPILED),$(wildcard $(one)/*.px[yd])) src/polybus/scan/batch.py \
    src/polybus/edges/tcp/handling.py src/polybus/edges/tcp/outbox.py \
    src/polybus/edges/tcp/pump.py src/polybus/edges/tcp/transport.py \
    src/polybus/log/journal/message.py src/polybus/edges/http/sending.py \
    src/polybus/services/tallies.py $(foreach one,contents delivery sequence session,\
    src/polybus/services/sessions/$(one).py) pyproject.toml setup.py

.PHONY: run test test-fast lint docs bench clean

run: .venv/ready
	$(BIN)/polybus up --demo

# Random order: `make test SEED=N` repeats that of an earlier run, which says its seed at the top.
# Each worker takes a file at a time: what the tests of a file share, they share in one process. Three
# workers on two cores: many tests wait for a disk, a timer or a process.
SEED ?= random
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --shuffle=$(SEED)

test: .venv/ready
	$(PYTEST)

test-fast: .venv/ready
	$(PYTEST) -m "not slow"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/python -m polybus.cli.reference --check docs/reference

docs: .venv/ready
	$(BIN)/python -m polybus.cli.reference docs/reference

bench: .venv/ready
	$(BIN)/polybus bench

clean:
	rm -rf .venv build dist $(foreach one,$(COMPILED),$(one)/*.so $(one)/*.c)

.venv/ready: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Polybus needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv (once; some minutes) ..."
	@test -d .venv || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,spark]'
	@# Spark starts in half the time with an archive of its classes; without one it works too.
	@$(BIN)/python -m polybus.spark.session.archive 2>/dev/null || true
	@touch $@
