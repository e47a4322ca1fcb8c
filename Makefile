PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
ARGS ?=
SPARK ?= 4.0.0
DJANGO ?= 6.1.3
# Two processes: the tests of a file stay together, for they share servers, and so do all tests of Spark, for they share a
# session (tests/conftest.py). In the order of their names: files of few and long tests would come last otherwise, and one
# process wait for the other.
SPLIT ?= -n 2 --dist loadfile --no-loadscope-reorder
PYTEST = JAVA_HOME="$(CURDIR)/$(VENV)/java" $(PY) -m pytest $(SPLIT)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-quick test-slow test-storm test-spark test-python test-django check lint fmt bench bench-scale bench-features bench-spark bench-duel bench-process bench-steps bench-history clean

help:
	@echo "make demo            the main job on the embedded store, in a minute"
	@echo "make test            all tests but the slow ones      (ARGS='-k name' is passed on to pytest)"
	@echo "make test-quick      core, contract and client tests without servers and Spark, in 90 seconds"
	@echo "make test-slow       crashes, soak, failover"
	@echo "make test-storm      kills, pauses, failovers under load (ARGS='--engine valkey --jobs 20000 --kills 40')"
	@echo "make test-spark      the tests of Spark on another pyspark (SPARK=4.0.0)"
	@echo "make test-python     core, contract and client tests on another interpreter (PYTHON=python3.13)"
	@echo "make test-django     the glue for Django, and Django's own tests of task backends (PYTHON=python3.13 DJANGO=6.1.3)"
	@echo "make check           all of it: lint, test"
	@echo "make lint            format, lint, types, import rules"
	@echo "make fmt             format and mend what can be mended"
	@echo "make bench           measure against the peers        (ARGS is passed on)"
	@echo "make bench-scale     cost per job at 10,000 and 1,000,000 jobs"
	@echo "make bench-features  what each feature costs, beside plain jobs"
	@echo "make bench-spark     the pipeline on Spark, beside plain processes"
	@echo "make bench-duel      an async call per row of a table, beside Daft, Ray Data and Spark"
	@echo "make bench-process   process over settled rows, beside a bare Spark scan"
	@echo "make bench-steps     durable steps, beside plain jobs and DBOS"
	@echo "make bench-history   new events in small and large histories"
	@echo "make clean           remove .venv, caches and builds"

demo: $(VENV)/.demo
	$(PY) examples/demo.py $(ARGS)

test: $(VENV)/.java
	$(PYTEST) -m "not slow" $(ARGS)

# No server, no JVM: what a change to the core, a verb or the client can break at once.
QUICK = -m "not slow" -k "not valkey and not cluster" tests/core tests/contract tests/client tests/storage/sqlite
test-quick: $(VENV)/.dev
	$(PY) -m pytest $(SPLIT) $(QUICK) $(ARGS)

test-slow: $(VENV)/.java
	$(PYTEST) -m slow $(ARGS)

test-storm: $(VENV)/.dev
	$(PY) -m tests.storm $(ARGS)

# Releases before 4.2 leave sockets open; what they warn of is not ours to mend.
test-spark: .venv-spark-$(SPARK)/.made
	.venv-spark-$(SPARK)/bin/python -m pytest $(SPLIT) -m "not slow" tests/spark tests/cli/test_tables.py tests/examples \
		-W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning $(ARGS)

# Servers and Spark do not depend on the interpreter; what SQLite, asyncio and the standard library do, does.
test-python: PYTHON_VENV = .venv-python-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
test-python:
	$(MAKE) $(PYTHON_VENV)/.made
	$(PYTHON_VENV)/bin/python -m pytest $(SPLIT) $(QUICK) $(ARGS)

# Django 6 needs Python 3.12. Its source has the tests of django.tasks, which its wheel leaves out.
test-django: DJANGO_VENV = .venv-django-$(DJANGO)-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
test-django:
	$(MAKE) $(DJANGO_VENV)/.made
	DJANGO_SOURCE="$(CURDIR)/$(DJANGO_VENV)/source/django-$(DJANGO)" \
		$(DJANGO_VENV)/bin/python -m pytest tests/integrations/django $(ARGS)

check: $(VENV)/.dev
	$(MAKE) --jobs=2 lint $(VENV)/.java
	$(MAKE) test

lint: $(VENV)/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

fmt: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/run $(ARGS)

bench-scale: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/scale $(ARGS)

bench-features: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/features $(ARGS)

bench-spark: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/spark $(ARGS)

bench-duel: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/duel $(ARGS)

bench-process: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/process $(ARGS)

bench-steps: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/steps $(ARGS)

bench-history: $(VENV)/.dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bench/history $(ARGS)

clean:
	rm -rf $(VENV) .venv-spark-* .venv-python-* .venv-django-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each stage: the demo needs little and is quick, the tests add the dev group to it.
$(VENV)/.made:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { echo "No venv for $(PYTHON): on Debian, apt-get install python3-venv" >&2; exit 1; }
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) --editable '.[cli,spark]'
	touch $@

# --group came with pip 25.1, newer than the pip of current Debian releases.
$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) --editable . --group dev
	touch $@

# Tests start Spark some fifty times: with what it loads in an archive, in half the time.
$(VENV)/.java: $(VENV)/.dev
	$(PY) -m tests.spark.javahome $(VENV)/java
	touch $@

.venv-spark-%/.made: pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	grep -v '^pyspark==' constraints.txt >$(@D)/constraints.txt
	echo 'pyspark==$*' >>$(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable '.[cli,spark]' --group dev
	touch $@

.venv-python-%/.made: pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable . --group test
	touch $@

.venv-django-%/.made: pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	sed 's/^Django==.*/Django==$(DJANGO)/' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable '.[cli,django]' --group test
	$(@D)/bin/python -m pip download --quiet --no-deps --no-binary django --dest $(@D)/source django==$(DJANGO)
	cd $(@D)/source && tar -xzf django-$(DJANGO).tar.gz
	touch $@
