# `make demo` and `make test` set everything up by themselves. `make help` lists the rest.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help demo test lint bench fuzz pins clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   the main job on the shipped policy (sets everything up first)"
	@echo "make test   ruff, mypy, the layer test and pytest (sets everything up first)"
	@echo "make fuzz   100,000 damaged files a format and 2,000 random policies, summary in out/fuzz.json; hours"
	@echo "make bench  engines beside what users run today, into out/; leave the machine alone while it runs"

$(READY): requirements.txt pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(READY)
	$(VENV)/bin/blockcache demo

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PYTHON) -m pytest

bench: $(READY)
	mkdir -p out
	$(VENV)/bin/blockcache bench --json out/bench.json --plot out/bench.png

fuzz: $(READY)
	$(PYTHON) -m tests.fuzz --output out/fuzz.json

pins: $(READY)
	{ sed -n '/^#/p' requirements.txt; $(PYTHON) -m pip freeze --exclude blockcache | sed 's/+cpu//'; } > requirements.new
	mv requirements.new requirements.txt

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
