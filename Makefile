# `make demo` and `make test` set everything up by themselves. `make help` lists the rest.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

BROWSER := $(VENV)/.browser

.PHONY: help demo test test-browser lint bench fuzz pins clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   the main job on the shipped policy (sets everything up first)"
	@echo "make test   ruff, mypy, the layer test and pytest (sets everything up first)"
	@echo "make test-browser  the page of 'blockcache report' in headless Chromium, which is installed if it is missing"
	@echo "make fuzz   100,000 damaged files a format and 2,000 random policies, summary in out/fuzz.json; about an hour on two cores"
	@echo "make bench  engines beside what users run today, into out/; leave the machine alone while it runs"

HOUSES := runtime library plugin laboratory

$(READY): requirements.txt $(HOUSES:%=%/pyproject.toml)
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps $(HOUSES:%=--editable ./%)
	@touch $@

demo: $(READY)
	mkdir -p out
	$(VENV)/bin/blockcache demo --report out/demo.html

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PYTHON) -m pytest --numprocesses 2 --dist worksteal

$(BROWSER): library/tests/browser/requirements.txt $(READY)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --requirement library/tests/browser/requirements.txt
	@touch $@

test-browser: $(BROWSER)
	sh library/tests/browser/install_chromium.sh
	$(PYTHON) -m pytest library/tests/browser

bench: $(READY)
	mkdir -p out
	$(VENV)/bin/blockcache bench --json out/bench.json --plot out/bench.png

fuzz: $(READY)
	PYTHONPATH=library/tests $(PYTHON) -m fuzz --output out/fuzz.json

pins: $(READY)
	{ sed -n '/^#/p' requirements.txt; $(PYTHON) -m pip freeze --exclude blockcache --exclude blockcache-runtime --exclude blockcache-lab --exclude lerobot_policy_blockcache --exclude playwright --exclude greenlet --exclude pyee | sed 's/+cpu//'; } > requirements.new
	mv requirements.new requirements.txt

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
